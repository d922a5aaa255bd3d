"""The quadratic form in float64: slow, plain, and the oracle of every other path."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.chunks import LEAST_LOG_DECAY
from hf_linear_attn.ops.linear_attention.problem import LinearCall
from hf_linear_attn.ops.state import LinearAttentionState


def guarded(den: Tensor, eps: float) -> Tensor:
    """Move the normaliser away from 0 by ``eps`` without changing its sign."""
    return torch.where(den < 0, den - eps, den + eps)


def linear_attention_reference(call: LinearCall) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention from the full ``[T, S]`` matrix in float64; see :func:`linear_attention`.

    Returns:
        ``o [B, H, T, V]`` in q's dtype and the state after the last token that left the delay.
    """
    if call.cu_seqlens is not None:
        bounds = enumerate(pairwise(call.cu_seqlens.tolist()))
        sequences = (call.sequence(slice(n, n + 1), slice(a, b), slice(a, b)) for n, (a, b) in bounds)
        pieces = [linear_attention_reference(each) for each in sequences]
        return torch.cat([o for o, _ in pieces], dim=2), LinearAttentionState(
            torch.cat([s.kv for _, s in pieces]), torch.cat([s.z for _, s in pieces])
        )
    q, k, v, key_mask, log_decay, delay = call.q, call.k, call.v, call.key_mask, call.log_decay, call.delay
    dtype, state_dtype = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]
    if hidden is not None:
        # 0 times a NaN is one.
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    feature_map = elementwise_map(call.phi)
    phi_q, phi_k, v = feature_map.phi(q.double()), feature_map.phi(k.double()), v.double()
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden, 0)
    groups = q.shape[1] // k.shape[1]
    scores = phi_q @ phi_k.repeat_interleave(groups, 1).transpose(-1, -2)
    folded, faded = max(k.shape[2] - delay, 0), None
    if log_decay is not None:
        # What has faded since the first token: when each key comes, for each query, and at the end.
        log_decay = log_decay.double().clamp(min=LEAST_LOG_DECAY)
        keys = log_decay.cumsum(-1)
        faded = F.pad(keys[:, :, :folded], (k.shape[2] - folded, 0))
        left = log_decay[:, :, :folded].sum(-1, keepdim=True)
        # Of keys that are yet to come it would overflow.
        since = (faded[..., None] - keys[:, :, None]).tril(-delay).exp()
        scores = scores * since.repeat_interleave(groups, 1)
    if call.causal:
        scores = scores.tril(-delay)
        phi_k, folded_v = phi_k[:, :, :folded], v[:, :, :folded]
    else:
        folded_v = v
    num, den = scores @ v.repeat_interleave(groups, 1), scores.sum(-1)
    if faded is not None:
        phi_k = phi_k * (left - keys[:, :, :folded]).exp()[..., None]
    kv, z = phi_k.transpose(-1, -2) @ folded_v, phi_k.sum(-2)
    if call.kv0 is not None and call.z0 is not None:
        kv0, z0 = call.kv0.double(), call.z0.double()
        if faded is not None:
            phi_q = phi_q * faded.exp().repeat_interleave(groups, 1)[..., None]
        num = num + phi_q @ kv0.repeat_interleave(groups, 1)
        den = den + (phi_q @ z0.repeat_interleave(groups, 1)[..., None])[..., 0]
        if faded is not None:
            kv0, z0 = kv0 * left.exp()[..., None], z0 * left.exp()
        kv, z = kv + kv0, z + z0
    o = num / guarded(den, call.eps)[..., None]
    return o.to(dtype), LinearAttentionState(kv.to(state_dtype), z.to(state_dtype))
