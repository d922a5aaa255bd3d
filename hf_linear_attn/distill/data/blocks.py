"""Sequences by number: documents cut and laid out in blocks, in memory or as they come, and several sets mixed."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from logging import getLogger
from typing import NamedTuple, Protocol

from typing_extensions import override

from hf_linear_attn.distill.data.rows import Document, Row
from hf_linear_attn.errors import ArgumentError

logger = getLogger(__name__)

Pieces = list[tuple[Document, int]]
"""The documents of a block, each with the first token that it shows."""


class Blocks(Protocol):
    """Text sequences by number."""

    def block(self, number: int, length: int) -> Row:
        """Return at most ``length`` tokens of documents, BOS before each where the tokenizer has one."""


class Blocking(NamedTuple):
    """How documents are laid out in blocks.

    Attributes:
        bos: What a document begins with in a block, one token or none.
        shortest: Tokens of the shortest blocks, which some document must fill.
        pack: Whether documents that do not fill a block share one.
        close: What ends a document in a block.
    """

    bos: Sequence[int]
    shortest: int
    pack: bool = True
    close: Sequence[int] = ()

    def blocks(self, documents: Iterable[Document], length: int) -> Iterator[Pieces]:
        """Lay documents out in blocks of ``length`` tokens, and yield those that teach something.

        A long document fills blocks by itself, the last of which ends where it ends, so it may overlap the one before
        it. Documents that do not fill a block share one with those that follow, as many as fit whole.

        Raises:
            ArgumentError: At the end, if every document is shorter than the shortest block, or no block teaches.
        """
        found = False
        for pieces in self._lay_out(documents, length):
            if self._teaches(pieces, length):
                found = True
                yield pieces
        if not found:
            remedy = "No answer of the dataset has a token; use `all`, or another dataset."
            raise ArgumentError("loss_on", "leave something to learn", "answers", remedy)

    def _lay_out(self, documents: Iterable[Document], length: int) -> Iterator[Pieces]:
        shared: Pieces = []
        room, longest = length, 0
        for document in documents:
            # Its own tokens, and the special ones around them.
            size, frame = len(document.ids), len(self.bos) * document.bos + len(self.close)
            longest = max(longest, size + frame)
            if size >= length - frame:
                for start in range(0, size, length - frame):
                    yield [(document, min(start, size - length + frame))]
                continue
            if shared and (not self.pack or size + frame > room):
                yield shared
                shared, room = [], length
            shared.append((document, 0))
            room -= size + frame
        if shared:
            yield shared
        if longest < (shortest := min(length, self.shortest)):
            rule = f"be at most {longest}, the longest document's tokens"
            remedy = (
                "What stands far back cannot be learned from such texts: lower it, or use a dataset of longer ones."
            )
            raise ArgumentError("block_tokens", rule, shortest, remedy)

    def _teaches(self, pieces: Pieces, length: int) -> bool:
        """Tell whether a block has a token that is learned."""
        for document, first in pieces:
            if document.taught is None:
                return True
            begin = len(self.bos) if document.bos else 0
            if document.taught.find(1, first + (not begin), first + length - begin) >= 0:
                return True
        return False

    def fill(self, pieces: Pieces, length: int) -> Row:
        """Return a block of documents, each between what begins and what closes it."""
        ids: list[int] = []
        weights: list[float] = []
        starts: list[int] = []
        for document, first in pieces:
            begin = list(self.bos) if document.bos else []
            shown = document.part(first, first + length - len(begin) - len(self.close))
            starts.append(len(ids))
            ids += [*begin, *shown.ids, *self.close]
            learned = list(map(float, shown.taught or b"\1" * len(shown.ids)))
            # The first token of a document is not told by the one before it.
            weights += [0.0, *([0.0] * len(begin) + learned + [1.0] * len(self.close))[1:]]
        return Row(ids, weights, starts)


class DocumentBlocks(Blocks):
    """Blocks of documents that are all in memory, in an order shuffled by the seed, anew in every epoch."""

    def __init__(self, documents: Sequence[Document], blocking: Blocking, seed: int) -> None:
        self.documents, self.blocking, self.seed = documents, blocking, seed
        self._places: dict[int, list[Pieces]] = {}
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def places(self, length: int) -> list[Pieces]:
        """Return what stands in every block, as :meth:`Blocking.blocks` yields it."""
        if length not in self._places:
            self._places[length] = list(self.blocking.blocks(self.documents, length))
        return self._places[length]

    @override
    def block(self, number: int, length: int) -> Row:
        places = self.places(length)
        epoch, index = divmod(number, len(places))
        of_epoch, order = self._orders.get(length, (-1, []))
        if of_epoch != epoch:
            order = list(range(len(places)))
            random.Random(f"{self.seed}/{length}/{epoch}").shuffle(order)
            # Steps take lengths in turn, so each keeps its own.
            self._orders[length] = epoch, order
        return self.blocking.fill(places[order[index]], length)


class StreamBlocks(Blocks):
    """Blocks of documents that come one by one, in their order; each length of blocks reads the stream by itself.

    Whenever ``documents`` is iterated over, it begins with the first one.
    """

    def __init__(self, documents: Iterable[Document], blocking: Blocking) -> None:
        self.documents, self.blocking = documents, blocking
        self._next: dict[int, int] = {}
        self._blocks: dict[int, Iterator[Row]] = {}

    def _read(self, length: int) -> Iterator[Row]:
        for epoch in itertools.count(1):
            for pieces in self.blocking.blocks(self.documents, length):
                yield self.blocking.fill(pieces, length)
            logger.info("dataset read to its end %d times", epoch)

    @override
    def block(self, number: int, length: int) -> Row:
        if number < self._next.get(length, number + 1):
            self._next[length], self._blocks[length] = 0, self._read(length)
        for _ in range(number - self._next[length]):
            next(self._blocks[length])
        self._next[length] = number + 1
        return next(self._blocks[length])


class MixedBlocks(Blocks):
    """Blocks of several datasets, whose shares are as their weights, > 0, are to each other.

    Of any run of blocks the shares hold to a whole block.
    """

    def __init__(self, parts: Sequence[Blocks], weights: Sequence[float]) -> None:
        self.parts, self.weights = parts, weights
        left = list(itertools.accumulate(reversed(weights)))[::-1]
        # Each part's share of what the parts before it leave.
        self.shares = [weight / rest for weight, rest in zip(weights, left, strict=True)]

    def place(self, number: int) -> tuple[int, int]:
        """Return which part a block is of, and its number there."""
        for index, share in enumerate(self.shares[:-1]):
            before, after = int(number * share), int((number + 1) * share)
            if after > before:
                return index, before
            number -= before
        return len(self.parts) - 1, number

    @override
    def block(self, number: int, length: int) -> Row:
        index, place = self.place(number)
        return self.parts[index].block(place, length)
