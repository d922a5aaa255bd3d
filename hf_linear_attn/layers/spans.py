"""A call's tokens, and the walk over them span by span.

On a CPU a layer reads a few hundred tokens at a time, so that features, scores and partial sums stay in a core's cache
and memory beyond inputs and outputs does not grow with the text. Every span is read by the same function that reads a
whole call; what the linear branch carries from one to the next is small. The backward walks back and reads each span
again, so that it keeps no more than the forward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_linear_attn.layers.call import Layer, Piece
from hf_linear_attn.layers.fused import fused_prefill
from hf_linear_attn.ops.state import empty_like_tokens

SPAN = 2**18
"""Entries of a span's queries: so many that calls are few, so few that a span stays in a core's cache."""

LENGTHS = (128, 1024)
"""Tokens of a span, of all rows together at least and of each row at most, whatever the size of the heads."""

CHUNK = 64
"""Spans are multiples of what the operations walk by."""

Carried = dict[str, Tensor]


def spans_of(q: Tensor) -> list[tuple[int, int]]:
    """Cut a call's queries into spans of whole chunks, shorter ones where there are many rows or large heads."""
    batch, heads, tokens, dim = q.shape
    least, most = LENGTHS
    length = min(max(SPAN // (batch * heads * dim), least // batch), most)
    length = max(length // CHUNK, 1) * CHUNK
    return [(a, min(a + length, tokens)) for a in range(0, tokens, length)]


def walks(layer: Layer, whole: Piece) -> bool:
    """Tell whether a call is read span by span: on a CPU, in PyTorch, where there is more than one."""
    if torch.compiler.is_compiling() or whole.q.device.type != "cpu" or not whole.causal:
        return False
    if layer.settings.backend not in ("auto", "torch", "numba") or whole.cu_seqlens is not None:
        return False
    if layer.kept is not None:
        # A span would see keys from anywhere before it.
        return False
    if layer.window is None and layer.elementwise is not None:
        # The operation walks by itself.
        return False
    if torch.is_grad_enabled() and not all(isinstance(p, nn.Parameter) for p in layer.parameters()):
        # Under functional_call the backward would read other weights.
        return False
    return len(spans_of(whole.q)) > 1


def walk(layer: Layer, whole: Piece, carried: Mapping[str, Tensor] | None) -> tuple[Tensor, Carried]:
    """Read a call span by span; arguments and results as of :meth:`LinearAttention.read`."""
    names = sorted(carried or {})
    inputs = [whole.q, *_keys(whole), *((carried or {})[name] for name in names)]
    weights = [p for p in layer.parameters() if p.requires_grad]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *weights)):
        left: list[str] = []
        found = _Walk.apply(layer, whole, names, left, *inputs, *weights)  # type: ignore[no-untyped-call]
        return found[0], dict(zip(left, found[1:], strict=True))
    o, _, last = _forward(layer, whole, carried)
    return o, last


def read_whole(layer: Layer, whole: Piece, carried: Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Attend from all queries of a call, in the way that serves it best; see :meth:`LinearAttention.read`."""
    fused = fused_prefill(layer, whole, carried)
    if fused is not None:
        return fused
    return walk(layer, whole, carried) if walks(layer, whole) else layer.read(whole, carried)


def _keys(whole: Piece) -> list[Tensor]:
    """Return the keys and values of a call, all that have gradients."""
    if whole.tokens is None:
        return [whole.k, whole.v]
    found = [whole.tokens.k, whole.tokens.v]
    if whole.tokens.sink_k is not None and whole.tokens.sink_v is not None:
        found += [whole.tokens.sink_k, whole.tokens.sink_v]
    return found


def _with_keys(piece: Piece, q: Tensor, keys: Sequence[Tensor]) -> Piece:
    """Put other queries and keys into a piece, as :func:`_keys` lists them."""
    if piece.tokens is None:
        return piece._replace(q=q, k=keys[0], v=keys[1])
    tokens = piece.tokens._replace(k=keys[0], v=keys[1])
    if len(keys) > 2:
        tokens = tokens._replace(sink_k=keys[2], sink_v=keys[3])
    return piece._replace(q=q, tokens=tokens)


def _forward(
    layer: Layer, whole: Piece, carried: Mapping[str, Tensor] | None
) -> tuple[Tensor, list[Mapping[str, Tensor] | None], Carried]:
    """Return the output, what was carried into each span, and what the last one leaves."""
    o = empty_like_tokens(whole.q, whole.v.shape[3])
    starts: list[Mapping[str, Tensor] | None] = []
    for a, b in spans_of(whole.q):
        starts.append(carried)
        piece = whole.cut(a, b, layer.reach)
        found, carried = fused_prefill(layer, piece, carried) or layer.read(piece, carried)
        o[:, :, a:b] = found
    return o, starts, dict(carried or {})


class _Walk(torch.autograd.Function):
    """The walk with gradients: its backward reads each span again, the last one first."""

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, whole: Piece, names: list[str], left: list[str], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        number = 1 + len(_keys(whole))
        carried = dict(zip(names, tensors[number:], strict=False)) if names else None
        o, starts, last = _forward(layer, whole, carried)
        left += last
        ctx.layer, ctx.whole, ctx.names, ctx.left, ctx.number = layer, _without_tensors(whole), names, left, number
        ctx.starts = [None if x is None else list(x) for x in starts[1:]]
        ctx.save_for_backward(*tensors, *(x for start in starts[1:] for x in (start or {}).values()))
        ctx.inputs = len(tensors)
        return o, *last.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, *dlast: Tensor) -> tuple[Any, ...]:
        layer, saved = ctx.layer, ctx.saved_tensors
        tensors, between = saved[: ctx.inputs], iter(saved[ctx.inputs :])
        whole = _with_keys(ctx.whole, tensors[0], tensors[1 : ctx.number])
        first = dict(zip(ctx.names, tensors[ctx.number :], strict=False)) if ctx.names else None
        starts = [first, *({name: next(between) for name in names} for names in ctx.starts)]
        weights = tensors[ctx.number + len(ctx.names) :]
        totals = [Total(x) for x in (*tensors[: ctx.number], *weights)]
        dcarried = dict(zip(ctx.left, dlast, strict=True))
        spans = spans_of(whole.q)
        with torch.autocast("cpu", enabled=False):
            for (a, b), start in zip(reversed(spans), reversed(starts), strict=True):
                dcarried = _backward(layer, whole, (a, b), start, do, dcarried, totals, weights)
        found = [total.gradient() for total in totals]
        return (
            *(None,) * 4,
            *found[: ctx.number],
            *(dcarried.get(name) for name in ctx.names),
            *found[ctx.number :],
        )


class Total:
    """The sum of the parts of a tensor's gradient, in fp32 at least; none where there was no part."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.sum: Tensor | None = None

    def add_(self, part: Tensor | None, place: tuple[slice, ...]) -> None:
        """Add a part, at its place."""
        if part is None:
            return
        if self.sum is None:
            self.sum = torch.zeros(
                self.x.shape, dtype=torch.promote_types(self.x.dtype, torch.float32), device=self.x.device
            )
        self.sum[place].add_(part)

    def gradient(self) -> Tensor | None:
        """Return the sum, in the dtype of what it is of."""
        return None if self.sum is None else self.sum.to(self.x.dtype)


def _without_tensors(whole: Piece) -> Piece:
    """Return a piece without what autograd keeps: the queries and keys are saved apart."""
    empty = whole.q.new_empty(0, 0)
    return _with_keys(whole._replace(k=empty, v=empty), empty, [empty] * len(_keys(whole)))


def _backward(
    layer: Layer,
    whole: Piece,
    span: tuple[int, int],
    start: Mapping[str, Tensor] | None,
    do: Tensor,
    dcarried: Carried,
    totals: list["Total"],
    weights: Sequence[Tensor],
) -> Carried:
    """Add one span's gradients to the totals; return those of what was carried into it."""
    a, b = span
    piece = whole.cut(a, b, layer.reach)
    leaves = [x.detach().requires_grad_() for x in (piece.q, *_keys(piece))]
    before = None if start is None else {name: x.detach().requires_grad_() for name, x in start.items()}
    with torch.enable_grad():
        o, carried = layer.read(_with_keys(piece, leaves[0], leaves[1:]), before)
    outputs, gradients = [o], [do[:, :, a:b]]
    for name, x in carried.items():
        if x.requires_grad and name in dcarried:
            outputs.append(x)
            gradients.append(dcarried[name])
    inputs = [*leaves, *(before or {}).values(), *weights]
    found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    low, high = whole.reach(a, b, layer.reach)
    places = [(slice(None), slice(None), slice(a, b)), *[(slice(None), slice(None), slice(low, high))] * 2]
    for n, (total, dx) in enumerate(zip(totals[: len(leaves)], found, strict=False)):
        total.add_(dx, places[n] if n < len(places) else ())
    for total, dx in zip(totals[len(leaves) :], found[len(inputs) - len(weights) :], strict=True):
        total.add_(dx, ())
    return {name: dx for name, dx in zip(before or {}, found[len(leaves) :], strict=False) if dx is not None}
