"""What follows from the cells of the retrieval suite: scores by length, effective lengths, paired differences."""

from collections.abc import Sequence
from typing import Any

from hf_linear_attn.evaluation.statistics import effective_length, paired_difference, wilson_interval

# Of a task that cannot be guessed.
_NEAR_NOTHING = 0.02


def by_length(cells: Sequence[dict[str, Any]], model: str, task: str) -> list[dict[str, Any]]:
    """Pool the depths of a task: one row per length in which every depth was measured."""
    rows = []
    mine = [cell for cell in cells if cell["model"] == model and cell["task"] == task]
    for length in sorted({cell["length"] for cell in mine}):
        at = [cell for cell in mine if cell["length"] == length]
        if all(cell["status"] == "ok" for cell in at):
            scores = [value for cell in at for value in cell["scores"]]
            low, high = wilson_interval(sum(scores), len(scores))
            rows.append(
                {
                    "length": length,
                    "n": len(scores),
                    "score": sum(scores) / len(scores),
                    "ci95": [low, high],
                    "scores": scores,
                    "prompts": [cell["prompts_sha256"] for cell in at],
                }
            )
    return rows


def out_of_reach(cells: Sequence[dict[str, Any]], teacher: str) -> dict[str, list[int]]:
    """Return the lengths at which a teacher's score is no better than chance, by task: 95% intervals tell."""
    found: dict[str, list[int]] = {}
    for task, chance in {cell["task"]: cell.get("chance", 0.0) for cell in cells}.items():
        for row in by_length(cells, teacher, task):
            if at_chance(row["ci95"], chance):
                found.setdefault(task, []).append(row["length"])
    return found


def at_chance(interval: Sequence[float], chance: float) -> bool:
    """Tell whether a score with this 95% interval is at or near what guessing finds."""
    return interval[0] <= max(chance, _NEAR_NOTHING)


def effective_lengths(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the effective length of every model on every task that was measured."""
    found = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        for task in dict.fromkeys(cell["task"] for cell in cells):
            rows = by_length(cells, model, task)
            if rows:
                length = effective_length([row["length"] for row in rows], [row["scores"] for row in rows])
                found.append({"model": model, "task": task, **length})
    return found


def paired_differences(cells: Sequence[dict[str, Any]], first: str, others: Sequence[str]) -> list[dict[str, Any]]:
    """Compare a model with others wherever both answered the very same prompts."""
    found = []
    for other in others:
        for task in dict.fromkeys(cell["task"] for cell in cells):
            theirs = {row["length"]: row for row in by_length(cells, other, task)}
            for row in by_length(cells, first, task):
                match = theirs.get(row["length"])
                if match is not None and match["prompts"] == row["prompts"]:
                    cell = {"model": first, "other": other, "task": task, "length": row["length"]}
                    found.append(cell | paired_difference(row["scores"], match["scores"]))
    return found
