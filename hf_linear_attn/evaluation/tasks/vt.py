"""Variable tracking: one chain of assignments in a haystack, after RULER (Hsieh et al., 2024)."""

from __future__ import annotations

import random
from itertools import pairwise
from string import ascii_uppercase
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.tasks.base import (
    Sample,
    Task,
    assemble,
    prompt_head,
    register_task,
)
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
class VariableTracking(Task):
    """Ask for all five variables of a chain of four hops, whose links stand in order, scattered over a haystack."""

    name: ClassVar[str] = "vt"
    needs_depth: ClassVar[bool] = False

    def max_new_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the generation budget; a letter of a name never takes more than one token."""
        separator = len(encode(tokenizer, ", "))
        return max(BUDGET_TOKENS, (HOPS + 1) * (NAME_LETTERS + 1 + separator) + 2)

    def min_length(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the shortest length at which every sample fits."""
        tokens = len(prompt_head(tokenizer, HEAD)) + len(encode(tokenizer, TAIL.format(value=""))) + 2 * (DIGITS + 1)
        tokens += len(encode(tokenizer, FIRST.format(name="", value=""))) + NAME_LETTERS + DIGITS + 2
        tokens += HOPS * (len(encode(tokenizer, NEXT.format(name="", source=""))) + 2 * (NAME_LETTERS + 1))
        return tokens + self.least_filler(tokenizer, HOPS + 1) + self.max_new_tokens(tokenizer)

    def build(self, tokenizer: PreTrainedTokenizerBase, length: int, depth: float, rng: random.Random) -> Sample:
        """Build one sample; `meta["value"]` holds the value at the head of the chain."""
        self.check(tokenizer, length, depth)
        names = distinct(HOPS + 1, lambda: variable(rng), set())
        value = number(rng, DIGITS)
        links = [FIRST.format(name=names[0], value=value)]
        links += [NEXT.format(name=name, source=source) for source, name in pairwise(names)]
        depths = sorted(rng.uniform(0, 100) for _ in links)
        return assemble(
            self,
            tokenizer,
            head=HEAD,
            tail=TAIL.format(value=value),
            needles=list(zip(links, depths, strict=True)),
            references=names,
            max_new_tokens=self.max_new_tokens(tokenizer),
            length=length,
            depth=None,
            rng=rng,
            meta={"value": value},
        )
