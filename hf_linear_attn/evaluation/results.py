"""`results.json`: its schema, what is derived from the cells, and how several runs become one."""

import copy
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from typing import Any

import jsonschema

from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.evaluation.suite import suites, with_parts
from hf_linear_attn.evaluation.view import Results, models_of
from hf_linear_attn.files import write_atomic

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"
_LONGEST_REASON = 200
_KNOWN_EXTRAS = {
    "linear_branch_off_nats": "Switching the linear branch off costs {value:.3g} nats per token beyond the window.",
}


def schema() -> dict[str, Any]:
    """Return the JSON schema of `results.json`; the parts of a user's own suites may hold anything."""
    text = files("hf_linear_attn.evaluation").joinpath("results.schema.json").read_text(encoding="utf-8")
    found = dict(json.loads(text))
    for name in with_parts({}):
        found["properties"].setdefault(name, {})
    return found


def add_comparisons(results: Results) -> dict[str, Any]:
    """Return results with all that follows from their parts."""
    found = with_parts(results)
    for suite in suites():
        found |= suite.conclude(found)
    extras = [
        _KNOWN_EXTRAS[name].format(value=value) if name in _KNOWN_EXTRAS else str(value)
        for name, value in found["extras"].items()
        if name.startswith("note ") or (name in _KNOWN_EXTRAS and isinstance(value, int | float))
    ]
    quality = [sentence for suite in suites() for sentence in suite.quality(found)]
    speed = [sentence for suite in suites() for sentence in suite.speed(found)]
    # What depends on a clock stands apart.
    found["summary"] = {"quality": [*quality, *extras], "speed": speed}
    return found


def without_times(results: Results) -> dict[str, Any]:
    """Return results without any duration or what follows from one: the part that a resumed run reproduces."""
    kept = copy.deepcopy(with_parts(results))
    kept.pop("timing", None)
    kept["summary"] = {"quality": kept["summary"]["quality"]}
    for suite in suites():
        kept = suite.without_times(kept)
    return kept


def write_results(results: Mapping[str, Any], folder: Path) -> Path:
    """Write `results.json` at once or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    try:
        text = json.dumps(results, indent=1, allow_nan=False)
    except ValueError as error:
        rule, remedy = "compute finite numbers", "A weight is NaN, or its dtype holds too little: look at the model."
        raise ArgumentError("model", rule, "NaN or infinity", remedy) from error
    write_atomic(path, text + "\n")
    return path


def read_results(path: Path) -> dict[str, Any]:
    """Read a `results.json`, or the one in a folder, and hold it against the schema.

    Raises:
        CheckpointError: If it is missing, damaged, changed or of another schema version.
    """
    path = path / RESULTS_FILE if path.is_dir() else path
    try:
        results = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        version = results["schema_version"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(
            "paths", "be results of an evaluation", str(path), f"Check the file: {error!r}."
        ) from error
    if version != SCHEMA_VERSION:
        raise CheckpointError("schema_version", f"be {SCHEMA_VERSION}", version, "Evaluate again.", where=str(path))
    # Parts of suites that are not here are left as they are.
    validator = jsonschema.Draft202012Validator(schema() | {"additionalProperties": True})
    wrong = jsonschema.exceptions.best_match(validator.iter_errors(results))
    if wrong is not None:
        rule = "be results of an evaluation"
        remedy = f"{wrong.message[-_LONGEST_REASON:]}: restore the file, or evaluate again."
        raise CheckpointError("paths", rule, str(path), remedy, where=wrong.json_path.removeprefix("$."))
    return dict(results)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of a result")


def combine(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Put the models of several runs side by side.

    A model that several runs share, told by its fingerprint, appears once. Scores are compared in pairs only where the
    prompts are the same.

    Args:
        runs: Label and results of each run, at least one; the first one's model leads.
    """
    lead = copy.deepcopy(with_parts(runs[0][1]))
    known: dict[str, str] = {}
    models: list[dict[str, Any]] = []
    merged = with_parts({})
    notes = []
    for label, run in runs:
        named = _renamed(with_parts(run), _rename(label, run, known, models))
        notes += [suite.merge(merged, named, lead, label) for suite in suites()]
    numbered = enumerate((note for note in notes if note), 1)
    combined = {
        **lead,
        **merged,
        "model": models[0],
        "references": models[1:],
        "extras": {**lead["extras"], **{f"note {n}": note for n, note in numbered}},
        "args": {**lead["args"], "runs": [label for label, _ in runs]},
    }
    return add_comparisons(combined)


def _rename(label: str, run: Mapping[str, Any], known: dict[str, str], models: list[dict[str, Any]]) -> dict[str, str]:
    """Name a run's models among those of all runs, each as the first run that had it."""
    names: dict[str, str] = {}
    for model in models_of(run):
        shared = known.get(model["fingerprint"])
        if shared is None:
            taken = {other["name"] for other in models}
            wanted = label if model["role"] == "model" else model["name"]
            wanted = wanted if wanted not in taken else f"{label} {model['name']}"
            numbered = (f"{wanted} ({n})" for n in count(2))
            name = next(name for name in chain([wanted], numbered) if name not in taken)
            role = "baseline" if models and model["role"] == "model" else model["role"]
            models.append({**model, "name": name, "role": role})
            known[model["fingerprint"]] = shared = name
        names[model["name"]] = shared
    return names


def _renamed(results: Results, names: Mapping[str, str]) -> dict[str, Any]:
    """Return results in which every row bears its model's new name."""

    def rename(value: Any) -> Any:
        if isinstance(value, list):
            return [rename(item) for item in value]
        if not isinstance(value, dict):
            return value
        found = {key: rename(item) for key, item in value.items()}
        return found | {"model": names[found["model"]]} if found.get("model") in names else found

    parts = {name for suite in suites() for name in suite.parts}
    return {name: rename(value) if name in parts else value for name, value in results.items()}
