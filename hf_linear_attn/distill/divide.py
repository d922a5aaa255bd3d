"""How window and kept keys are divided among layers: measured, one layer at a time, on the teacher's weights.

Layers need very different numbers of keys: a few look far back, and most do not (Xiao et al., 2024, arXiv:2410.10819,
who tell such heads apart by training; Cai et al., 2024, arXiv:2406.02069, who give lower layers more). Here each layer
is converted alone with several sizes, all others being softmax, and what that costs is measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_linear_attn.config import PER_LAYER
from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.distill.selection import Saved, mean_over_tokens
from hf_linear_attn.distill.softmax import instead_of_forward, softmax_output
from hf_linear_attn.distill.teacher import Teacher
from hf_linear_attn.evaluation.generation import evaluating
from hf_linear_attn.layers import Call, LinearAttention

STEPS = 4
"""Steps in which a layer's share is given out, for a whole one: shares are multiples of a quarter."""

LARGEST = 8
"""Largest share of a layer that is measured, in what every layer has on average."""

TEXTS, LONGEST = 8, 2048
"""Texts on which layers are measured, and the tokens of the longest."""


@dataclass(frozen=True)
class Division(Saved):
    """What each layer gets, and what that is based on.

    Args:
        measured: ``layer``, its index among the model's self-attention layers, ``share`` of what layers have on
            average, and ``kl_nats`` from the teacher with that layer alone converted.
        per_layer: As of :class:`LinearAttentionConfig`; layers that get what all have are left out.
    """

    FILE: ClassVar[str] = "division.json"
    measured: list[dict[str, Any]]
    per_layer: dict[str, dict[str, int]]


@torch.no_grad()
def divide(student: nn.Module, teacher: Teacher, batches: Sequence[Batch], *, progress: bool = False) -> Division:
    """Find how many keys each converted layer gets, so that all together they have as many as before.

    No weight matters but the teacher's: a layer is measured with its window, its sinks and its kept keys alone, kept by
    redundancy, and below the average with a window of as many tokens in their place. That is done for shares of a
    quarter, a half, one, two, four and eight times its settings, as far as half of a text holds them. What lies between
    is interpolated over the share's logarithm; then the layer whose KL falls most by it gets the next quarter.

    Args:
        student: A model patched with a window, of one size for all layers.
        teacher: What it was made from.
        batches: Texts of the training data.
        progress: Show a progress bar.

    Returns:
        The division.
    """
    parts = linear_attention_parts(student)
    layers: list[int] = student.config.linear_attention["layers"]  # type: ignore[union-attr,index,assignment]
    tokens = max(batch.input_ids.shape[1] for batch in batches) // 2
    most = max(1, min(LARGEST, len(parts), tokens // sum(_keys(parts[0], 1).values())))
    shares = [2.0**n for n in range(-2, int(math.log2(most)) + 1)]
    asked = [teacher.divergence(batch) for batch in batches]
    curves: list[dict[float, float]] = [{} for _ in parts]
    bar = tqdm(total=len(parts) * len(shares), desc="division of keys", disable=not progress)
    with evaluating(student), bar:
        for place, part in enumerate(parts):
            for share in shares:
                with instead_of_forward(parts, _alone(part, share)):
                    curves[place][share] = mean_over_tokens(student, batches, asked)
                bar.update()
    chosen = given_out(curves)
    measured = [
        {"layer": layer, "share": share, "kl_nats": kl}
        for layer, curve in zip(layers, curves, strict=True)
        for share, kl in curve.items()
    ]
    own = {
        str(layer): _keys(part, share) for layer, part, share in zip(layers, parts, chosen, strict=True) if share != 1
    }
    return Division(measured, own)


def given_out(curves: Sequence[Mapping[float, float]]) -> list[float]:
    """Return the share of each layer, such that they are 1 on average.

    Of each layer is given what it costs by its share, rising; a share that costs more than a smaller one counts as that
    does.
    """
    shares = [min(curve) for curve in curves]

    def fall(place: int) -> float:
        curve, share = curves[place], shares[place]
        if share + 1 / STEPS > max(curve):
            return -math.inf
        return _cost(curve, share) - _cost(curve, share + 1 / STEPS)

    while sum(shares) + 1 / STEPS <= len(shares):
        # Of layers that gain alike, as where a text is too short to tell, the one that has least.
        place = max(range(len(shares)), key=lambda n: (fall(n), -shares[n]))
        if fall(place) == -math.inf:
            break
        shares[place] += 1 / STEPS
    return shares


def _cost(curve: Mapping[float, float], share: float) -> float:
    """Return what a share costs, between those measured on a line over the logarithm."""
    known = sorted(curve)
    costs = np.minimum.accumulate([curve[one] for one in known])
    return float(np.interp(np.log2(share), np.log2(known), costs))


def _keys(part: LinearAttention, share: float) -> dict[str, int]:
    """Return a share of a layer's window and kept keys; a window has at least the query itself.

    A layer with less than layers have on average looks near, so that all it gets is a window.
    """
    settings = part.settings
    window, kept = settings.window or 0, settings.kept
    sizes = (window + kept, 0) if share < 1 else (window, kept)
    found = {name: int(share * size) for name, size in zip(PER_LAYER, sizes, strict=True)}
    return {"window": max(found["window"], 1)} | ({"kept": found["kept"]} if kept else {})


def _alone(part: LinearAttention, share: float) -> Callable[..., Tensor]:
    """Return what takes the place of all layers' forwards: one has a share of its exact keys alone, others softmax."""
    own: dict[str, Any] = _keys(part, share)
    settings = replace(part.settings, mix="window", retention="redundancy", rotary="keep", **own)
    tried = LinearAttention(settings, part.sizes, part.name).train(False)

    def compute(other: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return tried(q, k, v, call) if other is part else softmax_output(other, q, k, v, call)

    return compute
