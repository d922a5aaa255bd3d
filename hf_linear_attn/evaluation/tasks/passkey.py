"""Passkey retrieval: one five-digit number in a haystack of noise.

The prompt follows Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context Length for
Transformers" (2023), except that the key stands in the text once.
"""

from __future__ import annotations

import random
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import (
    Sample,
    Task,
    answer_budget,
    assemble,
    prompt_head,
    register_task,
)
from hf_linear_attn.evaluation.tasks.haystack import encode
from hf_linear_attn.evaluation.tasks.words import number

DIGITS = 5
HEAD = (
    "There is an important piece of information hidden inside a lot of irrelevant text. "
    "Find it and remember it. I will quiz you about it.\n"
)
NEEDLE = "The pass key is {value}. Remember it.\n"
TAIL = "What is the pass key? The pass key is"


@register_task
class Passkey(Task):
    """Ask for a pass key of five digits hidden in a haystack."""

    name: ClassVar[str] = "passkey"
    needs_depth: ClassVar[bool] = True

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""
        return answer_budget(tokenizer, [f" {'7' * DIGITS}."], at_least=8)

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""
        # A tokenizer may give a digit a token of its own, but no more than one.
        tokens = len(prompt_head(tokenizer, HEAD)) + len(encode(tokenizer, TAIL))
        tokens += len(encode(tokenizer, NEEDLE.format(value=""))) + DIGITS + 1
        return tokens + self.least_filler(tokenizer, 1) + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; `meta` adds nothing to the common entries."""
        self.check(tokenizer, length, depth)
        value = number(rng, DIGITS)
        return assemble(
            self,
            tokenizer,
            head=HEAD,
            tail=TAIL,
            needles=[(NEEDLE.format(value=value), depth)],
            references=[value],
            max_new_tokens=self.max_new_tokens(tokenizer),
            length=length,
            depth=depth,
            rng=rng,
            meta={},
        )
