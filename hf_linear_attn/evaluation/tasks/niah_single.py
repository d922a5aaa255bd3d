"""One needle in a haystack."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.niah import NeedleTask


@register_task
class NIAHSingle(NeedleTask):
    """Ask for the number of the only key."""

    name: ClassVar[str] = "niah_single"
    needs_depth: ClassVar[bool] = True
