"""The quadratic form in float64: slow, plain, and the oracle of every other path."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.state import LinearAttentionState


def guarded(den: Tensor, eps: float) -> Tensor:
    """Move the normaliser away from 0 by ``eps`` without changing its sign."""
    return torch.where(den < 0, den - eps, den + eps)


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: str,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: LinearAttentionState | None,
    delay: int,
    eps: float,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention from the full ``[T, S]`` matrix in float64; see :func:`linear_attention`.

    Args:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, S, D]``.
        v: Values ``[B, HKV, S, V]``.
        phi: Elementwise map; ``"identity"`` where q and k are features already.
        causal: Whether query i sees only keys ``j <= i - delay``.
        key_mask: ``[B, S]`` bool, True = a real token.
        cu_seqlens: ``[N + 1]`` boundaries of sequences packed along T, with B = 1.
        state: State before the first token, ``[B or N, HKV, ...]``.
        delay: Tokens by which keys lag behind.
        eps: Added to the normaliser, away from 0.
        log_decay: ``[B, HKV, S]``, by whose exponential the sums fade before a key is added, 0 for masked keys; None
            where they do not.

    Returns:
        ``o [B, H, T, V]`` in q's dtype and the state after the last token that left the delay.
    """
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        pieces = [
            linear_attention_reference(
                q[:, :, a:b],
                k[:, :, a:b],
                v[:, :, a:b],
                phi=phi,
                causal=causal,
                key_mask=None if key_mask is None else key_mask[:, a:b],
                cu_seqlens=None,
                state=None if state is None else LinearAttentionState(state.kv[n : n + 1], state.z[n : n + 1]),
                delay=delay,
                eps=eps,
                log_decay=None if log_decay is None else log_decay[:, :, a:b],
            )
            for n, (a, b) in enumerate(pairwise(bounds))
        ]
        return torch.cat([o for o, _ in pieces], dim=2), LinearAttentionState(
            torch.cat([s.kv for _, s in pieces]), torch.cat([s.z for _, s in pieces])
        )
    dtype, state_dtype = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    feature_map = elementwise_map(phi)
    phi_q, phi_k, v = feature_map.phi(q.double()), feature_map.phi(k.double()), v.double()
    if key_mask is not None:
        phi_k = phi_k * key_mask[:, None, :, None]
    groups = q.shape[1] // k.shape[1]
    scores = phi_q @ phi_k.repeat_interleave(groups, 1).transpose(-1, -2)
    folded, faded = max(k.shape[2] - delay, 0), None
    if log_decay is not None:
        # What has faded since the first token: when each key comes, for each query, and at the end.
        keys = log_decay.double().cumsum(-1)
        faded = F.pad(keys[:, :, :folded], (k.shape[2] - folded, 0))
        left = log_decay[:, :, :folded].double().sum(-1, keepdim=True)
        since = (faded[..., None] - keys[:, :, None]).clamp(max=0).exp()
        scores = scores * since.repeat_interleave(groups, 1)
    if causal:
        scores = scores.tril(-delay)
        phi_k, folded_v = phi_k[:, :, :folded], v[:, :, :folded]
    else:
        folded_v = v
    num, den = scores @ v.repeat_interleave(groups, 1), scores.sum(-1)
    if faded is not None:
        phi_k = phi_k * (left - keys[:, :, :folded]).exp()[..., None]
    kv, z = phi_k.transpose(-1, -2) @ folded_v, phi_k.sum(-2)
    if state is not None:
        kv0, z0 = state.kv.double(), state.z.double()
        if faded is not None:
            phi_q = phi_q * faded.exp().repeat_interleave(groups, 1)[..., None]
        num = num + phi_q @ kv0.repeat_interleave(groups, 1)
        den = den + (phi_q @ z0.repeat_interleave(groups, 1)[..., None])[..., 0]
        if faded is not None:
            kv0, z0 = kv0 * left.exp()[..., None], z0 * left.exp()
        kv, z = kv + kv0, z + z0
    o = num / guarded(den, eps)[..., None]
    return o.to(dtype), LinearAttentionState(kv.to(state_dtype), z.to(state_dtype))
