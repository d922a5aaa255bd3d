"""Every configuration registered for a language task; `make sweep` also writes docs/results/architectures.md.

Other conversions are swept with `make sweep SWEEP="--update-rule gated_delta --rotary undo"`, to a page of their own.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.patching import LinearAttention, attention_layers
from hf_linear_attn.patching.discover import attends_causally

from . import checks
from .checks import Subject
from .zoo import Task, registered, tiny_model

NOT_BUILT: dict[tuple[Task, str], str] = {
    ("causal", "blt"): "reads bytes through patches of its own; its configuration builds no small model",
    ("causal", "gemma3n"): "needs the timm package for its image tower; gemma3n_text stands for it",
    ("causal", "gemma4_assistant"): "drafts from another model's hidden states, not from text alone",
    ("causal", "gemma4_unified_assistant"): "drafts from another model's hidden states, not from text alone",
    ("causal", "dots3_note"): "the same class as dots3_note_text",
    ("causal", "musicgen"): "reads audio codes",
    ("causal", "musicgen_melody"): "reads audio codes",
    ("masked", "luke"): "builds no small model",
    ("masked", "perceiver"): "builds no small model",
    ("seq2seq", "vibevoice_asr"): "builds no small model",
    ("seq2seq", "voxtral_realtime"): "needs audio",
    ("seq2seq", "nemo_speechlm"): "needs audio",
}
"""Configurations that a text-only test of a tiny model cannot run, softmax or not, with the reason."""

_UNFOLLOWED = "position ids do not follow the mask, and features of rotated keys depend on them"

KNOWN_LIMITS: dict[tuple[Task, str], dict[str, str]] = {
    ("causal", "moss_transcribe_diarize"): {"padding": _UNFOLLOWED},
    ("seq2seq", "moss_transcribe_diarize"): {"padding": _UNFOLLOWED},
}
"""Properties that a converted architecture does not have though its softmax model has, with the reason."""

HANDFUL = [
    ("causal", "gemma3_text"),
    ("causal", "internlm3"),
    ("causal", "phi3"),
    ("masked", "roberta"),
    ("seq2seq", "marian"),
]
"""What the default tier runs of the sweep, besides test_architectures.py."""


def examine(task: Task, model_type: str, **settings: str) -> dict[str, Any]:
    """Convert one architecture, with settings of ``patch_model``, and check everything; return its row of the table."""
    row: dict[str, Any] = {"task": task, "model_type": model_type, "checks": {}}
    if (task, model_type) in NOT_BUILT:
        return row | {"status": "not run", "reason": NOT_BUILT[task, model_type]}
    build = partial(tiny_model, task, model_type)
    model = build()
    row["class"] = type(model).__name__
    if task == "seq2seq" and not model.config.is_encoder_decoder:
        task, row["decoder_only"] = "causal", True
    found = [layer for layer in attention_layers(model) if layer.kind != "cross"]
    layers: Any = None if any(layer.kind == "full" for layer in found) else "all"
    causal = [layer.index for layer in found if attends_causally(layer.module)]
    if task == "seq2seq" and causal and settings.get("update_rule", "additive") != "additive":
        # Such a rule goes by the order of keys, and an encoder has none.
        layers = causal
    settings = settings | {"layers": layers}
    try:
        checks.patched(model, feature_map="elu", **settings)
        Subject(model, task).logits(Subject(model, task).tokens())
    except UnsupportedError as error:
        reason = re.sub(r"^`(\w+)` must (.*?)\. ", r"\1 must \2; ", str(error))
        return row | {"status": "refused", "reason": reason}
    parts = [m for m in model.modules() if isinstance(m, LinearAttention)]
    row["converted"] = f"{len(parts)} of {len(found)}"
    steps: dict[str, Any] = {
        check.__name__: lambda check=check: check(Subject(model, task)) for check in checks.checks_for(task)
    }
    steps["save_and_load"] = lambda: checks.save_and_load(Subject(model, task))
    steps["undo"] = lambda: checks.differs_and_unpatches(build, task, feature_map="elu", **settings)
    window = {} if task != "causal" else {"window": 3, "sinks": 1}
    windowed = lambda: checks.patched(build(), feature_map="hedgehog", **window, **settings)  # noqa: E731
    steps["gradients"] = lambda: checks.gradients(windowed(), task)
    if window:
        steps["window"] = lambda: checks.cached_decoding(Subject(windowed(), task))
    for name, step in steps.items():
        try:
            step()
        except Exception as error:
            row["checks"][name] = _judge(build, task, name, error)
        else:
            row["checks"][name] = "yes"
    known = KNOWN_LIMITS.get((row["task"], model_type), {}) if settings.get("rotary") != "undo" else {}
    failed = {name: result for name, result in row["checks"].items() if result not in ("yes", "own")}
    row["checks"] |= dict.fromkeys(failed, "no")
    reasons = [f"{name}: {known.get(name, result)}" for name, result in failed.items()]
    # A known limit that is none any more has to leave the list.
    status = "converted" if failed.keys() == known.keys() else "fails"
    return row | {"status": status, "reason": "; ".join(reasons)}


def _judge(build: Callable[[], PreTrainedModel], task: Task, name: str, error: Exception) -> str:
    """Return "own" where the softmax model lacks the property too, else what went wrong."""
    same = {check.__name__: check for check in checks.checks_for(task)}
    same |= {"window": checks.cached_decoding, "save_and_load": checks.save_and_load}
    if name in same:
        try:
            same[name](Subject(build(), task))
        except Exception:
            return "own"
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


ALL = [(task, name) for task in ("causal", "masked", "seq2seq") for name in registered(task)]


@pytest.mark.parametrize(("task", "model_type"), HANDFUL)
def test_a_handful(task, model_type):
    row = examine(task, model_type)
    assert row["status"] == "converted", row["reason"]
    assert "own" not in row["checks"].values()


@pytest.mark.sweep
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("task", "model_type"), ALL)
def test_every_configuration(task, model_type, record_property, pytestconfig):
    row = examine(task, model_type, **{name: pytestconfig.getoption(name) for name in ("update_rule", "rotary")})
    record_property("row", row)
    assert row["status"] != "fails", row["reason"]
