"""Common words: the ten words of a numbered list that stand in it most often, after RULER (Hsieh et al., 2024)."""

import random
from itertools import count

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import (
    Question,
    Sample,
    Task,
    answer_budget,
    compose,
    prompt_tokens,
    register_task,
)
from hf_linear_attn.evaluation.tasks.haystack import encode
from hf_linear_attn.evaluation.tasks.words import distinct, longest_pair, word_pair

COMMON_WORDS = 10
COMMON_REPEATS = 30
OTHER_REPEATS = 3
BUDGET_TOKENS = 120
HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
TAIL = (
    f"Question: What are the {COMMON_WORDS} most common words in the above list? "
    f"Answer: The {COMMON_WORDS} words that appear most often in the list are:"
)


def entry(tokenizer: PreTrainedTokenizerBase, index: int, word: str) -> tuple[int, ...]:
    """Tokenise one line of the list."""
    return encode(tokenizer, f"{index}.") + encode(tokenizer, f" {word}\n")


@register_task
class CommonWords(Task):
    """Ask for the ten words that stand 30 times in a shuffled list, among others that stand 3 times."""

    name = "cwe"
    needs_depth = False
    has_haystack = False

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget."""
        answer = " ".join(f"{i}. {longest_pair(tokenizer)}" for i in range(1, COMMON_WORDS + 1))
        return answer_budget(tokenizer, [f" {answer}"], at_least=BUDGET_TOKENS)

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits: the common words and one other."""
        tokens = prompt_tokens(tokenizer, HEAD, TAIL)
        entries = COMMON_WORDS * COMMON_REPEATS + OTHER_REPEATS
        tokens += sum(len(entry(tokenizer, i, longest_pair(tokenizer))) for i in range(1, entries + 1))
        return tokens + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; the references are the common words."""
        self.check(tokenizer, length, depth)
        budget = self.max_new_tokens(tokenizer)
        room = length - budget - prompt_tokens(tokenizer, HEAD, TAIL)
        taken: set[str] = set()
        common = distinct(COMMON_WORDS, lambda: word_pair(rng), taken)
        words: list[str] = []
        # Which number a word gets changes nothing in the sum, so the list can be measured before it is shuffled.
        for rank in count():
            word = common[rank] if rank < COMMON_WORDS else distinct(1, lambda: word_pair(rng), taken)[0]
            group = [word] * (COMMON_REPEATS if rank < COMMON_WORDS else OTHER_REPEATS)
            room -= sum(len(entry(tokenizer, len(words) + 1 + i, word)) for i in range(len(group)))
            if room < 0:
                break
            words += group
        rng.shuffle(words)
        body = [token for i, word in enumerate(words, 1) for token in entry(tokenizer, i, word)]
        question = Question(HEAD, TAIL, common, meta={"words": len(words)})
        return compose(self, tokenizer, length, budget, question, body)
