"""One key with several values."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.niah import NeedleTask


@register_task
class NIAHMultivalue(NeedleTask):
    """Ask for all four numbers of the only key, scattered over the haystack."""

    name: ClassVar[str] = "niah_multivalue"
    needs_depth: ClassVar[bool] = False
    values_per_key: ClassVar[int] = 4
