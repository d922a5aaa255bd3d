"""Records of JSON. The form is held out of training."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.pairs import PairTask


@register_task
class JSONRecord(PairTask):
    """Ask for the city of a record by its name."""

    name: ClassVar[str] = "json_record"
    held_out: ClassVar[bool] = True
    pair: ClassVar[str] = '{{"name": "{key}", "city": "{value}"}}\n'
    question: ClassVar[str] = '{{"name": "{key}", "city":'
    answer: ClassVar[str] = '"{value}"'
