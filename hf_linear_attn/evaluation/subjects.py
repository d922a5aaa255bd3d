"""The models under evaluation: loading them, what is known about them, how far their positions reach."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.encoders import is_encoder
from hf_linear_attn.errors import ArgumentError, UnsupportedError, explain
from hf_linear_attn.evaluation.generation import device_of
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.loading import Kind, find_device, load_model, position_limit, process_state, trained_positions
from hf_linear_attn.patching import unpatch_model


@dataclass(frozen=True)
class Subject:
    """One model of a run.

    Args:
        name: What the report calls it; unique within a run.
        role: `"model"` (the one under test), `"teacher"` or `"baseline"`.
        model: A causal language model in evaluation mode.
        path: Where it was loaded from, or None for a model that was in memory.
    """

    name: str
    role: str
    model: PreTrainedModel
    path: str | None

    @property
    def device(self) -> torch.device:
        """Return the device of the model's input."""
        return device_of(self.model)

    @property
    def linear_attention(self) -> Mapping[str, Any] | None:
        """Return the patch settings the model carries, or None if no layer is patched."""
        settings = getattr(self.model.config, "linear_attention", None)
        return settings if settings else None

    @cached_property
    def fingerprint(self) -> str:
        """Return a SHA-256 hash of the weights, the architecture and the patch settings."""
        digest = hashlib.sha256(type(self.model).__name__.encode())
        digest.update(json.dumps(self.linear_attention, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @cached_property
    def patched_layers(self) -> list[str]:
        """Return the names of the attention modules that were converted."""
        return [
            name.removesuffix(".linear_attention")
            for name, _ in self.model.named_modules()
            if name.endswith(".linear_attention")
        ]

    @cached_property
    def vocabulary(self) -> int:
        """Return the number of logits per token."""
        head: nn.Module | None = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        # An encoder may have none.
        table = self.model.get_input_embeddings() if head is None else head  # type: ignore[no-untyped-call]
        return int(table.weight.shape[0])  # type: ignore[index]

    @cached_property
    def position_limit(self) -> int | None:
        """Return the number of positions a table of the model holds, or None where positions do not run out."""
        return position_limit(self.model)

    @property
    def trained_length(self) -> int | None:
        """Return the length the patched layers were trained at, else the length the configuration declares."""
        return (self.linear_attention or {}).get("trained_length") or trained_positions(self.model)

    def refusal(self, length: int) -> str | None:
        """Say why the model cannot read `length` tokens, or None if it can."""
        if self.position_limit is None or length <= self.position_limit:
            return None
        return explain(
            "lengths",
            f"stay within the {self.position_limit} learned positions",
            length,
            "Leave the length out for this model.",
            where=self.name,
        )

    def facts(self) -> dict[str, Any]:
        """Return the provenance of the model, ready for JSON."""
        settings = self.linear_attention
        config = self.model.config
        return {
            "name": self.name,
            "role": self.role,
            "path": self.path,
            "fingerprint": self.fingerprint,
            "class": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "vocabulary": self.vocabulary,
            "layers": getattr(config.get_text_config(), "num_hidden_layers", None),
            "attention": "linear" if settings else "softmax",
            "attention_backend": getattr(config, "_attn_implementation", None),
            "patched_layers": self.patched_layers,
            "feature_map": settings.get("feature_map") if settings and settings.get("mix") != "window" else None,
            "window": settings.get("window") if settings else None,
            "linear_attention": json.loads(json.dumps(settings, default=str)) if settings else None,
            "trained_length": self.trained_length,
            "position_limit": self.position_limit,
        }


def check_vocabulary(teacher: Subject | None, subject: Subject) -> None:
    """Refuse a teacher, if there is one, that does not know the tokens of a model."""
    if teacher is not None and teacher.vocabulary != subject.vocabulary:
        rule = f"have the {subject.vocabulary} tokens of the model beside it"
        remedy = "Name the softmax model that it was made from, or leave it out."
        raise ArgumentError("teacher", rule, teacher.vocabulary, remedy, where=subject.name)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, subjects: Sequence[Subject]) -> None:
    """Refuse a tokenizer without any token that ends, begins or pads a text, or with tokens that models have not."""
    least = min(subjects, key=lambda subject: subject.vocabulary)
    if len(tokenizer) > least.vocabulary:
        remedy = "Pass the tokenizer that the model was trained with, or resize the model's embeddings."
        rule = f"have at most the model's {least.vocabulary} tokens"
        raise ArgumentError("tokenizer", rule, len(tokenizer), remedy, where=least.name)
    if tokenizer.eos_token_id is tokenizer.bos_token_id is tokenizer.pad_token_id is None:
        remedy = "Set tokenizer.eos_token to the token that ends a text."
        raise ArgumentError("tokenizer", "have an EOS, BOS or padding token", type(tokenizer).__name__, remedy)


def gather_subjects(
    settings: EvaluationSettings,
    model: PreTrainedModel | None,
    teacher: PreTrainedModel | None,
    baselines: Mapping[str, PreTrainedModel],
    kind: Kind,
) -> list[Subject]:
    """Load or take every model of a run, the one under test first.

    Raises:
        ArgumentError: If no model is given, or one is given twice, the teacher is patched, the device cannot be used,
            or `attn="softmax"` was asked for a patched model in memory.
        CheckpointError: If a path cannot be loaded.
        UnsupportedError: If a model is not of the kind, or `attn="linear"` was asked and no layer of the model under
            test is patched.
    """
    known = [id(one) for one in (model, teacher, *baselines.values()) if one is not None]
    if len(set(known)) != len(known):
        remedy = "patch_model works in place: load twice."
        raise ArgumentError("teacher", "be another object than `model`", "the same model", remedy)
    subjects = []
    for role, given, path in (("model", model, settings.model), ("teacher", teacher, settings.teacher)):
        if given is None and path is not None:
            device = find_device(settings.device) if settings.device else process_state().device
            local = settings.offline or os.path.isdir(path)
            loaded = load_model(path, role, kind=kind, local_files_only=local, dtype=settings.dtype)
            subjects.append(_prepare(Subject(role, role, loaded.to(device), path), settings, kind))  # type: ignore[arg-type]
        elif given is not None:
            subjects.append(_prepare(Subject(role, role, given, None), settings, kind))
        elif role == "model":
            raise ArgumentError(
                "model", "be a model or a path", None, "Pass model=..., or set the path in the settings."
            )
    for name, baseline in baselines.items():
        if name in ("model", "teacher"):
            raise ArgumentError("baselines", "have names of their own", name, "Choose another name.")
        subjects.append(_prepare(Subject(name, "baseline", baseline, None), settings, kind))
    return subjects


def _prepare(subject: Subject, settings: EvaluationSettings, kind: Kind) -> Subject:
    """Check a model and put it into evaluation mode."""
    model, called = subject.model, type(subject.model).__name__
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if kind == "causal" and (head is None or model.config.is_encoder_decoder):
        rule = "be a causal language model"
        raise UnsupportedError("model", rule, called, "Pass one with a head.", where=subject.name)
    if kind == "causal" and is_encoder(model):
        rule = "be a causal language model for these suites"
        raise UnsupportedError("model", rule, called, "Use the suite `embedding` for an encoder.", where=subject.name)
    model.train(False)
    patched = subject.linear_attention is not None
    if subject.role == "teacher" and patched:
        rule = "be a softmax model, and this one is patched"
        remedy = "Name the softmax model that it was made from; `compare` shows two students side by side."
        raise ArgumentError("teacher", rule, subject.path or called, remedy)
    if subject.role == "model" and settings.attn == "linear" and not patched:
        rule = "be 'softmax' or 'auto' for a model without a patched layer"
        remedy = "Call patch_model first, or load a folder that a patched model was saved to."
        raise UnsupportedError("attn", rule, "linear", remedy, where=subject.name)
    if subject.role == "model" and settings.attn == "softmax" and patched:
        if subject.path is None:
            rule = "be 'linear' or 'auto' for a patched model in memory"
            raise ArgumentError("attn", rule, "softmax", "Call unpatch_model first.", where=subject.name)
        unpatch_model(model)
    return subject
