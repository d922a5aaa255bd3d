"""A step of the delta rule: a few new tokens against a state that is updated in place, at a fixed address."""

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.ops.chunks import LEAST_LOG_DECAY
from hf_linear_attn.ops.delta_rule.api import delta_rule
from hf_linear_attn.ops.delta_rule.checks import check_call, check_state
from hf_linear_attn.ops.delta_rule.problem import DeltaCall
from hf_linear_attn.ops.delta_rule.reference import unit
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.dispatch import choose_backend, kernel_obstacle
from hf_linear_attn.ops.library import no_gradients, operator
from hf_linear_attn.ops.state import check_rows, contiguous_like_values


@no_gradients
def delta_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: DeltaRuleState,
    *,
    key_mask: Tensor | None = None,
    l2norm: bool = True,
    backend: str = "auto",
    rows: Tensor | None = None,
) -> Tensor:
    """Read T new tokens and write them into ``state`` in place; no gradients.

    The same as :func:`delta_rule` with that state, without a new state each time, so that a captured graph can replay
    it. Masked tokens leave the state as it is: a finished row is a masked row.

    Args:
        q: Queries ``[B, H, T, F]``.
        k: Keys ``[B, HKV, T, F]``.
        v: Values ``[B, HKV, T, V]``.
        beta: How much of what stands at a key is replaced ``[B, HKV, T]``, in 0..2.
        log_decay: Logarithm of what a token leaves of the state ``[B, HKV, T]``, at most 0; None for no decay.
        state: ``kv [B, HKV, F, V]``, contiguous, fp32 (fp64 for fp64 tokens).
        key_mask: ``[B, T]`` bool, True = a real token.
        l2norm: Whether queries and keys are divided by their lengths.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        rows: Where in a pool of P states those of the rows lie ``[B]`` int64, all different; None where row b's is the
            b-th. A pool's ``kv`` has any stride from state to state.

    Returns:
        ``o [B, H, T, V]`` in q's dtype.

    Raises:
        ArgumentError: If shapes do not fit, gates lie out of their range, or the state is not contiguous.
        ArgumentTypeError: If a dtype does not fit.
        BackendError: If the backend asked for cannot run here.
    """
    check_state(state)
    held = kv = state.kv
    if rows is not None:
        check_rows(rows, len(q))
        # Of a pool, as many states as there are rows.
        held = kv[:1].expand(len(q), *kv.shape[1:])
    call = DeltaCall(q, k, v, beta, log_decay, key_mask, None, held, 0, l2norm)
    check_call(call)
    if not (kv if rows is None else kv[:1]).is_contiguous():
        raise ArgumentError("state.kv", "be contiguous, to be updated in place", kv.stride(), "Clone it.")
    if choose_backend(backend, q.device, lambda: kernel_obstacle(q, k, v)) == "triton":
        # Imported here so that the package needs neither Triton nor a GPU.
        from hf_linear_attn.ops.delta_rule.triton.op import delta_step_triton_

        return delta_step_triton_(q, k, v, beta, log_decay, key_mask, kv, l2norm, rows)
    if rows is not None:
        own = kv.index_select(0, rows)
        o = delta_plain_(q, k, v, beta, log_decay, own, key_mask, l2norm, "torch")
        kv.index_copy_(0, rows, own)
        return o
    if q.shape[2] == 1:
        by_group = torch.unflatten(q[:, :, 0], 1, (k.shape[1], -1))
        o = overwrite_and_read_(by_group, k, v, beta, log_decay, kv, key_mask, l2norm)
        return o.view(*q.shape[:3], -1).to(q.dtype)
    o, final = delta_rule(q, k, v, beta, log_decay, key_mask=key_mask, state=state, l2norm=l2norm, backend="torch")
    kv.copy_(final.kv)
    return o


def overwrite_and_read_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    counts: Tensor | None,
    l2norm: bool,
) -> Tensor:
    """Take one key into ``kv`` in place and read it, in the fewest operations of PyTorch.

    Queries are those of each group ``[B, HKV, G, F]``, the key is ``[B, HKV, 1, F]``, its value ``[B, HKV, 1, V]``, its
    gates ``[B, HKV, 1]``; it counts in rows where ``counts [B, 1]`` says so, without that in all. Returns
    ``o [B, HKV, G, V]`` in the state's dtype.
    """
    batch, kv_heads, group, dim = q.shape
    rows, dtype = batch * kv_heads, kv.dtype
    v, beta = v.to(dtype).reshape(rows, 1, -1), beta.to(dtype).reshape(rows, 1, 1)
    log_decay = None if log_decay is None else log_decay.to(dtype).reshape(rows, 1, 1)
    if counts is not None:
        hidden = ~counts.expand(batch, kv_heads).reshape(rows, 1, 1)
        k = k.masked_fill(hidden.view(batch, kv_heads, 1, 1), 0)
        v, beta = v.masked_fill(hidden, 0), beta.masked_fill(hidden, 0)
        log_decay = None if log_decay is None else log_decay.masked_fill(hidden, 0)
    # One normalisation for both.
    both = torch.cat([k, q], 2).to(dtype)
    both = (unit(both) if l2norm else both).view(rows, 1 + group, dim)
    key, queries, state = both[:, :1], both[:, 1:], kv.view(rows, dim, -1)
    if log_decay is not None:
        state.mul_(log_decay.clamp(min=LEAST_LOG_DECAY).exp_())
    error = torch.baddbmm(v, key, state, alpha=-1).mul_(beta)
    state.baddbmm_(key.mT, error)
    return torch.bmm(queries, state).view(batch, kv_heads, group, -1)


def delta_plain_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    key_mask: Tensor | None,
    l2norm: bool,
    backend: str,
    rows: Tensor | None = None,
) -> Tensor:
    """Run :func:`delta_step_` on plain tensors."""
    state = DeltaRuleState(kv)
    o = delta_step_(q, k, v, beta, log_decay, state, key_mask=key_mask, l2norm=l2norm, backend=backend, rows=rows)
    return o.contiguous()


delta_opaque_ = operator("delta_opaque_", delta_plain_, contiguous_like_values, changes=("kv",))
"""The same as one node of a graph: what chooses a backend does not belong into it."""
