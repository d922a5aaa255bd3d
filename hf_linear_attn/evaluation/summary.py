"""What the figures say, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KNOWN_EXTRAS = {
    "linear_branch_off_nats": "Switching the linear branch off costs {value:.3g} nats per token beyond the window.",
}


def tokens(number: float) -> str:
    """Write a number of tokens."""
    return f"{round(number):,}"


def times(ratio: float) -> str:
    """Write a ratio with two significant digits."""
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def summarise(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the sentences of a report: `quality`, and `speed` for whatever depends on a clock."""
    quality = [*_retrieval(results), *_perplexity(results), *_gaps(results), *_harness(results), *_extras(results)]
    return {"quality": quality, "speed": _speed(results)}


def _reach(row: Mapping[str, Any]) -> str:
    if row["status"] == "undetermined":
        if row["at_least"]:
            return f"to {tokens(row['at_least'])} tokens, possibly {tokens(row['at_most'])} (too few samples to tell)"
        return f"to at most {tokens(row['at_most'])} tokens (too few samples to tell)"
    if row["tokens"] is None:
        return "at no tested length"
    suffix = ", the longest tested" if row["tokens"] == row["longest_tested"] else ""
    return f"to {tokens(row['tokens'])} tokens{suffix}"


def _retrieval(results: Mapping[str, Any]) -> list[str]:
    sentences = []
    first = results["model"]["name"]
    for task in dict.fromkeys(row["task"] for row in results["effective_length"]):
        rows = {row["model"]: row for row in results["effective_length"] if row["task"] == task}
        if first not in rows:
            continue
        others = [f"{name} {_reach(row)}" for name, row in rows.items() if name != first]
        sentences.append(f"{task}: {first} holds {_reach(rows[first])}" + "".join(f"; {o}" for o in others) + ".")
    worst = max((floor["score"] for floor in results["floors"] if floor["score"] is not None), default=None)
    if worst is not None:
        sentences.append(f"With the needle cut out of the prompt, no model scores above {worst:.0%}.")
    for model in dict.fromkeys(cell["model"] for cell in results["cells"]):
        beyond = [c["length"] for c in results["cells"] if c["model"] == model and c["status"] == "unsupported"]
        if beyond:
            sentences.append(f"{model} cannot read {tokens(min(beyond))} tokens or more: its positions end before.")
    return sentences


def _perplexity(results: Mapping[str, Any]) -> list[str]:
    if results["perplexity"] is None:
        return []
    rows = [row for row in results["perplexity"]["windows"] if row["status"] == "ok"]
    first = results["model"]["name"]
    mine = [row for row in rows if row["model"] == first]
    if not mine:
        return []
    at = max(mine, key=lambda row: row["length"])
    others = [
        f"{row['model']} {row['perplexity']:.4g}"
        for row in rows
        if row["length"] == at["length"] and row["model"] != first
    ]
    beside = f" ({', '.join(others)})" if others else ""
    sentence = (
        f"Perplexity in windows of {tokens(at['length'])} tokens is {at['perplexity']:.4g}{beside}, "
        f"{at['bits_per_byte']:.3f} bits per byte"
    )
    sentences = [sentence + "."]
    # Beyond the length a teacher was trained for, to be near it is no merit.
    known = [row for row in mine if row["kl_nats"] is not None]
    losses = {row["length"]: row["nll_nats"] for row in rows if row["model"] in _teachers(results)}
    if known and losses:
        best = min(known, key=lambda row: losses.get(row["length"], math.inf))
        sentences.append(
            f"Where the teacher reads best, in windows of {tokens(best['length'])} tokens, {first} is "
            f"{best['kl_nats']:.3g} nats from it and has the same top token {best['agreement']:.0%} of the time."
        )
    return sentences


def _teachers(results: Mapping[str, Any]) -> list[str]:
    return [model["name"] for model in results["references"] if model["role"] == "teacher"]


def _gaps(results: Mapping[str, Any]) -> list[str]:
    """Say how much of the gap is closed at the length the teacher reads best: elsewhere it is no goal."""
    sentences = []
    losses = {
        (row["model"], row["length"]): row["nll_nats"]
        for row in (results["perplexity"] or {"windows": []})["windows"]
        if row["status"] == "ok"
    }
    for baseline in dict.fromkeys(row["baseline"] for row in results["gap_closed"]):
        rows = [row for row in results["gap_closed"] if row["baseline"] == baseline]
        row = min(rows, key=lambda row: losses[row["teacher"], row["length"]])
        sentences.append(
            f"At {tokens(row['length'])} tokens {results['model']['name']} closes {row['gap_closed']:.0%} of the loss "
            f"between {baseline} and {row['teacher']}."
        )
    return sentences


def _harness(results: Mapping[str, Any]) -> list[str]:
    first = results["model"]["name"]
    rows = [row for row in results["lm_eval"] if row["model"] == first and row["status"] == "ok"]
    if not rows:
        return []
    listed = ", ".join(f"{row['task']} at {tokens(row['length'])}: {row['value']:.0%}" for row in rows)
    return [f"lm-evaluation-harness on {first}: {listed}."]


def _extras(results: Mapping[str, Any]) -> list[str]:
    sentences = []
    for name, value in results["extras"].items():
        if name in KNOWN_EXTRAS and isinstance(value, int | float):
            sentences.append(KNOWN_EXTRAS[name].format(value=value))
        elif name.startswith("note "):
            sentences.append(str(value))
    return sentences


def _speed(results: Mapping[str, Any]) -> list[str]:
    first = results["model"]["name"]
    cells = {(c["model"], c["length"]): c for c in results["latency"] if c["status"] == "ok"}
    teachers = _teachers(results)
    other = teachers[0] if teachers else next((model["name"] for model in results["references"]), None)
    shared = [length for name, length in cells if name == first and (other, length) in cells]
    if not shared:
        return []
    at = max(shared)
    mine, theirs = cells[first, at], cells[other, at]
    compared = [
        _ratio("decode", theirs["decode_ms_per_token"] / mine["decode_ms_per_token"], "faster", "slower"),
        _ratio("prefill", theirs["ttft_ms"] / mine["ttft_ms"], "faster", "slower"),
        _ratio("the cache", theirs["cache_bytes"] / mine["cache_bytes"], "smaller", "larger"),
        _ratio("peak memory above the weights", theirs["peak_mib"] / mine["peak_mib"], "smaller", "larger"),
    ]
    batch = "" if mine["batch_size"] == 1 else f" in a batch of {mine['batch_size']}"
    sentences = [f"At {tokens(at)} tokens{batch}, {first} beside {other}: " + ", ".join(compared) + "."]
    for row in results["break_even"]:
        if row["other"] == other:
            places = [
                f"{name} from {tokens(row[name])} tokens" for name in ("prefill", "decode", "memory") if row[name]
            ]
            never = [name for name in ("prefill", "decode", "memory") if not row[name]]
            if places:
                sentences.append(f"{first} costs less than {other} in " + ", ".join(places) + ".")
            if never:
                sentences.append(
                    f"{first} does not cost less than {other} in {' or '.join(never)} at the tested lengths."
                )
    return sentences


def _ratio(what: str, ratio: float, better: str, worse: str) -> str:
    if times(max(ratio, 1 / ratio)) == times(1):
        return f"{what} about the same"
    return f"{what} {times(ratio)} {better}" if ratio >= 1 else f"{what} {times(1 / ratio)} {worse}"
