"""The recurrence in float64, token by token: slow, plain, and the oracle of every other path."""

from itertools import pairwise

import torch
from torch import Tensor

from hf_linear_attn.ops.delta_rule.problem import DeltaCall
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState

NORM_EPS = 1e-6
"""Added to a squared length before its root is divided by; as peers do, so that their checkpoints compute the same."""


def unit(x: Tensor) -> Tensor:
    """Divide vectors by their lengths; a vector of zeros stays one."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def delta_rule_reference(call: DeltaCall) -> tuple[Tensor, DeltaRuleState]:
    """Compute the delta rule one token after another in float64; see :func:`delta_rule`.

    Returns:
        ``o [B, H, T, V]`` in q's dtype and the state after the last token that left the delay.
    """
    if call.cu_seqlens is not None:
        bounds = pairwise(call.cu_seqlens.tolist())
        pieces = [delta_rule_reference(_sequence(call, n, slice(a, b))) for n, (a, b) in enumerate(bounds)]
        return torch.cat([o for o, _ in pieces], dim=2), DeltaRuleState(torch.cat([s.kv for _, s in pieces]))
    q, k, v, beta, key_mask, delay = call.q, call.k, call.v, call.beta, call.key_mask, call.delay
    dtype, state_dtype = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    log_decay = torch.zeros_like(beta) if call.log_decay is None else call.log_decay
    q, k, v, beta, log_decay = (x.double() for x in (q, k, v, beta, log_decay))
    if key_mask is not None:
        hidden = ~key_mask[:, None]
        k, v = k.masked_fill(hidden[..., None], 0), v.masked_fill(hidden[..., None], 0)
        beta, log_decay = beta.masked_fill(hidden, 0), log_decay.masked_fill(hidden, 0)
    if call.l2norm:
        q, k = unit(q), unit(k)
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    # Zeros that are made of no keys, so that a state of none has gradients like any other.
    s = k[:, :, :0].mT @ v[:, :, :0] if call.kv0 is None else call.kv0.double()
    o = []
    for t in range(tokens):
        if t >= delay:
            j = t - delay
            s = s * log_decay[:, :, j, None, None].exp()
            error = v[:, :, j] - torch.einsum("bhf,bhfv->bhv", k[:, :, j], s)
            s = s + torch.einsum("bhf,bhv->bhfv", k[:, :, j], beta[:, :, j, None] * error)
        o.append(torch.einsum("bhf,bhfv->bhv", q[:, :, t], s.repeat_interleave(groups, 1)))
    out = torch.stack(o, 2) if o else q.new_zeros(*q.shape[:3], v.shape[3])
    return out.to(dtype), DeltaRuleState(s.to(state_dtype))


def _sequence(call: DeltaCall, n: int, at: slice) -> DeltaCall:
    """Return the call on the n-th of packed sequences alone."""
    tokens = [None if x is None else x[:, :, at] for x in (call.q, call.k, call.v, call.beta, call.log_decay)]
    mask = None if call.key_mask is None else call.key_mask[:, at]
    kv0 = None if call.kv0 is None else call.kv0[n : n + 1]
    return DeltaCall._make((*tokens, mask, None, kv0, call.delay, call.l2norm))
