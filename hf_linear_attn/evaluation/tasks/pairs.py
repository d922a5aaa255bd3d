"""What tasks share that ask for the value of one key out of several pairs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks.base import Sample, Task, answer_budget, assemble, prompt_head
from hf_linear_attn.evaluation.tasks.haystack import encode
from hf_linear_attn.evaluation.tasks.words import MADE_UP_KEYS, MADE_UP_VALUES

DEFAULT_PAIRS = 4


class PairTask(Task):
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

    needs_depth: ClassVar[bool] = True
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

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""

        def most(texts: Iterable[str]) -> int:
            return max(len(encode(tokenizer, text)) for text in texts)

        key, value = self.keys[0], self.values[0]
        pair = most(self.pair.format(key=key, value=other) for other in self.values)
        pair += most(self.pair.format(key=other, value=value) for other in self.keys)
        pair -= len(encode(tokenizer, self.pair.format(key=key, value=value)))
        tokens = len(prompt_head(tokenizer, self.head)) + most(self.question.format(key=other) for other in self.keys)
        tokens += self.pairs * pair + self.least_filler(tokenizer, self.pairs)
        return tokens + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; `meta["pairs"]` holds all (key, value) pairs, the asked one first."""
        self.check(tokenizer, length, depth)
        pairs = list(zip(rng.sample(self.keys, self.pairs), rng.sample(self.values, self.pairs), strict=True))
        depths = [depth] + [rng.uniform(0, 100) for _ in pairs[1:]]
        said = [self.pair.format(key=key, value=value) for key, value in pairs]
        key, value = pairs[0]
        return assemble(
            self,
            tokenizer,
            head=self.head,
            tail=self.question.format(key=key),
            needles=list(zip(said, depths, strict=True)),
            references=[self.answer.format(value=value)],
            max_new_tokens=self.max_new_tokens(tokenizer),
            length=length,
            depth=depth,
            rng=rng,
            meta={"pairs": tuple(pairs)},
        )
