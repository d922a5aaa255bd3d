"""What the retrieval suite shows of results: sentences, headlines, pictures and tables.

A form that is held out of training says what a model can do, a trained one what it was drilled in; and real text is
harder to find something in than noise. So each of these stands by itself, held-out forms in text first.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from hf_linear_attn.evaluation import view
from hf_linear_attn.evaluation.figures import Axes, HeatCell, Series, heat_map, short_number
from hf_linear_attn.evaluation.scores import by_length, out_of_reach
from hf_linear_attn.evaluation.statistics import EFFECTIVE_THRESHOLD
from hf_linear_attn.evaluation.view import Results, Row

# A score is kept, or not, where the other model has one to keep.
_WORTH_KEEPING = 0.5
_MARKS = {"unsupported": "n/a", "out-of-memory": "OOM"}


@dataclass(frozen=True, order=True)
class Kind:
    """Tasks that may be looked at together.

    Args:
        trained: Whether training may have had their forms.
        noise: Whether their needles are hidden in noise.
        haystack: What they are hidden in; empty for tasks without needles.
    """

    trained: bool
    noise: bool
    haystack: str

    def __str__(self) -> str:
        forms = "trained forms" if self.trained else "held-out forms"
        return f"{forms} in {self.haystack}" if self.haystack else forms


def kind_of(cell: Row) -> Kind:
    """Return a cell's kind; results that do not say it are of trained forms in noise, for there was nothing else."""
    haystack = cell.get("haystack", "noise") or ""
    return Kind(not cell.get("held_out", False), haystack in ("noise", ""), haystack)


def kinds_of(results: Results) -> dict[Kind, list[str]]:
    """Return the tasks of each kind, held-out forms in text first."""
    found: dict[Kind, dict[str, None]] = {}
    for cell in results["cells"]:
        found.setdefault(kind_of(cell), {})[cell["task"]] = None
    return {kind: list(found[kind]) for kind in sorted(found)}


def _unasked(results: Results) -> dict[str, list[int]]:
    """Return the lengths at which the teacher itself fails a task: nothing is asked of others there."""
    teachers = view.teachers_of(results)
    return out_of_reach(results["cells"], teachers[0]) if teachers else {}


def sentences(results: Results) -> list[str]:
    """Say how far each model holds a task, what is not asked, what can be guessed, and who cannot read how much."""
    found = []
    first = results["model"]["name"]
    for task in dict.fromkeys(row["task"] for row in results["effective_length"]):
        rows = {row["model"]: row for row in results["effective_length"] if row["task"] == task}
        if first in rows:
            others = "".join(f"; {name} {_reach(row)}" for name, row in rows.items() if name != first)
            found.append(f"{task}: {first} holds {_reach(rows[first])}{others}.")
    for task, lengths in _unasked(results).items():
        found.append(
            f"{task}: {view.teachers_of(results)[0]} itself finds no more than by chance at "
            f"{', '.join(map(view.tokens, lengths))} tokens, so nothing is asked of the others there."
        )
    worst = max((floor["score"] for floor in results["floors"] if floor["score"] is not None), default=None)
    if worst is not None:
        found.append(f"With the needle cut out of the prompt, no model scores above {worst:.0%}.")
    for model in dict.fromkeys(cell["model"] for cell in results["cells"]):
        beyond = [c["length"] for c in results["cells"] if c["model"] == model and c["status"] == "unsupported"]
        if beyond:
            found.append(f"{model} cannot read {view.tokens(min(beyond))} tokens or more: its positions end before.")
    return found


def headlines(results: Results) -> list[view.Headline]:
    """Say how much of the other model's score was kept, for each kind of task, held-out forms in text first."""
    return [one for kind, tasks in kinds_of(results).items() for one in _kept(results, kind, tasks)]


def _kept(results: Results, kind: Kind, tasks: Collection[str]) -> list[view.Headline]:
    """Say it of the longest length at which the other model has a score to keep."""
    first, other = results["model"]["name"], view.other_of(results)
    unasked = _unasked(results)
    mine, theirs = (_by_task(results, name, tasks, unasked) for name in (first, other))
    if not mine:
        if not _by_task(results, first, tasks, {}):
            return []
        detail = f"the {other} itself finds no more than by chance: {', '.join(tasks)}"
        return [view.Headline("-", f"nothing asked: {kind}", detail)]
    shared = [length for length in mine if set(mine[length]) == set(theirs.get(length, {}))]
    length = max(mine)
    kept = None
    beside: dict[str, str] = {}
    if shared:
        worth = [length for length in shared if _mean(theirs[length]) >= _WORTH_KEEPING]
        length = max(worth) if worth else max(shared, key=lambda length: _mean(theirs[length]))
        kept = _mean(mine[length]) / _mean(theirs[length]) if _mean(theirs[length]) else None
        beside = {task: f" ({other} {row['score']:.0%})" for task, row in theirs[length].items()}
    skipped = [task for task in tasks if length in unasked.get(task, ())]
    counts = " or ".join(dict.fromkeys(str(row["n"]) for row in mine[length].values()))
    scores = (f"{task} {row['score']:.0%}{beside.get(task, '')}" for task, row in mine[length].items())
    detail = f"{', '.join(scores)}; n = {counts}"
    if skipped:
        detail += f"; not asked, for the {other} fails: {', '.join(skipped)}"
    at = f"at {view.tokens(length)} tokens: {kind}"
    if kept is None:
        return [view.Headline(f"{_mean(mine[length]):.0%}", f"score {at}", detail)]
    return [view.Headline(f"{kept:.0%}", f"of the {other}'s score kept {at}", detail)]


def pictures(results: Results) -> list[view.Section]:
    """Draw scores by length for each kind of task, by number of pairs, and by depth and length."""
    kinds = kinds_of(results)
    by_length_too = [
        view.Section(
            f"Score by length: {kind}",
            _ABOUT[kind.trained] + " All depths together, with Wilson's 95% interval. The dotted line is RULER's "
            f"threshold for an effective length, {100 * EFFECTIVE_THRESHOLD:.1f}%.",
            [picture for task in tasks for picture in _lines(results, task)],
        )
        for kind, tasks in kinds.items()
    ]
    return [
        *by_length_too,
        view.Section(
            "Score by number of pairs",
            "How many facts of one form a model can hold; one of them is asked. All depths together, with Wilson's 95% "
            "interval. A guess among n values that were read is right once in n.",
            _capacity(results),
        ),
        view.Section(
            "Score by depth and length",
            "Depth is where the asked needle stands: 0% is the start of the context, 100% right before the question.",
            [
                picture
                for tasks in kinds.values()
                for task in tasks
                for model in view.numbers_of(results)
                for picture in _map(results, task, model)
            ],
            legend=False,
        ),
    ]


_ABOUT = {
    True: "Training may have had samples of these very forms: what is measured is rehearsed.",
    False: "No training of this project ever has these forms or their words.",
}


def tables(results: Results) -> list[view.Table]:
    """Return effective lengths, differences on the same prompts, and every cell."""
    lengths: view.Columns = {
        "model": ("model", str),
        "task": ("task", str),
        "tokens": ("tokens", view.tokens),
        "status": ("status", str),
        "at least": ("at_least", view.tokens),
        "at most": ("at_most", view.tokens),
    }
    paired: view.Columns = {
        "model": ("model", str),
        "other": ("other", str),
        "task": ("task", str),
        "length": ("length", view.tokens),
        "n": ("n", str),
        "difference": ("difference", lambda share: f"{100 * share:+.1f} points"),
        "95% interval": ("ci95", lambda ci95: f"{100 * ci95[0]:+.1f} to {100 * ci95[1]:+.1f}"),
        "wins": ("wins", str),
        "losses": ("losses", str),
        "McNemar p": ("p_value", "{:.3g}".format),
    }
    columns: view.Columns = {
        "model": ("model", str),
        "task": ("task", str),
        "form": ("form", str),
        "haystack": ("haystack", str),
        "length": ("length", view.tokens),
        "depth": ("depth", "{:g}%".format),
        "n": ("n", str),
        "score": ("score", view.percent),
        "95% interval": ("ci95", view.interval),
        "nulls": ("nulls", str),
    }
    cells = [
        {**row, "form": "trained" if kind_of(row).trained else "held out", "haystack": kind_of(row).haystack or None}
        | ({"task": f"{row['task']} without needle", "depth": None} if part == "floors" else {})
        for part in ("cells", "capacity", "floors")
        for row in results[part]
    ]
    return [
        view.table("Effective length", results["effective_length"], lengths),
        view.table("Difference on the same prompts", results["paired"], paired),
        view.table("Retrieval cells", cells, columns, status="score"),
    ]


def _by_task(
    results: Results, model: str | None, tasks: Iterable[str], unasked: Mapping[str, Collection[int]]
) -> dict[int, dict[str, Row]]:
    """Return a model's scores, all depths together, by length and task, without those that are not asked for."""
    found: dict[int, dict[str, Row]] = {}
    for task in tasks if model else ():
        for row in by_length(results["cells"], str(model), task):
            if row["length"] not in unasked.get(task, ()):
                found.setdefault(row["length"], {})[task] = row
    return found


def _mean(rows: Mapping[str, Row]) -> float:
    return fmean(row["score"] for row in rows.values())


def _reach(row: Row) -> str:
    if row["status"] == "undetermined":
        if row["at_least"]:
            least, most = view.tokens(row["at_least"]), view.tokens(row["at_most"])
            return f"to {least} tokens, possibly {most} (too few samples to tell)"
        return f"to at most {view.tokens(row['at_most'])} tokens (too few samples to tell)"
    if row["tokens"] is None:
        return "at no tested length"
    return f"to {view.tokens(row['tokens'])} tokens" + (
        ", the longest tested" if row["tokens"] == row["longest_tested"] else ""
    )


def _lines(results: Results, task: str) -> list[view.Picture]:
    rows = {model: by_length(results["cells"], model, task) for model in view.numbers_of(results)}
    series = [
        Series(model, n, [(r["length"], r["score"], *r["ci95"]) for r in rows[model]])
        for model, n in view.numbers_of(results).items()
    ]
    axes = Axes("context length in tokens", "score", y_range=(0.0, 1.03), percent=True, threshold=EFFECTIVE_THRESHOLD)
    n = max((row["n"] for found in rows.values() for row in found), default=0)
    return view.chart(f"score-{view.slug(task)}", f"{task}: score by length", f"n = {n} per length", series, axes)


def _capacity(results: Results) -> list[view.Picture]:
    """Draw the score by number of pairs, for each form and length of which several numbers were asked."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for cell in results["capacity"]:
        form = cell["task"].replace(f":pairs={cell['pairs']}", "")
        groups.setdefault((form, cell["length"]), {})[cell["pairs"]] = cell["task"]
    drawn = []
    for (form, length), tasks in groups.items():
        cells = [cell for cell in results["capacity"] if cell["length"] == length]
        series = []
        for model, number in view.numbers_of(results).items():
            points = [
                (pairs, row["score"], *row["ci95"])
                for pairs, task in sorted(tasks.items())
                for row in by_length(cells, model, task)
            ]
            series.append(Series(model, number, points))
        axes = Axes("pairs in the context", "score", y_range=(0.0, 1.03), percent=True)
        title = f"{form}: score by number of pairs"
        drawn += view.chart(
            f"capacity-{view.slug(form)}-{length}", title, f"{view.tokens(length)} tokens", series, axes
        )
    return drawn


def _map(results: Results, task: str, model: str) -> list[view.Picture]:
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
    return [view.Picture(f"heat-{view.slug(task)}-{view.slug(model)}", title, subtitle, svg)]


def _field(cell: Row | None) -> HeatCell:
    if cell is None:
        return HeatCell("", None, "not measured")
    if cell["status"] != "ok":
        return HeatCell(_MARKS[cell["status"]], None, str(cell["reason"]))
    low, high = cell["ci95"]
    hint = f"{cell['score']:.1%} of {cell['n']}, 95% interval {low:.1%} to {high:.1%}"
    return HeatCell(f"{100 * cell['score']:.0f}", cell["score"], hint)
