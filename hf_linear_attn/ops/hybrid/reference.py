"""The definition of a layer with a window, in float64, token by token: slow, plain, the oracle of every other path.

A token enters the ring, which holds the last W. What leaves the ring is kept, where C keys are, and what then goes, or
what leaves the ring where none are, is folded into the state by the update rule. The first N real tokens are sinks:
they stay in sight, and are never folded. A query then reads sinks, kept keys and ring by softmax and the state by its
features, and the mix joins both. Every key head of every text does so by itself.
"""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from hf_linear_attn.ops.hybrid.formulas import GATES, MIXES, RULES, Query, keep
from hf_linear_attn.ops.hybrid.problem import HeadState, HybridParams, HybridState, Key, Tokens
from hf_linear_attn.ops.rotation import Rotation


def step(head: HeadState, key: Key | None, params: HybridParams) -> None:
    """Let a token into the ring, None for padding, and the one that leaves it into the state."""
    fold, _ = RULES[params.rule]
    if key is not None and len(head.sinks) < params.geometry.sinks:
        head.sinks.append(key)
        key = None
    head.ring.append(key)
    gone = head.ring.pop(0) if len(head.ring) > params.geometry.lag else None
    if gone is not None and params.geometry.kept:
        head.kept, gone = keep(head.kept, gone, head.ring, params)
    if gone is not None:
        head.sums = fold(head.sums, gone)
        head.key_sum, head.number = head.key_sum + gone.k, head.number + 1


def attend(head: HeadState, q: Tensor, phi_q: Tensor, params: HybridParams) -> Tensor:
    """Return what the queries of one token ``[G, D]`` read, ``[G, V]``."""
    _, read = RULES[params.rule]
    num, den = read(head.sums, phi_q, params.rule_weights)
    near = [key for key in (*head.sinks, *(x.key for x in head.kept), *head.ring) if key is not None]
    scores = torch.stack([params.scaling * q @ key.k for key in near], 1) if near else q[:, :0]
    values = torch.stack([key.v for key in near]) if near else num[:0]
    x = Query(q, scores, values, num, den, head.number, head.key_sum, params.scaling, params.eps)
    return x.far() if params.geometry.window is None else MIXES[params.mix](x, params.mix_weights)


def unrotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn pairs ``(a, b)`` of queries or keys back: the complex ``a + ib`` over its ``cos + i sin``."""
    if rotation is None:
        return x
    width, layout = rotation.turns.shape[-1], rotation.layout
    turned, still = (x[..., -width:], x[..., :-width]) if layout.at_end else (x[..., :width], x[..., width:])
    angles = torch.complex(*rotation.turns.double().chunk(2, -1))[:, None]
    back = torch.view_as_real(torch.complex(*layout.pairs_of(turned)) / angles)
    turned = layout.whole(back[..., 0], back[..., 1])
    return torch.cat([still, turned] if layout.at_end else [turned, still], -1)


def gates_of(k: Tensor, v: Tensor, params: HybridParams) -> dict[str, Tensor]:
    """Return what each key does to the state, ``[B, HKV, T]`` by name: of ``b + u.k + w.v``, learned per key head."""
    w, found = {name: x.double() for name, x in params.gate_weights.items()}, {}
    for name in (name for name in GATES if f"{name}_bias" in w):
        score = torch.einsum("bhtd,hd->bht", k, w[f"{name}_key"]) + torch.einsum("bhtd,hd->bht", v, w[f"{name}_value"])
        found[name] = GATES[name](score + w[f"{name}_bias"][:, None])
    return found


def begin(tokens: Tokens, params: HybridParams) -> HybridState:
    """Return the state before the first token."""
    kv = tokens.q.new_zeros(params.feature_map.feature_dim, tokens.v.shape[3], dtype=torch.float64)
    empty = HeadState(sums={"kv": kv, "z": kv[:, 0]}, key_sum=kv.new_zeros(tokens.k.shape[3]))
    return HybridState(heads=[[empty] * tokens.k.shape[1]] * len(tokens.k), seen=[0] * len(tokens.k))


def hybrid_reference(
    tokens: Tokens, params: HybridParams, state: HybridState | None = None
) -> tuple[Tensor, HybridState]:
    """Read tokens behind those of a state.

    Args:
        tokens: The tokens.
        params: What is computed.
        state: What was remembered before; None where nothing was, as of packed texts.

    Returns:
        ``o [B, H, T, V]`` in float64, 0 of padding, and the state after the tokens; of packed texts, one text a row.
    """
    if tokens.cu_seqlens is not None:
        texts = [hybrid_reference(tokens.cut(*ends), params) for ends in pairwise(tokens.cu_seqlens.tolist())]
        heads, seen = [row for _, s in texts for row in s.heads], [n for _, s in texts for n in s.seen]
        return torch.cat([o for o, _ in texts], 2), HybridState(heads=heads, seen=seen)
    before = begin(tokens, params) if state is None else state
    (batch, kv_heads, count, _), value_dim = tokens.k.shape, tokens.v.shape[3]
    if not count:
        return tokens.q.new_zeros(batch, tokens.q.shape[1], 0, value_dim, dtype=torch.float64), before
    real = tokens.k.new_ones(batch, count, dtype=torch.bool) if tokens.key_mask is None else tokens.key_mask
    q, k, v = tokens.q.double(), *(x.double().masked_fill(~real[:, None, :, None], 0) for x in (tokens.k, tokens.v))
    positions = (real.cumsum(1) - 1).clamp(min=0) + torch.tensor(before.seen, device=q.device)[:, None]
    plain_q, plain_k = unrotated(q, tokens.rotation), unrotated(k, tokens.rotation)
    phi_q, phi_k = (params.feature_map(x, side, positions) for x, side in ((plain_q, "q"), (plain_k, "k")))
    gates, size = gates_of(plain_k, v, params), q.shape[1] // kv_heads
    said = torch.cat([plain_k, v], 3).transpose(1, 2).flatten(2)
    o, heads = q.new_zeros(*q.shape[:3], value_dim), []
    for b, row in enumerate(before.heads):
        heads.append([replace(head, sinks=[*head.sinks], ring=[*head.ring], kept=[*head.kept]) for head in row])
        for g, head in enumerate(heads[b]):
            group = slice(g * size, (g + 1) * size)
            of_group = params.of_group(g, group)
            of_token = [{name: x[b, g, t] for name, x in gates.items()} for t in range(count)]
            each = zip(real[b], k[b, g], v[b, g], phi_k[b, g], said[b], positions[b].tolist(), of_token, strict=True)
            keys = [Key(*of_key) if is_real else None for is_real, *of_key in each]
            for key in [] if params.geometry.causal else keys:
                step(head, key, of_group)
            for t, key in enumerate(keys):
                if params.geometry.causal:
                    step(head, key, of_group)
                if key is not None:
                    o[b, group, t] = attend(head, q[b, group, t], phi_q[b, group, t], of_group)
    seen = [n + int(row.sum()) for n, row in zip(before.seen, real, strict=True)]
    return o, HybridState(heads=heads, seen=seen)
