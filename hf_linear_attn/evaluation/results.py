"""`results.json`: its schema, what is derived from the cells, and how several runs become one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_linear_attn.errors import CheckpointError
from hf_linear_attn.evaluation.latency import break_even
from hf_linear_attn.evaluation.retrieval import effective_lengths, paired_differences
from hf_linear_attn.evaluation.store import write_atomically
from hf_linear_attn.evaluation.summary import summarise

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"


def schema() -> dict[str, Any]:
    """Return the JSON schema of `results.json`."""
    text = files("hf_linear_attn.evaluation").joinpath("results.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def models_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of every model of a run, the one under test first."""
    return [results["model"], *results["references"]]


def add_comparisons(results: dict[str, Any]) -> dict[str, Any]:
    """Add to results all that follows from their cells, and return them."""
    first = results["model"]["name"]
    others = [reference["name"] for reference in results["references"]]
    results["effective_length"] = effective_lengths(results["cells"])
    results["paired"] = paired_differences(results["cells"], first, others)
    results["gap_closed"] = _gaps_closed(results)
    results["break_even"] = [break_even(results["latency"], first, other) for other in others if results["latency"]]
    results["summary"] = summarise(results)
    return results


def _gaps_closed(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `1 - (L_model - L_teacher) / (L_baseline - L_teacher)` for every baseline and length all could read."""
    teachers = [model["name"] for model in results["references"] if model["role"] == "teacher"]
    if results["perplexity"] is None or not teachers:
        return []
    losses = {
        (row["model"], row["length"]): row["nll_nats"]
        for row in results["perplexity"]["windows"]
        if row["status"] == "ok"
    }
    found = []
    for baseline in (model["name"] for model in results["references"] if model["role"] == "baseline"):
        for length in sorted({length for _, length in losses}):
            mine, teacher, theirs = (
                losses.get((name, length)) for name in (results["model"]["name"], teachers[0], baseline)
            )
            if mine is None or teacher is None or theirs is None or theirs <= teacher:
                continue
            found.append(
                {
                    "baseline": baseline,
                    "teacher": teachers[0],
                    "length": length,
                    "gap_closed": 1 - (mine - teacher) / (theirs - teacher),
                }
            )
    return found


def without_times(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results without any duration or what follows from one: the part that a resumed run reproduces."""
    kept = copy.deepcopy(dict(results))
    for name in ("timing", "break_even"):
        kept.pop(name, None)
    kept["summary"] = {"quality": kept["summary"]["quality"]}
    for cell in kept["latency"]:
        for column in [column for column in cell if "_ms" in column or column.endswith("_per_s")]:
            del cell[column]
    return kept


def write_results(results: Mapping[str, Any], folder: Path) -> Path:
    """Write `results.json` at once or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    write_atomically(path, json.dumps(results, indent=1, allow_nan=False) + "\n")
    return path


def read_results(path: Path) -> dict[str, Any]:
    """Read a `results.json`, or the one in a folder.

    Raises:
        CheckpointError: If it is missing, damaged or of another schema version.
    """
    path = path / RESULTS_FILE if path.is_dir() else path
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        version = results["schema_version"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(
            "paths", "be results of an evaluation", str(path), f"Check the file: {error!r}."
        ) from error
    if version != SCHEMA_VERSION:
        raise CheckpointError("schema_version", f"be {SCHEMA_VERSION}", version, "Evaluate again.", where=str(path))
    return dict(results)


def combine(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Put the models of several runs side by side.

    A model that several runs share, told by its fingerprint, appears once. Scores are compared in pairs only where the
    prompts are the same.

    Args:
        runs: Label and results of each run, at least one; the first one's model leads.
    """
    lead = copy.deepcopy(dict(runs[0][1]))
    known: dict[str, str] = {}
    models: list[dict[str, Any]] = []
    merged: dict[str, Any] = {"cells": [], "floors": [], "latency": [], "lm_eval": []}
    text: dict[str, Any] | None = None
    perplexity: dict[str, list[dict[str, Any]]] = {"windows": [], "by_position": [], "growing_context": []}
    notes: list[str] = []
    for label, run in runs:
        names = _rename(label, run, known, models)
        rename = _renamer(names)
        for part, rows in merged.items():
            _extend(rows, [rename(row) for row in run[part]])
        found = run["perplexity"]
        if found is not None:
            if text is not None and text["sha256"] != found["text"]["sha256"]:
                notes.append(f"Perplexities of {label} are left out: they were measured on another text.")
                continue
            text = found["text"]
            for part, rows in perplexity.items():
                _extend(rows, [rename(row) for row in found[part]])
        if run["environment"] != runs[0][1]["environment"] and run["latency"]:
            notes.append(f"Times of {label} were taken in another environment.")
    combined = {
        **lead,
        **merged,
        "model": models[0],
        "references": models[1:],
        "perplexity": None if text is None else {"text": text, **perplexity},
        "extras": {**lead["extras"], **{f"note {n}": note for n, note in enumerate(notes, 1)}},
        "args": {**lead["args"], "runs": [label for label, _ in runs]},
    }
    return add_comparisons(combined)


def _rename(
    label: str, run: Mapping[str, Any], known: dict[str, str], models: list[dict[str, Any]]
) -> dict[str, str | None]:
    """Name a run's models among those of all runs: None for one whose name stays as another run gave it."""
    names: dict[str, str | None] = {}
    for model in models_of(run):
        shared = known.get(model["fingerprint"])
        if shared is None:
            taken = {other["name"] for other in models}
            wanted = label if model["role"] == "model" else model["name"]
            wanted = wanted if wanted not in taken else f"{label} {model['name']}"
            n = 2
            name = wanted
            while name in taken:
                name, n = f"{wanted} ({n})", n + 1
            role = "baseline" if models and model["role"] == "model" else model["role"]
            models.append({**model, "name": name, "role": role})
            known[model["fingerprint"]] = shared = name
        names[model["name"]] = shared
    return names


def _renamer(names: Mapping[str, str | None]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda row: {**row, "model": names[row["model"]]}


_KEY = ("model", "task", "length", "depth", "window_length", "start", "metric")


def _extend(rows: list[dict[str, Any]], more: Sequence[dict[str, Any]]) -> None:
    """Add rows that are not there yet."""
    have = {tuple(row.get(name) for name in _KEY) for row in rows}
    rows.extend(row for row in more if tuple(row.get(name) for name in _KEY) not in have)
