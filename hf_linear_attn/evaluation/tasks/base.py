"""What a retrieval task is: the sample, the abstract task, the registry, scoring and prompt assembly.

A prompt is `head + haystack + tail`, assembled as token ids: text is never decoded and encoded again, so its
length is known exactly. Pieces end in a newline, where tokenizers of all kinds agree on the boundary.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError, renamed
from hf_linear_attn.evaluation.tasks.haystack import KINDS, Haystack, Noise, Text, encode, encode_once

NOISE_SENTENCES = (
    "The grass is green.\n",
    "The sky is blue.\n",
    "The sun is yellow.\n",
    "Here we go.\n",
    "There and back again.\n",
)

NOISE = Noise(NOISE_SENTENCES)

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

    Attributes:
        name: What settings and results call it.
        needs_depth: Whether there is one asked needle, whose depth is chosen.
        held_out: Whether its form and its words are kept out of all training data, so that a score says what a model
            can do and not what it was drilled in; default False.
        has_haystack: Whether its needles are hidden in a haystack; default True.
        haystack: What they are hidden in; noise unless `get_task` or `parse_task` is told otherwise.
        chance: Score of a model that guesses among the answers it has seen; default 0.
        pairs: Number of pairs that a prompt holds; None for a task without any.
        spec: What the task was made of: its name with its settings.
    """

    name: ClassVar[str]
    needs_depth: ClassVar[bool]
    held_out: ClassVar[bool] = False
    has_haystack: ClassVar[bool] = True
    haystack: Haystack = NOISE
    chance: float = 0.0
    pairs: int | None = None
    spec: str = ""

    @property
    def label(self) -> str:
        """What results call it: its spec, and where it is not noise, what its needles are hidden in."""
        spec = self.spec or self.name
        return f"{spec} in {self.haystack.name}" if self.has_haystack and self.haystack.name != "noise" else spec

    def facts(self) -> dict[str, Any]:
        """Return what a result says of the task, ready for JSON."""
        return {
            "held_out": self.held_out,
            "haystack": self.haystack.name if self.has_haystack else None,
            "chance": self.chance,
            "pairs": self.pairs,
        }

    def least_filler(self, tokenizer: PreTrainedTokenizerBase, needles: int) -> int:
        """Return the fewest tokens beside head, needles, tail and answer: filler, and what stands between them."""
        return MIN_FILLER_TOKENS + (needles + 1) * len(encode(tokenizer, self.haystack.separator))

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
            ArgumentError: If the task cannot fit into `length`, the haystack has fewer tokens, or `depth` lies outside
                0..100.
        """
        shortest = self.min_length(tokenizer)
        if length < shortest:
            remedy = "Ask for a longer context or leave the task out."
            raise ArgumentError("length", f"be at least {shortest} tokens", length, remedy, where=f"task {self.name!r}")
        if not 0 <= depth <= 100:
            raise ArgumentError("depth", "lie in 0..100", depth, "Pass it in percent.", where=f"task {self.name!r}")
        held = self.haystack.size(tokenizer) if self.has_haystack else length
        if held < length:
            rule = f"hold at least {length} tokens"
            remedy = "Ask for a shorter context, name longer `haystack_files`, or take haystack=noise."
            raise ArgumentError("haystack", rule, held, remedy, where=f"task {self.label!r}")


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


def available_tasks(*, held_out: bool | None = None) -> tuple[str, ...]:
    """Return the names of the registered tasks, sorted: all, or only those that are held out of training or are not."""
    return tuple(sorted(name for name, task in _TASKS.items() if held_out in (None, task.held_out)))


def get_task(name: str, *, haystack: Haystack | None = None, **settings: Any) -> Task:
    """Make a task by its registered name.

    Args:
        name: One of `available_tasks()`.
        haystack: What its needles are hidden in, such as `Text()`; noise without it.
        **settings: Settings of the task's constructor, such as `pairs` of `kv_recall`.

    Raises:
        ArgumentError: If no task has the name.
    """
    if name not in _TASKS:
        raise ArgumentError("name", "be a registered task", name, "Use one of those.", available=available_tasks())
    task = _TASKS[name](**settings)
    if haystack is not None and task.has_haystack:
        task.haystack = haystack
    return task


def parse_task(spec: str, haystack: str = "noise", text: Text | None = None) -> Task:
    """Make the task that `name` or `name:setting=integer:haystack=kind` describes.

    Args:
        spec: The description.
        haystack: Kind of haystack where the description names none, `"noise"` or `"text"`; default noise.
        text: The text to take; held-out source files of the standard library without it.

    Raises:
        ArgumentError: If there is no such task, or it has no such setting.

    Example:
        >>> parse_task("kv_recall:pairs=8").pairs, parse_task("passkey:haystack=text").label
        (8, 'passkey in text')
    """
    name, *items = spec.split(":")
    values: dict[str, int] = {}
    said = [name]
    for item in filter(None, items):
        key, _, value = item.partition("=")
        if key == "haystack":
            haystack = value
            continue
        said.append(item)
        try:
            values[key] = int(value)
        except ValueError as error:
            raise ArgumentError(
                "tasks", "be written name:setting=integer", spec, "Write it as in kv_recall:pairs=8."
            ) from error
    if haystack not in KINDS:
        raise ArgumentError("haystack", "be a known kind", haystack, "Use one of those.", available=KINDS)
    try:
        with renamed(name="tasks"):
            task = get_task(name, haystack=(text or Text()) if haystack == "text" else None, **values)
    except TypeError as error:
        raise ArgumentError(
            "tasks", "name settings that the task has", spec, "Leave the setting out.", where=str(error)
        ) from error
    task.spec = ":".join(said)
    return task


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


def prompt_head(tokenizer: PreTrainedTokenizerBase, head: str) -> tuple[int, ...]:
    """Return the tokens of the text before the haystack, with the BOS token that the tokenizer puts first."""
    return bos_ids(tokenizer) + encode(tokenizer, head)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, head: str, tail: str) -> int:
    """Return the tokens of a prompt around its body."""
    return len(prompt_head(tokenizer, head)) + len(encode(tokenizer, tail))


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
class Question:
    """What a prompt says and asks.

    Args:
        head: Text before the body.
        tail: Text after it.
        references: The strings an answer must contain.
        needles: Texts with the depths in percent where they are to stand, those of the references first.
        meta: The task's own entries of a sample's `meta`.
    """

    head: str
    tail: str
    references: Sequence[str]
    needles: Sequence[tuple[str, float]] = ()
    meta: dict[str, Any] = field(default_factory=dict)


def compose(
    task: Task, tokenizer: PreTrainedTokenizerBase, length: int, budget: int, question: Question, body: Sequence[int]
) -> Sample:
    """Compose the sample whose prompt is BOS, head, body and tail, with the entries of `meta` all tasks have."""
    ids = prompt_head(tokenizer, question.head) + tuple(body) + encode_once(tokenizer, question.tail)
    common = {"task": task.name, "length": length, "depth": None, "measured_tokens": len(ids) + budget}
    common |= {"needle_spans": (), "measured_depth": None}
    return Sample(ids, tuple(question.references), budget, common | question.meta)


class HaystackTask(Task):
    """A task that hides needles in its haystack: a subclass says what it asks, and how many tokens that can take."""

    @abstractmethod
    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""

    @abstractmethod
    def longest(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """Return the most tokens of a prompt without its filler, and its number of needles."""

    @abstractmethod
    def ask(self, depth: float, rng: random.Random) -> Question:
        """Draw a question whose asked needle stands at a depth in percent, where the task has depths."""

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""
        tokens, needles = self.longest(tokenizer)
        return tokens + self.least_filler(tokenizer, needles) + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build a sample of exactly `length` tokens, budget included; `meta` has what :meth:`ask` puts there.

        The haystack is drawn last, so that a sample says and asks the same in each.
        """
        self.check(tokenizer, length, depth)
        asked = self.ask(depth, rng)
        before = self.haystack.separator
        tail = before + asked.tail
        offset = len(prompt_head(tokenizer, asked.head))
        budget = self.max_new_tokens(tokenizer)
        total = length - budget - offset - len(encode_once(tokenizer, tail))
        said = [(encode_once(tokenizer, before + text), at) for text, at in asked.needles]
        buried = self.haystack.bury(tokenizer, said, total, rng)
        spans = [(start, len(ids)) for start, (ids, _) in zip(buried.starts, said, strict=True)][
            : len(asked.references)
        ]
        start, size = spans[0]
        meta = {
            "depth": depth if self.needs_depth else None,
            "needle_spans": tuple((start + offset, start + offset + size) for start, size in spans),
            # Its start over the last start at which it would fit.
            "measured_depth": 100.0 * start / max(1, total - size) if self.needs_depth else None,
        }
        question = replace(asked, tail=tail, meta=meta | asked.meta)
        return compose(self, tokenizer, length, budget, question, buried.ids)
