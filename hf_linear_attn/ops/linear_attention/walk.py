"""Tokens of one sequence cut into chunks on demand, and what a walk over spans of them does in each."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.feature_maps.elementwise import ElementwiseMap, elementwise_map
from hf_linear_attn.ops.chunks import LEAST_LOG_DECAY, Span
from hf_linear_attn.ops.linear_attention.problem import LinearCall


class Fade(NamedTuple):
    """How sums fade within each chunk of a span.

    Attributes:
        read: From before the chunk to each query, ``[rows, C, 1]``.
        kept: From each key to the end of the chunk, ``[rows, C, 1]``.
        within: From each key to each query, ``[rows, C, C]``; 1 where the query comes first.
        whole: Over the chunk, ``[rows, 1, 1]``.
    """

    read: Tensor
    kept: Tensor
    within: Tensor
    whole: Tensor


class Walk:
    """Queries and keys of one sequence (or one padded batch), cut into chunks on demand.

    ``[rows, ...]`` is ``[B HKV n, ...]``: the chunks of a span are rows of their own. The G heads of a group share
    their keys, so their queries are rows of the same matrix, ``[G C, F]``.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        phi: ElementwiseMap,
        log_decay: Tensor | None = None,
    ) -> None:
        self.q, self.k, self.v, self.phi = q, k, v, phi
        self.hidden = None if key_mask is None else ~key_mask[:, None, :, None].expand(-1, k.shape[1], -1, -1)
        # Differences of sums over many tokens: in less than fp64 they would lose what follows a strong decay.
        self.log_decay = None if log_decay is None else log_decay[..., None].double().clamp(min=LEAST_LOG_DECAY)
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def cut(self, x: Tensor, span: Span) -> Tensor:
        """View a span's tokens of ``x [B, heads, T, E]`` as ``[B, HKV, n, G, C, E]``."""
        kv_heads, chunk = self.k.shape[1], (span.b - span.a) // span.n
        shape = len(x), kv_heads, x.shape[1] // kv_heads, span.n, chunk, x.shape[3]
        return x[:, :, span.a : span.b].view(shape).transpose(2, 3)

    def rows(self, x: Tensor, span: Span) -> Tensor:
        """Return a span's tokens of ``x`` as ``[rows, G C, E]``."""
        x = self.cut(x, span)
        return x.reshape(-1, x.shape[3] * x.shape[4], x.shape[5])

    def before_(self, state: Tensor, phi_k: Tensor, v1: Tensor, span: Span, fade: Fade | None) -> Tensor:
        """Return the state before each chunk of a span, and take the span's keys into ``state``."""
        if fade is None:
            return running_(state, torch.bmm(phi_k.transpose(1, 2), v1), span.n)
        changes = torch.bmm((phi_k * fade.kept).transpose(1, 2), v1)
        return running_(state, changes, span.n, whole=fade.whole)

    def add_products_(self, db: Tensor, span: Span, x: Tensor, dx: Tensor, factor: float = 1) -> None:
        """Add ``factor x . dx``, of all heads of a group, to a span's tokens of ``db [B, HKV, T, 1]``."""
        to = self.cut(db, span)
        products = (x * dx).sum(-1, dtype=db.dtype).view(*to.shape[:3], -1, to.shape[4]).sum(3)
        to.add_(products.view(to.shape), alpha=factor)

    def paste(self, x: Tensor, span: Span, y: Tensor) -> None:
        """Write ``y``, shaped as :meth:`cut` shapes it or as rows, over a span's tokens of ``x``."""
        to = self.cut(x, span)
        to.copy_(y.view(to.shape))

    def queries(self, span: Span) -> Tensor:
        """Return phi(q) as ``[rows, G C, F]``."""
        return self.phi.phi(self.rows(self.q, span))

    def keys_and_values(self, span: Span) -> tuple[Tensor, Tensor]:
        """Return phi(k) as ``[rows, C, F]`` and [v, 1] as ``[rows, C, V + 1]``, both masked."""
        phi_k, v = self.phi.phi(self.rows(self.k, span)), self.cut(self.v, span)
        v1 = torch.empty(*v.shape[:-1], v.shape[-1] + 1, dtype=self.dtype, device=v.device)
        v1[..., :-1] = v
        v1[..., -1] = 1
        v1 = v1.flatten(0, 3)
        if self.hidden is None:
            return phi_k, v1
        # Of values, too: 0 times a NaN is one.
        hidden = self.rows(self.hidden, span)
        return phi_k.masked_fill(hidden, 0), v1.masked_fill_(hidden, 0)

    def weighted(self, errors: Sequence[Tensor], span: Span) -> Tensor:
        """Return [G, h] as ``[rows, G C, V + 1]``, G = do / den, given do, h and 1 / den."""
        do, h, inverse = (self.cut(x, span) for x in errors)
        g1 = torch.empty(*do.shape[:-1], do.shape[-1] + 1, dtype=self.dtype, device=do.device)
        torch.mul(do, inverse, out=g1[..., :-1])
        g1[..., -1:] = h
        return g1.flatten(3, 4).flatten(0, 2)

    def derive(self, dx: Tensor, x: Tensor, span: Span, dphi: Tensor, features: Tensor | None = None) -> None:
        """Write ``dphi phi'(x)`` over a span's tokens of ``dx``; ``features`` are phi(x) where they are at hand."""
        x = upcast(self.cut(x, span))
        features = self.phi.phi(x) if features is None else features.view(x.shape)
        self.paste(dx, span, dphi.view(x.shape).mul_(self.phi.derivative(x, features)))

    def fade(self, span: Span) -> Fade | None:
        """Return how sums fade within a span; None where they do not."""
        if self.log_decay is None:
            return None
        b = self.rows(self.log_decay, span).cumsum(1)
        last = b[:, -1:]
        read, kept, within, whole = (
            x.to(self.dtype).exp() for x in (b, last - b, (b - b.transpose(1, 2)).clamp_(max=0), last)
        )
        return Fade(read, kept, within, whole)

    def state(self, kv: Tensor | None, z: Tensor | None) -> Tensor:
        """Return [S, z] as ``[B HKV, F, V + 1]``, zeros where there is none; always a new tensor."""
        if kv is None or z is None:
            shape = (self.k.shape[0] * self.k.shape[1], self.k.shape[3], self.v.shape[3] + 1)
            return torch.zeros(shape, dtype=self.dtype, device=self.k.device)
        return torch.cat([kv, z[..., None]], dim=-1).flatten(0, 1)


def walks(call: LinearCall) -> tuple[Walk, Walk, int]:
    """Part the tokens of a sequence.

    Returns:
        All keys with the queries that read one state and no key of their own: the first ``delay`` ones, or all of
        them where attention is not causal. Then the other queries, each beside the last key that it sees. And the
        number of the former.
    """
    q, k, v, phi = call.q, call.k, call.v, elementwise_map(call.phi)
    lead = min(call.delay, q.shape[2]) if call.causal else q.shape[2]
    near = max(q.shape[2] - lead, 0)
    mask = None if call.key_mask is None else call.key_mask[:, :near]
    log_decay = None if call.log_decay is None else call.log_decay[:, :, :near]
    return (
        Walk(q[:, :, :lead], k, v, call.key_mask, phi),
        Walk(q[:, :, lead:], k[:, :, :near], v[:, :, :near], mask, phi, log_decay),
        lead,
    )


def causal_(scores: Tensor, fade: Fade | None = None) -> Tensor:
    """Zero the scores ``[rows, G C, C]`` of keys that a query cannot see yet, and fade the others, in place."""
    if fade is not None:
        scale_(scores, fade.within)
    torch.unflatten(scores, 1, (-1, scores.shape[2])).tril_()
    return scores


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply ``x [rows, G C, E]`` by ``factor [rows, C, E or 1]``, alike for all heads of a group, in place."""
    torch.unflatten(x, 1, (-1, factor.shape[1])).mul_(factor[:, None])
    return x


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``x [rows, G C, E]`` times ``factor [rows, C, 1]``."""
    return (torch.unflatten(x, 1, (-1, factor.shape[1])) * factor[:, None]).view(x.shape)


def running_(state: Tensor, changes: Tensor, n: int, *, reverse: bool = False, whole: Tensor | None = None) -> Tensor:
    """Return the state before each of a span's n chunks, ``[rows, F, V + 1]``, and add their changes to ``state``.

    In reverse a chunk follows the later ones; ``whole [rows, 1, 1]`` says how the state fades over each chunk.
    """
    before, order = torch.empty_like(changes), slice(None, None, -1 if reverse else 1)
    steps, added = torch.unflatten(before, 0, (-1, n)).unbind(1)[order], torch.unflatten(changes, 0, (-1, n)).unbind(1)
    factors = (None,) * n if whole is None else torch.unflatten(whole, 0, (-1, n)).unbind(1)
    steps[0].copy_(state)
    for step, change, factor, after in zip(steps, added[order], factors[order], (*steps[1:], state), strict=True):
        if factor is None:
            torch.add(step, change, out=after)
        else:
            torch.addcmul(change, step, factor, out=after)
    return before
