"""One new token: what leaves the window is folded into the linear branch, and every tensor is updated where it lies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.call import Call, Layer
from hf_linear_attn.layers.fused import count_, fused_backend, fused_step_
from hf_linear_attn.layers.mixes import LastToken
from hf_linear_attn.layers.rules import RuleStep
from hf_linear_attn.layers.state import State
from hf_linear_attn.layers.window import Window
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.step import constant


def can_step(layer: Layer) -> bool:
    """Tell whether a layer has a step of its own; without one a token is read as any other text."""
    if layer.settings.backend == "reference" or layer.disabled or not layer.rule.steps:
        return False
    return layer.window is None or layer.mix.steps


def steps(layer: Layer, q: Tensor, call: Call) -> bool:
    """Tell whether a call is one token, and the state from before it is not needed: by autograd, or for a rollback."""
    state = call.state
    if state is None or q.shape[2] != 1 or not state.tensors or not call.in_place or torch.is_grad_enabled():
        return False
    if not can_step(layer):
        return False
    # What was made under inference_mode can be changed in place only there.
    return (
        torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not state.tensors["seen"].is_inference()
    )


def step_(layer: Layer, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
    """Read one token and fold it into the call's state in place; arguments as of :meth:`LinearAttention.forward`.

    None where the layer keeps keys beyond its window and no kernel or loop does: it is then read as any other text.
    """
    state, window, real = call.state, layer.window, call.key_mask
    if state is None:
        raise RuntimeError("there is no state to step")
    chosen = fused_backend(layer.settings.backend, q.device)
    whole = None if window is None or chosen is None else fused_step_(chosen, layer, window, q, k, v, call, state)
    if whole is not None or layer.kept is not None:
        return whole
    kernels = chosen == "triton"
    if call.rotation is not None:
        state.check_common("near_turns", steps=True)
    if real is not None and (window is not None or not kernels):
        # What is masked must not matter, whatever it holds.
        hidden = ~real[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    if window is None:
        # The token is folded at once.
        seen = state.tensors["seen"]
        o = read_far(layer, grouped(q, k.shape[1]), k, v, real, seen, seen, state.tensors, kernels=kernels)
        count_(seen, real)
    else:
        ring = OwnRing(window, state, real, q.dtype)
        o = windowed_(layer, q, k, v, call, state.tensors, state.tensors, ring, kernels=kernels)
    state.advance(1, q.device, masked=real is not None)
    layer.look_for_sinks(state, 1)
    return o.flatten(1, 2)[:, :, None].to(q.dtype)


def read_far(
    layer: Layer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    position_q: Tensor,
    position_k: Tensor,
    tensors: Mapping[str, Tensor],
    rows: Tensor | None = None,
    *,
    kernels: bool,
) -> Tensor:
    """Fold a key into the linear branch and read it: return ``o [B, HKV, G, V]``.

    Queries are ``[B, HKV, G, D]``, the key and its value ``[B, HKV, 1, *]``, their positions ``[B]``; ``counts [B, 1]``
    says whether the key counts, None where all do. The rule's tensors are updated; ``rows`` and ``kernels`` are as of
    :class:`RuleStep`.
    """
    feature_map, backend, gates = layer.feature_map, layer.settings.backend, layer.gates(k, v)
    phi = layer.elementwise
    if phi is None and feature_map.joint and not kernels:
        both = feature_map(q, "q", key=k)
        q, k = both[:, :, 1:], both[:, :, :1]
    elif phi is None:
        group = q.shape[1:3]
        of_q = features_of(feature_map, q.flatten(1, 2)[:, :, None], "q", position_q[:, None], backend)
        q, k = of_q.view(len(q), *group, -1), features_of(feature_map, k, "k", position_k[:, None], backend)
    step = RuleStep(q, k, v, gates, phi, counts, not feature_map.non_negative, rows, kernels)
    return layer.rule.step_(step, tensors)


Entered = tuple[Tensor | None, Tensor | int]
"""What is added to scores once a token has come, 0 or far below it ``[B, 1, 1, slots]``, None where all slots but the
free one are in sight; and the keys beyond the window ``[B, 1, 1, 1]``, in the dtype of the scores, or the number of
all rows."""


class Ring(ABC):
    """How a step moves the windows of its rows: which slot each token comes to, and which one is free afterwards.

    Attributes:
        rows: Where in a pool the rows' states lie ``[B]`` int64; None where row b's is the b-th.
        seen: Tokens that each row has read before ``[B]`` int64.
        full: Whether every slot but one is known to hold a token of every row, and a key that counts to leave.
        counts: Whether the key that leaves counts in the linear branch ``[B, 1]`` bool; None where all do.
        old: The slot that is free afterwards.
    """

    rows: Tensor | None
    seen: Tensor
    full: bool
    counts: Tensor | None
    old: Any

    @abstractmethod
    def left(self, x: Tensor, dim: int) -> Tensor:
        """Return what the token that leaves has in a tensor ``[P, ..., slots, ...]`` with slots in a dimension."""

    @abstractmethod
    def position(self) -> Tensor:
        """Return the number of that token ``[B]``."""

    @abstractmethod
    def enter_(self, new: Sequence[tuple[Tensor, int, Tensor]], cleared: Sequence[Tensor]) -> Entered:
        """Let the token in.

        Args:
            new: Tensors, their dimension of slots, and what the token puts there; keys and values first.
            cleared: Keys or values whose free slot is set to 0: nothing shows what has left, and 0 times a NaN is one.
        """


class OwnRing(Ring):
    """The windows of a state, whose rows move alike: slots are known to the host, or to a static state's tensor.

    ``real [B, 1]`` says whether the token of a row is real, None where all are; ``dtype`` is that of the tokens.
    """

    rows = None

    def __init__(self, window: Window, state: State, real: Tensor | None, dtype: torch.dtype) -> None:
        self.window, self.state, self.real, self.dtype = window, state, real, dtype
        self.mask, self.seen = state.tensors["near_mask"], state.tensors["seen"]
        # The token that comes goes to one slot; the one in the other leaves the window.
        places, length = window.size + 1, state.length
        self.new, self.old = window.sinks + length % places, window.sinks + (length + 1) % places
        self.full = (
            not (real is not None or state.padded or isinstance(state.length, Tensor) or torch.compiler.is_compiling())
            and state.first_read
            and state.length >= window.size + window.sinks
        )
        self.counts = None if self.full else self.left(self.mask, 1)

    @override
    def left(self, x: Tensor, dim: int) -> Tensor:
        # A copy where a tensor tells the slot.
        return x.index_select(dim, self.old[None]) if isinstance(self.old, Tensor) else x.narrow(dim, self.old, 1)

    @override
    def position(self) -> Tensor:
        # Those in the ring came last, and the one that leaves is the first of them.
        return self.seen - (self.window.size if self.full else self.mask[:, self.window.sinks :].sum(1))

    @override
    def enter_(self, new: Sequence[tuple[Tensor, int, Tensor]], cleared: Sequence[Tensor]) -> Entered:
        mask, seen, state = self.mask, self.seen, self.state
        if self.full:
            yes, no = _flags(mask.device)
            slots = [mask.narrow(1, self.new, 1), mask.narrow(1, self.old, 1)]
            values = [yes.expand(len(mask), 1), no.expand(len(mask), 1)]
            for x, dim, y in new:
                slots.append(x.narrow(dim, self.new, 1))
                values.append(y if len(y) == len(mask) else y.expand(len(mask), -1, -1))
            for x in cleared:
                slots.append(x.narrow(2, self.old, 1))
                values.append(constant(0.0, x).expand_as(slots[-1]))
            torch._foreach_copy_(slots, values)
            seen.add_(1)
            return None, state.length + 1 - self.window.size - self.window.sinks
        (_, _, k), (_, _, v) = new[:2]
        _put_(mask, 1, self.new, _enter_(self.window, k, v, self.real, state))
        _put_(mask, 1, self.old, False)
        for x in cleared:
            _put_(x, 2, self.old, 0.0)
        for x, dim, y in new:
            _put_(x, dim, self.new, y)
        count_(seen, self.real)
        like = upcast(mask.new_empty(0, dtype=self.dtype))
        hidden = torch.where(mask, constant(0.0, like), constant(torch.finfo(like.dtype).min, like))
        number = seen[:, None] - mask.sum(1, keepdim=True, dtype=like.dtype)
        return hidden[:, None, None], number[:, :, None, None]


def windowed_(
    layer: Layer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    tensors: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
    ring: Ring,
    *,
    kernels: bool,
) -> Tensor:
    """Step a layer with a window: return ``o [B, HKV, G, V]``.

    The window's tensors, where the ring lies, and the sums of rule and mix are updated. The rule's lie in a pool where
    it takes rows. ``kernels`` is as of :class:`RuleStep`.
    """
    rotation, scaling = call.rotation, layer.scaling(call)
    near_k, near_v, keys, far = tensors["near_k"], tensors["near_v"], sums.get("far_keys"), None
    mix, backend, rows = layer.mix, layer.settings.backend, grouped(q, k.shape[1])
    wide, gone_k, gone_v = upcast(rows), ring.left(near_k, 2), ring.left(near_v, 2)
    new = [(near_k, 2, k), (near_v, 2, v)]
    if mix.has_far:
        plain, queries = gone_k, rows if kernels else wide
        if rotation is not None:
            turns = tensors["near_turns"][..., : rotation.turns.shape[2]]
            known = ring.full and not kernels
            plain, queries = turned_back(rotation, ring.left(turns, 1), gone_k, queries, backend, known=known)
            new.append((turns, 1, rotation.turns))
        reads_position = layer.feature_map.positional and layer.feature_map.kernel is None
        position = ring.position() if reads_position else ring.seen
        at = ring.rows if layer.rule.steps_rows and kernels else None
        far = read_far(layer, queries, plain, gone_v, ring.counts, ring.seen, position, sums, at, kernels=kernels)
        if keys is not None:
            gone = gone_k[:, :, 0] if keys.ndim == 3 else gone_k
            if ring.counts is None:
                keys.add_(gone)
            else:
                keys.addcmul_(gone, ring.counts.view(-1, *(1,) * (keys.ndim - 1)))
    takes_slot = ring.full and mix.takes_slot
    cleared = [near_v] if takes_slot or far is None else []
    hidden, number = ring.enter_(new, cleared if ring.full or far is not None else [near_k, near_v])
    held_k, held_v = (near_k, near_v) if ring.rows is None else (x.index_select(0, ring.rows) for x in (near_k, near_v))
    if hidden is not None:
        scores = torch.add(hidden, rows @ held_k.mT, alpha=scaling)
    else:
        scores = torch.baddbmm(constant(0.0, rows), rows.flatten(0, 1), held_k.flatten(0, 1).mT, beta=0, alpha=scaling)
        scores = upcast(scores).view(*rows.shape[:3], -1)
        if not takes_slot:
            _put_(scores, 3, ring.old, torch.finfo(wide.dtype).min)
    if far is None:
        return scores.softmax(-1).to(held_v.dtype) @ held_v
    if keys is not None and keys.ndim == 4:
        keys = keys[:, :, 0]
    free = ring.old if takes_slot else None
    return mix.join_last(LastToken(wide, scores, held_v, far, number, keys, scaling, free), layer.weights("mix"))


@cache
def _flags(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return true and false as tensors ``[1, 1]``."""
    return torch.ones(1, 1, dtype=torch.bool, device=device), torch.zeros(1, 1, dtype=torch.bool, device=device)


def turned_back(
    rotation: Rotation, turns: Tensor, gone: Tensor, q: Tensor, backend: str, *, known: bool = False
) -> tuple[Tensor, Tensor]:
    """Undo the rotation of the key that leaves a window ``[B, HKV, 1, D]``, and of the new queries ``[B, HKV, G, D]``.

    ``turns [B, 1, R]`` are the key's; ``known`` says that there is one in every row.
    """
    now = rotation.turns.expand(len(q), q.shape[2], -1)
    turns, both = torch.cat([turns, now], 1), torch.cat([gone, q], 2)
    others = rotation.of_others(turns)
    both = others.divide(both) if known and turns.shape[2] == q.shape[3] else others.undo(both, backend)
    return both[:, :, :1], both[:, :, 1:]


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Return the queries of a step by group, ``[B, HKV, G, D]``."""
    batch, heads, _, dim = q.shape
    return q.reshape(batch, kv_heads, heads // kv_heads, dim)


def _enter_(window: Window, k: Tensor, v: Tensor, real: Tensor | None, state: State) -> Any:
    """Keep a new token for ever where it is a sink; return whether it counts in the ring."""
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
