"""One new token: what leaves the window is folded into the linear branch, and every tensor is updated where it lies."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.in_one import count_, step_in_one_
from hf_linear_attn.layers.mixes import LastToken
from hf_linear_attn.layers.rules import RuleStep
from hf_linear_attn.layers.state import State
from hf_linear_attn.layers.window import Window
from hf_linear_attn.ops.dispatch import wants_kernels
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.step import constant

if TYPE_CHECKING:
    from hf_linear_attn.layers.attention import Call, LinearAttention


def can_step(layer: "LinearAttention") -> bool:
    """Tell whether a layer has a step of its own; without one a token is read as any other text."""
    if layer.settings.backend == "reference" or layer.disabled or not layer.rule.steps:
        return False
    return layer.window is None or layer.mix.steps


def steps(layer: "LinearAttention", q: Tensor, call: "Call") -> bool:
    """Tell whether a call is one token, and nobody can need the state from before it: not autograd, nor a rollback."""
    state = call.state
    if state is None or q.shape[2] != 1 or not state.tensors or not call.in_place or torch.is_grad_enabled():
        return False
    if not can_step(layer):
        return False
    # What was made under inference_mode can be changed in place only there.
    return (
        torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not state.tensors["seen"].is_inference()
    )


def step_(layer: "LinearAttention", q: Tensor, k: Tensor, v: Tensor, call: "Call") -> Tensor:
    """Read one token and fold it into the call's state in place; arguments as of :meth:`LinearAttention.forward`."""
    state, window, real = call.state, layer.window, call.key_mask
    if state is None:
        raise RuntimeError("there is no state to step")
    whole = None if window is None else step_in_one_(layer, window, q, k, v, call, state)
    if whole is not None:
        return whole
    if call.rotation is not None:
        state.check_common("near_turns", steps=True)
    if window is None:
        o = _plain_(layer, q, k, v, real, state)
    elif _is_full(window, state, real):
        o = _full_(layer, window, q, k, v, state, call)
    else:
        o = _hybrid_(layer, window, q, k, v, state, call)
    state.advance(1, q.device)
    state.padded |= real is not None
    layer.look_for_sinks(state, 1)
    return o.flatten(1, 2)[:, :, None].to(q.dtype)


def read_far(
    layer: "LinearAttention",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    position_q: Tensor,
    position_k: Tensor,
    tensors: Mapping[str, Tensor],
    rows: Tensor | None = None,
) -> Tensor:
    """Fold a key into the linear branch and read it.

    Args:
        layer: The layer.
        q: Queries ``[B, HKV, G, D]``.
        k: The key ``[B, HKV, 1, D]``.
        v: Its value.
        counts: Whether it counts ``[B, 1]``; None where all do.
        position_q: Numbers of the queries ``[B]``.
        position_k: Numbers of the keys.
        tensors: The layer's state; the rule's are updated.
        rows: Where in a pool the rows' states lie; see :class:`RuleStep`.

    Returns:
        ``o [B, HKV, G, V]``.
    """
    feature_map, backend, gates = layer.feature_map, layer.settings.backend, layer.gates(k, v)
    phi = layer.elementwise
    if phi is None and feature_map.joint and not wants_kernels(backend, q.device):
        both = feature_map(q, "q", key=k)
        q, k = both[:, :, 1:], both[:, :, :1]
    elif phi is None:
        group = q.shape[1:3]
        of_q = features_of(feature_map, q.flatten(1, 2)[:, :, None], "q", position_q[:, None], backend)
        q, k = of_q.view(len(q), *group, -1), features_of(feature_map, k, "k", position_k[:, None], backend)
    return layer.rule.step_(RuleStep(q, k, v, gates, phi, counts, not feature_map.non_negative, rows), tensors)


def _plain_(layer: "LinearAttention", q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, state: State) -> Tensor:
    """Step a layer without a window: the token is folded at once."""
    seen = state.tensors["seen"]
    if not wants_kernels(layer.settings.backend, q.device):
        k, v = _cleared(k, real), _cleared(v, real)
    o = read_far(layer, grouped(q, k.shape[1]), k, v, real, seen, seen, state.tensors)
    count_(seen, real)
    return o


def _hybrid_(
    layer: "LinearAttention",
    window: Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    call: "Call",
) -> Tensor:
    """Step a layer with a window."""
    real, scaling, rotation = call.key_mask, layer.scaling(call), call.rotation
    k, v = _cleared(k, real), _cleared(v, real)
    tensors, (new, old) = state.tensors, window.places(state)
    near_k, near_v, mask, seen = (tensors[name] for name in ("near_k", "near_v", "near_mask", "seen"))
    keys, far = tensors.get("far_keys"), None
    number = None
    rows = grouped(q, near_k.shape[1])
    wide = upcast(rows)
    if layer.mix.has_far:
        gone_k, gone_v = _take(near_k, 2, old), _take(near_v, 2, old)
        counts = _take(mask, 1, old)
        position = seen
        if layer.feature_map.positional and layer.feature_map.kernel is None:
            # Those that are in the circle came last, and the one that leaves is the first of them.
            position = seen - mask[:, window.sinks :].sum(1)
        queries = rows if wants_kernels(layer.settings.backend, q.device) else wide
        plain = gone_k
        if rotation is not None:
            turns = tensors["near_turns"][..., : rotation.turns.shape[2]]
            plain, queries = turned_back(rotation, _take(turns, 1, old), gone_k, queries, layer.settings.backend)
            _put_(turns, 1, new, rotation.turns)
        far = read_far(layer, queries, plain, gone_v, counts, seen, position, tensors)
        if keys is not None:
            gone = gone_k[:, :, 0] if keys.ndim == 3 else gone_k
            keys.addcmul_(gone, counts.view(-1, *(1,) * (keys.ndim - 1)))
    _put_(mask, 1, new, _enter_(window, k, v, real, state))
    _put_(mask, 1, old, False)
    if far is None:
        # Nothing shows what has left, and 0 times a NaN is one.
        for x in (near_k, near_v):
            _put_(x, 2, old, 0.0)
    _put_(near_k, 2, new, k)
    _put_(near_v, 2, new, v)
    count_(seen, real)
    scores = rows @ near_k.mT
    if far is not None:
        number = seen[:, None] - mask.sum(1, keepdim=True, dtype=wide.dtype)
    hidden = torch.where(mask, constant(0.0, wide), constant(torch.finfo(wide.dtype).min, wide))
    scores = torch.add(hidden[:, None, None], scores, alpha=scaling)
    if keys is not None and keys.ndim == 4:
        keys = keys[:, :, 0]
    return layer.mix.join_last(LastToken(wide, scores, near_v, far, number, keys, scaling), layer.weights())


def _full_(
    layer: "LinearAttention", window: Window, q: Tensor, k: Tensor, v: Tensor, state: State, call: "Call"
) -> Tensor:
    """Step a layer whose window is full: all numbers but those of tensors are known, and operations are fewest."""
    scaling, rotation, backend = layer.scaling(call), call.rotation, layer.settings.backend
    tensors, (new, old) = state.tensors, window.places(state)
    near_k, near_v, mask, seen = (tensors[name] for name in ("near_k", "near_v", "near_mask", "seen"))
    keys, far, number = tensors.get("far_keys"), None, None
    rows = grouped(q, near_k.shape[1])
    wide, gone_k, gone_v = upcast(rows), near_k.narrow(2, old, 1), near_v.narrow(2, old, 1)
    yes, no = _flags(mask.device)
    slots = [near_k.narrow(2, new, 1), near_v.narrow(2, new, 1), mask.narrow(1, new, 1), mask.narrow(1, old, 1)]
    values = [k, v, yes.expand(len(mask), 1), no.expand(len(mask), 1)]
    if layer.mix.has_far:
        kernels = wants_kernels(backend, q.device)
        plain, queries = gone_k, rows if kernels else wide
        if rotation is not None:
            turns = tensors["near_turns"][..., : rotation.turns.shape[2]]
            plain, queries = turned_back(rotation, turns.narrow(1, old, 1), plain, queries, backend, known=not kernels)
            slots.append(turns.narrow(1, new, 1))
            values.append(rotation.turns.expand(len(mask), -1, -1))
        # Those that are in the circle came last, and the one that leaves is the first of them.
        position = seen - window.size if layer.feature_map.positional and layer.feature_map.kernel is None else seen
        far = read_far(layer, queries, plain, gone_v, None, seen, position, tensors)
        number = state.length + 1 - window.size - window.sinks
        if keys is not None:
            keys.add_(gone_k[:, :, 0] if keys.ndim == 3 else gone_k)
    if far is None or layer.mix.takes_slot:
        # Nothing shows what has left, and 0 times a NaN is one.
        slots.append(gone_v)
        values.append(constant(0.0, near_v).expand_as(gone_v))
    torch._foreach_copy_(slots, values)
    count_(seen, None)
    scores = torch.baddbmm(constant(0.0, rows), rows.flatten(0, 1), near_k.flatten(0, 1).mT, beta=0, alpha=scaling)
    scores = upcast(scores).view(*rows.shape[:3], -1)
    if not layer.mix.takes_slot:
        _put_(scores, 3, old, torch.finfo(wide.dtype).min)
    if keys is not None and keys.ndim == 4:
        keys = keys[:, :, 0]
    free = old if layer.mix.takes_slot else None
    return layer.mix.join_last(LastToken(wide, scores, near_v, far, number, keys, scaling, free), layer.weights())


@cache
def _flags(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return true and false as tensors ``[1, 1]``."""
    return torch.ones(1, 1, dtype=torch.bool, device=device), torch.zeros(1, 1, dtype=torch.bool, device=device)


def turned_back(
    rotation: Rotation, turns: Tensor, gone: Tensor, q: Tensor, backend: str, *, known: bool = False
) -> tuple[Tensor, Tensor]:
    """Undo the rotation of the key that leaves a window and of the new token's queries.

    Args:
        rotation: That of the new tokens.
        turns: Those of the key ``[B, 1, R]``.
        gone: The key ``[B, HKV, 1, D]``.
        q: Queries ``[B, HKV, G, D]``.
        backend: As in :func:`linear_attention`.
        known: Whether there is such a key in every row.

    Returns:
        The key and the queries.
    """
    now = rotation.turns.expand(len(q), q.shape[2], -1)
    turns, both = torch.cat([turns, now], 1), torch.cat([gone, q], 2)
    others = rotation.of_others(turns)
    both = others.divide(both) if known and turns.shape[2] == q.shape[3] else others.undo(both, backend)
    return both[:, :, :1], both[:, :, 1:]


def _is_full(window: Window, state: State, real: Tensor | None) -> bool:
    """Tell whether the host knows that every slot but one holds a token of every row, and one leaves that counts."""
    if real is not None or state.padded or isinstance(state.length, Tensor) or torch.compiler.is_compiling():
        return False
    return state.first_read and state.length >= window.size + window.sinks


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Return the queries of a step by group, ``[B, HKV, G, D]``."""
    batch, heads, _, dim = q.shape
    return q.reshape(batch, kv_heads, heads // kv_heads, dim)


def _cleared(x: Tensor, real: Tensor | None) -> Tensor:
    """Return keys or values without what is masked: it must not matter, whatever it holds."""
    return x if real is None else x.masked_fill(~real[:, None, :, None], 0)


def _enter_(window: Window, k: Tensor, v: Tensor, real: Tensor | None, state: State) -> Any:
    """Keep a new token for ever where it is a sink; return whether it counts in the circle."""
    if state.first_read or not window.sinks:
        return True if real is None else real
    sinks, tensors = window.sinks, state.tensors
    slot = torch.arange(sinks, device=k.device) == tensors["seen"][:, None]
    if real is not None:
        slot = slot & real
    for name, x in (("near_k", k), ("near_v", v)):
        held = tensors[name][:, :, :sinks]
        held.copy_(torch.where(slot[:, None, :, None], x, held))
    tensors["near_mask"][:, :sinks].logical_or_(slot)
    counts = ~slot.any(1, keepdim=True)
    return counts if real is None else counts & real


def _take(x: Tensor, dim: int, place: int | Tensor) -> Tensor:
    """Return one slot; a copy where its place is a tensor, as in a static state."""
    return x.index_select(dim, place[None]) if isinstance(place, Tensor) else x.narrow(dim, place, 1)


def _put_(x: Tensor, dim: int, place: int | Tensor, value: Tensor | float) -> None:
    """Overwrite one slot."""
    if isinstance(place, Tensor):
        shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        value = value.expand(shape) if isinstance(value, Tensor) else x.new_full(shape, value)
        x.index_copy_(dim, place[None], value)
    elif isinstance(value, Tensor):
        x.narrow(dim, place, 1).copy_(value)
    else:
        x.narrow(dim, place, 1).fill_(value)
