"""The exact branch's tokens: the first few, kept for ever, and the last W in a ring buffer.

Token t of a text, counted from 0 with padding, lies in slot ``t mod (W + 1)`` of a ring. The ring holds the last W
tokens; the slot left over is where the next token goes. A step so reads the token that leaves the window, and writes
the one that comes, in two places: no program of a kernel reads what another one overwrites. Softmax does not care for
the order of slots. The first ``sinks`` real tokens have slots of their own before the ring, and none in it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.layers.numbers import behind, last_slots, numbered
from hf_linear_attn.layers.state import Slot, State
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.window import NOWHERE
from hf_linear_attn.tracing import is_symbol


class Tokens(NamedTuple):
    """The keys and values of one call that queries see exactly, with those from before it.

    Attributes:
        k: ``[B, HKV, P + T, D]``: P keys from before the first query, none or the window's W, then its own.
        v: ``[B, HKV, P + T, V]``.
        mask: ``[B, P + T]`` bool, True = a key that the window shows: a real token, and none of the past that is a
            sink. None where all are.
        counts: ``[B, P + T]`` bool, True = a real token that is no sink: it counts in the linear branch once it has
            left the window. None where all do.
        rotation: By which the keys are turned, where they are to be turned back once they leave the window.
        sink_k: ``[B, HKV, N, D]``, None without sinks.
        sink_v: ``[B, HKV, N, V]``.
        sink_place: ``[B, N]`` int64: the query at which a sink came; -1 before the first query, :data:`NOWHERE` for one
            that has not come.
        first: Whether the sinks are the first of these keys, as in texts without padding that begin with them.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None
    counts: Tensor | None
    rotation: Rotation | None = None
    sink_k: Tensor | None = None
    sink_v: Tensor | None = None
    sink_place: Tensor | None = None
    first: bool = False

    def cut(self, start: int, end: int) -> "Tokens":
        """Return the tokens ``[start, end)``, or those up to the last one, with all sinks."""
        mask, counts = (None if x is None else x[:, start:end] for x in (self.mask, self.counts))
        rotation = None if self.rotation is None else self.rotation.cut(start, end)
        k, v = self.k[:, :, start:end], self.v[:, :, start:end]
        return self._replace(k=k, v=v, mask=mask, counts=counts, rotation=rotation, first=self.first and not start)

    def counted(self) -> Tensor:
        """Return :attr:`counts`, written out where all count."""
        if self.counts is not None:
            return self.counts
        return self.k.new_ones(self.k.shape[0], self.k.shape[2], dtype=torch.bool)


class Window:
    """Where the tokens of a window of W >= 1 lie, and N sinks, in sight for ever; how they come and go."""

    def __init__(self, size: int, sinks: int) -> None:
        self.size, self.sinks = size, sinks

    def slots(self, kv_heads: int, head_dim: int, value_dim: int, *, turned: bool = False) -> dict[str, Slot]:
        """Describe the tensors: sinks first, then the ring; with the angles by which keys are turned, if need be."""
        places = self.sinks + self.size + 1
        found = {
            "near_k": Slot((kv_heads, places, head_dim), "token"),
            "near_v": Slot((kv_heads, places, value_dim), "token"),
            "near_mask": Slot((places,), torch.bool),
        }
        if turned:
            # All heads turn alike, and most often all layers.
            found["near_turns"] = Slot((places, head_dim), "token", common=True)
        return found

    def open(
        self,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        numbers: Tensor | None,
        state: State | None,
        rotation: Rotation | None = None,
    ) -> Tokens:
        """Put new tokens ``k [B, HKV, T, D]``, ``v [B, HKV, T, V]`` behind those that a state holds, if it holds any.

        ``mask [B, T]`` is True for a real token, None where all are. Their ``numbers [B, T]`` tell sinks, and are None
        where all sinks have been read. A rotation that is not asked for is None.
        """
        held = state.read() if state is not None and state.tensors else None
        sinks: tuple[Any, ...] = ()
        counts = mask
        if self.sinks:
            if numbers is not None:
                whole = mask is None and held is None and not is_symbol(k.shape[2])
                if whole and k.shape[2] > self.sinks:
                    counts = behind(k.device, *numbers.shape, self.sinks)
                    place = numbered(k.device, len(numbers), self.sinks)
                    sinks = (k[:, :, : self.sinks], v[:, :, : self.sinks], place, True)
                else:
                    is_sink = numbers < self.sinks
                    is_sink = is_sink if mask is None else is_sink & mask
                    counts = ~is_sink if mask is None else mask & ~is_sink
                    sinks = self._collect(k, v, numbers, is_sink, held)
            elif held is not None:
                place = torch.where(held["near_mask"][:, : self.sinks], -1, NOWHERE)
                sinks = (*(held[name][:, :, : self.sinks] for name in ("near_k", "near_v")), place)
        if held is None or state is None:
            if not is_symbol(k.shape[2]):
                return Tokens(k, v, mask, counts, rotation, *sinks)
            # A graph for every length has no branch on whether a text is longer than the window: a window of nothing
            # stands before it.
            old_k, old_v = (x.new_zeros(*x.shape[:2], self.size, x.shape[3]) for x in (k, v))
            old_mask = k.new_zeros(k.shape[0], self.size, dtype=torch.bool)
            old_turns = k.new_zeros(k.shape[0], self.size, k.shape[3])
        else:
            order = last_slots(k.device, self.size, state.length, self.size + 1, self.sinks)
            old_k, old_v = (held[name].index_select(2, order) for name in ("near_k", "near_v"))
            old_mask = held["near_mask"].index_select(1, order)
            if rotation is not None:
                state.check_common("near_turns", steps=False)
                old_turns = held["near_turns"].index_select(1, order)
        if rotation is not None:
            new_turns = rotation.turns.expand(k.shape[0], -1, -1)
            old_turns = old_turns[..., : new_turns.shape[2]]
            rotation = rotation._replace(turns=torch.cat([old_turns, new_turns.to(old_turns.dtype)], 1))
        all_real = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool)
        mask, counts = (torch.cat([old_mask, all_real if x is None else x], 1) for x in (mask, counts))
        return Tokens(torch.cat([old_k, k], 2), torch.cat([old_v, v], 2), mask, counts, rotation, *sinks)

    def close(self, tokens: Tokens, new: int, state: State) -> dict[str, Tensor]:
        """Return the tensors that hold the last W tokens and the sinks, after ``new`` more than a state has read."""
        past = tokens.k.shape[2] - new
        kept = min(self.size, past + new)
        batch, heads, _, _ = tokens.k.shape
        # Places of the last tokens: they end before the one that comes next.
        places = last_slots(tokens.k.device, kept, new + state.length, self.size + 1, self.sinks)
        mask = tokens.counted()
        found = {}
        for name, x, sink in (("near_k", tokens.k, tokens.sink_k), ("near_v", tokens.v, tokens.sink_v)):
            ring = x.new_zeros(batch, heads, self.sinks + self.size + 1, x.shape[3])
            ring.index_copy_(2, places, x[:, :, past + new - kept :])
            if sink is not None:
                ring[:, :, : self.sinks] = sink
            found[name] = ring
        if tokens.rotation is not None:
            found["near_turns"] = self._turns(tokens.rotation, tokens.k, kept, places, new, state)
        held = mask.new_zeros(batch, self.sinks + self.size + 1).index_copy_(1, places, mask[:, past + new - kept :])
        if tokens.sink_place is not None:
            held[:, : self.sinks] = tokens.sink_place < NOWHERE
        return found | {"near_mask": held}

    def _turns(self, rotation: Rotation, k: Tensor, kept: int, places: Tensor, new: int, state: State) -> Tensor:
        """Return the ring of angles of the last tokens; layers that turn alike get the same one."""
        shape = k.shape[0], self.sinks + self.size + 1, k.shape[3]

        def ring() -> Tensor:
            turns = rotation.turns[:, rotation.turns.shape[1] - kept :]
            found = k.new_zeros(shape)
            found[..., : turns.shape[2]].index_copy_(1, places, turns.to(k.dtype).expand(k.shape[0], -1, -1))
            return found

        if rotation.source is None or state.common is None:
            return ring()
        # Layers turn alike where they go on from the same ring, by cosines that are one object.
        before = state.tensors["near_turns"] if state.length else None
        parts = before, rotation.source, rotation.layout, state.length, new, shape, k.dtype, k.device
        return state.once(("near_turns", shape[1]), parts, ring)

    def held(self, lengths: Tensor) -> Tensor:
        """Return which slots hold a token that counts ``[B, N + W + 1]``, after ``lengths [B]`` without padding."""
        lengths = lengths[:, None]
        place = torch.arange(self.size + 1, device=lengths.device)
        # The last token that came to a slot.
        token = lengths - 1 - (lengths - 1 - place) % (self.size + 1)
        ring = (token >= self.sinks) & (token >= lengths - self.size)
        return torch.cat([torch.arange(self.sinks, device=lengths.device) < lengths, ring], 1)

    def _collect(
        self, k: Tensor, v: Tensor, numbers: Tensor, is_sink: Tensor, held: dict[str, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take the sinks out of the new tokens, beside those that are known: keys, values and places."""
        tokens = torch.arange(k.shape[2], device=k.device)
        chosen = (numbers[:, None] == torch.arange(self.sinks, device=k.device)[:, None]) & is_sink[:, None]
        place = torch.where(chosen, tokens, NOWHERE).amin(-1)
        new, at = (place < NOWHERE)[:, None, :, None], place.clamp(max=k.shape[2] - 1)[:, None, :, None]
        found = [x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v)]
        if held is None:
            sink_k, sink_v = (x.masked_fill(~new, 0) for x in found)
        else:
            before = (held[name][:, :, : self.sinks] for name in ("near_k", "near_v"))
            sink_k, sink_v = (torch.where(new, x, y) for x, y in zip(found, before, strict=True))
            place = torch.where(held["near_mask"][:, : self.sinks], -1, place)
        return sink_k, sink_v, place
