"""States of many texts side by side, as a server keeps them: a call reads and updates some places of a pool."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.layers.attention import LinearAttention
from hf_linear_attn.layers.call import Call, Piece
from hf_linear_attn.layers.fused import for_kernel, fused_backend
from hf_linear_attn.layers.spans import read_whole
from hf_linear_attn.layers.state import Slot, State
from hf_linear_attn.layers.step import Entered, Ring, can_step, grouped, read_far, windowed_
from hf_linear_attn.layers.window import Tokens, Window
from hf_linear_attn.ops.hybrid import hybrid_step_
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.window import NOWHERE

__all__ = ["Pool", "Rows", "Texts", "can_step", "pool_slots", "read_", "read_rows_", "step_rows_"]

TOLD_BY_LENGTH = ("seen", "near_mask")
"""What a state holds and a pool does not: of a text without padding, its length says it."""


class Pool(NamedTuple):
    """States of one layer; the owner of the pool says which slot is whose, and how many tokens it has read.

    Attributes:
        slots: What the tensors are.
        tensors: ``[P, ...]`` by name, of any stride from place to place. What is not in use may hold anything.
    """

    slots: Mapping[str, Slot]
    tensors: Mapping[str, Tensor]

    def copy_(self, source: int, target: int) -> None:
        """Make one place like another."""
        for x in self.tensors.values():
            x[target].copy_(x[source])


class PoolRing(Ring):
    """The windows of rows in a pool, each with slots of its own; ``dtype`` is that of scores."""

    rows: Tensor
    full = False

    def __init__(self, window: Window, rows: "Rows", dtype: torch.dtype) -> None:
        self.rows, self.seen, self.size = rows.places, rows.lengths, window.size
        lengths, size, sinks = rows.lengths, window.size, window.sinks
        self.new, self.old = (sinks + (lengths + ahead) % (size + 1) for ahead in (0, 1))
        if rows.shortest < sinks:
            self.new = torch.where(lengths < sinks, lengths, self.new)
        self.counts = None if rows.shortest >= size + sinks else (lengths >= size + sinks)[:, None]
        held = window.held(lengths + 1)
        hidden = torch.zeros_like(held, dtype=dtype).masked_fill_(~held, torch.finfo(dtype).min)
        number = (lengths + 1 - size - sinks).clamp_(min=0).to(dtype)
        self.entered = hidden[:, None, None], number[:, None, None, None]

    @override
    def left(self, x: Tensor, dim: int) -> Tensor:
        return x.movedim(dim, 1)[self.rows, self.old].unsqueeze(dim)

    @override
    def position(self) -> Tensor:
        # It came W tokens before.
        return self.seen - self.size

    @override
    def enter_(self, new: Sequence[tuple[Tensor, int, Tensor]], cleared: Sequence[Tensor]) -> Entered:
        for x in cleared:
            x.movedim(2, 1)[self.rows, self.old] = 0
        for x, dim, y in new:
            x.movedim(dim, 1)[self.rows, self.new] = y.squeeze(dim).to(x.dtype)
        return self.entered


class Rows:
    """One more token of each of several texts: what all layers of a step have in common.

    Args:
        places: Where their states lie ``[B]`` int64, all different.
        lengths: Tokens read before ``[B]`` int64, each >= 1.
        shortest: A number that none of these is below, which is known without asking the device.
    """

    def __init__(self, places: Tensor, lengths: Tensor, shortest: int = 1) -> None:
        self.places, self.lengths, self.shortest = places, lengths, shortest
        self._rings: dict[tuple[int, int, torch.dtype], PoolRing] = {}

    def ring(self, window: Window, dtype: torch.dtype) -> PoolRing:
        """Return how a step moves a window, for scores of a dtype; it is worked out once for all layers."""
        key = window.size, window.sinks, dtype
        if key not in self._rings:
            self._rings[key] = PoolRing(window, self, dtype)
        return self._rings[key]


def pool_slots(layer: LinearAttention, value_dim: int) -> dict[str, Slot]:
    """Describe the tensors of a layer in a pool, for values of a size."""
    # A kernel's copies are equal: one is kept.
    slots = layer.slots(value_dim, torch.device("cpu"))
    return {name: slot for name, slot in slots.items() if name not in TOLD_BY_LENGTH}


def read_(
    layer: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Pool,
    place: int,
    length: int,
    rotation: Rotation | None = None,
) -> Tensor:
    """Read the next tokens of one text: return ``o [1, H, T, V]``.

    Tokens are ``q [1, H, T, D]``, ``k [1, HKV, T, D]`` and ``v [1, HKV, T, V]``. The state at a place of the pool is
    updated; where ``length``, the tokens read before, is 0, whatever that place holds is forgotten.
    """
    state = State()
    if length:
        state.slots, state.length = layer.slots(v.shape[3], torch.device("cpu")), length
        state.tensors = {name: x[place : place + 1] for name, x in pool.tensors.items()}
        state.tensors["seen"] = torch.full((1,), length, device=v.device)
        if layer.window is not None:
            state.tensors["near_mask"] = layer.window.held(state.tensors["seen"])
        state.first_read = layer.window is None or length >= layer.window.sinks
    o: Tensor = layer(q, k, v, Call(state=state, rotation=rotation))
    found = state.read()
    for name, x in pool.tensors.items():
        # A step has updated the place itself.
        if found[name].data_ptr() != x[place].data_ptr():
            x[place].copy_(found[name][0])
    return o


class Texts:
    """More tokens of each of several texts, one a row: what all layers of a call have in common.

    Args:
        places: Where their states lie ``[B]`` int64, all different.
        lengths: Tokens read before ``[B]`` int64; where 0, whatever the place holds is forgotten.
        new: Tokens that come ``[B]`` int64, each >= 1.
        most: The largest of these, T.
    """

    def __init__(self, places: Tensor, lengths: Tensor, new: Tensor, most: int) -> None:
        self.places, self.lengths, self.new = places, lengths, new
        ahead = torch.arange(most, device=places.device)
        self.real = ahead < new[:, None]
        """Which tokens are no filling ``[B, T]`` bool."""
        self.positions = lengths[:, None] + ahead
        """Their numbers in their texts ``[B, T]`` int64."""


def read_rows_(
    layer: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Pool,
    texts: Texts,
    rotation: Rotation | None = None,
) -> Tensor:
    """Read the next tokens of several texts at once: return ``o [B, H, T, V]``, behind the ends of texts anything.

    Tokens are ``q [B, H, T, D]``, ``k [B, HKV, T, D]`` and ``v [B, HKV, T, V]``, finite behind the ends of their texts.
    States are gathered and put back, once a call; nothing is asked of the device.
    """
    window, rotation = layer.window, rotation if layer.undoes else None
    begins, held = texts.lengths == 0, {}
    for name, x in pool.tensors.items():
        if not name.startswith("near_"):
            of_rows = x.index_select(0, texts.places)
            held[name] = of_rows.masked_fill(begins.view(-1, *(1,) * (of_rows.ndim - 1)), 0)
    carried = {name: x for name, x in held.items() if not name.startswith("kept_")}
    if window is None and rotation is not None:
        backend, turned, rotation = layer.settings.backend, rotation, None
        q, k = turned.undo(q, backend), turned.undo(k, backend)
    whole = Piece(q, k, v, texts.real, texts.positions, None, None, layer.sizes.scaling, rotation=rotation)
    if window is not None:
        whole = _with_past(whole, window, pool.tensors, texts)
        whole = layer.keeps(whole, (texts.lengths - window.size - window.sinks).clamp(min=0), held)
    o, kept = read_whole(layer, whole, carried or None)
    if whole.beyond is not None:
        kept = kept | whole.beyond.close(layer.sizes.head_dim)
    for name in held:
        pool.tensors[name].index_copy_(0, texts.places, kept[name])
    if window is not None and whole.tokens is not None:
        _keep_(window, whole.tokens, pool.tensors, texts)
    return o


def _with_past(whole: Piece, window: Window, tensors: Mapping[str, Tensor], texts: Texts) -> Piece:
    """Put the new tokens of every row behind those of its window, as :meth:`Window.open` does for one length."""
    size, sinks, places, count = window.size, window.sinks, texts.places[:, None], whole.q.shape[2]
    before = texts.lengths[:, None] + torch.arange(-size, 0, device=places.device)
    slots, counted = sinks + before % (size + 1), before >= sinks

    def joined(new: Tensor, name: str) -> Tensor:
        # [B, W, HKV, *], of places that may hold anything.
        past = tensors[name][places, :, slots].masked_fill(~counted[:, :, None, None], 0)
        return torch.cat([past.transpose(1, 2), new], 2)

    # What has not left the window when a text ends is not summed.
    leaves = torch.arange(size + count, device=places.device) < texts.new[:, None]
    mask = torch.cat([counted, texts.real], 1)
    counts = torch.cat([counted, texts.real & (texts.positions >= sinks)], 1) & leaves
    tokens = Tokens(joined(whole.k, "near_k"), joined(whole.v, "near_v"), mask, counts)
    if whole.rotation is not None:
        new = whole.rotation.turns
        past = tensors["near_turns"][places, slots][..., : new.shape[2]].masked_fill(~counted[:, :, None], 0)
        tokens = tokens._replace(rotation=whole.rotation.of_others(torch.cat([past, new.to(past.dtype)], 1)))
    if sinks:
        number = torch.arange(sinks, device=places.device)
        place = number - texts.lengths[:, None]
        known, comes = place < 0, place < texts.new[:, None]
        at = place.clamp(0, count - 1)[:, None, :, None]

        def first(new: Tensor, name: str) -> Tensor:
            held = tensors[name][:, :, :sinks].index_select(0, texts.places)
            coming = new.gather(2, at.expand(-1, new.shape[1], -1, new.shape[3]))
            return torch.where(known[:, None, :, None], held, coming.masked_fill(~comes[:, None, :, None], 0))

        place = torch.where(known, -1, torch.where(comes, place, NOWHERE))
        tokens = tokens._replace(sink_k=first(whole.k, "near_k"), sink_v=first(whole.v, "near_v"), sink_place=place)
    positions = torch.cat([before.clamp(min=0), texts.positions], 1)
    number = (texts.positions + 1 - size - sinks).clamp(min=0)
    return whole._replace(tokens=tokens, number=number, key_positions=positions)


def _keep_(window: Window, tokens: Tokens, tensors: Mapping[str, Tensor], texts: Texts) -> None:
    """Write the last W tokens of every row, and its sinks, where they belong, and something finite beside them."""
    size, sinks, places = window.size, window.sinks, texts.places[:, None]
    last = torch.arange(size, device=places.device) + texts.new[:, None]
    slots = sinks + (texts.lengths[:, None] - size + last) % (size + 1)
    free = sinks + (texts.lengths + texts.new) % (size + 1)
    row = torch.arange(len(last), device=places.device)[:, None]
    for name, x in (("near_k", tokens.k), ("near_v", tokens.v)):
        tensors[name][places, :, slots] = x[row, :, last]
        tensors[name][texts.places, :, free] = 0
    if tokens.rotation is not None:
        turns = tokens.rotation.turns
        tensors["near_turns"][..., : turns.shape[2]][places, slots] = turns[row, last]
        tensors["near_turns"][texts.places, free] = 0
    if tokens.sink_k is not None and tokens.sink_v is not None:
        first = torch.arange(sinks, device=places.device)
        for name, x in (("near_k", tokens.sink_k), ("near_v", tokens.sink_v)):
            tensors[name][places, :, first] = x.transpose(1, 2)


def step_rows_(
    layer: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Pool,
    rows: Rows,
    rotation: Rotation | None = None,
) -> Tensor:
    """Read one more token of each of several texts: return ``o [B, H, 1, V]``; :func:`can_step` says of which layers.

    Tokens are ``q [B, H, 1, D]``, ``k [B, HKV, 1, D]`` and ``v [B, HKV, 1, V]``. Nothing is asked of the device. Where
    there is a kernel for all of a step, or for a rule's, it reads and writes states where they lie. In PyTorch a new
    token of the window is written where it belongs; sums are gathered, stepped and put back.
    """
    rotation = rotation if layer.undoes else None
    call, lengths = Call(rotation=rotation), rows.lengths
    chosen = fused_backend(layer.settings.backend, q.device)
    if layer.window is not None and chosen is not None:
        whole = for_kernel(chosen, layer, layer.window, q, k, v, call, pool.tensors, lengths, lengths, rows.places)
        if whole is not None:
            return hybrid_step_(whole, chosen)
    kernels = chosen == "triton"
    if layer.kept is not None:
        texts = Texts(rows.places, rows.lengths, torch.ones_like(rows.lengths), 1)
        return read_rows_(layer, q, k, v, pool, texts, rotation)
    sums = {name: x for name, x in pool.tensors.items() if not name.startswith("near_")}
    # What a rule's kernel reads and writes by itself.
    by_rows = layer.rule.steps_rows and kernels
    stay = layer.rule.slots(1, 1, 1).keys() if by_rows else set()
    taken = {name: x.index_select(0, rows.places) for name, x in sums.items() if name not in stay}
    sums, at = sums | taken, rows.places if by_rows else None
    if layer.window is None:
        if rotation is not None:
            backend = layer.settings.backend
            q, k = rotation.undo(q, backend), rotation.undo(k, backend)
        o = read_far(layer, grouped(q, k.shape[1]), k, v, None, lengths, lengths, sums, at, kernels=kernels)
    else:
        ring = rows.ring(layer.window, torch.promote_types(q.dtype, torch.float32))
        o = windowed_(layer, q, k, v, call, pool.tensors, sums, ring, kernels=kernels)
    for name, x in taken.items():
        pool.tensors[name].index_copy_(0, rows.places, x)
    return o.flatten(1, 2)[:, :, None].to(q.dtype)
