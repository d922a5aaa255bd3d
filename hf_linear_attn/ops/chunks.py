"""How the PyTorch backends cut tokens into chunks, and batches into sequences."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

LEAST_LOG_DECAY = -1000.0
"""Smaller ones count as this one, minus infinity among them: its exponential is 0, in fp64 as well, and unlike infinity
it can be taken out of a sum again. Sums with it keep their small terms in fp64, and in two numbers of fp32."""


class Span(NamedTuple):
    """Tokens [a, b), in chunks of C = (b - a) / n."""

    a: int
    b: int
    n: int


def spans(tokens: int, chunk: int, most: int) -> list[Span]:
    """Cut tokens into spans of whole chunks, of ``most`` tokens each, and a last chunk that may be shorter."""
    whole = tokens - tokens % chunk
    found = [Span(a, b, (b - a) // chunk) for a in range(0, whole, most) for b in [min(a + most, whole)]]
    return [*found, Span(whole, tokens, 1)] if tokens > whole else found


def pieces(tokens: int, most: int) -> list[Span]:
    """Cut tokens into spans of one chunk each, for products without causality."""
    return [Span(a, min(a + most, tokens), 1) for a in range(0, tokens, most)]


def sequences(queries: int, keys: int, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice, slice]]:
    """Yield, per independent sequence, the rows of its state and its tokens of q and of k."""
    if cu_seqlens is None:
        yield slice(None), slice(0, queries), slice(0, keys)
        return
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        yield slice(n, n + 1), slice(a, b), slice(a, b)
