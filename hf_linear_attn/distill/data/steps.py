"""Which sequences a step takes, and how many tokens a run reads."""

import math
from typing import NamedTuple

from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.distill.settings import DistillationSettings


class Step(NamedTuple):
    """The sequences of an optimiser step.

    Attributes:
        length: Their tokens.
        numbers: Their numbers, over all processes.
        at_once: How many of them a forward takes.
    """

    length: int
    numbers: range
    at_once: int


def tokens_read(settings: DistillationSettings, processes: int) -> int:
    """Return how many text tokens a run reads."""
    rows = settings.rows * settings.accumulation * processes
    total = 0
    for stage in map(stage_class, settings.stages):
        # Every step of a stage reads as many tokens.
        of_a_step = stage.sequences(settings, 0, rows)
        total += stage.steps(settings) * len(of_a_step.numbers) * of_a_step.length
    return math.ceil(total * (1 - settings.recall_share))


def numbers_before(settings: DistillationSettings, processes: int, share: float) -> dict[int, int]:
    """Return, by length, the number of the first sequence that the first steps leave, a share of all stages' steps."""
    rows = settings.rows * settings.accumulation * processes
    stages = [stage for stage in map(stage_class, settings.stages) for _ in range(stage.steps(settings))]
    read = [stages[step].sequences(settings, step, rows) for step in range(math.ceil(share * len(stages)))]
    return {step.length: step.numbers.stop for step in read}
