"""Sequences by number: documents cut and laid out in blocks, in memory or as they come, and several sets mixed."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from logging import getLogger
from typing import NamedTuple, Protocol, TypeVar

from typing_extensions import override

from hf_linear_attn.distill.data.rows import Document, Row
from hf_linear_attn.errors import ArgumentError

logger = getLogger(__name__)

K = TypeVar("K")


class Blocks(Protocol):
    """Text sequences by number."""

    def block(self, number: int, length: int) -> Row:
        """Return at most ``length`` tokens of documents, BOS before each where the tokenizer has one."""


def lay_out(documents: Iterable[tuple[K, int, int]], length: int, pack: bool) -> Iterator[list[tuple[K, int]]]:
    """Lay documents out in blocks.

    A long document fills blocks by itself, the last of which ends where it ends, so it may overlap the one before it.
    Documents that do not fill a block share one with those that follow, as many as fit whole.

    Args:
        documents: Documents, in any form, their tokens, and the special tokens of each in a block.
        length: Tokens of a block.
        pack: Whether documents may share a block.

    Yields:
        The documents of a block, each with the first token that it shows.
    """
    shared: list[tuple[K, int]] = []
    room = length
    for document, size, frame in documents:
        if size >= length - frame:
            for start in range(0, size, length - frame):
                yield [(document, min(start, size - length + frame))]
            continue
        if shared and (not pack or size + frame > room):
            yield shared
            shared, room = [], length
        shared.append((document, 0))
        room -= size + frame
    if shared:
        yield shared


def fill(pieces: Iterable[tuple[Document, int]], length: int, bos: Sequence[int], close: Sequence[int] = ()) -> Row:
    """Return a block of documents, each from its first token shown on, between what begins and what closes it."""
    ids: list[int] = []
    weights: list[float] = []
    starts: list[int] = []
    for document, first in pieces:
        begin = list(bos) if document.bos else []
        shown = document.part(first, first + length - len(begin) - len(close))
        starts.append(len(ids))
        ids += [*begin, *shown.ids, *close]
        told = [0.0] * len(begin) + list(map(float, shown.taught or b"\1" * len(shown.ids))) + [1.0] * len(close)
        # The first token of a document is not told by the one before it.
        weights += [0.0, *told[1:]]
    return Row(ids, weights, starts)


def teaches(pieces: Iterable[tuple[Document, int]], length: int, bos: Sequence[int]) -> bool:
    """Tell whether a block of documents has a token that is learned."""
    for document, first in pieces:
        if document.taught is None:
            return True
        begin = len(bos) if document.bos else 0
        if document.taught.find(1, first + (not begin), first + length - begin) >= 0:
            return True
    return False


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

    def size(self, document: Document) -> tuple[int, int]:
        """Return a document's tokens, and the special ones around it in a block."""
        return len(document.ids), len(self.bos) * document.bos + len(self.close)

    def fill(self, pieces: Iterable[tuple[Document, int]], length: int) -> Row:
        """Return a block of documents, each from its first token shown on."""
        return fill(pieces, length, self.bos, self.close)


class DocumentBlocks(Blocks):
    """Blocks of documents that are all in memory, in an order shuffled anew in every epoch.

    Args:
        documents: The documents.
        blocking: How they are laid out.
        seed: Of the order.
    """

    def __init__(self, documents: Sequence[Document], blocking: Blocking, seed: int) -> None:
        self.documents, self.blocking, self.seed = documents, blocking, seed
        self._places: dict[int, list[list[tuple[int, int]]]] = {}
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def places(self, length: int) -> list[list[tuple[int, int]]]:
        """Return the documents and their first tokens of every block that teaches something.

        Raises:
            ArgumentError: If every document is shorter than the shortest block.
        """
        if length not in self._places:
            blocking = self.blocking
            sizes = [(n, *blocking.size(document)) for n, document in enumerate(self.documents)]
            check_longest(max((size + frame for _, size, frame in sizes), default=0), min(length, blocking.shortest))
            laid_out = lay_out(sizes, length, blocking.pack)
            self._places[length] = [one for one in laid_out if teaches(self._shown(one), length, blocking.bos)]
            check_teaches(bool(self._places[length]))
        return self._places[length]

    def _shown(self, pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[Document, int]]:
        return ((self.documents[document], first) for document, first in pieces)

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
        return self.blocking.fill(self._shown(places[order[index]]), length)


class StreamBlocks(Blocks):
    """Blocks of documents that come one by one, in their order; each length of blocks reads the stream by itself.

    Args:
        documents: Iterable over the documents, each time from the first one.
        blocking: How they are laid out.
    """

    def __init__(self, documents: Iterable[Document], blocking: Blocking) -> None:
        self.documents, self.blocking = documents, blocking
        self._next: dict[int, int] = {}
        self._blocks: dict[int, Iterator[Row]] = {}

    def _read(self, length: int) -> Iterator[Row]:
        longest = 0

        def sized() -> Iterator[tuple[Document, int, int]]:
            nonlocal longest
            for document in self.documents:
                size, frame = self.blocking.size(document)
                longest = max(longest, size + frame)
                yield document, size, frame

        for epoch in itertools.count():
            found = False
            for pieces in lay_out(sized(), length, self.blocking.pack):
                if teaches(pieces, length, self.blocking.bos):
                    found = True
                    yield self.blocking.fill(pieces, length)
            check_longest(longest, min(length, self.blocking.shortest))
            check_teaches(found)
            logger.info("dataset read to its end %d times", epoch + 1)

    @override
    def block(self, number: int, length: int) -> Row:
        if number < self._next.get(length, number + 1):
            self._next[length], self._blocks[length] = 0, self._read(length)
        for _ in range(number - self._next[length]):
            next(self._blocks[length])
        self._next[length] = number + 1
        return next(self._blocks[length])


def check_longest(longest: int, shortest: int) -> None:
    """Refuse documents that are all shorter than the shortest block."""
    if longest < shortest:
        remedy = "What stands far back cannot be learned from such texts: lower it, or use a dataset of longer ones."
        raise ArgumentError("block_tokens", f"be at most {longest}, the longest document's tokens", shortest, remedy)


def check_teaches(found: bool) -> None:
    """Refuse documents of which no block has a token that is learned."""
    if not found:
        remedy = "No answer of the dataset has a token; use `all`, or another dataset."
        raise ArgumentError("loss_on", "leave something to learn", "answers", remedy)


class MixedBlocks(Blocks):
    """Blocks of several datasets, each with its share; of any run of blocks the shares hold to a whole block.

    Args:
        parts: The datasets' blocks.
        weights: A weight for each, > 0; the shares are as these are to each other.
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
