"""A converted layer in one rank's part of the texts.

A rank sums up its own keys without reading a query, as they are when they have left the next rank's window.
All ranks hand round those sums, their last W keys and values, and the sinks that they have, in one exchange; where keys
fade or overwrite what was there, they also hand round how theirs pass a state on. From what earlier ranks hand on, each
makes the state that one process would have there, and goes on from it as from a cache.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers import Call, LinearAttention, State
from hf_linear_attn.layers.packing import packed
from hf_linear_attn.layers.rules import Gates, RuleCall
from hf_linear_attn.layers.window import Tokens, Window
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.window import NOWHERE
from hf_linear_attn.parallel.layout import Layout
from hf_linear_attn.parallel.ranks import Ranks

SPAN = 4096
"""Keys whose features are held at once while they are summed up."""

Sums = dict[str, Tensor]


class Message(NamedTuple):
    """What a rank hands on of its part: sums over keys, and tokens.

    Attributes:
        sums: What the linear branch carries of the keys that have left the window when the next rank begins, and the
            sinks: every entry is a sum over ranks.
        tail: Keys and values of the last W tokens, ``[B, HKV, W, *]``, zeros before the first; and their angles
            ``[B, 1, W, R]``, where they are to be turned back.
    """

    sums: Sums
    tail: dict[str, Tensor]

    def packed(self) -> Tensor:
        """Return all of it end to end, in the dtype of sums."""
        parts = [*self.sums.values(), *self.tail.values()]
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in parts) else torch.float32
        return torch.cat([x.reshape(-1).to(dtype) for x in parts])

    def unpacked(self, x: Tensor) -> "Message":
        """Return messages of several ranks ``x [P, *]`` in the form of this one."""
        parts = [*self.sums.values(), *self.tail.values()]
        pieces = torch.split(x, [part.numel() for part in parts], 1)
        found = iter(piece.view(-1, *part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True))
        return Message({name: next(found) for name in self.sums}, {name: next(found) for name in self.tail})


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
        state = self.before(layer, k, v, call.rotation)
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
        whole, first = call.state, bounds[1]
        if whole is None:
            raise RuntimeError("there is no state before the part")
        state = State()
        state.slots, state.length, state.first_read = whole.slots, whole.length, whole.first_read
        state.tensors = {name: x[row : row + 1] for name, x in whole.tensors.items()}
        turned = call.rotation if call.rotation is None else call.rotation.row(row)
        begins = call._replace(state=state, key_mask=None, rotation=turned and turned.cut(0, first))
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

    def before(self, layer: LinearAttention, k: Tensor, v: Tensor, rotation: Rotation | None = None) -> State:
        """Return the state that one process has before this rank's first token."""
        layout, window = self.layout, layer.window
        message = self.message(layer, k, v, rotation)
        found = message.unpacked(self.ranks.gather(message.packed())[: layout.rank])
        late = self._late(layer, found.tail, rotation)
        sums = {name: _selected_sum(x, layout.weights) for name, x in found.sums.items() if name != "passed"}
        if layer.rule.ordered and "kv" in sums:
            sums |= _in_turn(found.sums, late, layout.weights)
        for name in late.keys() - ({"kv", "z", "passed"} if layer.rule.ordered else set()):
            sums[name] = sums[name] + _selected_sum(late[name], layout.weights[: len(late[name])])
        state = State()
        state.slots, state.length = layer.slots(v.shape[3], v.device), layout.start
        state.first_read, state.padded = window is not None and layout.sinks_read, layout.masked
        tensors = {name: x for name, x in sums.items() if not name.startswith("sink_")}
        if window is not None:
            tensors |= self._near(layer, window, state, sums, found.tail, rotation)
        state.write(tensors | {"seen": layout.seen})
        return state

    def message(self, layer: LinearAttention, k: Tensor, v: Tensor, rotation: Rotation | None) -> Message:
        """Return what this rank hands on."""
        layout, window = self.layout, layer.window
        counts, tokens = _both(layout.real, layout.last), k.shape[2]
        if window is None:
            return Message(_sums(layer, k, v, layout.numbers, counts), {})
        kept = max(tokens - window.size, 0)
        sums: Sums = {}
        if layer.mix.has_far:
            # Operations take no empty text: of a part within the window one key is read, which does not count.
            read = max(kept, 1)
            left = layout.numbers[:, :read]
            mask = None if counts is None else counts[:, :read]
            if not kept:
                mask = torch.zeros_like(left, dtype=torch.bool)
            if window.sinks and not (layout.sinks_read and layout.bounds is None):
                mask = _both(mask, left >= window.sinks)
            sums = _sums(layer, k[:, :, :read], v[:, :, :read], left, mask, rotation and rotation.cut(0, read))
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
        if window is None or not layer.mix.has_far or not (gone := layout.tail_order[: -window.size]):
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
        found = _sums(layer, rows["k"], rows["v"], numbers, mask, turned)
        return {name: torch.unflatten(x, 0, (ranks, batch)) for name, x in found.items()}


def _in_turn(steps: Sums, late: Sums, weights: Tensor) -> Sums:
    """Return the state of a rule that goes by the order of keys, after the ranks that ``weights [R, B]`` name.

    ``steps`` are what each rank's own keys make of a state of zeros, and how they pass another on, ``[R, B, *]``;
    ``late`` the same of their last tokens, of as many ranks as have any.
    """
    state: Sums = {name: x[:0].sum(0) for name, x in steps.items() if name in ("kv", "z")}
    for rank, named in enumerate(weights):
        after = state
        for source in (steps, late):
            if source and rank < len(source["kv"]):
                after = _after(after, {name: x[rank] for name, x in source.items()})
        state = {name: torch.where(named.view(-1, *(1,) * (x.ndim - 1)), after[name], x) for name, x in state.items()}
    return state


def _after(state: Sums, step: Sums) -> Sums:
    """Return a state after some keys, given how they pass it on ``[B, HKV, F, F]``, or by what it fades.

    Where the state tells how it passes on another, so does what is returned. Sums that nothing changes are added.
    """
    passed = step.get("passed")
    if passed is None:
        return {name: x + step[name] for name, x in state.items()}

    def pass_on(x: Tensor) -> Tensor:
        return passed @ x if passed.shape[-1] > 1 else passed * x

    found = {"kv": pass_on(state["kv"]) + step["kv"]}
    if "z" in state:
        found["z"] = passed[..., 0] * state["z"] + step["z"]
    if "passed" in state:
        found["passed"] = pass_on(state["passed"])
    return found


def _spans(x: Tensor | None, dim: int, number: int) -> Sequence[Tensor | None]:
    """Cut into pieces of :data:`SPAN` tokens."""
    return (None,) * number if x is None else torch.split(x, SPAN, dim)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return where both masks are True; None is True everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _selected_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Sum ``x [R, B, *]`` over the ranks that ``weights [R, B]`` name; what the others hold does not matter."""
    named = weights.view(*weights.shape, *(1,) * (x.ndim - 2))
    return torch.where(named, x, 0).sum(0)


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


def _sums(
    layer: LinearAttention,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    mask: Tensor | None,
    rotation: Rotation | None = None,
) -> Sums:
    """Sum up keys as the linear branch does, without a query: return the rule's tensors, and what the mix keeps.

    Keys are ``[B, HKV, S, D]``, values ``[B, HKV, S, V]``, ``numbers [B, S]`` those in their text; ``mask [B, S]`` is
    True for a key that counts, None where all do. A rotation is to be turned back.
    """
    backend = layer.settings.backend

    def read(k: Tensor, v: Tensor, numbers: Tensor, mask: Tensor | None, turns: Tensor | None) -> Sums:
        phi_k = k if rotation is None or turns is None else rotation.of_others(turns).undo(k, backend)
        gates, kernel = layer.gates(phi_k, v), layer.elementwise
        if kernel is None:
            phi_k = features_of(layer.feature_map, phi_k, "k", numbers, backend)
        if gates is not None:
            return _passing(layer, phi_k, v, gates, kernel, mask)
        # The state does not depend on the one query that asks for it.
        unused = phi_k.new_zeros(len(k), layer.sizes.num_heads, 1, phi_k.shape[3])
        call = RuleCall(unused, phi_k, v, kernel=kernel, key_mask=mask, causal=False)
        return dict(layer.rule.read(call, None).state)

    if layer.elementwise is not None and rotation is None and not layer.rule.ordered:
        # The operation walks by itself.
        found = read(k, v, numbers, mask, None)
    else:
        found = {}
        whole = (k, 2), (v, 2), (numbers, 1), (mask, 1), (None if rotation is None else rotation.turns, 1)
        number = -(-k.shape[2] // SPAN)
        for span in zip(*(_spans(x, dim, number) for x, dim in whole), strict=True):
            # Features are larger than keys: a few at a time are computed, and again in the backward.
            learns = torch.is_grad_enabled()
            step = checkpoint(read, *span, use_reentrant=False) if learns else read(*span)
            found = _after(found, step) if found else step
    if layer.window is not None and layer.mix.sums_keys:
        keys = k if mask is None else k.masked_fill(~mask[:, None, :, None], 0)
        found["far_keys"] = keys.sum(2, dtype=upcast(keys[:0]).dtype)
    return found


def _passing(
    layer: LinearAttention, phi_k: Tensor, v: Tensor, gates: Gates, kernel: str | None, mask: Tensor | None
) -> Sums:
    """Return what keys of a rule with gates make of a state of zeros, and as ``passed`` how they pass another on.

    A state S becomes ``P S + A``. For rules that overwrite, P is what the same keys make of the identity, of values
    that are 0; others fade a state by one number for each head. Shapes are as of :class:`RuleCall`.
    """
    batch, heads, _, size = phi_k.shape
    state, values = None, v
    if gates.beta is not None:
        zeros = upcast(v[:, :, :0]).new_zeros(batch, heads, size, v.shape[3])
        unit = torch.eye(size, dtype=zeros.dtype, device=v.device).expand(batch, heads, -1, -1)
        state, values = {"kv": torch.cat([zeros, unit], -1)}, F.pad(v, (0, size))
    if gates.scale is not None:
        gates = gates._replace(scale=gates.scale.new_ones(heads))
    unused = phi_k.new_zeros(1, 1, 1, 1).expand(phi_k.shape)
    found = dict(layer.rule.read(RuleCall(unused, phi_k, values, gates, kernel, mask), state).state)
    if gates.beta is not None:
        found["kv"], found["passed"] = torch.split(found["kv"], [v.shape[3], size], -1)
    elif gates.log_decay is not None:
        fading = gates.log_decay if mask is None else gates.log_decay.masked_fill(~mask[:, None], 0)
        found["passed"] = fading.sum(-1).exp()[..., None, None]
    return found
