"""Key-value recall: multi-query associative recall (Arora et al., "Zoology", 2023) in natural words."""

from __future__ import annotations

import random
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks.base import (
    MIN_FILLER_TOKENS,
    Sample,
    Task,
    answer_budget,
    assemble,
    encode,
    noise_lines,
    prompt_head,
    register_task,
)
from hf_linear_attn.evaluation.tasks.words import ADJECTIVES, NOUNS, longest_word

HEAD = "Remember the code of each thing in this text. I will ask for one of them.\n"
PAIR = "The code of {key} is {value}.\n"
QUESTION = "The code of {key} is"
DEFAULT_PAIRS = 4


@register_task
class KVRecall(Task):
    """Ask for the value of one key out of several pairs, all scattered over repeated noise sentences.

    Args:
        pairs: Number of pairs, 1..80; default 4. Keys are nouns, values adjectives, neither repeats.
    """

    name: ClassVar[str] = "kv_recall"
    needs_depth: ClassVar[bool] = True

    def __init__(self, pairs: int = DEFAULT_PAIRS) -> None:
        """Set the number of pairs."""
        most = min(len(NOUNS), len(ADJECTIVES))
        if not 1 <= pairs <= most:
            raise ArgumentError("pairs", f"lie in 1..{most}", pairs, "Choose fewer pairs.", where=f"task {self.name!r}")
        self.pairs = pairs

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""
        return answer_budget(tokenizer, [f" {longest_word(tokenizer, ADJECTIVES)}."], at_least=8)

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""
        key, value = longest_word(tokenizer, NOUNS), longest_word(tokenizer, ADJECTIVES)
        tokens = len(prompt_head(tokenizer, HEAD)) + len(encode(tokenizer, QUESTION.format(key=key)))
        tokens += self.pairs * len(encode(tokenizer, PAIR.format(key=key, value=value)))
        return tokens + MIN_FILLER_TOKENS + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; `meta["pairs"]` holds all (key, value) pairs, the asked one first."""
        self.check(tokenizer, length, depth)
        pairs = list(zip(rng.sample(NOUNS, self.pairs), rng.sample(ADJECTIVES, self.pairs), strict=True))
        depths = [depth] + [rng.uniform(0, 100) for _ in pairs[1:]]
        return assemble(
            self,
            tokenizer,
            head=HEAD,
            tail=QUESTION.format(key=pairs[0][0]),
            needles=[(PAIR.format(key=key, value=value), at) for (key, value), at in zip(pairs, depths, strict=True)],
            lines=noise_lines(tokenizer),
            references=[pairs[0][1]],
            max_new_tokens=self.max_new_tokens(tokenizer),
            length=length,
            depth=depth,
            meta={"pairs": tuple(pairs)},
        )
