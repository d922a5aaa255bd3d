"""What a suite shows of results: figures in large, pictures, tables, and the words and numbers in them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_linear_attn.evaluation.figures import Axes, Point, Series, line_chart

Results = Mapping[str, Any]
Row = Mapping[str, Any]
Columns = Mapping[str, tuple[str, Callable[[Any], str]]]
"""By its heading the key of each column in a row, and what writes its values."""


@dataclass(frozen=True)
class Headline:
    """One figure of the report's first screen: what was kept, or what was gained.

    Args:
        figure: The figure, such as `7.9x`.
        label: What it is, such as `faster decode at 16,384 tokens`.
        detail: What it is made of.
    """

    figure: str
    label: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.figure:>6}  {self.label}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Table:
    """A table; a suite returns it whether or not it has rows.

    Args:
        title: What stands above it.
        header: Names of the columns.
        rows: Cells as text.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(markdown_table(["", "nats"], [["student", "1.25"]]))
        | | nats |
        | --- | --- |
        | student | 1.25 |
    """
    lines = [header, ["---"] * len(header), *rows]
    cells = [[f" {cell} |" if cell else " |" for cell in (text.replace("|", "\\|") for text in line)] for line in lines]
    return "\n".join("|" + "".join(line) for line in cells)


@dataclass(frozen=True)
class Picture:
    """A picture, also written to a file of its own.

    Args:
        name: The file's name without its ending.
        title: What stands above it.
        subtitle: What stands below the title.
        svg: The drawing.
    """

    name: str
    title: str
    subtitle: str
    svg: str


@dataclass(frozen=True)
class Section:
    """Pictures that belong together.

    Args:
        title: The heading.
        text: How to read them.
        pictures: The pictures; a section without any is left out.
        legend: Whether the models' colours are shown.
    """

    title: str
    text: str
    pictures: Sequence[Picture]
    legend: bool = True


def table(title: str, rows: Sequence[Row], columns: Columns, *, status: str = "") -> Table:
    """Make a table of rows, with a dash for None; in the column `status` a row without figures says why it has none."""

    def cell(row: Row, heading: str) -> str:
        key, write = columns[heading]
        if heading == status and row["status"] != "ok":
            return str(row["status"])
        return "-" if row[key] is None else write(row[key])

    return Table(title, tuple(columns), [[cell(row, heading) for heading in columns] for row in rows])


def models_of(results: Results) -> list[dict[str, Any]]:
    """Return the facts of every model of a run, the one under test first."""
    return [results["model"], *results["references"]]


def teachers_of(results: Results) -> list[str]:
    """Return the names of the teachers of a run."""
    return [model["name"] for model in results["references"] if model["role"] == "teacher"]


def other_of(results: Results) -> str | None:
    """Return the name of the model that the one under test is compared with: the teacher, else the first other."""
    others = [*teachers_of(results), *(model["name"] for model in results["references"])]
    return others[0] if others else None


def numbers_of(results: Results) -> dict[str, int]:
    """Number the models: each wears its colour, dash and marker in every picture."""
    return {model["name"]: number for number, model in enumerate(models_of(results))}


def measured(rows: Iterable[Row], model: str | None) -> list[Row]:
    """Return a model's rows that have figures."""
    return [row for row in rows if row["model"] == model and row.get("status", "ok") == "ok"]


def lines(results: Results, rows: Sequence[Row], column: str, *, x: str = "length", scale: float = 1.0) -> list[Series]:
    """Make a line for each model: its figures in a column, with their intervals, if they have some, over another."""
    series = []
    for model, number in numbers_of(results).items():
        points: list[Point] = []
        for row in measured(rows, model):
            if row[column] is not None:
                ends = row.get(f"{column}_ci95") or row.get(f"{column}_iqr") or (None, None)
                low, high = (None if end is None else scale * end for end in ends)
                points.append((row[x], scale * row[column], low, high))
        series.append(Series(model, number, points))
    return series


def chart(name: str, title: str, subtitle: str, series: Sequence[Series], axes: Axes) -> list[Picture]:
    """Draw lines, unless there is no point on any."""
    drawn = any(line.points for line in series)
    return [Picture(name, title, subtitle, line_chart(title, series, axes))] if drawn else []


def slug(text: str) -> str:
    """Write a text so that it can be part of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def tokens(number: float) -> str:
    """Write a number of tokens."""
    return f"{round(number):,}"


def times(ratio: float) -> str:
    """Write a ratio with two significant digits."""
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def compared(ratio: float, better: str, worse: str) -> tuple[str, str | None]:
    """Write a ratio and what it is: `("2.0x", better)`, `("1.5x", worse)` or, of what is alike, `("1.0x", None)`."""
    if times(max(ratio, 1 / ratio)) == times(1):
        return times(1), None
    return (times(ratio), better) if ratio >= 1 else (times(1 / ratio), worse)


def number(value: float, digits: int = 4) -> str:
    """Write a number for a table."""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def percent(value: float) -> str:
    """Write a share for a table."""
    return f"{value:.1%}"


def interval(pair: Sequence[float]) -> str:
    """Write an interval of shares for a table."""
    return f"{100 * pair[0]:.1f}-{100 * pair[1]:.1f}%"


def size(count: float) -> str:
    """Write a number of bytes.

    Example:
        >>> [size(n) for n in (512, 210_624, 33_554_432)]
        ['512 B', '206 KiB', '32 MiB']
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
