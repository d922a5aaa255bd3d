"""What the four needle-in-a-haystack tasks share, after RULER (Hsieh et al., 2024)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import (
    NOISE_SENTENCES,
    Sample,
    Task,
    answer_budget,
    assemble,
    prompt_head,
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


class NeedleTask(Task):
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

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""
        key = longest_pair(tokenizer)
        head, tail = self.head_and_tail([key] * self.asked_keys)
        needle = len(encode(tokenizer, NEEDLE.format(key=key, value=""))) + DIGITS + 1
        tokens = len(prompt_head(tokenizer, head)) + len(encode(tokenizer, tail))
        needles = self.keys * self.values_per_key
        tokens += needles * needle + self.least_filler(tokenizer, needles)
        return tokens + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; `meta["needles"]` holds all (key, value) needles, the asked ones first."""
        self.check(tokenizer, length, depth)
        keys = distinct(self.keys, lambda: word_pair(rng), set())
        values = distinct(self.keys * self.values_per_key, lambda: number(rng, DIGITS), set())
        needles = [(keys[i // self.values_per_key], value) for i, value in enumerate(values)]
        depths = [rng.uniform(0, 100) for _ in needles]
        if self.needs_depth:
            depths[0] = depth
        asked = keys[: self.asked_keys]
        head, tail = self.head_and_tail(asked)
        return assemble(
            self,
            tokenizer,
            head=head,
            tail=tail,
            needles=[
                (NEEDLE.format(key=key, value=value), at) for (key, value), at in zip(needles, depths, strict=True)
            ],
            references=values[: self.answers],
            max_new_tokens=self.max_new_tokens(tokenizer),
            length=length,
            depth=depth if self.needs_depth else None,
            rng=rng,
            meta={"needles": tuple(needles), "asked_keys": tuple(asked)},
        )
