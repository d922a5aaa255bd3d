"""A byte-level n-gram model with interpolated Kneser-Ney smoothing: the yardstick for a small model's bits per byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_ORDER = 7  # seven bytes and the order fit into one 64-bit key


class NgramModel:
    """An n-gram model over bytes.

    `p(b | h) = max(c(hb) - d, 0) / c(h) + d n(h) / c(h) p(b | h')`, with `h'` the history `h` without its first byte,
    `n(h)` the number of distinct bytes seen after `h`, and counts below the highest order replaced by the number of
    distinct bytes seen before (Kneser and Ney, 1995; interpolated as in Chen and Goodman, 1999).

    Args:
        documents: Training text; no n-gram crosses from one document into the next.
        order: Length of an n-gram, 1..7; default 5.
    """

    def __init__(self, documents: Sequence[str], order: int = 5) -> None:
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"`order` must lie in 1..{MAX_ORDER}, got {order}. Choose a smaller one.")
        self.order = order
        # The document break stands as `order - 1` zero bytes, which source text does not hold.
        text = np.concatenate([self._padded(document) for document in documents])
        grams = self._windows(text, order)
        grams = grams[(grams & 0xFF) != 0]
        keys, counts = np.unique(grams, return_counts=True)
        self.levels: list[tuple[NDArray[np.uint64], NDArray[np.int64], float, tuple[NDArray, NDArray, NDArray]]] = []
        for length in range(order, 0, -1):
            if length < order:
                # Kneser-Ney: a shorter n-gram counts once for each distinct byte it was seen after.
                keys, counts = np.unique(keys & np.uint64((1 << 8 * length) - 1), return_counts=True)
            once, twice = int((counts == 1).sum()), int((counts == 2).sum())
            discount = once / (once + 2 * twice) if once and twice else 0.5
            histories, first = np.unique(keys >> np.uint64(8), return_index=True)
            totals = np.add.reduceat(counts, first)
            kinds = np.diff(np.append(first, len(keys)))
            self.levels.append((keys, counts, discount, (histories, totals, kinds)))

    def _padded(self, document: str) -> NDArray[np.uint8]:
        return np.frombuffer(b"\0" * (self.order - 1) + document.encode(), dtype=np.uint8)

    @staticmethod
    def _windows(text: NDArray[np.uint8], order: int) -> NDArray[np.uint64]:
        windows = np.zeros(len(text) - order + 1, dtype=np.uint64)
        for i in range(order):
            windows = (windows << np.uint64(8)) | text[i : len(text) - order + 1 + i]
        return windows

    def bits_per_byte(self, documents: Sequence[str]) -> float:
        """Return the mean bits that the model needs for a byte of the documents."""
        text = np.concatenate([self._padded(document) for document in documents])
        grams = self._windows(text, self.order)
        grams = grams[(grams & 0xFF) != 0]
        return float(-np.log2(self._probability(grams, 0)).mean())

    def _probability(self, grams: NDArray[np.uint64], level: int) -> NDArray[np.float64]:
        """Return the probability of each n-gram's last byte after the bytes before it."""
        if level == self.order:
            return np.full(len(grams), 1 / 256)
        keys, counts, discount, (histories, totals, kinds) = self.levels[level]
        grams = grams & np.uint64((1 << 8 * (self.order - level)) - 1)
        shorter = self._probability(grams, level + 1)
        seen = self._lookup(keys, counts, grams)
        total = self._lookup(histories, totals, grams >> np.uint64(8))
        spread = self._lookup(histories, kinds, grams >> np.uint64(8))
        known = total > 0
        safe = np.where(known, total, 1)
        interpolated = np.maximum(seen - discount, 0) / safe + discount * spread / safe * shorter
        return np.where(known, interpolated, shorter)

    @staticmethod
    def _lookup(keys: NDArray[np.uint64], values: NDArray[np.int64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, values[at], 0)
