"""A converted layer in one rank's part of the texts.

A rank sums up its own keys without reading a query, as they are when they have left the next rank's window.
All ranks hand round those sums, their last W keys and values, and the sinks that they have, in one exchange; where keys
fade or overwrite what was there, they also hand round how theirs pass a state on. From what earlier ranks hand on, each
makes the state that one process would have there, and goes on from it as from a cache.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers import Call, LinearAttention, State
from hf_linear_attn.layers.packing import packed
from hf_linear_attn.layers.window import Tokens, Window
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.window import NOWHERE
from hf_linear_attn.parallel.kept import choose, row_of
from hf_linear_attn.parallel.layout import Layout
from hf_linear_attn.parallel.ranks import Ranks
from hf_linear_attn.parallel.sums import Message, Sums, key_sums, sums_before, sums_of


class Waiting:
    """The part of a model that is yet to be called: where it lies is not known."""

    def attend(self, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Refuse."""
        rule = "be called itself where texts are split over ranks"
        remedy = "Only the model that context_parallel was given sees how the parts lie."
        raise ArgumentError("model", rule, "a call of a module inside", remedy, where=layer.name)


class Shard:
    """One rank's part of a batch in a forward, in which rows lie over the ranks as a layout says."""

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        self.ranks, self.layout = ranks, layout

    # Ranks exchange in the midst of it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Attend from the part's queries to what they see of the whole texts; as :meth:`LinearAttention.attend`."""
        layout, cache = self.layout, call.state
        self._check(layer, q, call)
        state = self.before(layer, q, k, v, call._replace(state=None, cu_seqlens=None))
        call = call._replace(state=state, cu_seqlens=None)
        if layout.bounds is not None:
            rows = [self._row(layer, row, bounds, q, k, v, call) for row, bounds in enumerate(layout.bounds)]
            return torch.cat(rows)
        o = layer.attend(q, k, v, call, keep=cache is not None)
        if cache is not None:
            cache.allocate(state.slots, len(v), v)
            cache.write(state.read())
            cache.advance(layout.start + q.shape[2], v.device)
            cache.first_read, cache.padded = state.first_read, state.padded
        return o

    def _row(
        self,
        layer: LinearAttention,
        row: int,
        bounds: Sequence[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
    ) -> Tensor:
        """Attend in one row of several documents, of which the first may have begun on an earlier rank."""
        q, k, v = (x[row : row + 1] for x in (q, k, v))
        if call.state is None:
            raise RuntimeError("there is no state before the part")
        first = bounds[1]
        turned = call.rotation and call.rotation.row(row)
        begins = call._replace(state=row_of(call.state, row), key_mask=None, rotation=turned and turned.cut(0, first))
        head = layer.attend(q[:, :, :first], k[:, :, :first], v[:, :, :first], begins, keep=False)
        if first == bounds[-1]:
            return head
        cu_seqlens = torch.tensor([bound - first for bound in bounds[1:]], device=q.device)
        turned = turned and turned.cut(first, bounds[-1])
        alone = call._replace(state=None, key_mask=None, cu_seqlens=cu_seqlens, rotation=turned)
        attend = layer.attend if layer.window is None else partial(packed, layer)
        return torch.cat([head, attend(q[:, :, first:], k[:, :, first:], v[:, :, first:], alone)], 2)

    def _check(self, layer: LinearAttention, q: Tensor, call: Call) -> None:
        batch, tokens = self.layout.numbers.shape
        if (q.shape[0], q.shape[2]) != (batch, tokens):
            rule = f"be the {batch} rows of {tokens} tokens of the last forward"
            remedy = "Where activations are recomputed, run the backward before the next forward."
            raise ArgumentError("input_ids", rule, (q.shape[0], q.shape[2]), remedy, where=layer.name)
        if not call.causal:
            rule, remedy = "attend causally where texts are split over ranks", "Run it without context_parallel."
            raise UnsupportedError("model", rule, "attention in both directions", remedy, where=layer.name)
        if call.state is not None and self.layout.packed:
            remedy = "A state is one text's; call the model with use_cache=False."
            raise UnsupportedError("cache", "be None for packed documents", "a cache", remedy, where=layer.name)

    def before(self, layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> State:
        """Return the state that one process has before this rank's first token."""
        layout, window, rotation = self.layout, layer.window, call.rotation
        message = self.message(layer, k, v, rotation)
        gathered = self.ranks.gather(message.packed())
        found = message.unpacked(gathered[: layout.rank])
        late = self._late(layer, found.tail, rotation)
        sums = sums_before(layer, found.sums, late, layout.weights)
        state = State()
        state.slots, state.length = layer.slots(v.shape[3], v.device), layout.start
        state.first_read, state.padded = window is not None and layout.sinks_read, layout.masked
        tensors = {name: x for name, x in sums.items() if not name.startswith("sink_")}
        if window is not None:
            tensors |= self._near(layer, window, state, sums, found.tail, rotation)
        state.write(tensors | {"seen": layout.seen})
        if layer.kept is not None:
            call = call._replace(state=state)
            state.write(choose(self.ranks, layout, layer, layer.kept, (q, k, v), call, gathered))
        return state

    def message(self, layer: LinearAttention, k: Tensor, v: Tensor, rotation: Rotation | None) -> Message:
        """Return what this rank hands on."""
        layout, window = self.layout, layer.window
        counts, tokens = _both(layout.real, layout.last), k.shape[2]
        if window is None:
            return Message(sums_of(layer, k, v, layout.numbers, counts), {})
        kept = max(tokens - window.size, 0)
        sums: Sums = {}
        if layer.mix.has_far and layer.kept is None:
            # Operations take no empty text: of a part within the window one key is read, which does not count.
            read = max(kept, 1)
            left = layout.numbers[:, :read]
            mask = None if counts is None else counts[:, :read]
            if not kept:
                mask = torch.zeros_like(left, dtype=torch.bool)
            if window.sinks and not (layout.sinks_read and layout.bounds is None):
                mask = _both(mask, left >= window.sinks)
            sums = sums_of(layer, k[:, :, :read], v[:, :, :read], left, mask, rotation and rotation.cut(0, read))
            sums |= key_sums(layer, k[:, :, :read], mask)
        if window.sinks:
            sums |= _sinks(window, layout.numbers, counts, k, v)
        pad = (0, 0, max(window.size - tokens, 0), 0)
        tail = {"k": k, "v": v}
        if rotation is not None:
            tail["turns"] = rotation.turns.to(k.dtype).expand(len(k), -1, -1)[:, None]
        return Message(sums, {name: F.pad(x[:, :, kept:], pad) for name, x in tail.items()})

    def _near(
        self,
        layer: LinearAttention,
        window: Window,
        state: State,
        sums: Sums,
        tail: dict[str, Tensor],
        rotation: Rotation | None,
    ) -> dict[str, Tensor]:
        """Return the window's tensors: the last W tokens of all earlier ranks, and the sinks."""
        layout = self.layout
        order = layout.tail_order[-window.size :]
        pad = window.size - len(order)
        places = torch.tensor(order, dtype=torch.long, device=layout.seen.device)
        found = {name: F.pad(_in_order(x, places), (0, 0, pad, 0)) for name, x in tail.items()}
        counts = layout.tail_real & (layout.tail_numbers >= window.sinks)
        counts = F.pad(counts[:, places], (pad, 0))
        k, v = found["k"], found["v"]
        past = Tokens(k, v, counts, counts, rotation and rotation.of_others(found["turns"][:, 0]))
        if window.sinks:
            come = torch.arange(window.sinks, device=counts.device) < layout.seen[:, None]
            past = past._replace(
                sink_k=sums["sink_k"].to(k.dtype),
                sink_v=sums["sink_v"].to(v.dtype),
                sink_place=torch.where(come, -1, NOWHERE),
            )
        return window.close(past, 0, state)

    def _late(self, layer: LinearAttention, tail: dict[str, Tensor], rotation: Rotation | None) -> Sums:
        """Return what the last tokens of ranks before add up to that have left the window since, ``[R, B, *]``."""
        layout, window = self.layout, layer.window
        if window is None or not layer.mix.has_far or layer.kept is not None:
            return {}
        gone = layout.tail_order[: -window.size]
        if not gone:
            return {}
        ranks, batch, size = gone[-1] // window.size + 1, len(layout.seen), window.size
        left = torch.zeros(ranks * size, dtype=torch.bool)
        left[list(gone)] = True

        def by_rank(x: Tensor) -> Tensor:
            return x[:, : ranks * size].view(batch, ranks, size).transpose(0, 1).flatten(0, 1)

        numbers = by_rank(layout.tail_numbers)
        mask = by_rank(layout.tail_real & (layout.tail_numbers >= window.sinks))
        mask = mask & by_rank(left.to(mask.device).expand(batch, -1))
        rows = {name: x[:ranks].flatten(0, 1) for name, x in tail.items()}
        turned = rotation and rotation.of_others(rows["turns"][:, 0])
        found = sums_of(layer, rows["k"], rows["v"], numbers, mask, turned) | key_sums(layer, rows["k"], mask)
        return {name: torch.unflatten(x, 0, (ranks, batch)) for name, x in found.items()}


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return where both masks are True; None is True everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _in_order(x: Tensor, places: Tensor) -> Tensor:
    """Lay the last tokens of ranks ``[R, B, HKV, W, E]`` end to end, and take some."""
    batch, heads, size = x.shape[1], x.shape[2], x.shape[4]
    return x.permute(1, 2, 0, 3, 4).reshape(batch, heads, -1, size)[:, :, places]


def _sinks(window: Window, numbers: Tensor, counts: Tensor | None, k: Tensor, v: Tensor) -> Sums:
    """Return keys and values of the first tokens that are here, each in its place, ``[B, HKV, N, *]``."""
    place = torch.arange(window.sinks, device=k.device)
    chosen = numbers[:, None] == place[:, None]
    if counts is not None:
        chosen = chosen & counts[:, None]
    here, at = chosen.any(-1)[:, None, :, None], chosen.long().argmax(-1)[:, None, :, None]
    return {
        f"sink_{name}": upcast(x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3]))).masked_fill(~here, 0)
        for name, x in (("k", k), ("v", v))
    }
