"""The public op: checks its arguments and hands over to a backend."""

from typing import Literal, overload

from torch import Tensor

from hf_linear_attn.checks import check_type
from hf_linear_attn.ops.delta_rule.checks import check_call, check_state
from hf_linear_attn.ops.delta_rule.problem import DeltaCall
from hf_linear_attn.ops.delta_rule.reference import delta_rule_reference
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.delta_rule.torch import delta_rule_chunked
from hf_linear_attn.ops.dispatch import choose_backend, kernel_obstacle
from hf_linear_attn.ops.library import own_precision


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = ...,
    *,
    key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    state: DeltaRuleState | None = ...,
    return_state: Literal[True] = ...,
    delay: int = ...,
    l2norm: bool = ...,
    backend: str = ...,
) -> tuple[Tensor, DeltaRuleState]: ...
@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = ...,
    *,
    key_mask: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    state: DeltaRuleState | None = ...,
    return_state: Literal[False],
    delay: int = ...,
    l2norm: bool = ...,
    backend: str = ...,
) -> Tensor: ...
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: DeltaRuleState | None = None,
    return_state: bool = True,
    delay: int = 0,
    l2norm: bool = True,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, DeltaRuleState]:
    """Compute the delta rule, gated where there is a decay, in O(T) time with a state of constant size.

    A token first fades the state, then overwrites what stands at its key: ``S = exp(g_t) S``, then
    ``S += beta_t k_t (v_t - S^T k_t)^T``; ``o_i = S_j^T q_i`` reads the state after key ``j = i - delay``. There is no
    normaliser and no scale (DeltaNet: Yang et al., 2024, arXiv:2406.06484; gated: Yang et al., 2024,
    arXiv:2412.06464). Queries and keys may be features; the op divides them by their lengths. A query that sees no
    key gives 0.

    Args:
        q: Queries ``[B, H, T, F]``, bf16, fp16, fp32 or fp64, any strides.
        k: Keys ``[B, HKV, S, F]``, q's dtype; ``H % HKV == 0`` and ``S == T``.
        v: Values ``[B, HKV, S, V]``, q's dtype.
        beta: How much of what stands at a key is replaced ``[B, HKV, S]``, in 0..2, of any floating dtype.
        log_decay: g, the logarithm of what a token leaves of the state ``[B, HKV, S]``, at most 0, of any floating
            dtype. Minus infinity is a reset: the state is 0 before the token is written, and no gradient crosses it;
            below -1000 it counts as that. None for no decay.
        key_mask: ``[B, S]`` bool, True = a real token. A masked key neither writes nor fades, whatever it holds.
        cu_seqlens: ``[N + 1]`` int32 or int64, ``0 = c_0 <= c_1 <= ... <= c_N = T``: boundaries of N sequences
            packed along T; then ``B == 1``, and states have N rows.
        state: State before the first token, ``kv [B or N, HKV, F, V]``; not changed.
        return_state: Whether to return the final state too.
        delay: Tokens by which keys and their gates lag, >= 0; the state returned holds keys ``j < T - delay``.
        l2norm: Whether queries and keys are divided by their lengths, ``x / sqrt(x . x + 1e-6)``. Without it the
            state stays bounded only where ``beta (k . k) <= 2``.
        backend: ``"auto"`` (Triton on a GPU where it can run, else PyTorch), ``"triton"``, ``"torch"`` or
            ``"reference"`` (float64, a token at a time). A backend asked for by name is used or refused.

    Returns:
        ``o [B, H, T, V]`` in q's dtype, and with ``return_state`` the pair ``(o, state)``.

    Raises:
        ArgumentError: If a shape, device, size or name does not fit, a beta lies outside 0..2, or a log decay is
            positive. On a GPU numbers are looked at without waiting for them, and a device assertion fails; in a
            graph that is being compiled they are not looked at.
        ArgumentTypeError: If a dtype does not fit.
        BackendError: If the backend asked for cannot run here.

    Example:
        >>> import torch
        >>> from hf_linear_attn import delta_rule
        >>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
        >>> beta = torch.rand(1, 2, 6)
        >>> whole, _ = delta_rule(q, k, v, beta)
        >>> first, state = delta_rule(q[:, :, :4], k[:, :, :4], v[:, :, :4], beta[:, :, :4])
        >>> rest, _ = delta_rule(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], beta[:, :, 4:], state=state)
        >>> torch.allclose(whole, torch.cat([first, rest], dim=2), atol=1e-5)
        True
    """
    for name, flag in (("return_state", return_state), ("l2norm", l2norm)):
        check_type(name, flag, bool)
    check_state(state)
    kv0 = None if state is None else state.kv
    call = DeltaCall(q, k, v, beta, log_decay, key_mask, cu_seqlens, kv0, delay, l2norm)
    check_call(call)
    # States have a precision of their own, whatever products around them are cast to.
    with own_precision(q.device):
        chosen = choose_backend(backend, q.device, lambda: kernel_obstacle(q, k, v))
        if chosen == "triton":
            # Imported here so that the package needs neither Triton nor a GPU.
            from hf_linear_attn.ops.delta_rule.triton.op import delta_rule_triton

            o, final = delta_rule_triton(call)
        else:
            o, final = (delta_rule_reference if chosen == "reference" else delta_rule_chunked)(call)
    return (o, final) if return_state else o
