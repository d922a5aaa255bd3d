"""Copying: a list of words that stands far back, to be written again word for word."""

import random

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks.base import HaystackTask, Question, answer_budget, prompt_tokens, register_task
from hf_linear_attn.evaluation.tasks.haystack import encode
from hf_linear_attn.evaluation.tasks.words import COMMON, longest_word

HEAD = "Remember the list of words in this text. I will ask you to repeat it.\n"
NEEDLE = "The list of words is: {words}.\n"
TAIL = "Repeat the list of words. The list of words is:"
DEFAULT_WORDS = 4


@register_task
class Copying(HaystackTask):
    """Ask for a list of words, all of it and in its order, that stands in a haystack.

    Args:
        words: Number of words, 1..29; default 4. None of them stands twice.
    """

    name = "copying"
    needs_depth = True

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

    def longest(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """Return the most tokens of a prompt without its filler, and its number of needles."""
        needle = len(encode(tokenizer, NEEDLE.format(words=self._longest(tokenizer))))
        return prompt_tokens(tokenizer, HEAD, TAIL) + needle, 1

    def ask(self, depth: float, rng: random.Random) -> Question:
        """Draw a question."""
        words = " ".join(rng.sample(COMMON, self.words))
        return Question(HEAD, TAIL, [words], [(NEEDLE.format(words=words), depth)])
