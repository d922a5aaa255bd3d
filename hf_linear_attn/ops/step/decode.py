"""The decode step: a few new tokens against a state that is updated in place, at fixed addresses."""

from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.dispatch import LARGEST_FEATURES, LARGEST_HEAD, choose_backend, kernel_obstacle
from hf_linear_attn.ops.library import no_gradients, operator
from hf_linear_attn.ops.linear_attention.api import linear_attention
from hf_linear_attn.ops.linear_attention.checks import check_log_decay
from hf_linear_attn.ops.linear_attention.reference import guarded
from hf_linear_attn.ops.state import LinearAttentionState, check_rows, contiguous_like_values
from hf_linear_attn.ops.step.checks import check_decode, check_step_mask
from hf_linear_attn.ops.triton.plan import target_of, tile


# Whatever torch.compile traces, it need not look for tiles.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def copies_of(device: torch.device, role: Literal["decode", "hybrid"], feature_dim: int, value_dim: int) -> int | None:
    """Return how many programs share a head in a step; each keeps its own copy of the sums that all of them need.

    It is None where no kernel runs, or only interpreted ones, which run one after another.
    """
    target = target_of(device) if device.type == "cuda" else None
    if target is None or feature_dim > LARGEST_FEATURES or value_dim > LARGEST_HEAD:
        return None
    # Widths are the same for every dtype: a state is fp32.
    return -(-value_dim // tile(target, torch.bfloat16, role, feature_dim, value_dim, 0).width)


def decode_state(
    batch: int, num_kv_heads: int, feature_dim: int, value_dim: int, *, device: torch.device | str
) -> LinearAttentionState:
    """Allocate an empty state for :func:`decode_step_`.

    Args:
        batch: Sequences ``B``.
        num_kv_heads: Key heads ``HKV``.
        feature_dim: Features ``F``.
        value_dim: Size ``V`` of a value.
        device: Where.

    Returns:
        ``kv [B, HKV, F, V]`` and ``z [B, HKV, C, F]``, fp32 zeros. The C copies of the normaliser, one per
        program of the kernel that shares a head, are always equal: fill them all
        (``z.copy_(other.z[:, :, None])``) and read any one (``z[:, :, 0]``).
    """
    device = torch.device(device)
    copies = copies_of(device, "decode", feature_dim, value_dim) or 1
    return LinearAttentionState(
        torch.zeros(batch, num_kv_heads, feature_dim, value_dim, device=device),
        torch.zeros(batch, num_kv_heads, copies, feature_dim, device=device),
    )


@no_gradients
def decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    *,
    phi: str = "elu",
    key_mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
    log_decay: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Read T new tokens and fold them into ``state`` in place; no gradients.

    The same sums as :func:`linear_attention` with ``causal=True`` and that state, without a new state each
    time, so that a captured graph can replay it. Masked tokens leave the state as it is: a finished row is a
    masked row.

    Args:
        q: Queries ``[B, H, T, D]``; features already where ``phi`` is ``"identity"``.
        k: Keys ``[B, HKV, T, D]``.
        v: Values ``[B, HKV, T, V]``.
        state: ``kv [B, HKV, F, V]`` and ``z [B, HKV, F]`` or ``[B, HKV, C, F]``, contiguous, fp32 (fp64 for
            fp64 tokens); see :func:`decode_state`.
        phi: Name of an elementwise map.
        key_mask: ``[B, T]`` bool, True = a real token.
        eps: Added to the normaliser, away from 0.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        log_decay: ``[B, HKV, T]``, <= 0: by whose exponential the sums fade when a key comes; None where they do not.
        rows: Where in a pool of P states those of the rows lie ``[B]`` int64, all different; None where row b's is the
            b-th. A pool's ``kv`` and ``z [P, HKV, F]`` have any stride from state to state.

    Returns:
        ``o [B, H, T, V]`` in q's dtype.

    Raises:
        ArgumentError: If shapes or names do not fit, the state is not contiguous, or it would grow.
        ArgumentTypeError: If the state is not fp32 (fp64 for fp64 tokens).
        BackendError: If the backend asked for cannot run here.
    """
    if rows is not None:
        check_rows(rows, len(q))
        if state.z.ndim != 3:
            shape = tuple(state.z.shape)
            raise ArgumentError("state.z", "have no copies in a pool", shape, "Allocate it without them.")
    if log_decay is not None:
        log_decay = check_log_decay(log_decay, k, True, key_mask)
    if choose_backend(backend, q.device, lambda: kernel_obstacle(q, k, v, LARGEST_FEATURES)) == "triton":
        # Imported here so that the package needs neither Triton nor a GPU.
        from hf_linear_attn.ops.step.triton.op import decode_step_triton_

        z = state.z if state.z.ndim == 4 else state.z[:, :, None]
        return decode_step_triton_(q, k, v, key_mask, state.kv, z, phi, eps, log_decay, rows)
    check_decode(q, k, v, *state, rows)
    check_step_mask(key_mask, q)
    if rows is not None:
        own = LinearAttentionState(*(x.index_select(0, rows) for x in state))
        o = decode_plain_(q, k, v, *own, key_mask, phi, eps, "torch", log_decay)
        for x, y in zip(state, own, strict=True):
            x.index_copy_(0, rows, y)
        return o
    feature_map = elementwise_map(phi)
    if q.shape[2] == 1:
        if key_mask is not None:
            # What is masked must not matter, whatever it holds.
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
        phi_q = feature_map.phi(torch.unflatten(q[:, :, 0], 1, (k.shape[1], -1)))
        if log_decay is not None:
            fade_(*state, log_decay)
        o = fold_and_read_(phi_q, feature_map.phi(k), v, *state, key_mask, eps, not feature_map.non_negative)
        return o.view(*q.shape[:3], -1).to(q.dtype)
    one = state.z if state.z.ndim == 3 else state.z[:, :, 0]
    o, (kv, z) = linear_attention(
        q, k, v, feature_map, key_mask=key_mask, state=LinearAttentionState(state.kv, one), eps=eps,
        log_decay=log_decay, backend="torch",
    )  # fmt: skip
    state.kv.copy_(kv)
    state.z.copy_(z if state.z.ndim == 3 else z[:, :, None])
    return o


def fade_(kv: Tensor, z: Tensor, log_decay: Tensor, counts: Tensor | None = None) -> None:
    """Let sums fade by one key's log decay ``[B, HKV, 1]``, in place, where it counts ``[B, 1]``."""
    if counts is not None:
        log_decay = log_decay.masked_fill(~counts[:, None], 0)
    fade = log_decay.exp().to(kv.dtype)
    for x in (kv, z):
        x.mul_(fade.view(*fade.shape[:2], *(1,) * (x.ndim - 2)))


def decode_plain_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    key_mask: Tensor | None,
    phi: str,
    eps: float,
    backend: str,
    log_decay: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Run :func:`decode_step_` on plain tensors."""
    step = partial(decode_step_, phi=phi, key_mask=key_mask, eps=eps, backend=backend, log_decay=log_decay, rows=rows)
    return step(q, k, v, LinearAttentionState(kv, z)).contiguous()


decode_opaque_ = operator("decode_opaque_", decode_plain_, contiguous_like_values, changes=("kv", "z"))
"""The same as one node of a graph: what chooses a backend does not belong into it."""


def fold_and_read_(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    counts: Tensor | None,
    eps: float,
    signed: bool,
) -> Tensor:
    """Fold one key into ``kv`` and ``z`` in place and read them, in the fewest operations of PyTorch.

    Features are those of the queries of each group ``[B, HKV, G, F]`` and of the key ``[B, HKV, 1, F]``, finite; its
    value is ``[B, HKV, 1, V]``, and it counts in rows where ``counts [B, 1]`` says so, without that in all. Returns
    ``o [B, HKV, G, V]`` in the state's dtype.
    """
    batch, kv_heads, group, dim = phi_q.shape
    phi_q, phi_k = phi_q.to(kv.dtype), phi_k.to(kv.dtype)
    rows, key = batch * kv_heads, phi_k[:, :, 0] if z.ndim == 3 else phi_k
    if counts is None:
        v = v.to(kv.dtype)
        z.add_(key)
    else:
        v = torch.where(counts[:, :, None, None], v, constant(0.0, kv))
        z.addcmul_(key, counts.view(batch, *(1,) * (z.ndim - 1)))
    sums, one = kv.view(rows, dim, -1), z if z.ndim == 3 else z[:, :, 0]
    sums.baddbmm_(phi_k.reshape(rows, 1, dim).mT, v.reshape(rows, 1, -1))
    phi_q, one = phi_q.reshape(rows, group, dim), one.reshape(rows, dim, 1)
    den = guarded(torch.bmm(phi_q, one), eps) if signed else torch.baddbmm(constant(eps, kv), phi_q, one)
    return torch.bmm(phi_q, sums).div_(den).view(batch, kv_heads, group, -1)


def constant(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor ``[1]`` of a dtype and on a device, kept for the next step."""
    make = _constant if torch.compiler.is_compiling() else _kept_constant
    return make(value, like.dtype, like.device)


def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


_kept_constant = cache(_constant)
