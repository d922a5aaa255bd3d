"""A patched model computes on a GPU, through the kernels and as graphs, what it computes on a CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linear_attn import patch_model

from .checks import NEW, Subject, left_padding
from .zoo import tiny_model

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SETTINGS = {
    "plain": {"feature_map": "elu"},
    "learned": {"feature_map": "hedgehog"},
    "key": {"feature_map": "norm_preserving", "window": 8, "sinks": 2},
    "gate": {"feature_map": "elu", "window": 8, "mix": "gate"},
    "shared": {"feature_map": "hedgehog", "window": 8, "mix": "shared"},
}
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
"""Relative to the largest logit: matrix products of fp32 inputs may run in TF32 outside of the kernels."""

TOKENS = 100


@pytest.fixture(params=SETTINGS)
def pair(request: pytest.FixtureRequest) -> tuple[Subject, Subject]:
    """Return a model on the CPU and its copy on the GPU."""
    model = patch_model(tiny_model("causal", "llama"), **SETTINGS[request.param])
    return Subject(model, "causal"), Subject(copy.deepcopy(model).to(DEVICE), "causal")


def padded(subject: Subject) -> tuple[Tensor, Tensor]:
    ids = subject.tokens(TOKENS)
    mask = left_padding(ids, 35)
    return ids * mask, mask


def error(found: Tensor, expected: Tensor, mask: Tensor) -> float:
    real = mask.bool()
    return float((found.cpu().float() - expected)[real].abs().max() / expected[real].abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits(pair: tuple[Subject, Subject], dtype: torch.dtype) -> None:
    cpu, gpu = pair
    ids, mask = padded(cpu)
    expected = cpu.logits(ids, attention_mask=mask)
    gpu.model.to(dtype)
    found = gpu.logits(ids.to(DEVICE), attention_mask=mask.to(DEVICE))
    assert error(found, expected, mask) < TOLERANCE[dtype]


def test_gradients(pair: tuple[Subject, Subject]) -> None:
    cpu, gpu = pair
    ids, mask = padded(cpu)
    for subject, device in ((cpu, "cpu"), (gpu, DEVICE)):
        labels = ids.masked_fill(mask == 0, -100).to(device)
        subject.model(input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels).loss.backward()
    largest = max(float(p.grad.norm()) for p in cpu.model.parameters() if p.grad is not None)
    for (name, expected), found in zip(cpu.model.named_parameters(), gpu.model.parameters(), strict=True):
        if expected.grad is not None:
            difference = float((found.grad.cpu() - expected.grad).norm())
            assert difference < 1e-2 * float(expected.grad.norm()) + 1e-4 * largest, name


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
def test_generation(pair: tuple[Subject, Subject], options: dict[str, Any]) -> None:
    cpu, gpu = pair
    ids, mask = padded(cpu)
    # What the CPU generates, forced: a tie that falls differently once would change all that follows.
    whole = cpu.generate(ids, attention_mask=mask)
    seen = torch.cat([mask, torch.ones_like(whole[:, -NEW:])], 1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    expected = cpu.logits(whole, attention_mask=seen, position_ids=positions)[:, -NEW - 1 : -1]

    def forced(_: Any, scores: Tensor) -> Tensor:
        step = len(steps)
        steps.append(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, whole[:, -NEW + step, None].to(DEVICE), 0.0)

    for _ in range(2):
        # The second time, what was compiled and captured is run again.
        steps: list[Tensor] = []
        settings = {"attention_mask": mask.to(DEVICE), "logits_processor": [forced], "min_new_tokens": 0}
        gpu.generate(ids.to(DEVICE), **settings, **options)
        found = torch.stack(steps, 1)
        assert error(found, expected, torch.ones(found.shape[:2])) < TOLERANCE[torch.float32]
