"""Passkey retrieval: one five-digit number in a haystack of noise.

The prompt follows Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context Length for
Transformers" (2023), except that the key stands in the text once.
"""

import random

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import HaystackTask, Question, answer_budget, prompt_tokens, register_task
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
class Passkey(HaystackTask):
    """Ask for a pass key of five digits hidden in a haystack."""

    name = "passkey"
    needs_depth = True

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""
        return answer_budget(tokenizer, [f" {'7' * DIGITS}."], at_least=8)

    def longest(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """Return the most tokens of a prompt without its filler, and its number of needles."""
        # A tokenizer may give a digit a token of its own, but no more than one.
        needle = len(encode(tokenizer, NEEDLE.format(value=""))) + DIGITS + 1
        return prompt_tokens(tokenizer, HEAD, TAIL) + needle, 1

    def ask(self, depth: float, rng: random.Random) -> Question:
        """Draw a question."""
        value = number(rng, DIGITS)
        return Question(HEAD, TAIL, [value], [(NEEDLE.format(value=value), depth)])
