"""Values assigned in code. The form is held out of training."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.pairs import PairTask


@register_task
class Assignment(PairTask):
    """Ask for the value that a variable was assigned."""

    name: ClassVar[str] = "assignment"
    held_out: ClassVar[bool] = True
    pair: ClassVar[str] = '{key} = "{value}"\n'
    question: ClassVar[str] = "{key} ="
    answer: ClassVar[str] = '"{value}"'
