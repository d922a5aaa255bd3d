"""Attention over a window in PyTorch: blocks of queries against a band of keys, ``[block, N + block + W - 1]`` scores.

Sinks and kept keys stand before the band, and a key of each query's own is one more column, whose score is written and
whose value is added apart: one product makes all other scores, one softmax joins them, one product makes the output.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.feature_maps.base import second_gradients, upcast
from hf_linear_attn.ops.library import operator, own_precision, refuse_vmap
from hf_linear_attn.ops.state import contiguous_like_values
from hf_linear_attn.ops.window.problem import INPUTS, NOWHERE, KeptKeys, WindowCall
from hf_linear_attn.tracing import is_symbol, needs_operations

BLOCKS = (32, 64)
"""Smallest and largest block of queries: a small one wastes few scores, a large one copies few keys."""


def window_attention_torch(call: WindowCall) -> Tensor:
    """Compute :func:`hf_linear_attn.ops.window.window_attention`."""
    band = Band(call)
    last = value = None
    if call.own is not None:
        score, seen, value = call.own
        last = band.rows(score.masked_fill(~seen[:, None], torch.finfo(score.dtype).min)[..., None])
    with own_precision(call.q.device):
        attend = _attend if needs_operations() else _Attend.apply
        o: Tensor = attend(band.q, band.k, band.v, last, value, band, call.scaling)
    return o


def _attend(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor | None, value: Tensor | None, band: "Band", scaling: float
) -> Tensor:
    """Return ``o [B, H, T, V]``.

    Where given, the scores of the last column are ``last [rows, G C, 1]``, and its values ``value [B, H, T, V]``.
    """
    scores = band.hide(upcast(_scaled_product(q, k.mT, scaling)))
    if last is not None:
        scores = torch.cat([scores[..., :-1], last], -1)
    weights = scores.softmax(-1).to(v.dtype)
    o = band.join(torch.bmm(weights, v))
    return o if value is None else torch.addcmul(o, band.join(weights[..., -1:]), value)


class _Attend(torch.autograd.Function):
    """:func:`_attend` in few passes over memory, forward and backward.

    A hidden key's weight is 0, and so is the gradient of its score: the backward needs no mask.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        last: Tensor | None,
        value: Tensor | None,
        band: "Band",
        scaling: float,
    ) -> Tensor:
        scores = upcast(_scaled_product(q, k.mT, scaling))
        scores = band.hide(scores, out=scores)
        if last is not None:
            scores[..., -1:] = last
        weights = scores.softmax(-1).to(v.dtype)
        o = band.join(torch.bmm(weights, v))
        if value is not None:
            o.addcmul_(band.join(weights[..., -1:]), value)
        ctx.band, ctx.scaling = band, scaling
        ctx.save_for_backward(q, k, v, last, value, weights)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, last, value, weights = ctx.saved_tensors
        band, scaling = ctx.band, ctx.scaling
        if torch.is_grad_enabled():
            return second_gradients(ctx, _attend, (q, k, v, last, value, band, scaling), do)
        rows = band.rows(do)
        dweights, dvalue = upcast(torch.bmm(rows, v.mT)), None
        if value is not None:
            dvalue = band.join(weights[..., -1:]) * do
            dweights[..., -1:] += band.rows(torch.linalg.vecdot(upcast(do), upcast(value))[..., None])
        weights_up = upcast(weights)
        dscores = torch._softmax_backward_data(dweights, weights_up, -1, weights_up.dtype)
        dlast = None if last is None else dscores[..., -1:].clone()
        dscores = dscores.to(q.dtype)
        # The row of zeros that stands for the last column has a gradient, too, which is dropped.
        dq, dk = (_scaled_product(x, y, scaling) for x, y in ((dscores, k), (dscores.mT, q)))
        return dq, dk, torch.bmm(weights.mT, rows), dlast, dvalue, None, None


def _scaled_product(x: Tensor, y: Tensor, scaling: float) -> Tensor:
    """Return ``scaling x y``: the product scales as it goes."""
    return torch.baddbmm(x.new_empty(()), x, y, beta=0, alpha=scaling)


def window_sums_torch(call: WindowCall) -> tuple[Tensor, Tensor]:
    """Compute :func:`hf_linear_attn.ops.window.window_sums`."""
    band = Band(call)
    scores = band.hide(upcast(_scaled_product(band.q, band.k.mT, call.scaling)))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return band.join(torch.bmm(weights, band.v.to(weights.dtype))), band.join(weights.sum(-1, keepdim=True))[..., 0]


class Band:
    """Blocks of C queries beside the keys that they see, as rows ``[B HKV n, ...]`` of one product.

    The G heads of a group share their keys, so their queries are rows of the same matrix, ``[G C, D]``. Keys are
    ``[N + W - 1 + C, D]``: sinks and kept keys, the band, and a row of zeros where queries have a key of their own.
    """

    def __init__(self, call: WindowCall) -> None:
        q, k, v, key_mask, sinks, of_own, kept, window, _ = call.shown()
        own = of_own is not None
        self.batch, self.heads, self.tokens, _ = q.shape
        self.kv_heads, past = k.shape[1], k.shape[2] - self.tokens
        self.block, least = self._block(window), 1
        if is_symbol(self.tokens):
            # A graph for every length cannot tell whether a text fills one block, nor a single block from several.
            least = 2
        else:
            self.block = min(self.block, self.tokens)
        self.blocks = max(-(-self.tokens // self.block), least)
        self.pad = self.blocks * self.block - self.tokens
        # Keys start W - 1 before the first query: cut off what lies further back, or pad what is missing.
        lead, self.own = window - 1 - past, own
        first = -min(lead, 0)
        # [B or 1, HKV or 1, n or 1, C, keys]
        visible = self._visible(window, first, max(lead, 0), past, key_mask).to(q.device)[:, None]
        before: list[tuple[Tensor, Tensor]] = []
        if sinks is not None:
            before.append((sinks[0][:, :, None], sinks[1][:, :, None]))
            seen = sinks[2]
            if self.pad:
                # What torch's inductor 2.13 vectorises of a mask that is computed and padded does not compile.
                whole = seen.float() if torch.compiler.is_compiling() else seen
                seen = F.pad(whole, (0, 0, 0, self.pad)).bool()
            seen = torch.unflatten(seen, 1, (self.blocks, self.block))
            visible = torch.cat([seen[:, None], visible.expand(self.batch, -1, self.blocks, -1, -1)], -1)
        if kept is not None:
            *found, seen = self._kept(kept)
            before.append((found[0], found[1]))
            visible = torch.cat([seen, visible.expand(self.batch, self.kv_heads, self.blocks, -1, -1)], -1)
            before.reverse()
        if own:
            visible = F.pad(visible, (0, 1), value=True)
        bands = _bands if needs_operations() else _Bands.apply
        size = self.block, self.blocks, window, first, max(lead, 0), self.pad, own
        each = [[x.expand(-1, -1, self.blocks, -1, -1) for x in of] for of in zip(*before, strict=True)] or [[], []]
        heads = [torch.cat(of, 3) if len(of) > 1 else of[0] if of else None for of in each]
        self.k, self.v = (bands(x, head, *size).flatten(0, 2) for x, head in zip((k, v), heads, strict=True))
        self.visible, self.q = visible, self.rows(q)

    def _block(self, window: int) -> int:
        """Return C: the larger the window, and the fewer heads share keys, the larger."""
        small, large = BLOCKS
        return large if window > 8 * small or 4 * self.kv_heads > self.heads else small

    def _visible(self, window: int, first: int, lead: int, past: int, key_mask: Tensor | None) -> Tensor:
        """Tell which query of a block sees which key of its band, ``[B or 1, n or 1, C, W - 1 + C]``."""
        i = torch.arange(self.block)[:, None]
        j = torch.arange(window - 1 + self.block)[None]
        near, itself = (j >= i) & (j < i + window), j == i + window - 1
        if key_mask is None:
            if lead == 0:
                return near[None, None]
            key_mask = torch.ones(1, past + self.tokens, dtype=torch.bool)
        device = key_mask.device
        real = F.pad(key_mask[:, first:], (lead, self.pad)).unfold(1, window - 1 + self.block, self.block)
        return (near.to(device) & real[:, :, None]) | itself.to(device)

    def _kept(self, kept: KeptKeys) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values that a block may see beyond its window ``[B, HKV, n, K, *]``, and which query does."""
        places = kept.k.shape[2] - self.tokens
        query = torch.arange(self.tokens + self.pad, device=kept.slot.device).view(self.blocks, self.block)
        # What lies there before a block, and what enters within it.
        enters = (places + query).expand(self.batch, self.kv_heads, -1, -1)
        index = torch.cat([kept.held(self.block, self.blocks), enters], 3)
        padded = [F.pad(x, (0, self.pad), value=NOWHERE) for x in (kept.begins, kept.ends)]
        seen = kept._replace(begins=padded[0], ends=padded[1]).seen(index, query)
        at = index.flatten(2).clamp(max=kept.k.shape[2] - 1)[..., None]
        k, v = (torch.unflatten(x.gather(2, at.expand(-1, -1, -1, x.shape[3])), 2, index.shape[2:]) for x in kept[:2])
        return k, v, seen

    def rows(self, x: Tensor) -> Tensor:
        """Cut ``[B, H, T, E]`` into ``[B HKV n, G C, E]``."""
        if self.pad:
            x = F.pad(x, (0, 0, 0, self.pad))
        x = torch.unflatten(torch.unflatten(x, 2, (self.blocks, self.block)), 1, (self.kv_heads, -1))
        return x.transpose(2, 3).reshape(self.batch * self.kv_heads * self.blocks, -1, x.shape[-1])

    def hide(self, scores: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the scores ``[rows, G C, N + W - 1 + C]``, far below 0 where a query does not see a key."""
        shape = (self.batch, self.kv_heads, self.blocks, -1, self.block, scores.shape[-1])
        info, hidden = torch.finfo(scores.dtype), ~self.visible[:, :, :, None]
        if scores.device.type != "cpu" or torch.compiler.is_compiling():
            # Without a tensor of limits.
            return scores.view(shape).masked_fill(hidden, info.min).view(scores.shape)
        # Several times faster than filling by a mask.
        limits = torch.full_like(hidden, info.max, dtype=scores.dtype).masked_fill_(hidden, info.min)
        to = None if out is None else out.view(shape)
        return torch.minimum(scores.view(shape), limits, out=to).view(scores.shape)

    def join(self, x: Tensor) -> Tensor:
        """Put ``[B HKV n, G C, E]`` back together as ``[B, H, T, E]``, laid out as output projections read it."""
        x = x.view(self.batch, self.kv_heads, self.blocks, -1, self.block, x.shape[-1]).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(self.batch, -1, self.heads, x.shape[-1])[:, : self.tokens].transpose(1, 2)


def _bands(
    x: Tensor, before: Tensor | None, block: int, blocks: int, window: int, first: int, lead: int, pad: int, own: bool
) -> Tensor:
    """Cut keys or values ``[B, HKV, P + T, D]`` into bands that overlap, ``[B, HKV, n, N + W - 1 + C, D]``.

    Keys ``before`` each band are ``[B, HKV, n, N, D]``. Of the others the ``first`` is the first that is seen; they get
    ``lead`` zeros before them and ``pad`` behind, and where queries have keys of their own each band one more row.
    """
    x = x[:, :, first:]
    if lead or pad:
        x = F.pad(x, (0, 0, lead, pad))
    # Of windows that do not overlap, code that torch's inductor 2.13 makes for the gradient writes where it may not.
    if blocks == 1:
        parts = [x[:, :, None]]
    elif window == 1:
        parts = [torch.unflatten(x, 2, (blocks, block))]
    else:
        parts = [x.unfold(2, window - 1 + block, block).mT]
    if before is not None:
        parts.insert(0, before)
    if own:
        parts.append(x.new_zeros(*x.shape[:2], blocks, 1, x.shape[3]))
    # All parts are copied at once.
    return torch.cat(parts, 3)


class _Bands(torch.autograd.Function):
    """:func:`_bands`, the backward of which adds blocks, where PyTorch's own would add rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor | None, *size: int) -> Tensor:
        ctx.before, ctx.size, ctx.shape = 0 if before is None else before.shape[3], size, x.shape
        return _bands(x, before, *size)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dbands: Tensor) -> tuple[Tensor | None, ...]:
        block, blocks, window, first, lead, *_ = ctx.size
        width = window - 1 + block
        over = -(-width // block)
        dx = dbands.new_zeros(*ctx.shape[:2], first + (blocks + over - 1) * block, ctx.shape[3])
        to = torch.unflatten(dx[:, :, first:], 2, (-1, block))
        band = dbands[:, :, :, ctx.before : ctx.before + width]
        for n in range(over):
            part = band[:, :, :, n * block : (n + 1) * block]
            to[:, :, n : n + blocks, : part.shape[3]] += part
        start = 0 if first else lead
        dbefore = dbands[:, :, :, : ctx.before] if ctx.before else None
        return dx[:, :, start : start + ctx.shape[2]], dbefore, *(None,) * len(ctx.size)


def _allocate_sums(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


def _refuse_gradients(ctx: Any, *gradients: Tensor) -> NoReturn:
    raise BackendError(
        "backend", "be able to run here", "torch", "An exported window has no gradients; train with torch.compile."
    )


# Of an export, or of inference, a window is one node of a graph: it is cut into blocks, and what a tracer would have to
# know of their sizes ties a graph to one length, and takes it a minute to find out.
window_forward = operator(
    "window_forward",
    lambda *inputs: window_attention_torch(WindowCall.of(*inputs)).contiguous(),
    contiguous_like_values,
    schema=f"({INPUTS}) -> Tensor",
)
sums_forward = operator(
    "sums_forward",
    lambda *inputs: tuple(x.contiguous() for x in window_sums_torch(WindowCall.of(*inputs))),
    _allocate_sums,
    schema=f"({INPUTS}) -> (Tensor, Tensor)",
)
for op in (window_forward, sums_forward):
    torch.library.register_autograd(op, _refuse_gradients)
    refuse_vmap("torch", op)
