"""Attention over a window in PyTorch: blocks of queries against a band of keys, ``[block, N + block + W - 1]`` scores.

Sinks stand before the band, and a key of each query's own is one more column, whose score is written and whose value is
added apart: one product makes all other scores, one softmax joins them, one product makes the output.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.feature_maps.base import is_watched, second_gradients, upcast
from hf_linear_attn.ops.library import own_precision

BLOCKS = (32, 64)
"""Smallest and largest block of queries: a small one wastes few scores, a large one copies few keys."""


def window_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None,
    sinks: tuple[Tensor, Tensor, Tensor] | None,
    own: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Compute :func:`hf_linear_attn.ops.window.window_attention`; arguments as in its reference."""
    band = Band(q, k, v, window, key_mask, sinks, own is not None)
    last = None
    if own is not None:
        last = band.rows(own[0].masked_fill(~own[1][:, None], torch.finfo(own[0].dtype).min)[..., None])
    with own_precision(q.device):
        attend = _attend if is_watched() else _Attend.apply
        o, share, *_ = attend(band.q, band.k, band.v, last, band, scaling)
    o = band.join(o)
    return o if own is None else torch.addcmul(o, band.join(share), own[2])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor | None, band: "Band", scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``o [rows, G C, V]``, the share of the last column ``[rows, G C, 1]``, and all weights.

    The scores of the last column are given where there are such.
    """
    scores = band.hide(upcast(_scaled_product(q, k.mT, scaling)))
    if last is not None:
        scores = torch.cat([scores[..., :-1], last], -1)
    weights = scores.softmax(-1).to(v.dtype)
    return torch.bmm(weights, v), weights[..., -1:], weights


class _Attend(torch.autograd.Function):
    """:func:`_attend` in few passes over memory, forward and backward.

    A hidden key's weight is 0, and so is the gradient of its score: the backward needs no mask.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, last: Tensor | None, band: "Band", scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = upcast(_scaled_product(q, k.mT, scaling))
        scores = band.hide(scores, out=scores)
        if last is not None:
            scores[..., -1:] = last
        weights = scores.softmax(-1).to(v.dtype)
        return torch.bmm(weights, v), weights[..., -1:].clone(), weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, last, ctx.band, ctx.scaling = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(q, k, v, last, output[2])

    @staticmethod
    def backward(ctx: Any, do: Tensor, dshare: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, k, v, last, weights = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(*inputs: Any) -> Any:
                return _attend(*inputs)[:2]

            return second_gradients(ctx, plain, (q, k, v, last, ctx.band, ctx.scaling), do, dshare)
        dweights = upcast(torch.bmm(do, v.mT))
        dweights[..., -1:] += dshare
        weights_up = upcast(weights)
        dscores = torch._softmax_backward_data(dweights, weights_up, -1, weights_up.dtype)
        dlast = None if last is None else dscores[..., -1:].clone()
        dscores = dscores.to(q.dtype)
        # The row of zeros that stands for the last column has a gradient, too: nobody's.
        dq, dk = (_scaled_product(x, y, ctx.scaling) for x, y in ((dscores, k), (dscores.mT, q)))
        return dq, dk, torch.bmm(weights.mT, do), dlast, None, None


def _scaled_product(x: Tensor, y: Tensor, scaling: float) -> Tensor:
    """Return ``scaling x y``: the product scales as it goes."""
    return torch.baddbmm(x.new_empty(()), x, y, beta=0, alpha=scaling)


def window_sums_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None,
    sinks: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`hf_linear_attn.ops.window.window_sums`."""
    band = Band(q, k, v, window, key_mask, sinks, False)
    scores = band.hide(upcast(_scaled_product(band.q, band.k.mT, scaling)))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return band.join(torch.bmm(weights, band.v.to(weights.dtype))), band.join(weights.sum(-1, keepdim=True))[..., 0]


class Band:
    """Blocks of C queries beside the keys that they see, as rows ``[B HKV n, ...]`` of one product.

    The G heads of a group share their keys, so their queries are rows of the same matrix, ``[G C, D]``. Keys are
    ``[N + W - 1 + C, D]``: the sinks, the band, and a row of zeros where queries have a key of their own.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        key_mask: Tensor | None,
        sinks: tuple[Tensor, Tensor, Tensor] | None,
        own: bool,
    ) -> None:
        self.batch, self.heads, self.tokens, _ = q.shape
        self.kv_heads, past = k.shape[1], k.shape[2] - self.tokens
        self.block = min(self._block(window), self.tokens)
        self.pad = -self.tokens % self.block
        self.blocks = (self.tokens + self.pad) // self.block
        # Keys start W - 1 before the first query: cut off what lies further back, or pad what is missing.
        lead, self.own = window - 1 - past, own
        first = -min(lead, 0)
        visible = self._visible(window, first, max(lead, 0), past, key_mask).to(q.device)
        k, v = (self._banded(x[:, :, first:], window, max(lead, 0)) for x in (k, v))
        of_k, of_v = [k], [v]
        if sinks is not None:
            for parts, x in zip((of_k, of_v), sinks[:2], strict=True):
                parts.insert(0, x[:, :, None].expand(-1, -1, self.blocks, -1, -1))
            seen = torch.unflatten(F.pad(sinks[2], (0, 0, 0, self.pad)), 1, (self.blocks, self.block))
            visible = torch.cat([seen, visible.expand(self.batch, self.blocks, -1, -1)], -1)
        if own:
            for parts in (of_k, of_v):
                parts.append(parts[-1].new_zeros(*parts[-1].shape[:3], 1, parts[-1].shape[4]))
            visible = F.pad(visible, (0, 1), value=True)
        # All parts are copied at once.
        k, v = (torch.cat(parts, 3) if len(parts) > 1 else parts[0] for parts in (of_k, of_v))
        self.k, self.v, self.visible = k.flatten(0, 2), v.flatten(0, 2), visible
        self.q = self.rows(q)

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

    def _banded(self, x: Tensor, window: int, lead: int) -> Tensor:
        """Cut keys or values into bands that overlap, ``[B, HKV, n, W - 1 + C, D]``."""
        if lead or self.pad:
            x = F.pad(x, (0, 0, lead, self.pad))
        return x.unfold(2, window - 1 + self.block, self.block).mT

    def rows(self, x: Tensor) -> Tensor:
        """Cut ``[B, H, T, E]`` into ``[B HKV n, G C, E]``."""
        if self.pad:
            x = F.pad(x, (0, 0, 0, self.pad))
        x = torch.unflatten(torch.unflatten(x, 2, (self.blocks, self.block)), 1, (self.kv_heads, -1))
        return x.transpose(2, 3).reshape(self.batch * self.kv_heads * self.blocks, -1, x.shape[-1])

    def hide(self, scores: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the scores ``[rows, G C, N + W - 1 + C]``, far below 0 where a query does not see a key."""
        shape = (self.batch, self.kv_heads, self.blocks, -1, self.block, scores.shape[-1])
        info, hidden = torch.finfo(scores.dtype), ~self.visible[:, None, :, None]
        if scores.device.type != "cpu" or torch.compiler.is_compiling():
            # Without a tensor of limits.
            return scores.view(shape).masked_fill(hidden, info.min).view(scores.shape)
        # Several times faster than filling by a mask.
        limits = torch.full_like(hidden, info.max, dtype=scores.dtype).masked_fill_(hidden, info.min)
        to = None if out is None else out.view(shape)
        return torch.minimum(scores.view(shape), limits, out=to).view(scores.shape)

    def join(self, x: Tensor) -> Tensor:
        """Put ``[B HKV n, G C, E]`` back together as ``[B, H, T, E]``."""
        x = x.view(self.batch, self.kv_heads, self.blocks, -1, self.block, x.shape[-1]).transpose(2, 3)
        return x.reshape(self.batch, self.heads, -1, x.shape[-1])[:, :, : self.tokens]
