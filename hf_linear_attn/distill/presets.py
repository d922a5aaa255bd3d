"""Settings that go together, by name: what each changes in the defaults."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError

CONVERSION = tuple(f.name for f in fields(LinearAttentionConfig) if f.name not in ("trained_length", "format_version"))
"""The settings of a conversion; what is left out says what became of it."""

CHOSEN: dict[str, Any] = {"softmax_budget": 0.0, "divide": "evenly"}
"""What chooses by measurement when a student is made, with the values for one that goes on as it is."""

PRESETS: dict[str, dict[str, Any]] = {
    "recommended": {},
    # Nothing is learned in phi, so there is nothing to transfer, and no window. All weights have to learn anew, and no
    # step is spent on recall, of which it is hardly capable.
    "elu": {
        "feature_map": "elu",
        "window": None,
        "sinks": 0,
        "stages": ["distill"],
        "recall_share": 0.0,
        "lr_factor": 4.0,
        "rest_lr_share": 1.0,
        "window_dropout": 0.0,
    },
    # Cross-entropy alone, on the user's own data.
    "finetune": {
        "stages": ["extend"],
        "length_factors": [1],
        "extend_factor": 1,
        "extend_steps": 200,
        "recall_share": 0.0,
    },
    # Which keys are worth keeping is learned with all weights as they are; then the weights learn to do with those, and
    # go most of the way back, since the near past was the teacher's to the bit (docs/results/notebook.md). Recall rows
    # teach what is asked for.
    "kept_keys": {
        "mix": "window",
        "kept": 64,
        "retention": "learned",
        "divide": "kl",
        "stages": ["retain", "distill"],
        "retain_steps": 1000,
        "distill_steps": 150,
        "teacher_share": 0.7,
        "recall_share": 0.4,
        "recall_text": 0.75,
    },
    # An encoder by its hidden states and embeddings. It has no window, since it sees both sides. Its attention starts
    # near the teacher's, so gentle steps are enough (docs/results/notebook.md).
    "encoder": {
        "lr_factor": 0.25,
        "window": None,
        "sinks": 0,
        "stages": ["transfer", "embed"],
        "recall_share": 0.0,
        "rows": 16,
        "block_tokens": 32,
        "length_factors": [1, 2, 4, 8],
    },
    # A model of 8B on a GPU of 40 GB and more: one copy of the frozen base serves student and teacher.
    "single_gpu": {
        "model_dtype": "bfloat16",
        "trainable": "lora",
        "gradient_checkpointing": True,
        "block_tokens": 1024,
    },
    # Zhang et al., 2024, arXiv:2410.10254: one denominator, D features, then LoRA with cross-entropy on frozen maps.
    "lolcats": {
        "feature_map": "hedgehog",
        "feature_map_options": {"num_features": "head_dim"},
        "window": 64,
        "sinks": 0,
        "mix": "shared",
        "rotary": "keep",
        "length_factors": [1],
        "transfer_loss": "output",
        "map_lr": 1e-2,
        "distill_loss": "ce",
        "window_dropout": 0.0,
        "trainable": "lora",
        "train_feature_maps": False,
        "lora_rank": 8,
        "lora_alpha": 16.0,
    },
}


def available_presets() -> tuple[str, ...]:
    """Return the names of the presets, sorted."""
    return tuple(sorted(PRESETS))


def preset(name: str) -> dict[str, Any]:
    """Return what a preset changes in the defaults.

    Raises:
        ArgumentError: If there is no such preset.
    """
    if name not in PRESETS:
        raise ArgumentError("preset", "be a known preset", name, "Use one of those", available=available_presets())
    return dict(PRESETS[name])


def over_preset(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings over those of a preset, and these over ``defaults``.

    A ``student`` goes on as it was converted, so what a preset says of conversion is left out beside one.

    Raises:
        ArgumentError: If there is no such preset.
    """
    named, defaults = preset(name), defaults or {}
    if {**defaults, **values}.get("student") is not None:
        named = {one: value for one, value in named.items() if one not in (*CONVERSION, *CHOSEN)}
    return {**defaults, **named, **values}
