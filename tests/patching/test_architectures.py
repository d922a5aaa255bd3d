"""The properties of checks.py on the five main architectures, with plain, windowed and mixed conversion."""

import pytest
import torch

from hf_linear_attn import patch_model

from . import checks
from .checks import Subject
from .zoo import Task, tiny_model

MAIN: dict[str, Task] = {
    "llama": "causal",
    "gpt2": "causal",
    "qwen3": "causal",
    "mistral": "causal",
    "bart": "seq2seq",
    "bert": "masked",
}
# Mistral's layers are all sliding in the tiny configuration, as in Mistral 7B v0.1.
SETTINGS = {
    "plain": {"feature_map": "elu", "layers": "all"},
    "window": {"feature_map": "hedgehog", "window": 3, "sinks": 2, "layers": "all"},
    "kept": {"feature_map": "elu", "window": 3, "sinks": 1, "kept": 2, "layers": "all"},
    "shared": {"feature_map": "hedgehog", "window": 3, "sinks": 1, "mix": "shared", "layers": "all"},
    "only_window": {"window": 3, "sinks": 1, "mix": "window", "layers": "all"},
    "mixed": {"feature_map": "hedgehog", "layers": [1]},
    "decay": {"feature_map": "hedgehog", "window": 3, "sinks": 1, "update_rule": "decay", "layers": "all"},
    "delta": {"feature_map": "elu", "update_rule": "delta", "layers": "all"},
}


def settings_for(name: str) -> list[str]:
    if MAIN[name] != "causal":
        return ["plain", "mixed"]
    # A rule's state is the same in every architecture: one with a rotation and one without show it.
    return [setting for setting in SETTINGS if "update_rule" not in SETTINGS[setting] or name in ("llama", "gpt2")]


CASES = [
    pytest.param(name, setting, check, id=f"{name}-{setting}-{check.__name__}")
    for name, task in MAIN.items()
    for setting in settings_for(name)
    for check in (*checks.checks_for(task), checks.save_and_load)
]


@pytest.mark.parametrize(("name", "setting", "check"), CASES)
def test_property(name, setting, check):
    model = checks.patched(tiny_model(MAIN[name], name), **SETTINGS[setting])
    check(Subject(model, MAIN[name]))


PAIRS = [pytest.param(name, setting, id=f"{name}-{setting}") for name in MAIN for setting in settings_for(name)]


@pytest.mark.parametrize(("name", "setting"), PAIRS)
def test_patching_changes_one_model_and_can_be_undone(name, setting):
    checks.differs_and_unpatches(lambda: tiny_model(MAIN[name], name), MAIN[name], **SETTINGS[setting])


@pytest.mark.parametrize(
    ("name", "setting"), [p for p in PAIRS if p.values[1] in ("window", "shared", "mixed", "decay", "delta")]
)
def test_a_gradient_reaches_every_parameter(name, setting):
    checks.gradients(checks.patched(tiny_model(MAIN[name], name), **SETTINGS[setting]), MAIN[name])


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_close_to_fp32(name, dtype):
    task = MAIN[name]
    reference = patch_model(tiny_model(task, name), "elu")
    half = patch_model(tiny_model(task, name).to(dtype), "elu")
    ids = Subject(half, task).tokens()
    a, b = Subject(half, task).logits(ids), Subject(reference, task).logits(ids)
    assert a.dtype == dtype
    # 24 roundings of activations to 8 (bf16) or 11 bits (fp16).
    assert (a.float() - b).abs().max() < 24 * torch.finfo(dtype).eps * b.abs().max()
