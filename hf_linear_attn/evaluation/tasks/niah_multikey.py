"""One needle among needles of other keys."""

from __future__ import annotations

from typing import ClassVar

from hf_linear_attn.evaluation.tasks.base import register_task
from hf_linear_attn.evaluation.tasks.niah import NeedleTask


@register_task
class NIAHMultikey(NeedleTask):
    """Ask for the number of one key out of four, at the given depth; the others stand anywhere."""

    name: ClassVar[str] = "niah_multikey"
    needs_depth: ClassVar[bool] = True
    keys: ClassVar[int] = 4
    chance: float = 1 / keys
