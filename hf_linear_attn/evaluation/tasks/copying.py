"""Copying: a list of words that stands far back, to be written again word for word."""

from __future__ import annotations

import random
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks.base import (
    Sample,
    Task,
    answer_budget,
    assemble,
    prompt_head,
    register_task,
)
from hf_linear_attn.evaluation.tasks.haystack import encode
from hf_linear_attn.evaluation.tasks.words import COMMON, longest_word

HEAD = "Remember the list of words in this text. I will ask you to repeat it.\n"
NEEDLE = "The list of words is: {words}.\n"
TAIL = "Repeat the list of words. The list of words is:"
DEFAULT_WORDS = 4


@register_task
class Copying(Task):
    """Ask for a list of words, all of it and in its order, that stands in a haystack.

    Args:
        words: Number of words, 1..29; default 4. None of them stands twice.
    """

    name: ClassVar[str] = "copying"
    needs_depth: ClassVar[bool] = True

    def __init__(self, words: int = DEFAULT_WORDS) -> None:
        """Set the number of words."""
        if not 1 <= words <= len(COMMON):
            rule = f"lie in 1..{len(COMMON)}"
            raise ArgumentError("words", rule, words, "Choose fewer words.", where=f"task {self.name!r}")
        self.words = words

    def _longest(self, tokenizer: PreTrainedTokenizerBase) -> str:
        return " ".join([longest_word(tokenizer, COMMON)] * self.words)

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""
        return answer_budget(tokenizer, [f" {self._longest(tokenizer)}."], at_least=8)

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""
        tokens = len(prompt_head(tokenizer, HEAD)) + len(encode(tokenizer, TAIL))
        tokens += len(encode(tokenizer, NEEDLE.format(words=self._longest(tokenizer))))
        return tokens + self.least_filler(tokenizer, 1) + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; `meta` adds nothing to the common entries."""
        self.check(tokenizer, length, depth)
        words = " ".join(rng.sample(COMMON, self.words))
        return assemble(
            self,
            tokenizer,
            head=HEAD,
            tail=TAIL,
            needles=[(NEEDLE.format(words=words), depth)],
            references=[words],
            max_new_tokens=self.max_new_tokens(tokenizer),
            length=length,
            depth=depth,
            rng=rng,
            meta={},
        )
