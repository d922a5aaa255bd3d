"""Look at a model before or after its conversion, and write down what is there."""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.diagnostics.approximation import ApproximationSettings, Attention, first_matrices, measure_layer
from hf_linear_attn.diagnostics.branches import branch_usage
from hf_linear_attn.diagnostics.capture import AttentionInputs, observable_layers, observe_attention
from hf_linear_attn.diagnostics.report import EXACT, PICTURED_TOKENS, Matrices, summary_table, write_report
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.generation import evaluating
from hf_linear_attn.feature_maps import FeatureMap, available_feature_maps, get_feature_map
from hf_linear_attn.feature_maps.base import feature_map_class
from hf_linear_attn.files import output_folder, paths_read, write_atomic
from hf_linear_attn.loading import position_limit
from hf_linear_attn.patching import is_patched

logger = logging.getLogger(__name__)

PICTURED_LAYERS = 4
TENTHS = 10
MOST_KEPT = 20
"""Kept tokens that a report lists."""
DEFAULT_TOKENS = 1024
"""Most tokens that are looked at, unless told otherwise."""


def inspect_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    output_dir: str | Path | None = None,
    *,
    overwrite: bool = False,
    maps: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
    settings: ApproximationSettings | None = None,
) -> dict[str, Any]:
    """Compare feature maps with a softmax model's attention, or see what each branch of a patched model does.

    Learned maps are compared as they start, before any training.

    Args:
        model: A Transformers causal language model, softmax or patched.
        tokenizer: Its tokenizer.
        text: Text to look at; what goes beyond ``max_tokens`` is left out.
        output_dir: Where ``report.html``, ``inspection.json`` and ``table.md`` are written; None for nowhere. Without
            matplotlib the report has no pictures.
        overwrite: Whether to replace an earlier report there.
        maps: Registered names, or names with the options of each; defaults to all maps. Softmax models only.
        max_tokens: Most tokens, >= 2; None for 1024, or the model's positions where they are fewer.
        settings: What is measured, and in how much memory; softmax models only.

    Returns:
        What is written to ``inspection.json``: ``model``, ``tokens``, ``settings``, and ``layers`` as from
        :func:`measure_layer` with a ``summary`` by map, or for a patched model ``branches`` as from
        :func:`branch_usage`, and where it keeps keys ``kept`` as from :func:`summarise_kept`.

    Raises:
        ArgumentError: If an argument is out of range, a map unknown, the text too short, what the model computes not
            finite, or the folder not empty, the model's, or not to be written.
        UnsupportedError: If the model's attention cannot be observed.

    Example:
        >>> from hf_linear_attn.diagnostics import inspect_model
        >>> report = inspect_model(model, tokenizer, text, "inspection", maps=["elu", "hedgehog"])  # doctest: +SKIP
    """
    if output_dir is not None:
        read = paths_read(None, (), model=model, tokenizer=tokenizer)
        output_folder(output_dir, inputs=read, overwrite=overwrite)
    ids = _tokens(model, tokenizer, text, max_tokens)
    device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
    results: dict[str, Any] = {
        "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
        "architecture": type(model).__name__,
        "tokens": ids.shape[1],
    }
    with evaluating(model):
        if is_patched(model):
            if maps is not None:
                raise ArgumentError("maps", "be None for a patched model", maps, "Call unpatch_model to compare maps.")
            results["settings"] = dict(model.config.linear_attention)
            results["branches"] = branch_usage(model, ids.to(device))
            _check_finite(math.isfinite(results["branches"]["loss_nats"]), type(model).__name__)
            if "kept_at" in results["branches"]:
                results["kept"] = summarise_kept(results["branches"]["kept_at"], ids[0].tolist(), tokenizer)
            matrices: Matrices = {}
        else:
            settings = settings or ApproximationSettings()
            results["settings"] = asdict(settings)
            results["layers"], matrices = _compare(model, ids.to(device), _options(maps), settings)
            results["summary"] = summarise(results["layers"])
    if output_dir is not None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "inspection.json", json.dumps(results, indent=1) + "\n")
        write_atomic(folder / "table.md", summary_table(results))
        write_report(results, matrices, folder / "report.html")
    return results


def _tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int | None
) -> torch.Tensor:
    """Return the first tokens of a text, ``[1, T]``, as many as may be looked at."""
    positions = position_limit(model)
    if max_tokens is None:
        max_tokens = min(DEFAULT_TOKENS, positions or DEFAULT_TOKENS)
    if max_tokens < 2:
        raise ArgumentError("max_tokens", "be at least 2", max_tokens, f"The default is {DEFAULT_TOKENS}.")
    # A token is a few characters: tokenising a whole book to look at its first page would take minutes.
    ids: torch.Tensor = tokenizer(text[: 20 * max_tokens], return_tensors="pt").input_ids[:, :max_tokens]
    if ids.shape[1] < 2:
        raise ArgumentError("text", "have at least 2 tokens", text, "Pass more text.")
    if positions is not None and ids.shape[1] > positions:
        rule = f"be at most {positions}, for which the model has positions"
        raise ArgumentError("max_tokens", rule, max_tokens, "Lower it, or leave it out.", where=type(model).__name__)
    return ids


def _check_finite(finite: bool, where: str) -> None:
    if not finite:
        remedy = "A weight is NaN, or its dtype holds too little: look at the model."
        raise ArgumentError("model", "compute finite numbers", "NaN or infinity", remedy, where=where)


def _options(maps: Sequence[str] | Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    if maps is None:
        maps = available_feature_maps()
    if isinstance(maps, str):
        raise ArgumentError("maps", "be a list of names", maps, f"Pass [{maps!r}].")
    options = {name: dict(maps[name]) if isinstance(maps, Mapping) else {} for name in maps}
    if not options:
        raise ArgumentError(
            "maps", "name at least one map", maps, "Use some of those", available=available_feature_maps()
        )
    for name in options:
        feature_map_class(name)
    return options


@torch.no_grad()
def _compare(
    model: PreTrainedModel, ids: torch.Tensor, options: Mapping[str, Mapping[str, Any]], settings: ApproximationSettings
) -> tuple[list[dict[str, Any]], Matrices]:
    found = [layer.index for layer in observable_layers(model).values()]
    step = max(1, -(-len(found) // PICTURED_LAYERS))
    pictured = set(found[::step])
    layers: list[dict[str, Any]] = []
    matrices: Matrices = {}

    def measure(inputs: AttentionInputs) -> None:
        _check_finite(all(bool(x.isfinite().all()) for x in (inputs.q, inputs.k, inputs.v)), inputs.name)
        sizes = inputs.q.shape[-1], inputs.q.shape[1], inputs.k.shape[1]
        maps: dict[str, FeatureMap] = {
            name: get_feature_map(name, *sizes, scaling=inputs.scaling, **given).to(inputs.q.device)
            for name, given in options.items()
        }
        layers.append(measure_layer(inputs, maps, settings))
        logger.info("measured %d maps on %s", len(maps), inputs.name)
        if inputs.index in pictured:
            entropies = layers[-1]["exact"]["entropy_nats"]
            head = entropies.index(min(entropies))
            matrices[inputs.index, head] = {
                name: first_matrices(Attention(inputs, phi, settings), PICTURED_TOKENS)[head].cpu()
                for name, phi in [(EXACT, None), *maps.items()]
            }

    with observe_attention(model, measure):
        model(input_ids=ids, use_cache=False)
    return layers, matrices


def summarise(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average what was measured over layers and heads, for exact softmax attention and each map.

    Args:
        layers: As from :func:`measure_layer`.

    Returns:
        ``exact`` and by name ``maps``: every number that is measured per head, and ``feature_dim``; maps with the
        smallest ``output_error`` first.
    """
    names = sorted(
        layers[0]["maps"], key=lambda name: fmean(e for layer in layers for e in layer["maps"][name]["output_error"])
    )
    return {
        "exact": _means([layer["exact"] for layer in layers]),
        "maps": {name: _means([layer["maps"][name] for layer in layers]) for name in names},
    }


def summarise_kept(
    kept_at: Mapping[str, Sequence[Sequence[int]]], ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Count which keys are kept at a text's end, over layers and key heads.

    Args:
        kept_at: As from :func:`branch_usage`.
        ids: The text's tokens.
        tokenizer: Theirs.

    Returns:
        ``by_depth``, the share of the kept keys that stand in each tenth of the text, and ``tokens``, those that are
        kept by most: ``token``, ``position``, and ``heads``, the share of key heads that
        keep that one.
    """
    heads = [head for layer in kept_at.values() for head in layer]
    counts = Counter(position for head in heads for position in head)
    total = max(counts.total(), 1)
    depths = Counter(position * TENTHS // len(ids) for position in counts.elements())
    return {
        "by_depth": [depths[n] / total for n in range(TENTHS)],
        "tokens": [
            {"token": tokenizer.decode([ids[position]]), "position": position, "heads": count / len(heads)}
            for position, count in counts.most_common(MOST_KEPT)
        ],
    }


def _means(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    means: dict[str, float] = {}
    for key, first in entries[0].items():
        if isinstance(first, list) and not isinstance(first[0], list):
            means[key] = fmean(value for entry in entries for value in entry[key])
        elif isinstance(first, int):
            means[key] = max(entry[key] for entry in entries)
    return means
