"""Exact softmax over the last W tokens and a few sink tokens, in O(T W) time.

On GPUs a kernel does it, see :mod:`hf_linear_attn.ops.window.triton.kernels`. Elsewhere queries are cut into blocks;
each block attends to its own keys and the W - 1 before them, so that a library's dense attention does the work on
``[block, block + W - 1]`` scores.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.dispatch import choose_backend, kernel_obstacle
from hf_linear_attn.ops.library import refuse_forward_mode

MIN_BLOCK = 64
"""Smallest block of queries: below it, launch overhead outweighs the scores that a wider band wastes."""

EXTRA = 8
"""Dimensions that :func:`window_attention` adds for a key of its own per query; fused kernels want multiples of 8."""


LARGEST_FP32 = 128
"""Dimensions up to which the kernels find enough registers for fp32."""


class OwnKey(NamedTuple):
    """A key of each query's own, that stands for the n keys beyond its window.

    Its score is that of their mean, plus ``log n``, since the softmax mass of n keys is at least n times that of their
    mean (by Jensen), plus what is learned.

    Attributes:
        value: Its value ``[B, H, T, V]``.
        bias: Added to the score, ``[H]``.
        weight: Multiplied with q and added to the score, ``[H, D]``.
        counts: Which keys count once they lie beyond the window, ``[B, P + T]`` bool.
        number: How many do so by now, ``[B, T]`` int64; where it is 0 the own key is not visible.
        before: Sum of those that came before the P, ``[B, HKV, D]`` fp32, or None.
        after: That by the last query, where it is known; it spares a lone query from summing again.
    """

    value: Tensor
    bias: Tensor
    weight: Tensor
    counts: Tensor
    number: Tensor
    before: Tensor | None = None
    after: Tensor | None = None

    def score(self, q: Tensor, k: Tensor, window: int, scaling: float) -> Tensor:
        """Return the scores ``[B, H, T]``, fp32 (fp64 for fp64 input)."""
        x = upcast(q)
        if self.after is not None and q.shape[2] == 1:
            keys = self.after[:, :, None]
        else:
            gone = max(k.shape[2] - window, 0)
            keys = upcast(k[:, :, :gone]) * self.counts[:, None, :gone, None]
            keys = running_sum(keys, q.shape[2] - gone, self.before)
        number = self.number.clamp(min=1)[:, None].to(x.dtype)
        learned = torch.einsum("bhtd,hd->bht", x, self.weight.to(x.dtype)) + self.bias[:, None]
        return learned + scaling * key_product(q, keys) / number + number.log()


def running_sum(x: Tensor, lag: int, before: Tensor | None) -> Tensor:
    """Sum over tokens up to each one, and put that off by a number of tokens.

    Args:
        x: ``[B, T]`` or ``[B, HKV, T, D]``.
        lag: Number of tokens, >= 0; as many sums of no token come first.
        before: The sum over earlier tokens, without their dimension.

    Returns:
        The sums, with ``T + lag`` tokens.
    """
    dim = 1 if x.ndim == 2 else 2
    sums = x.cumsum(dim)
    if lag:
        sums = F.pad(sums, [0, 0] * (x.ndim - dim - 1) + [lag, 0])
    return sums if before is None else sums + before.unsqueeze(dim)


def key_product(q: Tensor, keys: Tensor) -> Tensor:
    """Return the product of every query with its own key of ``[B, HKV, T, D]``, ``[B, H, T]``."""
    grouped = upcast(q).reshape(q.shape[0], keys.shape[1], -1, *q.shape[2:])
    return torch.einsum("bhgtd,bhtd->bhgt", grouped, keys).flatten(1, 2)


class _Blocks:
    """Queries, keys, values and their visibility, cut into blocks of a band."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        key_mask: Tensor | None,
        sinks: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        batch, heads, tokens, _ = q.shape
        past = k.shape[2] - tokens
        self.shape, self.tokens = (batch, heads), tokens
        if key_mask is None:
            key_mask = torch.ones(batch, k.shape[2], dtype=torch.bool, device=q.device)
        if tokens == 1 and past >= window - 1:
            self._decode(q, k, v, window, key_mask, sinks)
            return
        self.block = min(max(window, MIN_BLOCK), tokens)
        pad = -tokens % self.block
        self.number = (tokens + pad) // self.block
        groups = heads // k.shape[1]
        # Keys start W - 1 before the first query: cut off what lies further back, or pad what is missing.
        lead = window - 1 - past
        self.q = self._split(F.pad(q, (0, 0, 0, pad)), self.block, self.block)
        span = self.block + window - 1
        k, v = (self._split(F.pad(x, (0, 0, lead, pad)), span, self.block) for x in (k, v))
        visible = F.pad(key_mask, (lead, pad)).unfold(1, span, self.block).reshape(-1, 1, 1, span)
        i = torch.arange(self.block, device=q.device)[:, None]
        j = torch.arange(span, device=q.device)[None, :]
        # A query sees itself even where it is padding: its row is then finite, and nobody reads it.
        visible = ((j >= i) & (j < i + window) & visible) | (j == i + window - 1)
        if sinks is not None:
            sink_k, sink_v, sink_visible = sinks
            k = torch.cat([self._repeat(sink_k), k], dim=2)
            v = torch.cat([self._repeat(sink_v), v], dim=2)
            sink_visible = F.pad(sink_visible, (0, 0, 0, pad)).reshape(-1, 1, self.block, sink_k.shape[2])
            visible = torch.cat([sink_visible, visible], dim=-1)
        self.k, self.v = _repeat_heads(k, groups), _repeat_heads(v, groups)
        self.visible = visible

    def _decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        key_mask: Tensor,
        sinks: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Take one query and the last keys as they are: a single block, without the cutting."""
        self.block = self.number = 1
        k, v, visible = k[:, :, -window:], v[:, :, -window:], key_mask[:, None, None, -window:]
        itself = torch.arange(window, device=q.device) == window - 1
        visible = visible | itself
        if sinks is not None:
            sink_k, sink_v, sink_visible = sinks
            k, v = torch.cat([sink_k, k], dim=2), torch.cat([sink_v, v], dim=2)
            visible = torch.cat([sink_visible[:, None], visible], dim=-1)
        groups = q.shape[1] // k.shape[1]
        self.q, self.k, self.v = q, _repeat_heads(k, groups), _repeat_heads(v, groups)
        self.visible = visible

    def _split(self, x: Tensor, size: int, step: int) -> Tensor:
        """Cut ``[B, heads, tokens, D]`` into ``[B blocks, heads, size, D]``."""
        return x.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)

    def _repeat(self, x: Tensor) -> Tensor:
        return x[:, None].expand(-1, self.number, -1, -1, -1).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Put ``[B blocks, heads, block, ...]`` back together as ``[B, heads, T, ...]``."""
        batch, heads = self.shape
        x = x.reshape(batch, self.number, heads, self.block, *x.shape[3:]).transpose(1, 2)
        return x.flatten(2, 3)[:, :, : self.tokens]


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    # Repeating once would still copy.
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None = None,
    sinks: tuple[Tensor, Tensor, Tensor] | None = None,
    own_key: OwnKey | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal softmax attention over the last ``window`` keys, the sinks, and a key of each query's own.

    Args:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, P + T, D]``: P keys from before the first query, at most ``window``, then its own.
        v: Values ``[B, HKV, P + T, V]``.
        window: Keys in sight, the query's own included, >= 1.
        scaling: Factor on ``q.k``.
        key_mask: ``[B, P + T]`` bool, True = a real token.
        sinks: Keys ``[B, HKV, n, D]``, values ``[B, HKV, n, V]``, and ``[B, T, n]`` bool: which query sees which. A
            sink inside a query's window must not be visible a second time.
        own_key: One more key per query.
        backend: ``"auto"``, ``"triton"``, ``"torch"`` or ``"reference"``; the last two differ in what can be
            differentiated alone.

    Returns:
        ``o [B, H, T, V]``.

    Raises:
        BackendError: If the backend asked for cannot run here.
    """
    if choose_backend(backend, q.device, lambda: window_obstacle(q, k, v)) == "triton":
        # Imported here so that the package needs neither Triton nor a GPU.
        from hf_linear_attn.ops.window.triton.op import window_attention_triton

        return window_attention_triton(
            q, k, v, window=window, scaling=scaling, key_mask=key_mask, sinks=sinks, own_key=own_key
        )
    if backend == "reference":
        # The plainest form of dense attention can be differentiated in every way.
        with sdpa_kernel(SDPBackend.MATH):
            return _window_attention(q, k, v, window, scaling, key_mask, sinks, own_key)
    refuse_forward_mode("torch", q, k, v)
    return _window_attention(q, k, v, window, scaling, key_mask, sinks, own_key)


def _window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scaling: float,
    key_mask: Tensor | None,
    sinks: tuple[Tensor, Tensor, Tensor] | None,
    own_key: OwnKey | None,
) -> Tensor:
    """Attend with the dense attention of PyTorch."""
    if own_key is None:
        blocks = _Blocks(q, k, v, window, key_mask, sinks)
        o = F.scaled_dot_product_attention(blocks.q, blocks.k, blocks.v, attn_mask=blocks.visible, scale=scaling)
        return blocks.join(o)
    score, visible = own_key.score(q, k, window, scaling), own_key.number > 0
    if q.shape[2] == 1:
        return _single_query(_Blocks(q, k, v, window, key_mask, sinks), scaling, score, visible, own_key.value)
    q, k, v, sinks = _as_sink(score, visible, q, k, v, scaling, sinks)
    blocks = _Blocks(q, k, v, window, key_mask, sinks)
    o = F.scaled_dot_product_attention(blocks.q, blocks.k, blocks.v, attn_mask=blocks.visible, scale=scaling)
    o = blocks.join(o)
    return torch.addcmul(o[..., :-EXTRA], o[..., -EXTRA, None], own_key.value)


def window_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why no kernel can attend to a window of these tensors here, or None where one can."""
    reason = kernel_obstacle(q, k, v)
    if reason is None and q.dtype == torch.float32 and max(q.shape[3], v.shape[3]) > LARGEST_FP32:
        reason = f"in fp32 the window's kernels hold at most {LARGEST_FP32} dimensions"
    return reason


def _single_query(blocks: _Blocks, scaling: float, own_score: Tensor, own_visible: Tensor, own_value: Tensor) -> Tensor:
    """Attend from one token: so few scores cost less as they are than by :func:`_as_sink`."""
    scores = (blocks.q @ blocks.k.transpose(-1, -2)).to(own_score.dtype) * scaling
    own_score = own_score.masked_fill(~own_visible[:, None], -torch.inf)
    scores = torch.cat([scores.masked_fill(~blocks.visible, -torch.inf), own_score[..., None]], -1)
    weights = scores.softmax(-1).to(blocks.v.dtype)
    return torch.addcmul(weights[..., :-1] @ blocks.v, weights[..., -1:], own_value)


def _as_sink(
    own_score: Tensor,
    own_visible: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    sinks: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Make each query's own key a sink like any other, for dense attention to read.

    A dimension of q that only this sink's key reads carries each query's score, and one of v that only this sink's
    value writes tells its weight.
    """
    score = own_score / scaling
    high = score.to(q.dtype)
    # Half precision would round scores too coarsely: what it loses has a dimension of its own.
    low = (score - high.to(score.dtype)).to(q.dtype)
    q = torch.cat([q, high[..., None], low[..., None], q.new_zeros(*q.shape[:3], EXTRA - 2)], -1)
    k, v = F.pad(k, (0, EXTRA)), F.pad(v, (0, EXTRA))
    read, written = k.new_zeros(k.shape[-1]), v.new_zeros(v.shape[-1])
    read[-EXTRA : 2 - EXTRA], written[-EXTRA] = 1, 1
    ours = [x.expand(*k.shape[:2], 1, -1) for x in (read, written)]
    visible = own_visible[..., None]
    if sinks is not None:
        ours = [torch.cat([F.pad(x, (0, EXTRA)), y], 2) for x, y in zip(sinks[:2], ours, strict=True)]
        visible = torch.cat([sinks[2], visible], -1)
    return q, k, v, (ours[0], ours[1], visible)


def window_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None = None,
    sinks: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`window_attention` divides: ``sum_j exp(s_ij - m_i) v_j`` and ``sum_j exp(s_ij - m_i)``.

    Returns:
        Numerator ``[B, H, T, V]`` and denominator ``[B, H, T]``, fp32, relative to the row's largest score m_i.
    """
    blocks = _Blocks(q, k, v, window, key_mask, sinks)
    scores = (blocks.q @ blocks.k.transpose(-1, -2)).float() * scaling
    scores = scores.masked_fill(~blocks.visible, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return blocks.join(weights @ blocks.v.float()), blocks.join(weights.sum(-1))
