"""The recurrence in float64, token by token: slow, plain, and the oracle of every other path."""

from itertools import pairwise

import torch
from torch import Tensor

from hf_linear_attn.ops.delta_rule.state import DeltaRuleState

NORM_EPS = 1e-6
"""Added to a squared length before its root is divided by; as peers do, so that their checkpoints compute the same."""


def unit(x: Tensor) -> Tensor:
    """Divide vectors by their lengths; a vector of zeros stays one."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    *,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: DeltaRuleState | None,
    delay: int,
    l2norm: bool,
) -> tuple[Tensor, DeltaRuleState]:
    """Compute the delta rule one token after another in float64; see :func:`delta_rule`.

    Args:
        q: Queries ``[B, H, T, F]``.
        k: Keys ``[B, HKV, T, F]``.
        v: Values ``[B, HKV, T, V]``.
        beta: How much of a value is written ``[B, HKV, T]``.
        log_decay: Logarithm of what a token leaves of the state ``[B, HKV, T]``; None for all of it.
        key_mask: ``[B, T]`` bool, True = a real token.
        cu_seqlens: ``[N + 1]`` boundaries of sequences packed along T, with B = 1.
        state: State before the first token, ``[B or N, HKV, F, V]``.
        delay: Tokens by which keys lag behind.
        l2norm: Whether queries and keys are divided by their lengths.

    Returns:
        ``o [B, H, T, V]`` in q's dtype and the state after the last token that left the delay.
    """
    if cu_seqlens is not None:
        pieces = [
            delta_rule_reference(
                q[:, :, a:b],
                k[:, :, a:b],
                v[:, :, a:b],
                beta[:, :, a:b],
                None if log_decay is None else log_decay[:, :, a:b],
                key_mask=None if key_mask is None else key_mask[:, a:b],
                cu_seqlens=None,
                state=None if state is None else DeltaRuleState(state.kv[n : n + 1]),
                delay=delay,
                l2norm=l2norm,
            )
            for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist()))
        ]
        return torch.cat([o for o, _ in pieces], dim=2), DeltaRuleState(torch.cat([s.kv for _, s in pieces]))
    dtype, state_dtype = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    log_decay = torch.zeros_like(beta) if log_decay is None else log_decay
    q, k, v, beta, log_decay = (x.double() for x in (q, k, v, beta, log_decay))
    if key_mask is not None:
        hidden = ~key_mask[:, None]
        k, v = k.masked_fill(hidden[..., None], 0), v.masked_fill(hidden[..., None], 0)
        beta, log_decay = beta.masked_fill(hidden, 0), log_decay.masked_fill(hidden, 0)
    if l2norm:
        q, k = unit(q), unit(k)
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    # Zeros that are made of no keys, so that a state of none has gradients like any other.
    s = k[:, :, :0].mT @ v[:, :, :0] if state is None else state.kv.double()
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
