"""What needles are hidden in: repeated noise sentences, or real text."""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, cycle
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.loading import read_text

Needle = tuple[tuple[int, ...], float]
"""Token ids, and the depth in percent where they are to stand."""

KINDS = ("text", "noise")

# A needle stands between two lines where that moves it by no more than this share of the haystack.
_COARSEST_DEPTH = 0.015


def encode_once(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Tokenise a text without special tokens; for texts that are not met again."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@lru_cache(maxsize=65536)
def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Tokenise a piece of text without special tokens and remember the result."""
    return encode_once(tokenizer, text)


@dataclass(frozen=True)
class Buried:
    """Filler with needles in it.

    Args:
        ids: All tokens.
        starts: Where each needle begins in `ids`, in the order the needles were given.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]


class Haystack(ABC):
    """What needles are hidden in.

    Attributes:
        separator: Text that stands before every needle and before the question.
    """

    separator: ClassVar[str] = ""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return what results call it."""

    @property
    def digest(self) -> str:
        """Return what changes with its content; nothing where that is in the code."""
        return ""

    @abstractmethod
    def size(self, tokenizer: PreTrainedTokenizerBase) -> float:
        """Return the tokens that it has; infinity where it repeats itself."""

    @abstractmethod
    def bury(
        self, tokenizer: PreTrainedTokenizerBase, needles: Sequence[Needle], total: int, rng: random.Random
    ) -> Buried:
        """Put needles between the lines of the filler, each at the line break nearest to its depth.

        Args:
            tokenizer: The tokenizer.
            needles: The needles.
            total: Tokens of filler and needles together.
            rng: Draws where in its source the filler begins, if that can be chosen.
        """


@dataclass(frozen=True)
class Noise(Haystack):
    """Sentences over and over.

    Args:
        sentences: The sentences, each with its newline.
    """

    sentences: tuple[str, ...]

    @property
    @override
    def name(self) -> str:
        return "noise"

    @override
    def size(self, tokenizer: PreTrainedTokenizerBase) -> float:
        return math.inf

    def lines(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, ...]]:
        """Yield the tokenised sentences without end."""
        return cycle([encode(tokenizer, sentence) for sentence in self.sentences])

    @override
    def bury(
        self, tokenizer: PreTrainedTokenizerBase, needles: Sequence[Needle], total: int, rng: random.Random
    ) -> Buried:
        """Put needles between sentences; the filler begins inside one wherever that makes the length exact."""
        lines = self.lines(tokenizer)
        filler: list[tuple[int, ...]] = []
        missing = total - sum(len(ids) for ids, _ in needles)
        while missing > 0:
            line = next(lines)
            filler.append(line)
            missing -= len(line)
        if missing < 0:
            filler.insert(0, filler.pop()[-missing:])
        ends = [0, *accumulate(map(len, filler))]

        def place(target: float) -> int:
            # A line goes before the needle while that brings the needle's start nearer to its target.
            return ends[bisect_right(range(len(filler)), target, key=lambda line: (ends[line] + ends[line + 1]) / 2)]

        return _laid(needles, list(chain.from_iterable(filler)), total, place)


class RealText(Haystack):
    """Real text, a stretch of which is taken as it stands: a subclass says where it comes from."""

    # A stretch begins and ends inside a line.
    separator: ClassVar[str] = "\n"

    @abstractmethod
    def stream(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[int], Sequence[int]]:
        """Return all its tokens, and the places of those that begin a line."""

    @override
    def size(self, tokenizer: PreTrainedTokenizerBase) -> float:
        return len(self.stream(tokenizer)[0])

    def stretch(self, tokenizer: PreTrainedTokenizerBase, tokens: int, rng: random.Random) -> Sequence[int]:
        """Return so many tokens in a row, from anywhere in it."""
        ids, _ = self.stream(tokenizer)
        first = rng.randrange(len(ids) - tokens + 1)
        return ids[first : first + tokens]

    @override
    def bury(
        self, tokenizer: PreTrainedTokenizerBase, needles: Sequence[Needle], total: int, rng: random.Random
    ) -> Buried:
        """Put needles between lines, and into one where the next line break is too far."""
        stream, breaks = self.stream(tokenizer)
        room = total - sum(len(ids) for ids, _ in needles)
        first = rng.randrange(len(stream) - room + 1)

        def place(target: float) -> int:
            target += first
            at = bisect_left(breaks, target)
            near = min(breaks[max(0, at - 1) : at + 1], key=lambda found: abs(found - target), default=-total)
            return (near if abs(near - target) <= _COARSEST_DEPTH * total else round(target)) - first

        return _laid(needles, stream[first : first + room], total, place)


@dataclass(frozen=True)
class Text(RealText):
    """Real text, a stretch of which is taken as it stands.

    Args:
        files: UTF-8 texts of the user's. Without any, it is the source files of the standard library that
            distillation never reads.
    """

    files: tuple[str, ...] = ()

    @property
    @override
    def name(self) -> str:
        return ", ".join(Path(file).name for file in self.files) or "text"

    def documents(self) -> list[str]:
        """Return the texts.

        Raises:
            ArgumentError: If a file cannot be read as UTF-8.
        """
        if self.files:
            return [read_text(file, "haystack_files") for file in self.files]
        return load_stdlib_documents("heldout")

    @property
    @override
    def digest(self) -> str:
        return _digest(self)

    @override
    def stream(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[int], Sequence[int]]:
        return _stream(self, tokenizer)


def _laid(needles: Sequence[Needle], filler: Sequence[int], total: int, place: Callable[[float], int]) -> Buried:
    """Lay needles into filler, by depth; `place` tells after how many of its tokens, where so many are wanted."""
    ids: list[int] = []
    starts = [0] * len(needles)
    at = said = 0
    for index in sorted(range(len(needles)), key=lambda index: needles[index][1]):
        needle, depth = needles[index]
        end = min(max(at, place(depth / 100 * (total - len(needle)) - said)), len(filler))
        ids.extend(filler[at:end])
        starts[index] = len(ids)
        ids.extend(needle)
        at, said = end, said + len(needle)
    ids.extend(filler[at:])
    return Buried(tuple(ids), tuple(starts))


@lru_cache(maxsize=8)
def _digest(text: Text) -> str:
    """Return a hash of a text's documents."""
    return hashlib.sha256("\n".join(text.documents()).encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _stream(text: Text, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], Sequence[int]]:
    """Return a text's tokens, tokenised as a whole as any reader would, and which of them begin a line."""
    ids = encode_once(tokenizer, "\n".join(text.documents()))
    return ids, line_starts(tokenizer, ids)


def line_starts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Sequence[int]:
    """Return the places of the tokens that begin a line, in order."""
    said = {token: str(tokenizer.decode([token])) for token in set(ids)}
    # Some tokenizers join a line's end with what stands before it, others with the next line's indentation.
    ends = {token for token, text in said.items() if text.endswith("\n")}
    begins = {token for token, text in said.items() if text.startswith("\n")}
    return array("q", (place for place in range(1, len(ids)) if ids[place - 1] in ends or ids[place] in begins))
