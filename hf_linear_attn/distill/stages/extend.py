"""Training at greater length."""

from typing import ClassVar

from typing_extensions import override

from hf_linear_attn.distill.data import Step
from hf_linear_attn.distill.registry import register_stage
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages.distill import Distill


@register_stage
class Extend(Distill):
    """Cross-entropy on longer sequences than the stages before."""

    name: ClassVar[str] = "extend"
    place: ClassVar[int] = 30
    length_setting: ClassVar[str] = "extend_factor"

    @override
    @classmethod
    def steps(cls, settings: DistillationSettings) -> int:
        return settings.extend_steps

    @override
    @classmethod
    def lengths(cls, settings: DistillationSettings) -> list[int]:
        return [settings.extend_factor * settings.block_tokens]

    @override
    @classmethod
    def sequences(cls, settings: DistillationSettings, step: int, rows_per_step: int) -> Step:
        # As many as of short ones: a step reads so many tokens more.
        first = step * rows_per_step
        return Step(cls.lengths(settings)[0], range(first, first + rows_per_step), settings.rows)

    @override
    @classmethod
    def needs_teacher(cls, settings: DistillationSettings) -> bool:
        return False

    @override
    @property
    def peak_lr(self) -> float:
        return self.settings.extend_lr or 0.1 * self.settings.learning_rate(self.hidden_size)

    @override
    def begin_step(self, step: int) -> None:
        pass
