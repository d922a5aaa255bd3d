"""Default arguments of functions. The form is held out of training."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.pairs import PairTask


@register_task
class DefaultArgument(PairTask):
    """Ask for the default of a function, which is called with it."""

    name: ClassVar[str] = "default_argument"
    held_out: ClassVar[bool] = True
    pair: ClassVar[str] = 'def {key}(mode="{value}"): ...\n'
    question: ClassVar[str] = "{key}(mode="
    answer: ClassVar[str] = '"{value}"'
