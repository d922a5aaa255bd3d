"""Several keys asked at once."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.niah import NeedleTask


@register_task
class NIAHMultiquery(NeedleTask):
    """Ask for the numbers of all four keys, scattered over the haystack."""

    name: ClassVar[str] = "niah_multiquery"
    needs_depth: ClassVar[bool] = False
    keys: ClassVar[int] = 4
    asked_keys: ClassVar[int] = 4
