"""Tasks that ask for the value of one key out of several pairs: in held-out forms, and in one that training has."""

import random
from collections.abc import Iterable
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks.base import HaystackTask, Question, answer_budget, prompt_tokens, register_task
from hf_linear_attn.evaluation.tasks.haystack import encode
from hf_linear_attn.evaluation.tasks.words import ADJECTIVES, MADE_UP_KEYS, MADE_UP_VALUES, NOUNS

DEFAULT_PAIRS = 4


class PairTask(HaystackTask):
    """Ask for the value of one key out of several pairs, all scattered over a haystack.

    A subclass says what stands in the text and what is asked.

    Args:
        pairs: Number of pairs, at most as many as there are words; default 4. No key and no value stands twice.

    Attributes:
        head: Text before the haystack; default none.
        pair: A line that says a pair, with `{key}` and `{value}`.
        question: What is asked at the end, with `{key}`.
        answer: How the value is written in an answer, after a space; default as it is.
        keys: Words to draw keys from; made-up ones by default.
        values: Words to draw values from; made-up ones by default.
    """

    needs_depth = True
    head: ClassVar[str] = ""
    pair: ClassVar[str]
    question: ClassVar[str]
    answer: ClassVar[str] = "{value}"
    keys: ClassVar[tuple[str, ...]] = MADE_UP_KEYS
    values: ClassVar[tuple[str, ...]] = MADE_UP_VALUES
    pairs: int

    def __init__(self, pairs: int = DEFAULT_PAIRS) -> None:
        """Set the number of pairs."""
        most = min(len(self.keys), len(self.values))
        if not 1 <= pairs <= most:
            raise ArgumentError("pairs", f"lie in 1..{most}", pairs, "Choose fewer pairs.", where=f"task {self.name!r}")
        self.pairs = pairs
        self.chance = 1 / pairs if pairs > 1 else 0.0

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""
        return answer_budget(tokenizer, [f" {self.answer.format(value=value)}." for value in self.values], at_least=8)

    def longest(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """Return the most tokens of a prompt without its filler, and its number of needles."""

        def most(texts: Iterable[str]) -> int:
            return max(len(encode(tokenizer, text)) for text in texts)

        key, value = self.keys[0], self.values[0]
        pair = most(self.pair.format(key=key, value=other) for other in self.values)
        pair += most(self.pair.format(key=other, value=value) for other in self.keys)
        pair -= len(encode(tokenizer, self.pair.format(key=key, value=value)))
        asked = most(self.question.format(key=other) for other in self.keys)
        return prompt_tokens(tokenizer, self.head, "") + asked + self.pairs * pair, self.pairs

    def ask(self, depth: float, rng: random.Random) -> Question:
        """Draw a question; `meta["pairs"]` holds all (key, value) pairs, the asked one first."""
        pairs = list(zip(rng.sample(self.keys, self.pairs), rng.sample(self.values, self.pairs), strict=True))
        depths = [depth] + [rng.uniform(0, 100) for _ in pairs[1:]]
        said = [self.pair.format(key=key, value=value) for key, value in pairs]
        key, value = pairs[0]
        return Question(
            self.head,
            self.question.format(key=key),
            [self.answer.format(value=value)],
            list(zip(said, depths, strict=True)),
            {"pairs": tuple(pairs)},
        )


@register_task
class Capital(PairTask):
    """Ask for the capital of a made-up country, in prose."""

    name = "capital"
    held_out = True
    pair = "The capital of {key} is {value}.\n"
    question = "The capital of {key} is"
    keys = tuple(word.title() for word in MADE_UP_KEYS)
    values = tuple(word.title() for word in MADE_UP_VALUES)


@register_task
class Assignment(PairTask):
    """Ask for the value that a variable was assigned, in code."""

    name = "assignment"
    held_out = True
    pair = '{key} = "{value}"\n'
    question = "{key} ="
    answer = '"{value}"'


@register_task
class JSONRecord(PairTask):
    """Ask for the city of a record of JSON by its name."""

    name = "json_record"
    held_out = True
    pair = '{{"name": "{key}", "city": "{value}"}}\n'
    question = '{{"name": "{key}", "city":'
    answer = '"{value}"'


@register_task
class DefaultArgument(PairTask):
    """Ask for the default of a function's argument, which is called with it."""

    name = "default_argument"
    held_out = True
    pair = 'def {key}(mode="{value}"): ...\n'
    question = "{key}(mode="
    answer = '"{value}"'


@register_task
class KVRecall(PairTask):
    """Ask for the code of one thing out of several; keys are nouns, values adjectives.

    It is multi-query associative recall (Arora et al., "Zoology", 2023) in natural words.
    """

    name = "kv_recall"
    head = "Remember the code of each thing in this text. I will ask for one of them.\n"
    pair = "The code of {key} is {value}.\n"
    question = "The code of {key} is"
    keys = NOUNS
    values = ADJECTIVES
