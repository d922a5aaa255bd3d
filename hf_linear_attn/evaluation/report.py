"""`report.html`, self-contained, and `report.md`, from `results.json` alone: what the suites show, laid out."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Template

from hf_linear_attn.evaluation.figures import legend_swatch
from hf_linear_attn.evaluation.suite import suites, with_parts
from hf_linear_attn.evaluation.view import (
    Headline,
    Results,
    Section,
    Table,
    markdown_table,
    models_of,
    number,
    numbers_of,
)
from hf_linear_attn.files import write_atomic

_FACTS = (
    "role", "path", "class", "parameters", "dtype", "attention", "attention_backend", "feature_map", "window",
    "patched_layers", "trained_length", "position_limit", "fingerprint",
)  # fmt: skip
# A longer table is folded.
_OPEN_ROWS = 12


def write_report(results: Results, output_dir: str | Path, *, plots: bool = True) -> Path:
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
    results = with_parts(results)
    sections: list[Section] = []
    if plots:
        sections = [section for suite in suites() for section in suite.pictures(results) if section.pictures]
        figures = folder / "figures"
        if figures.is_symlink():
            # What it leads to may be anybody's.
            figures.unlink()
        figures.mkdir(exist_ok=True)
        for picture in (picture for section in sections for picture in section.pictures):
            write_atomic(figures / f"{picture.name}.svg", standalone(picture.svg) + "\n")
    write_atomic(folder / "report.md", _markdown(results, sections))
    path = folder / "report.html"
    write_atomic(path, _html(results, sections))
    return path


def _file(name: str) -> str:
    return files("hf_linear_attn.evaluation").joinpath(name).read_text(encoding="utf-8")


def standalone(svg: str) -> str:
    """Return an SVG that carries its colours and a background."""
    head, _, rest = svg.partition(">")
    background = '<rect width="100%" height="100%" style="fill:var(--card)"/>'
    return f'{head} font-family="system-ui, sans-serif"><style>{_file("report.css")}</style>{background}{rest}'


def headlines(results: Results) -> list[Headline]:
    """Return the figures of the first screen: what was kept, and what was gained."""
    filled = with_parts(results)
    return [headline for suite in suites() for headline in suite.headlines(filled)]


def _tables(results: Results) -> list[Table]:
    """Return every table there is something in."""
    tables = [table for suite in suites() for table in suite.tables(results)]
    rows = [
        [name, number(value) if isinstance(value, int | float) else str(value)]
        for name, value in results["extras"].items()
    ]
    # The longest tell the least at a glance.
    tables.sort(key=lambda table: len(table.rows) > 8 * _OPEN_ROWS)
    return [table for table in [*tables, Table("Further figures", ("name", "value"), rows)] if table.rows]


def _sentences(results: Results) -> list[str]:
    return [*results["summary"]["quality"], *results["summary"]["speed"]]


def _provenance(results: Results) -> list[Table]:
    models = models_of(results)

    def text(value: Any) -> str:
        if isinstance(value, list):
            return f"{len(value)}: {', '.join(map(str, value))}" if value else "none"
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value:,}"
        return "-" if value is None else str(value)

    def pairs(values: Results) -> list[list[str]]:
        return [[name.replace("_", " "), text(value)] for name, value in values.items()]

    facts = [[name.replace("_", " "), *(text(model[name]) for model in models)] for name in _FACTS]
    tables = [Table("Models", ("", *(model["name"] for model in models)), facts)]
    if results["perplexity"] is not None:
        tables.append(Table("Text", ("", ""), pairs(results["perplexity"]["text"])))
    tables.append(Table("Environment", ("", ""), pairs(results["environment"])))
    timing = [[name, str(value)] for name, value in results.get("timing", {}).items()]
    arguments = [[name, text(value)] for name, value in results["args"].items()]
    tables.append(Table("Settings", ("", ""), [*arguments, *timing]))
    return tables


def _title(results: Results) -> tuple[str, str]:
    model = results["model"]
    others = [reference["name"] for reference in results["references"]]
    name = model["path"] or f"{model['class']}, {model['name']}"
    beside = f", beside {', '.join(others)}" if others else ""
    kind = f"{model['attention']} attention" + (f" ({model['feature_map']})" if model["feature_map"] else "")
    if model.get("linear_attention") and not model["feature_map"]:
        settings = model["linear_attention"]
        kept = f" and {settings['kept']} kept keys" if settings.get("kept") else ""
        divided = ", divided among layers" if settings.get("per_layer") else ""
        kind = f"a window of {model['window']} tokens{kept}{divided}"
    return "Long-context evaluation", f"{name}: {kind}, {model['parameters']:,} parameters{beside}"


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text.startswith(("+", "-"))


def _html(results: Results, sections: Sequence[Section]) -> str:
    title, subtitle = _title(results)
    template = Template(
        _file("report.html"), autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    page: str = template.render(
        title=title,
        subtitle=subtitle,
        css=_file("report.css"),
        headlines=headlines(results),
        sentences=_sentences(results),
        sections=sections,
        legend=numbers_of(results),
        swatch=legend_swatch,
        tables=_tables(results),
        provenance=_provenance(results),
        open_rows=_OPEN_ROWS,
        is_number=_is_number,
    )
    return page


def _markdown(results: Results, sections: Sequence[Section]) -> str:
    title, subtitle = _title(results)
    blocks = [f"# {title}", subtitle]
    cards = headlines(results)
    if cards:
        rows = [[f"**{one.figure}**", one.label, one.detail] for one in cards]
        blocks.append(markdown_table(("", "", ""), rows))
    if _sentences(results):
        blocks += ["## In words", "\n".join(f"* {sentence}" for sentence in _sentences(results))]
    for section in sections:
        blocks += [f"## {section.title}", section.text]
        blocks += [f"![{picture.title}](figures/{picture.name}.svg)" for picture in section.pictures]
    for table in [*_tables(results), *_provenance(results)]:
        blocks += [f"## {table.title}", markdown_table(table.header, table.rows)]
    return "\n\n".join(blocks) + "\n"
