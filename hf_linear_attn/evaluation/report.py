"""`report.html`, self-contained, and `report.md`, from `results.json` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_linear_attn.evaluation.figures import (
    Axes,
    HeatCell,
    Series,
    heat_map,
    legend_swatch,
    line_chart,
    short_number,
)
from hf_linear_attn.evaluation.results import models_of
from hf_linear_attn.evaluation.retrieval import by_length
from hf_linear_attn.evaluation.statistics import EFFECTIVE_THRESHOLD
from hf_linear_attn.evaluation.store import write_atomically

Table = tuple[Sequence[str], list[list[str]]]
Picture = tuple[str, str, str, str]
"""File name, title, subtitle and SVG of a picture."""


def write_report(results: Mapping[str, Any], output_dir: str | Path, *, plots: bool = True) -> Path:
    """Write `report.html`, `report.md` and the pictures as `figures/*.svg`.

    Args:
        results: What `evaluate` or `compare` returned, or a `results.json`.
        output_dir: The folder; made where it is missing.
        plots: Whether to draw the pictures; default True.

    Returns:
        The path of `report.html`.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    sections = _sections(results) if plots else []
    css = files("hf_linear_attn.evaluation").joinpath("report.css").read_text(encoding="utf-8")
    if plots:
        (folder / "figures").mkdir(exist_ok=True)
        for _, _, pictures in sections:
            for name, _, _, svg in pictures:
                write_atomically(folder / "figures" / f"{name}.svg", standalone(svg, css) + "\n")
    write_atomically(folder / "report.md", _markdown(results, sections))
    path = folder / "report.html"
    write_atomically(path, _html(results, sections, css))
    return path


def standalone(svg: str, css: str) -> str:
    """Return an SVG that carries its colours and a background."""
    head, _, rest = svg.partition(">")
    background = '<rect width="100%" height="100%" style="fill:var(--card)"/>'
    return f'{head} font-family="system-ui, sans-serif"><style>{css}</style>{background}{rest}'


def _numbers(results: Mapping[str, Any]) -> dict[str, int]:
    return {model["name"]: number for number, model in enumerate(models_of(results))}


def _tasks(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["task"] for cell in results["cells"]))


Section = tuple[str, str, list[Picture]]


def _sections(results: Mapping[str, Any]) -> list[Section]:
    """Draw every picture there is something to draw for."""
    found = [
        (
            "Score by length",
            "All depths together, with Wilson's 95% interval. The dotted line is RULER's threshold for an effective "
            f"length, {100 * EFFECTIVE_THRESHOLD:.1f}%.",
            _score_pictures(results),
        ),
        (
            "Score by depth and length",
            "Depth is where the asked needle stands: 0% is the start of the context, 100% right before the question.",
            _heat_pictures(results),
        ),
        (
            "Perplexity",
            "Lower is better; every token is scored once, and whiskers are bootstrap 95% intervals over windows.",
            _perplexity_pictures(results),
        ),
        (
            "Speed and memory",
            "Both axes are logarithmic, lower is better. Dotted verticals mark the break-even length.",
            _latency_pictures(results),
        ),
    ]
    return [section for section in found if section[2]]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _score_pictures(results: Mapping[str, Any]) -> list[Picture]:
    pictures = []
    for task in _tasks(results):
        series = []
        for model, number in _numbers(results).items():
            rows = by_length(results["cells"], model, task)
            series.append(Series(model, number, [(r["length"], r["score"], *r["ci95"]) for r in rows]))
        if any(line.points for line in series):
            axes = Axes(
                "context length in tokens",
                "score",
                y_range=(0.0, 1.03),
                percent=True,
                threshold=EFFECTIVE_THRESHOLD,
            )
            n = max(len(r["scores"]) for m in _numbers(results) for r in by_length(results["cells"], m, task))
            title = f"{task}: score by length"
            pictures.append((f"score-{_slug(task)}", title, f"n = {n} per length", line_chart(title, series, axes)))
    return pictures


def _heat_pictures(results: Mapping[str, Any]) -> list[Picture]:
    pictures = []
    for task in _tasks(results):
        for model in _numbers(results):
            cells = [c for c in results["cells"] if c["task"] == task and c["model"] == model]
            if not cells or cells[0]["depth"] is None:
                continue
            lengths = sorted({cell["length"] for cell in cells})
            depths = sorted({cell["depth"] for cell in cells})
            at = {(cell["depth"], cell["length"]): cell for cell in cells}
            fields = [[_heat_cell(at.get((depth, length))) for length in lengths] for depth in depths]
            title = f"{task}: {model}"
            svg = heat_map(
                f"{title}, score in percent by depth and length",
                [short_number(length) for length in lengths],
                [f"{depth:g}%" for depth in depths],
                fields,
                "context length in tokens",
                "needle depth",
            )
            subtitle = f"score in percent, n = {max(cell['n'] for cell in cells)} per field"
            pictures.append((f"heat-{_slug(task)}-{_slug(model)}", title, subtitle, svg))
    return pictures


_STATUS_MARKS = {"unsupported": "n/a", "out-of-memory": "OOM"}


def _heat_cell(cell: Mapping[str, Any] | None) -> HeatCell:
    if cell is None:
        return HeatCell("", None, "not measured")
    if cell["status"] != "ok":
        return HeatCell(_STATUS_MARKS[cell["status"]], None, str(cell["reason"]))
    low, high = cell["ci95"]
    hint = f"{cell['score']:.1%} of {cell['n']}, 95% interval {low:.1%} to {high:.1%}"
    return HeatCell(f"{100 * cell['score']:.0f}", cell["score"], hint)


def _lines(
    results: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    point: Callable[[Mapping[str, Any]], tuple[float, float, float | None, float | None] | None],
) -> list[Series]:
    series = []
    for model, number in _numbers(results).items():
        points = [point(row) for row in rows if row["model"] == model and row.get("status", "ok") == "ok"]
        series.append(Series(model, number, [p for p in points if p is not None]))
    return series


def _picture(name: str, title: str, subtitle: str, series: Sequence[Series], axes: Axes) -> list[Picture]:
    return [(name, title, subtitle, line_chart(title, series, axes))] if any(s.points for s in series) else []


def _perplexity_pictures(results: Mapping[str, Any]) -> list[Picture]:
    found = results["perplexity"]
    if found is None:
        return []

    def by_window(row: Mapping[str, Any]) -> tuple[float, float, float | None, float | None]:
        return row["length"], row["perplexity"], *row["perplexity_ci95"]

    def loss(row: Mapping[str, Any]) -> tuple[float, float, float | None, float | None]:
        return row["stop"], row["nll_nats"], *row["nll_nats_ci95"]

    def divergence(row: Mapping[str, Any]) -> tuple[float, float, None, None] | None:
        return None if row["kl_nats"] is None else (row["stop"], row["kl_nats"], None, None)

    def agreement(row: Mapping[str, Any]) -> tuple[float, float, None, None] | None:
        return None if row["agreement"] is None else (row["stop"], row["agreement"], None, None)

    positions = found["by_position"]
    longest = max((row["window_length"] for row in positions), default=0)
    windows = f"in windows of up to {longest:,} tokens"
    place = "position in the window, up to"
    return [
        *_picture(
            "nll-by-position", "Loss by position", f"nats per token, {windows}",
            _lines(results, positions, loss), Axes(place, "nats per token"),
        ),
        *_picture(
            "growing-context", "The same final tokens under growing context", "perplexity of the same tokens",
            _lines(results, found["growing_context"], by_window), Axes("context length in tokens", "perplexity"),
        ),
        *_picture(
            "perplexity-by-window", "Perplexity of the whole text", "by window length, each from a fresh state",
            _lines(results, found["windows"], by_window), Axes("window length in tokens", "perplexity"),
        ),
        *_picture(
            "kl-by-position", "Distance from the teacher by position", f"KL(teacher || model), {windows}",
            _lines(results, positions, divergence), Axes(place, "nats per token"),
        ),
        *_picture(
            "agreement-by-position", "Same top token as the teacher", windows,
            _lines(results, positions, agreement), Axes(place, "share of tokens", percent=True),
        ),
    ]  # fmt: skip


_LATENCY_PICTURES = (
    ("decode", "Decode", "milliseconds per token", "decode_ms_per_token", "ms per token", 1.0),
    ("prefill", "Prefill", "time to first token", "ttft_ms", "ms", 1.0),
    ("memory", "Peak memory above the weights", "prefill and decode", "peak_mib", "MiB", 1.0),
    ("cache", "Cache", "kept from token to token", "cache_bytes", "KiB", 1 / 1024),
)


def _latency_pictures(results: Mapping[str, Any]) -> list[Picture]:
    pictures: list[Picture] = []
    sizes = sorted({row["batch_size"] for row in results["latency"] if row["status"] == "ok"})
    batch = f", batch of {' or '.join(map(str, sizes))}"
    for name, title, subtitle, column, unit, scale in _LATENCY_PICTURES:

        def point(
            row: Mapping[str, Any], column: str = column, scale: float = scale
        ) -> tuple[float, float, float | None, float | None]:
            low, high = row.get(f"{column}_iqr") or (None, None)
            return (
                row["length"],
                row[column] * scale,
                None if low is None else low * scale,
                None if high is None else high * scale,
            )

        marks = [(row[name], f"= {row['other']} at {row[name]:,.0f}") for row in results["break_even"] if row.get(name)]
        series = _lines(results, results["latency"], point)
        axes = Axes("context length in tokens", unit, log_y=True, marks=marks)
        pictures += _picture(f"latency-{name}", title, f"{subtitle}{batch}", series, axes)
    return pictures


def _status(row: Mapping[str, Any], text: str) -> str:
    return text if row["status"] == "ok" else row["status"]


def _number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _interval(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{100 * pair[0]:.1f}-{100 * pair[1]:.1f}%"


def _tables(results: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Return every table there is something to put into."""
    tables: list[tuple[str, Table]] = [
        (
            "Effective length",
            (
                ("model", "task", "tokens", "status", "at least", "at most"),
                [
                    [
                        row["model"],
                        row["task"],
                        *(
                            "-" if row[name] is None else f"{row[name]:,}" if name != "status" else row[name]
                            for name in ("tokens", "status", "at_least", "at_most")
                        ),
                    ]
                    for row in results["effective_length"]
                ],
            ),
        ),
        (
            "Difference on the same prompts",
            (
                ("model", "other", "task", "length", "n", "difference", "95% interval", "wins", "losses", "McNemar p"),
                [
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
                ],
            ),
        ),
        (
            "Perplexity by window length",
            (
                ("model", "length", "tokens", "perplexity", "bits per byte", "KL to teacher", "same top token"),
                [
                    [
                        row["model"],
                        f"{row['length']:,}",
                        f"{row['tokens']:,}",
                        _status(row, _number(row["perplexity"])),
                        _number(row["bits_per_byte"]),
                        _number(row["kl_nats"], 3),
                        _percent(row["agreement"]),
                    ]
                    for row in (results["perplexity"] or {"windows": []})["windows"]
                ],
            ),
        ),
        (
            "Gap closed",
            (
                ("baseline", "teacher", "length", "gap closed"),
                [
                    [row["baseline"], row["teacher"], f"{row['length']:,}", _percent(row["gap_closed"])]
                    for row in results["gap_closed"]
                ],
            ),
        ),
        (
            "Latency and memory",
            (
                (
                    "model",
                    "length",
                    "batch",
                    "repeats",
                    "prefill tok/s",
                    "first token ms",
                    "decode ms/token",
                    "peak MiB",
                    "cache bytes",
                ),
                [
                    [
                        row["model"],
                        f"{row['length']:,}",
                        *("-" if row[name] is None else str(row[name]) for name in ("batch_size", "repeats")),
                        _status(row, _number(row["prefill_tokens_per_s"])),
                        _number(row["ttft_ms"]),
                        _number(row["decode_ms_per_token"], 3),
                        _number(row["peak_mib"]),
                        "-" if row["cache_bytes"] is None else f"{row['cache_bytes']:,}",
                    ]
                    for row in results["latency"]
                ],
            ),
        ),
        (
            "lm-evaluation-harness",
            (
                ("model", "task", "length", "metric", "value", "95% interval", "n"),
                [
                    [
                        row["model"],
                        row["task"],
                        "-" if row["length"] is None else f"{row['length']:,}",
                        row["metric"],
                        _number(row["value"]),
                        _interval(row["ci95"]),
                        str(row["n"]),
                    ]
                    for row in results["lm_eval"]
                ],
            ),
        ),
        (
            "Further figures",
            (
                ("name", "value"),
                [
                    [name, _number(value) if isinstance(value, int | float) else str(value)]
                    for name, value in results["extras"].items()
                ],
            ),
        ),
        (
            "Retrieval cells",
            (
                ("model", "task", "length", "depth", "n", "score", "95% interval", "nulls"),
                [
                    [
                        row["model"],
                        row["task"] + (" without needle" if floor else ""),
                        f"{row['length']:,}",
                        "-" if row["depth"] is None or floor else f"{row['depth']:g}%",
                        str(row["n"]),
                        _status(row, _percent(row["score"])),
                        _interval(row["ci95"]),
                        str(row["nulls"]),
                    ]
                    for floor, rows in ((False, results["cells"]), (True, results["floors"]))
                    for row in rows
                ],
            ),
        ),
    ]
    return [(title, table) for title, table in tables if table[1]]


_FACTS = (
    "role", "path", "class", "parameters", "dtype", "attention", "attention_backend", "feature_map", "window",
    "patched_layers", "trained_length", "position_limit", "fingerprint",
)  # fmt: skip


def _provenance(results: Mapping[str, Any]) -> list[tuple[str, Table]]:
    models = models_of(results)

    def text(value: Any) -> str:
        if isinstance(value, list):
            return f"{len(value)}: {', '.join(map(str, value))}" if value else "none"
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value:,}"
        return "-" if value is None else str(value)

    facts = [[name.replace("_", " "), *(text(model[name]) for model in models)] for name in _FACTS]
    tables: list[tuple[str, Table]] = [("Models", (("", *(model["name"] for model in models)), facts))]
    if results["perplexity"] is not None:
        rows = [[name.replace("_", " "), text(value)] for name, value in results["perplexity"]["text"].items()]
        tables.append(("Text", (("", ""), rows)))
    environment = [[name.replace("_", " "), text(value)] for name, value in results["environment"].items()]
    tables.append(("Environment", (("", ""), environment)))
    timing = [[name, str(value)] for name, value in results.get("timing", {}).items()]
    arguments = [[name, text(value)] for name, value in results["args"].items()]
    tables.append(("Settings", (("", ""), [*arguments, *timing])))
    return tables


def _title(results: Mapping[str, Any]) -> tuple[str, str]:
    model = results["model"]
    others = [reference["name"] for reference in results["references"]]
    name = model["path"] or f"{model['class']}, {model['name']}"
    beside = f", beside {', '.join(others)}" if others else ""
    kind = f"{model['attention']} attention" + (f" ({model['feature_map']})" if model["feature_map"] else "")
    return "Long-context evaluation", f"{name}: {kind}, {model['parameters']:,} parameters{beside}"


def _html_table(table: Table, *, wrap: bool = False) -> str:
    header, rows = table

    def cell(tag: str, column: int, text: str) -> str:
        numeric = bool(text) and (text[0].isdigit() or text[0] in "+--")
        cls = "wrap" if wrap and column else "" if numeric and column else "text"
        return f'<{tag} class="{cls}">{escape(text)}</{tag}>' if cls else f"<{tag}>{escape(text)}</{tag}>"

    columns = range(len(header))
    numeric = {c for c in columns if c and rows[0][c] and (rows[0][c][0].isdigit() or rows[0][c][0] in "+--")}
    head = "".join(
        f"<th{'' if c in numeric and not wrap else ' class=text'}>{escape(text)}</th>" for c, text in enumerate(header)
    )
    body = "".join("<tr>" + "".join(cell("td", c, row[c]) for c in columns) + "</tr>" for row in rows)
    shown = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<div class="scroll" tabindex="0"><table>{shown}<tbody>{body}</tbody></table></div>'


def _html(results: Mapping[str, Any], sections: Sequence[Section], css: str) -> str:
    title, subtitle = _title(results)
    sentences = [*results["summary"]["quality"], *results["summary"]["speed"]]
    summary = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    legend = "".join(
        f"<li>{legend_swatch(number)}<span>{escape(name)}</span></li>" for name, number in _numbers(results).items()
    )
    body = []
    for heading, text, pictures in sections:
        figures = "".join(
            f'<figure id="{name}"><figcaption>{escape(caption)}<span>{escape(note)}</span></figcaption>{svg}</figure>'
            for name, caption, note, svg in pictures
        )
        key = "" if heading == "Score by depth and length" else f'<ul class="legend">{legend}</ul>'
        body.append(
            f'<h2>{escape(heading)}</h2><p class="soft">{escape(text)}</p>{key}<div class="grid">{figures}</div>'
        )
    tables = _tables(results)
    if tables:
        body.append("<h2>Tables</h2>")
    for heading, table in tables:
        opened = " open" if len(table[1]) <= 12 else ""
        body.append(f"<details{opened}><summary>{escape(heading)}</summary>{_html_table(table)}</details>")
    body.append("<h2>Provenance</h2>")
    for heading, table in _provenance(results):
        opened = " open" if heading == "Models" else ""
        body.append(f"<details{opened}><summary>{escape(heading)}</summary>{_html_table(table, wrap=True)}</details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}: {escape(subtitle)}</title><style>\n{css}</style></head>\n<body><main>"
        f'<h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p>'
        + (f'<ul class="summary">{summary}</ul>' if summary else "")
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def _markdown_table(table: Table) -> str:
    header, rows = table

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([row(header), row(["---"] * len(header)), *(row(cells) for cells in rows)])


def _markdown(results: Mapping[str, Any], sections: Sequence[Section]) -> str:
    title, subtitle = _title(results)
    blocks = [f"# {title}", subtitle]
    sentences = [*results["summary"]["quality"], *results["summary"]["speed"]]
    if sentences:
        blocks.append("\n".join(f"* {sentence}" for sentence in sentences))
    for heading, text, pictures in sections:
        blocks += [f"## {heading}", text]
        blocks += [f"![{caption}](figures/{name}.svg)" for name, caption, _, _ in pictures]
    for heading, table in _tables(results):
        blocks += [f"## {heading}", _markdown_table(table)]
    for heading, table in _provenance(results):
        blocks += [f"## {heading}", _markdown_table(table)]
    return "\n\n".join(blocks) + "\n"
