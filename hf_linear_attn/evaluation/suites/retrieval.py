"""The retrieval suite: generated tasks, scored by what the answer contains, by length and depth."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.answering import Answerer
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.figures import Axes, HeatCell, Series, heat_map, short_number
from hf_linear_attn.evaluation.generation import shared_prefix
from hf_linear_attn.evaluation.prompts import Group, Slot, Template, build_prompt, make_template
from hf_linear_attn.evaluation.scores import by_length, effective_lengths, paired_differences
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.statistics import EFFECTIVE_THRESHOLD, wilson_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.tasks import Sample
from hf_linear_attn.evaluation.tasks.base import parse_task
from hf_linear_attn.evaluation.view import (
    Headline,
    Picture,
    Results,
    Row,
    Section,
    Table,
    chart,
    interval,
    numbers_of,
    or_status,
    other_of,
    percent,
    slug,
    tokens,
)

FLOOR_DEPTH = 50.0
# A score is kept, or not, where the other model has one to keep.
_WORTH_KEEPING = 0.5
_MARKS = {"unsupported": "n/a", "out-of-memory": "OOM"}


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of the retrieval suite.

    Args:
        tasks: Retrieval tasks; settings follow a colon, as in kv_recall:pairs=8.
        depths: Where the asked needle stands, in percent of the haystack.
        num_samples: Samples per retrieval cell.
        chat_template: Put each prompt into the tokenizer's chat template.
    """

    tasks: tuple[str, ...] = ("passkey", "niah_single", "kv_recall")
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    num_samples: int = 50
    chat_template: bool = False

    def __post_init__(self) -> None:
        check_settings(self, num_samples=1)
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ArgumentError("depths", "lie in 0..100", depth, "Pass it in percent.")
        for task in self.tasks:
            parse_task(task)
        object.__setattr__(self, "depths", tuple(sorted(self.depths)))


@register_suite
class Retrieval(Suite):
    """Can the model still find what stands far back?"""

    name = "retrieval"
    title = "retrieval suite"
    Settings = RetrievalSettings
    parts = {"cells": [], "floors": []}  # noqa: RUF012
    row_key = ("model", "task", "length", "depth")
    place = 10
    by_default = True
    alone = False
    own: RetrievalSettings

    @cached_property
    def template(self) -> Template:
        """The chat template around each prompt; empty unless asked for."""
        return make_template(self.tokenizer) if self.own.chat_template else Template()

    @cached_property
    def groups(self) -> list[Group]:
        """The work: each task at each length, and its no-context floor at the shortest."""
        groups = []
        for spec in self.own.tasks:
            needs_depth = parse_task(spec).needs_depth
            depths: tuple[float | None, ...] = self.own.depths if needs_depth else (None,)
            groups += [Group(spec, length, depths) for length in self.settings.lengths]
            if needs_depth:
                groups.append(Group(spec, self.settings.lengths[0], (FLOOR_DEPTH,), floor=True))
        return groups

    def check(self) -> None:
        """Refuse what cannot be built.

        Raises:
            ArgumentError: If a task cannot fit into a length, or a template leaves too few tokens.
        """
        spent = self.template.cost(self.tokenizer)
        for spec in self.own.tasks:
            shortest = parse_task(spec).min_length(self.tokenizer)
            for length in self.settings.lengths:
                if length < shortest:
                    raise ArgumentError(
                        "lengths",
                        f"be at least {shortest + spent} tokens",
                        length,
                        "Ask for a longer context or leave the task out.",
                        where=f"task {spec!r}",
                    )
                if length - spent < shortest:
                    raise ArgumentError(
                        "chat_template",
                        f"leave {shortest} tokens for the task",
                        length - spent,
                        "Ask for a longer context or leave the template out.",
                        where=f"task {spec!r} at {length} tokens",
                    )

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the tokens of all prompts, judged by two samples of each kind."""
        read, seconds = 0, 0.0
        for group in self.groups:
            for depth in group.depths:
                built = [self._build(group, (depth, index)) for index in range(2)]
                shared = shared_prefix([prompt for _, prompt in built])
                answer = built[0][0].max_new_tokens
                for subject in self.subjects:
                    read += self.own.num_samples * group.length
                    if subject.name in paces and subject.refusal(group.length) is None:
                        pace = paces[subject.name]
                        answer_s = answer * pace.step_s(group.length) / self.settings.batch_size
                        seconds += self.own.num_samples * (pace.read_s(group.length, shared) + answer_s)
        return Plan(read, read, seconds)

    def _build(self, group: Group, slot: Slot) -> tuple[Sample, Tensor]:
        task = parse_task(group.spec)
        return build_prompt(task, group, *slot, self.tokenizer, self.template, self.settings.seed)

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Answer every sample that the store does not hold yet."""
        for subject in self.subjects:
            answerer = Answerer(subject, self.tokenizer, self.settings.batch_size, self.settings.prefill_chunk)
            for group in self.groups:
                slots = group.slots(self.own.num_samples)
                if subject.refusal(group.length):
                    advance(group.length * len(slots))
                else:
                    answerer.answer(group, slots, self._build, store, advance, rank=rank, world=world)

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's records into cells and floors."""
        found: dict[str, list[dict[str, Any]]] = {"cells": [], "floors": []}
        for subject in self.subjects:
            for group in self.groups:
                for depth in group.depths:
                    found["floors" if group.floor else "cells"].append(self._cell(subject, group, depth, store))
        return found

    def _cell(self, subject: Subject, group: Group, depth: float | None, store: SampleStore) -> dict[str, Any]:
        cell = {
            "model": subject.name, "task": group.spec, "length": group.length, "depth": depth, "n": 0, "score": None,
            "ci95": None, "nulls": 0, "measured_tokens": None, "status": "ok", "reason": None, "prompts_sha256": None,
            "scores": [],
        }  # fmt: skip
        refusal = subject.refusal(group.length)
        if refusal:
            return {**cell, "status": "unsupported", "reason": refusal}
        records = []
        for index in range(self.own.num_samples):
            name = group.sample_id(subject.name, depth, index)
            record = store.get(store.key(subject.fingerprint, name))
            if record is None:
                raise RuntimeError(f"no record of sample {name}")
            records.append(record)
        if any(record["status"] != "ok" for record in records):
            return {**cell, "status": "out-of-memory", "reason": "The model ran out of memory at this length."}
        scores = [float(record["score"]) for record in records]
        prompts = hashlib.sha256("".join(record["prompt_sha256"] for record in records).encode()).hexdigest()
        return {
            **cell,
            "n": len(scores),
            "score": sum(scores) / len(scores),
            "ci95": list(wilson_interval(sum(scores), len(scores))),
            "nulls": sum(not record["text"].strip() for record in records),
            "measured_tokens": sum(record["measured_tokens"] for record in records) / len(records),
            "prompts_sha256": prompts,
            "scores": scores,
        }

    @classmethod
    def conclude(cls, results: Results) -> dict[str, Any]:
        """Find effective lengths, and compare the model with the others on the same prompts."""
        others = [reference["name"] for reference in results["references"]]
        return {
            "effective_length": effective_lengths(results["cells"]),
            "paired": paired_differences(results["cells"], results["model"]["name"], others),
        }

    @classmethod
    def quality(cls, results: Results) -> list[str]:
        """Say how far each model holds a task, what can be guessed, and who cannot read how much."""
        found = []
        first = results["model"]["name"]
        for task in dict.fromkeys(row["task"] for row in results["effective_length"]):
            rows = {row["model"]: row for row in results["effective_length"] if row["task"] == task}
            if first in rows:
                others = "".join(f"; {name} {_reach(row)}" for name, row in rows.items() if name != first)
                found.append(f"{task}: {first} holds {_reach(rows[first])}{others}.")
        worst = max((floor["score"] for floor in results["floors"] if floor["score"] is not None), default=None)
        if worst is not None:
            found.append(f"With the needle cut out of the prompt, no model scores above {worst:.0%}.")
        for model in dict.fromkeys(cell["model"] for cell in results["cells"]):
            beyond = [c["length"] for c in results["cells"] if c["model"] == model and c["status"] == "unsupported"]
            if beyond:
                found.append(f"{model} cannot read {tokens(min(beyond))} tokens or more: its positions end before.")
        return found

    @classmethod
    def headlines(cls, results: Results) -> list[Headline]:
        """Say how much of the other model's score was kept, at the longest length where it has one to keep."""
        first, other = results["model"]["name"], other_of(results)
        mine, theirs = _by_task(results, first), _by_task(results, other)
        if not mine:
            return []
        shared = [length for length in mine if set(mine[length]) == set(theirs.get(length, {}))]
        if not shared:
            length = max(mine)
            return [Headline(f"{_mean(mine[length]):.0%}", f"score at {tokens(length)} tokens", _list(mine[length]))]
        worth = [length for length in shared if _mean(theirs[length]) >= _WORTH_KEEPING]
        length = max(worth) if worth else max(shared, key=lambda length: _mean(theirs[length]))
        kept = _mean(mine[length]) / _mean(theirs[length]) if _mean(theirs[length]) else None
        beside = {task: f" ({other} {row['score']:.0%})" for task, row in theirs[length].items()}
        detail = _list(mine[length], beside)
        if kept is None:
            return [Headline(f"{_mean(mine[length]):.0%}", f"score at {tokens(length)} tokens", detail)]
        return [Headline(f"{kept:.0%}", f"of the {other}'s score kept at {tokens(length)} tokens", detail)]

    @classmethod
    def pictures(cls, results: Results) -> list[Section]:
        """Draw scores by length, and by depth and length."""
        tasks = list(dict.fromkeys(cell["task"] for cell in results["cells"]))
        return [
            Section(
                "Score by length",
                "All depths together, with Wilson's 95% interval. The dotted line is RULER's threshold for an "
                f"effective length, {100 * EFFECTIVE_THRESHOLD:.1f}%.",
                [picture for task in tasks for picture in _lines(results, task)],
            ),
            Section(
                "Score by depth and length",
                "Depth is where the asked needle stands: 0% is the start of the context, 100% right before the "
                "question.",
                [picture for task in tasks for model in numbers_of(results) for picture in _map(results, task, model)],
                legend=False,
            ),
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Return effective lengths, differences on the same prompts, and every cell."""
        lengths = [
            [row["model"], row["task"], *(_known(row[name]) for name in ("tokens", "status", "at_least", "at_most"))]
            for row in results["effective_length"]
        ]
        paired = [
            [
                row["model"],
                row["other"],
                row["task"],
                f"{row['length']:,}",
                str(row["n"]),
                f"{100 * row['difference']:+.1f} points",
                f"{100 * row['ci95'][0]:+.1f} to {100 * row['ci95'][1]:+.1f}",
                str(row["wins"]),
                str(row["losses"]),
                f"{row['p_value']:.3g}",
            ]
            for row in results["paired"]
        ]
        cells = [
            [
                row["model"],
                row["task"] + (" without needle" if floor else ""),
                f"{row['length']:,}",
                "-" if row["depth"] is None or floor else f"{row['depth']:g}%",
                str(row["n"]),
                or_status(row, percent(row["score"])),
                interval(row["ci95"]),
                str(row["nulls"]),
            ]
            for floor, rows in ((False, results["cells"]), (True, results["floors"]))
            for row in rows
        ]
        header = ("model", "other", "task", "length", "n", "difference", "95% interval", "wins", "losses", "McNemar p")
        cell_header = ("model", "task", "length", "depth", "n", "score", "95% interval", "nulls")
        return [
            Table("Effective length", ("model", "task", "tokens", "status", "at least", "at most"), lengths),
            Table("Difference on the same prompts", header, paired),
            Table("Retrieval cells", cell_header, cells),
        ]


def _known(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _by_task(results: Results, model: str | None) -> dict[int, dict[str, Row]]:
    """Return a model's scores, all depths together, by length and task."""
    found: dict[int, dict[str, Row]] = {}
    for task in dict.fromkeys(cell["task"] for cell in results["cells"]) if model else ():
        for row in by_length(results["cells"], str(model), task):
            found.setdefault(row["length"], {})[task] = row
    return found


def _mean(rows: Mapping[str, Row]) -> float:
    return fmean(row["score"] for row in rows.values())


def _list(rows: Mapping[str, Row], beside: Mapping[str, str] | None = None) -> str:
    """List the score of each task, and of how many samples."""
    counts = " or ".join(dict.fromkeys(str(row["n"]) for row in rows.values()))
    scores = ", ".join(f"{task} {row['score']:.0%}{(beside or {}).get(task, '')}" for task, row in rows.items())
    return f"{scores}; n = {counts}"


def _reach(row: Row) -> str:
    if row["status"] == "undetermined":
        if row["at_least"]:
            return f"to {tokens(row['at_least'])} tokens, possibly {tokens(row['at_most'])} (too few samples to tell)"
        return f"to at most {tokens(row['at_most'])} tokens (too few samples to tell)"
    if row["tokens"] is None:
        return "at no tested length"
    return f"to {tokens(row['tokens'])} tokens" + (
        ", the longest tested" if row["tokens"] == row["longest_tested"] else ""
    )


def _lines(results: Results, task: str) -> list[Picture]:
    rows = {model: by_length(results["cells"], model, task) for model in numbers_of(results)}
    series = [
        Series(model, n, [(r["length"], r["score"], *r["ci95"]) for r in rows[model]])
        for model, n in numbers_of(results).items()
    ]
    axes = Axes("context length in tokens", "score", y_range=(0.0, 1.03), percent=True, threshold=EFFECTIVE_THRESHOLD)
    n = max((row["n"] for found in rows.values() for row in found), default=0)
    return chart(f"score-{slug(task)}", f"{task}: score by length", f"n = {n} per length", series, axes)


def _map(results: Results, task: str, model: str) -> list[Picture]:
    cells = [cell for cell in results["cells"] if cell["task"] == task and cell["model"] == model]
    if not cells or cells[0]["depth"] is None:
        return []
    lengths, depths = (sorted({cell[name] for cell in cells}) for name in ("length", "depth"))
    at = {(cell["depth"], cell["length"]): cell for cell in cells}
    title = f"{task}: {model}"
    svg = heat_map(
        f"{title}, score in percent by depth and length",
        [short_number(length) for length in lengths],
        [f"{depth:g}%" for depth in depths],
        [[_field(at.get((depth, length))) for length in lengths] for depth in depths],
        "context length in tokens",
        "needle depth",
    )
    subtitle = f"score in percent, n = {max(cell['n'] for cell in cells)} per field"
    return [Picture(f"heat-{slug(task)}-{slug(model)}", title, subtitle, svg)]


def _field(cell: Row | None) -> HeatCell:
    if cell is None:
        return HeatCell("", None, "not measured")
    if cell["status"] != "ok":
        return HeatCell(_MARKS[cell["status"]], None, str(cell["reason"]))
    low, high = cell["ci95"]
    hint = f"{cell['score']:.1%} of {cell['n']}, 95% interval {low:.1%} to {high:.1%}"
    return HeatCell(f"{100 * cell['score']:.0f}", cell["score"], hint)
