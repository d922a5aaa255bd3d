"""Facts in prose. The form is held out of training."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.pairs import PairTask
from hf_linear_attn.evaluation.tasks.words import MADE_UP_KEYS, MADE_UP_VALUES


@register_task
class Capital(PairTask):
    """Ask for the capital of a made-up country."""

    name: ClassVar[str] = "capital"
    held_out: ClassVar[bool] = True
    pair: ClassVar[str] = "The capital of {key} is {value}.\n"
    question: ClassVar[str] = "The capital of {key} is"
    keys: ClassVar[tuple[str, ...]] = tuple(word.title() for word in MADE_UP_KEYS)
    values: ClassVar[tuple[str, ...]] = tuple(word.title() for word in MADE_UP_VALUES)
