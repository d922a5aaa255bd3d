"""What a run gives."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_linear_attn.distill.settings import DistillationSettings


@dataclass
class DistillResult:
    """What :func:`distill` returns.

    Args:
        student: The distilled model, in evaluation mode.
        settings: The settings it was made with.
        history: One record per logged step: ``stage``, ``step``, ``loss_nats``, ``tokens``, ``tokens_per_s``, ...
        metrics: ``teacher`` and ``student`` as :func:`measure` returns them, empty with ``heldout_rows=0``.
        tokens: Tokens trained on.
        elapsed_s: Seconds trained.
        trainable_parameters: Parameters that were trained, by kind.
        output_dir: Where the student was saved, or None.
    """

    student: PreTrainedModel
    settings: DistillationSettings
    history: list[dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    elapsed_s: float = 0.0
    trainable_parameters: dict[str, int] = field(default_factory=dict)
    output_dir: Path | None = None
