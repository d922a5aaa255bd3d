"""The four needle-in-a-haystack tasks of RULER (Hsieh et al., 2024)."""

import random
from collections.abc import Sequence
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import (
    NOISE_SENTENCES,
    HaystackTask,
    Question,
    answer_budget,
    prompt_tokens,
    register_task,
)
from hf_linear_attn.evaluation.tasks.haystack import Haystack, Noise, encode
from hf_linear_attn.evaluation.tasks.words import distinct, longest_pair, number, word_pair

# RULER writes the sentences into one line.
RULER_NOISE = (" ".join(sentence.strip() for sentence in NOISE_SENTENCES) + "\n",)
DIGITS = 7
BUDGET_TOKENS = 128
NEEDLE = "One of the special magic numbers for {key} is: {value}.\n"
HEAD_ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
HEAD_MANY = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n"
)
TAIL_ONE = (
    "What is the special magic number for {keys} mentioned in the provided text? "
    "The special magic number for {keys} mentioned in the provided text is"
)
TAIL_MANY = (
    "What are all the special magic numbers for {keys} mentioned in the provided text? "
    "The special magic numbers for {keys} mentioned in the provided text are"
)


def join_keys(keys: Sequence[str]) -> str:
    """Join keys as English does: `a`, `a and b`, `a, b, and c`."""
    if len(keys) < 3:
        return " and ".join(keys)
    return ", ".join(keys[:-1]) + f", and {keys[-1]}"


class NeedleTask(HaystackTask):
    """Ask for the numbers of some keys, hidden in a haystack with the numbers of other keys."""

    keys: ClassVar[int] = 1
    values_per_key: ClassVar[int] = 1
    asked_keys: ClassVar[int] = 1
    haystack: Haystack = Noise(RULER_NOISE)

    @property
    def answers(self) -> int:
        """Number of references of a sample."""
        return self.asked_keys * self.values_per_key

    def head_and_tail(self, keys: Sequence[str]) -> tuple[str, str]:
        """Return the text before and after the haystack for the asked keys."""
        head = HEAD_ONE if self.keys * self.values_per_key == 1 else HEAD_MANY
        tail = TAIL_ONE if self.answers == 1 else TAIL_MANY
        return head, tail.format(keys=join_keys(keys))

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""
        answer = " " + ", ".join(["7" * DIGITS] * self.answers) + "."
        return answer_budget(tokenizer, [answer], at_least=BUDGET_TOKENS)

    def longest(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """Return the most tokens of a prompt without its filler, and its number of needles."""
        key, needles = longest_pair(tokenizer), self.keys * self.values_per_key
        needle = len(encode(tokenizer, NEEDLE.format(key=key, value=""))) + DIGITS + 1
        return prompt_tokens(tokenizer, *self.head_and_tail([key] * self.asked_keys)) + needles * needle, needles

    def ask(self, depth: float, rng: random.Random) -> Question:
        """Draw a question; `meta["needles"]` holds all (key, value) needles, the asked ones first."""
        keys = distinct(self.keys, lambda: word_pair(rng), set())
        values = distinct(self.keys * self.values_per_key, lambda: number(rng, DIGITS), set())
        needles = [(keys[i // self.values_per_key], value) for i, value in enumerate(values)]
        depths = [rng.uniform(0, 100) for _ in needles]
        if self.needs_depth:
            depths[0] = depth
        asked = keys[: self.asked_keys]
        said = [NEEDLE.format(key=key, value=value) for key, value in needles]
        meta = {"needles": tuple(needles), "asked_keys": tuple(asked)}
        references = values[: self.answers]
        return Question(*self.head_and_tail(asked), references, list(zip(said, depths, strict=True)), meta)


@register_task
class NIAHSingle(NeedleTask):
    """Ask for the number of the only key."""

    name = "niah_single"
    needs_depth = True


@register_task
class NIAHMultikey(NeedleTask):
    """Ask for the number of one key out of four, at the given depth; the others stand anywhere."""

    name = "niah_multikey"
    needs_depth = True
    keys = 4
    chance = 1 / keys


@register_task
class NIAHMultivalue(NeedleTask):
    """Ask for all four numbers of the only key, scattered over the haystack."""

    name = "niah_multivalue"
    needs_depth = False
    values_per_key = 4


@register_task
class NIAHMultiquery(NeedleTask):
    """Ask for the numbers of all four keys, scattered over the haystack."""

    name = "niah_multiquery"
    needs_depth = False
    keys = 4
    asked_keys = 4
