"""Variable tracking: one chain of assignments in a haystack, after RULER (Hsieh et al., 2024)."""

import random
from itertools import pairwise
from string import ascii_uppercase

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import HaystackTask, Question, prompt_tokens, register_task
from hf_linear_attn.evaluation.tasks.haystack import encode
from hf_linear_attn.evaluation.tasks.words import distinct, number

HOPS = 4
DIGITS = 5
NAME_LETTERS = 5
BUDGET_TOKENS = 30
HEAD = "Memorize and track the chain of variable assignments hidden in the following text.\n"
FIRST = "VAR {name} = {value}\n"
NEXT = "VAR {name} = VAR {source}\n"
TAIL = (
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    f"chain of variable assignments in the text above, {HOPS + 1} variables are assigned the value {{value}}, they are:"
)


def variable(rng: random.Random) -> str:
    """Draw a variable's name."""
    return "".join(rng.choices(ascii_uppercase, k=NAME_LETTERS))


@register_task
class VariableTracking(HaystackTask):
    """Ask for all five variables of a chain of four hops, whose links stand in order, scattered over a haystack."""

    name = "vt"
    needs_depth = False

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget; a letter of a name never takes more than one token."""
        separator = len(encode(tokenizer, ", "))
        return max(BUDGET_TOKENS, (HOPS + 1) * (NAME_LETTERS + 1 + separator) + 2)

    def longest(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
        """Return the most tokens of a prompt without its filler, and its number of needles."""
        tokens = prompt_tokens(tokenizer, HEAD, TAIL.format(value="")) + 2 * (DIGITS + 1)
        tokens += len(encode(tokenizer, FIRST.format(name="", value=""))) + NAME_LETTERS + DIGITS + 2
        tokens += HOPS * (len(encode(tokenizer, NEXT.format(name="", source=""))) + 2 * (NAME_LETTERS + 1))
        return tokens, HOPS + 1

    def ask(self, depth: float, rng: random.Random) -> Question:
        """Draw a question; `meta["value"]` holds the value at the head of the chain."""
        names = distinct(HOPS + 1, lambda: variable(rng), set())
        value = number(rng, DIGITS)
        links = [FIRST.format(name=names[0], value=value)]
        links += [NEXT.format(name=name, source=source) for source, name in pairwise(names)]
        depths = sorted(rng.uniform(0, 100) for _ in links)
        needles = list(zip(links, depths, strict=True))
        return Question(HEAD, TAIL.format(value=value), names, needles, {"value": value})
