"""Frequent words: made-up words whose frequencies follow a Zipf law, after RULER (Hsieh et al., 2024)."""

import random
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import Question, Sample, Task, compose, prompt_tokens, register_task
from hf_linear_attn.evaluation.tasks.haystack import encode, encode_once
from hf_linear_attn.evaluation.tasks.words import distinct

ALPHA = 2.0
DOTS = " ...."
ANSWER_RANKS = (2, 3, 4)
SYLLABLES = 3
BUDGET_TOKENS = 50
# The share of rank 4 exceeds that of rank 5 by a whole word from here on, so the answer is unambiguous.
MIN_WORDS = 96
HEAD = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words.\n"
)
TAIL = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)
_ZETA_2 = 1.6449340668482264


def coded_word(rng: random.Random) -> str:
    """Draw a word of three syllables; all have six letters, so none contains another."""
    return "".join(rng.choice("bcdfghjklmnpqrstvwxz") + rng.choice("aeiou") for _ in range(SYLLABLES))


def zipf_counts(words: int) -> list[int]:
    """Return how often each rank stands in a text of about `words` words: `words r^-2 / zeta(2)`, rounded."""
    shares = (words / _ZETA_2 / rank**ALPHA for rank in range(1, words + 1))
    return [round(share) for share in takewhile(lambda share: share >= 0.75, shares)]


@register_task
class FrequentWords(Task):
    """Ask for the words of rank 2 to 4 in a text of Zipf-distributed made-up words, rank 1 being dots."""

    name = "fwe"
    needs_depth = False
    has_haystack = False

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget; a letter never takes more than one token."""
        separator = len(encode(tokenizer, ", "))
        return max(BUDGET_TOKENS, len(ANSWER_RANKS) * (2 * SYLLABLES + 1 + separator) + 2)

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""
        tokens = prompt_tokens(tokenizer, HEAD, TAIL) + self.max_new_tokens(tokenizer)
        counts = zipf_counts(MIN_WORDS)
        return tokens + counts[0] * len(encode(tokenizer, DOTS)) + sum(counts[1:]) * (2 * SYLLABLES + 1)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; `meta["counts"]` holds the number of dots and of each reference."""
        self.check(tokenizer, length, depth)
        budget = self.max_new_tokens(tokenizer)
        room = length - budget - prompt_tokens(tokenizer, HEAD, TAIL)
        dots = encode(tokenizer, DOTS)
        names = distinct(len(zipf_counts(room)), lambda: coded_word(rng), set())
        pieces = [dots, *(encode_once(tokenizer, f" {name}") for name in names[1:])]

        def tokens(words: int) -> int:
            return sum(count * len(piece) for count, piece in zip(zipf_counts(words), pieces, strict=False))

        low, high = MIN_WORDS, room + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if tokens(middle) <= room else (low, middle)
        counts = zipf_counts(low)
        # Dots do not count, so they fill what no further step of the Zipf law fits into.
        counts[0] += (room - tokens(low)) // len(dots)
        body = [piece for count, piece in zip(counts, pieces, strict=False) for _ in range(count)]
        rng.shuffle(body)
        references = [names[rank - 1] for rank in ANSWER_RANKS]
        question = Question(HEAD, TAIL, references, meta={"counts": tuple(counts[: ANSWER_RANKS[-1]])})
        return compose(self, tokenizer, length, budget, question, [token for piece in body for token in piece])
