"""Key-value recall: multi-query associative recall (Arora et al., "Zoology", 2023) in natural words."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.pairs import PairTask
from hf_linear_attn.evaluation.tasks.words import ADJECTIVES, NOUNS

PAIR = "The code of {key} is {value}.\n"
QUESTION = "The code of {key} is"


@register_task
class KVRecall(PairTask):
    """Ask for the code of one thing out of several; keys are nouns, values adjectives."""

    name: ClassVar[str] = "kv_recall"
    head: ClassVar[str] = "Remember the code of each thing in this text. I will ask for one of them.\n"
    pair: ClassVar[str] = PAIR
    question: ClassVar[str] = QUESTION
    keys: ClassVar[tuple[str, ...]] = NOUNS
    values: ClassVar[tuple[str, ...]] = ADJECTIVES
