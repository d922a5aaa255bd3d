"""What a retrieval task is: the sample, the abstract task, the registry, scoring and prompt assembly.

A prompt is `head + haystack + tail`, assembled as token ids: text is never decoded and encoded again, so its
length is known exactly. Pieces end in a newline, where tokenizers of all kinds agree on the boundary.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError

NOISE_SENTENCES = (
    "The grass is green.\n",
    "The sky is blue.\n",
    "The sun is yellow.\n",
    "Here we go.\n",
    "There and back again.\n",
)

# RULER writes the same sentences into one line.
RULER_NOISE = (" ".join(sentence.strip() for sentence in NOISE_SENTENCES) + "\n",)

# A prompt with less filler than this is refused: a depth would have no meaning in it.
MIN_FILLER_TOKENS = 16


@dataclass(frozen=True)
class Sample:
    """One prompt with what it asks for.

    Args:
        input_ids: The prompt's token ids, a leading BOS included where the tokenizer adds one.
        references: The strings an answer must contain.
        max_new_tokens: The generation budget; with the prompt it never exceeds the asked length.
        meta: `task`, `length` (asked), `depth` (asked, None where the task has none), `measured_tokens`
            (prompt and budget), `needle_spans` (half-open token ranges in `input_ids`, in the order of the
            references), `measured_depth` (of the first reference's needle, None where the task has no depth),
            and the task's own entries.
    """

    input_ids: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int
    meta: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """A generated retrieval task.

    A subclass sets `name` and `needs_depth`, registers itself with `register_task`, and has a file of its own.
    """

    name: ClassVar[str]
    needs_depth: ClassVar[bool]

    @abstractmethod
    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length, generation budget included, at which every sample of the task fits."""

    @abstractmethod
    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample.

        Args:
            tokenizer: The tokenizer of the model under test.
            length: Tokens of the prompt and its generation budget together; at least `min_length(tokenizer)`.
            depth: Where the asked needle stands, 0 (start of the haystack) to 100 (end); ignored where
                `needs_depth` is False.
            rng: The only source of randomness; see `sample_rng`.

        Returns:
            A sample that fills at least 98% of `length` and never exceeds it.

        Raises:
            ArgumentError: If the task cannot fit into `length`, or `depth` lies outside 0..100.
        """

    def check(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float) -> None:
        """Refuse a cell the task cannot be built for, before any of it is built.

        Raises:
            ArgumentError: If the task cannot fit into `length`, or `depth` lies outside 0..100.
        """
        shortest = self.min_length(tokenizer)
        if length < shortest:
            raise ArgumentError(
                "length",
                f"be at least {shortest} tokens",
                length,
                "Ask for a longer context or leave the task out.",
                where=f"task {self.name!r}",
            )
        if not 0 <= depth <= 100:
            raise ArgumentError("depth", "lie in 0..100", depth, "Pass it in percent.", where=f"task {self.name!r}")


_TASKS: dict[str, type[Task]] = {}
_TaskType = TypeVar("_TaskType", bound=type[Task])


def register_task(cls: _TaskType) -> _TaskType:
    """Register a task class under its `name`; usable as a decorator.

    Raises:
        ArgumentError: If another class holds the name.
    """
    if _TASKS.get(cls.name, cls) is not cls:
        raise ArgumentError("name", "be new", cls.name, "Choose another one.", where=cls.__qualname__)
    _TASKS[cls.name] = cls
    return cls


def available_tasks() -> tuple[str, ...]:
    """Return the names of the registered tasks, sorted."""
    return tuple(sorted(_TASKS))


def get_task(name: str, **settings: Any) -> Task:
    """Make a task by its registered name.

    Args:
        name: One of `available_tasks()`.
        **settings: Settings of the task's constructor, such as `pairs` of `kv_recall`.

    Raises:
        ArgumentError: If no task has the name.
    """
    if name not in _TASKS:
        raise ArgumentError("name", "be a registered task", name, "Use one of those.", available=available_tasks())
    return _TASKS[name](**settings)


def parse_task(spec: str) -> Task:
    """Make the task that `name` or `name:setting=integer,...` describes.

    Raises:
        ArgumentError: If there is no such task, or it has no such setting.

    Example:
        >>> parse_task("kv_recall:pairs=8").pairs
        8
    """
    name, _, rest = spec.partition(":")
    values: dict[str, int] = {}
    for item in filter(None, rest.split(":")):
        key, _, value = item.partition("=")
        try:
            values[key] = int(value)
        except ValueError as error:
            raise ArgumentError(
                "tasks", "be written name:setting=integer", spec, "Write it as in kv_recall:pairs=8."
            ) from error
    try:
        return get_task(name, **values)
    except TypeError as error:
        raise ArgumentError(
            "tasks", "name settings that the task has", spec, "Leave the setting out.", where=str(error)
        ) from error


def sample_rng(seed: int, task: str, length: int, depth: float, index: int) -> random.Random:
    """Return the generator of sample `index` of a cell: it depends on nothing but the arguments."""
    return random.Random(f"{seed}/{task}/{length}/{depth}/{index}")


def score(sample: Sample, generated_text: str) -> float:
    """Return the share of the sample's references that the text contains, case-insensitive, in 0..1."""
    text = generated_text.lower()
    return sum(reference.lower() in text for reference in sample.references) / len(sample.references)


def true_answer(sample: Sample) -> str:
    """Return what a model writes that answers right: the references, after a space, with commas between."""
    return " " + ", ".join(sample.references)


def is_exact(sample: Sample, generated_text: str) -> bool:
    """Tell whether a text begins with the whole true answer, and no word or number goes on after it.

    Example:
        >>> sample = Sample((), ("712",), 8)
        >>> is_exact(sample, " 712. And on"), is_exact(sample, " 7124"), is_exact(sample, "It is 712")
        (True, False, False)
    """
    text, answer = generated_text.strip(), true_answer(sample).strip()
    return text.startswith(answer) and not text[len(answer) : len(answer) + 1].isalnum()


def encode_once(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Tokenise a text without special tokens; for texts that are not met again."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=65536)
def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Tokenise a piece of text without special tokens and remember the result."""
    return encode_once(tokenizer, text)


def prompt_head(tokenizer: PreTrainedTokenizerBase, head: str) -> tuple[int, ...]:
    """Return the tokens of the text before the haystack, with the BOS token that the tokenizer puts first."""
    return bos_ids(tokenizer) + encode(tokenizer, head)


@lru_cache(maxsize=64)
def bos_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the BOS token in a tuple if the tokenizer puts one before a text, else an empty tuple."""
    ids = tuple(tokenizer("a")["input_ids"])
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else ()


def answer_budget(tokenizer: PreTrainedTokenizerBase, answers: Sequence[str], at_least: int) -> int:
    """Return a generation budget in tokens that holds any of the answers and what a model writes around it.

    Args:
        tokenizer: The tokenizer of the model under test.
        answers: Full answers, one of them as long as any can be.
        at_least: The budget where a vocabulary needs no more.
    """
    longest = max(len(encode(tokenizer, answer)) for answer in answers)
    return max(at_least, longest + 2)


@dataclass(frozen=True)
class Haystack:
    """Filler with needles in it.

    Args:
        ids: All tokens.
        spans: Half-open range of each needle in `ids`, in the order the needles were given.
        depths: Measured depth of each needle in percent: its start over the last start at which it would fit.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    depths: tuple[float, ...]


def bury(needles: Sequence[tuple[tuple[int, ...], float]], total: int, lines: Iterator[tuple[int, ...]]) -> Haystack:
    """Put needles between the lines of a haystack, each at the line break nearest to its depth.

    The filler begins inside a line wherever that makes the haystack exactly `total` tokens long.

    Args:
        needles: Token ids and depth in percent of each.
        total: Tokens of the whole haystack.
        lines: An endless supply of tokenised filler lines.
    """
    filler: list[tuple[int, ...]] = []
    missing = total - sum(len(ids) for ids, _ in needles)
    while missing > 0:
        line = next(lines)
        filler.append(line)
        missing -= len(line)
    if missing < 0:
        filler.insert(0, filler.pop()[-missing:])

    order = sorted(range(len(needles)), key=lambda i: needles[i][1])
    ids: list[int] = []
    spans = [(0, 0)] * len(needles)
    position = 0
    for index in order:
        needle, depth = needles[index]
        target = depth / 100 * (total - len(needle))
        # A line goes before the needle while that brings the needle's start nearer to its target.
        while position < len(filler) and len(ids) + len(filler[position]) / 2 <= target:
            ids.extend(filler[position])
            position += 1
        spans[index] = (len(ids), len(ids) + len(needle))
        ids.extend(needle)
    for line in filler[position:]:
        ids.extend(line)
    depths = tuple(100.0 * start / max(1, total - (end - start)) for start, end in spans)
    return Haystack(tuple(ids), tuple(spans), depths)


def noise_lines(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str] = NOISE_SENTENCES
) -> Iterator[tuple[int, ...]]:
    """Yield the tokenised sentences over and over."""
    return cycle([encode(tokenizer, sentence) for sentence in sentences])


def compose(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    head: str,
    body: Sequence[int],
    tail: str,
    references: Sequence[str],
    max_new_tokens: int,
    length: int,
    meta: dict[str, Any],
) -> Sample:
    """Compose the sample whose prompt is BOS, head, body and tail, with the entries of `meta` all tasks have."""
    head_ids = prompt_head(tokenizer, head)
    input_ids = head_ids + tuple(body) + encode_once(tokenizer, tail)
    common = {
        "task": task.name,
        "length": length,
        "depth": None,
        "measured_tokens": len(input_ids) + max_new_tokens,
        "needle_spans": (),
        "measured_depth": None,
    }
    return Sample(input_ids, tuple(references), max_new_tokens, common | meta)


def assemble(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    head: str,
    tail: str,
    needles: Sequence[tuple[str, float]],
    lines: Iterator[tuple[int, ...]],
    references: Sequence[str],
    max_new_tokens: int,
    length: int,
    depth: float | None,
    meta: dict[str, Any],
) -> Sample:
    """Compose a sample of exactly `length` tokens, budget included, whose body is a haystack.

    The first `len(references)` needles are the asked ones and give `needle_spans`.
    """
    offset = len(prompt_head(tokenizer, head))
    total = length - max_new_tokens - offset - len(encode_once(tokenizer, tail))
    haystack = bury([(encode_once(tokenizer, text), at) for text, at in needles], total, lines)
    spans = tuple((start + offset, end + offset) for start, end in haystack.spans[: len(references)])
    return compose(
        task,
        tokenizer,
        head=head,
        body=haystack.ids,
        tail=tail,
        references=references,
        max_new_tokens=max_new_tokens,
        length=length,
        meta={
            "depth": depth,
            "needle_spans": spans,
            "measured_depth": None if depth is None else haystack.depths[0],
            **meta,
        },
    )
