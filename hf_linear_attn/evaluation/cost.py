"""What a run will cost: short trials of each model, and how its time grows with the length."""

from dataclasses import dataclass
from typing import Any

import torch

from hf_linear_attn.evaluation.generation import forward, prefill, unless_out_of_memory
from hf_linear_attn.evaluation.meters import timed
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.subjects import Subject

# Long enough for attention's square to show, short enough to be a small part of any run.
_TRIAL_TOKENS = (256, 2048)


@dataclass(frozen=True)
class Pace:
    """How long a model takes, as polynomials in the context length: softmax attention grows with it, linear does not.

    Args:
        read: Seconds per token, and per token squared, of reading one row of a batch.
        step: Seconds of decoding a token of every row, and more of them per token before it.
    """

    read: tuple[float, float]
    step: tuple[float, float]

    def read_s(self, tokens: int, shared: int = 0) -> float:
        """Return the seconds of reading a row of `tokens`, the first `shared` of them read before."""
        return self.read[0] * (tokens - shared) + self.read[1] * (tokens**2 - shared**2)

    def step_s(self, context: int) -> float:
        """Return the seconds of decoding a token of every row."""
        return self.step[0] + self.step[1] * context


def calibrate(subject: Subject, settings: EvaluationSettings, longest: int) -> Pace:
    """Time a model at two lengths; where memory ends before the longer one, the shorter has to do."""
    short, long = (min(tokens, longest - 1) for tokens in _TRIAL_TOKENS)
    # The first warms up.
    read, step = [trial(subject, settings, short) for _ in range(2)][1]
    found = unless_out_of_memory(trial, subject, settings, long) if long > short else None
    if found is None:
        return Pace((read, 0.0), (step, 0.0))
    long_read, long_step = found
    # Rounding and noise must not make a longer context cheaper.
    growth = max(0.0, long_read - read) / (long - short)
    step_growth = max(0.0, long_step - step) / (long - short)
    return Pace((max(0.0, long_read - growth * long), growth), (max(0.0, long_step - step_growth * long), step_growth))


def trial(subject: Subject, settings: EvaluationSettings, tokens: int) -> tuple[float, float]:
    """Return seconds per token read and per decode step at a length."""
    ids = torch.zeros(settings.batch_size, tokens, dtype=torch.long, device=subject.device)
    caches: list[Any] = []

    def read() -> None:
        caches.append(prefill(subject.model, ids, None, settings.prefill_chunk)[1])

    def step() -> None:
        forward(subject.model, ids[:, :1], caches[-1], all_logits=False)

    read_ms = timed(subject.device, read)
    # The first has what the later ones do not: a place for the tokens to come.
    step_ms = [timed(subject.device, step) for _ in range(2)][-1]
    return read_ms / 1000 / ids.numel(), step_ms / 1000


def duration(seconds: float) -> str:
    """Write how long something takes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
