"""Attention over a window from the full matrix of scores, in float64: slow, plain, the oracle of every other path."""

import torch
from torch import Tensor

from hf_linear_attn.ops.window.problem import WindowCall


def window_attention_reference(call: WindowCall) -> Tensor:
    """Compute :func:`hf_linear_attn.ops.window.window_attention`."""
    q, k, v, key_mask, sinks, own, kept, window, scaling = call.shown()
    dtype, groups, past = q.dtype, q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    i = torch.arange(q.shape[2], device=q.device)[:, None] + past
    j = torch.arange(k.shape[2], device=q.device)[None]
    visible = ((j <= i) & (j > i - window))[None]
    if key_mask is not None:
        visible = (visible & key_mask[:, None]) | (j == i)
    visible = visible.expand(q.shape[0], -1, -1)
    if sinks is not None:
        k, v, visible = torch.cat([sinks[0], k], 2), torch.cat([sinks[1], v], 2), torch.cat([sinks[2], visible], -1)
    visible = visible[:, None].expand(-1, q.shape[1], -1, -1)
    if kept is not None:
        every = torch.arange(kept.k.shape[2], device=q.device).expand(kept.ends.shape)
        seen = kept.seen(every, torch.arange(q.shape[2], device=q.device)).repeat_interleave(groups, 1)
        k, v, visible = torch.cat([kept.k, k], 2), torch.cat([kept.v, v], 2), torch.cat([seen, visible], -1)
    q, k, v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (scaling * q @ k.mT).masked_fill(~visible, -torch.inf)
    if own is not None:
        own_score = own[0].double().masked_fill(~own[1][:, None], -torch.inf)
        scores = torch.cat([scores, own_score[..., None]], -1)
    weights = scores.softmax(-1)
    o = weights[..., : k.shape[2]] @ v
    if own is not None:
        o = o + weights[..., -1:] * own[2].double()
    return o.to(dtype)
