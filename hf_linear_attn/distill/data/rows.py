"""What data is made of: documents, rows cut from them, and batches of rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Document(NamedTuple):
    """The tokens of a text, a conversation, or a prompt with its completion."""

    ids: Sequence[int]
    taught: bytes | None = None
    """A byte per token, 1 where it is learned, 0 where it is read only; None where all are learned."""
    bos: bool = True
    """Whether a row of it begins with the tokenizer's BOS, if it has one."""

    def part(self, first: int, end: int) -> "Document":
        """Return some of its tokens."""
        return self._replace(ids=self.ids[first:end], taught=self.taught and self.taught[first:end])


class Row(NamedTuple):
    """One sequence."""

    input_ids: list[int]
    weights: list[float]
    """Weight of the loss of predicting each token."""
    starts: Sequence[int] = (0,)
    """Where its documents begin."""


class Batch(NamedTuple):
    """Sequences of a forward."""

    input_ids: Tensor
    """``[B, T]`` int64, padded on the right."""
    weights: Tensor
    """``[B, T]`` fp32: weight of the loss of predicting token t; 0 at t = 0, in padding, and for context."""
    real: Tensor
    """``[B, T]`` bool, False in padding."""
    position_ids: Tensor | None = None
    """``[B, T]`` int64, from 0 in every document of a row; None where each row is one document."""
    numbers: tuple[int, ...] = ()
    """The rows' numbers among the sequences of their length."""
    part: "Part | None" = None
    """What the tokens are part of; weights are then those of the next tokens. None where they are whole sequences."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        return self._each(lambda x: x.to(device))

    def rows(self, first: int, last: int) -> "Batch":
        """Return some of the sequences."""
        return self._each(lambda x: x[first:last])._replace(numbers=self.numbers[first:last])

    def cut(self, first: int, last: int) -> "Batch":
        """Return the tokens ``[first, last)`` of every sequence, with what comes after each."""
        own = slice(first, last)
        targets, weights = (
            torch.nn.functional.pad(x[:, 1:], (0, 1))[:, own].contiguous() for x in (self.input_ids, self.weights)
        )
        positions = self.position_ids
        if positions is None:
            positions = torch.arange(self.input_ids.shape[1], device=targets.device).expand(len(targets), -1)
        ids, real, positions = (x[:, own].contiguous() for x in (self.input_ids, self.real, positions))
        return Batch(ids, weights, real, positions, self.numbers, Part(self, own, targets))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.position_ids is None else change(self.position_ids)
        return Batch(change(self.input_ids), change(self.weights), change(self.real), positions, self.numbers)


class Part(NamedTuple):
    """Where a part of some sequences comes from."""

    whole: Batch
    """The sequences."""
    own: slice
    """Which of their tokens."""
    targets: Tensor
    """``[B, T]`` int64: the tokens that follow on each, 0 behind the last."""


def collate(rows: Sequence[Row], length: int, pad: int) -> Batch:
    """Pad sequences to one length T with the token ``pad``."""
    ids = torch.full((len(rows), length), pad)
    weights = torch.zeros(len(rows), length)
    real = torch.zeros(len(rows), length, dtype=torch.bool)
    positions = torch.arange(length).repeat(len(rows), 1)
    for index, row in enumerate(rows):
        ids[index, : len(row.input_ids)] = torch.tensor(row.input_ids)
        weights[index, : len(row.input_ids)] = torch.tensor(row.weights)
        real[index, : len(row.input_ids)] = True
        for start in row.starts:
            positions[index, start:] -= positions[index, start].item()
    packed = any(len(row.starts) > 1 for row in rows)
    return Batch(ids, weights, real, positions if packed else None)
