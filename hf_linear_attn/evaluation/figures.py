"""Pictures as inline SVG: they follow the page's light or dark colours, stay sharp in print and need no library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 12, 42
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 4", "12 4")
COLOURS = 6

Point = tuple[float, float, float | None, float | None]
"""`(x, y, low, high)`, low and high None where there is no interval."""


@dataclass(frozen=True)
class Series:
    """One line.

    Args:
        name: What the legend calls it.
        number: Which of the colours, dashes and markers it wears; the same for a model in every picture.
        points: The points that it joins.
    """

    name: str
    number: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Axes:
    """What a line picture is drawn on.

    Args:
        x_label: Text below; x is always on a logarithmic axis.
        y_label: Text at the left.
        log_y: Whether y is logarithmic; default False.
        y_range: Fixed range of y, or None to fit the points.
        percent: Whether y is a share, written in percent.
        threshold: A level to mark, or None.
        marks: `(x, text)` of places on the x axis to mark.
    """

    x_label: str
    y_label: str
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    percent: bool = False
    threshold: float | None = None
    marks: Sequence[tuple[float, str]] = ()


def short_number(value: float) -> str:
    """Write a number for an axis or a table cell.

    Example:
        >>> [short_number(v) for v in (0, 0.0125, 3.14159, 512, 4096, 1048576)]
        ['0', '0.013', '3.1', '512', '4096', '1.05M']
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e5:
        return f"{value / 1e3:.3g}k"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.2g}" if size < 10 else f"{value:.3g}"


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values that cover a linear range."""
    raw = (high - low) / 5
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within a range, thinned to at most six."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**e for e in exponents for f in factors if low * 0.999 <= f * 10.0**e <= high * 1.001]
        if len(ticks) <= 6:
            break
    return ticks[:: max(1, math.ceil(len(ticks) / 6))]


class _Scale:
    """Maps values to pixels, linear or logarithmic."""

    def __init__(self, low: float, high: float, start: float, stop: float, *, log: bool) -> None:
        self.log = log
        self.low, self.high = (math.log(low), math.log(high)) if log else (low, high)
        if self.high == self.low:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        at = math.log(value) if self.log else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.stop - self.start)


def _text(x: float, y: float, text: str, anchor: str = "middle", cls: str = "tick", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{cls}"{extra}>{escape(text)}</text>'


def _marker(x: float, y: float, number: int) -> str:
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>',
        f'<rect x="{x - 3.3:.1f}" y="{y - 3.3:.1f}" width="6.6" height="6.6"/>',
        f'<path d="M{x:.1f} {y - 4.4:.1f} l4.2 7.6 h-8.4 z"/>',
        f'<path d="M{x:.1f} {y - 4.6:.1f} l4.6 4.6 l-4.6 4.6 l-4.6 -4.6 z"/>',
    )
    return shapes[number % len(shapes)]


def line_chart(title: str, series: Sequence[Series], axes: Axes) -> str:
    """Draw lines over a logarithmic x axis, with intervals where there are any.

    Args:
        title: What a screen reader says.
        series: The lines; those without points are left out.
        axes: What they are drawn on.
    """
    series = [line for line in series if line.points]
    xs = sorted({point[0] for line in series for point in line.points})
    ys = [y for line in series for point in line.points for y in point[1:] if y is not None]
    if axes.threshold is not None:
        ys.append(axes.threshold)
    if axes.log_y:
        ys = [y for y in ys if y > 0]
        low, high = min(ys) / 1.25, max(ys) * 1.25
    elif axes.y_range is not None:
        low, high = axes.y_range
    else:
        room = (max(ys) - min(ys)) * 0.08 or abs(max(ys)) * 0.05 or 1.0
        low, high = min(ys) - room, max(ys) + room
        low = max(0.0, low) if min(ys) >= 0 else low
    x = _Scale(xs[0], xs[-1], _LEFT + 10, WIDTH - _RIGHT - 12, log=True)
    y = _Scale(low, high, HEIGHT - _BOTTOM, _TOP, log=axes.log_y)
    parts = []
    for tick in _log_ticks(low, high) if axes.log_y else _ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        label = f"{100 * tick:.0f}%" if axes.percent else short_number(tick)
        parts.append(_text(_LEFT - 6, y(tick) + 4, label, "end"))
    last = -math.inf
    for tick in xs:
        label = short_number(tick)
        if x(tick) - last >= 7 * len(label) + 6:
            parts.append(f'<line class="axis" x1="{x(tick):.1f}" x2="{x(tick):.1f}" '
                         f'y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM + 4}"/>')  # fmt: skip
            parts.append(_text(x(tick), HEIGHT - _BOTTOM + 17, label))
            last = x(tick)
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}"/>'
    )
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, axes.x_label, cls="label"))
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(_text(13, middle, axes.y_label, cls="label", extra=f' transform="rotate(-90 13 {middle:.0f})"'))
    if axes.threshold is not None:
        level = y(axes.threshold)
        parts.append(f'<line class="threshold" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
    for row, (at, text) in enumerate(axes.marks):
        if xs[0] <= at <= xs[-1]:
            parts.append(f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
            side = "end" if x(at) > WIDTH * 0.6 else "start"
            parts.append(_text(x(at) + (-5 if side == "end" else 5), _TOP + 11 + 14 * row, text, side, "note"))
    for line in series:
        parts.append(_line(line, x, y))
    return _svg(title, "".join(parts), WIDTH, HEIGHT)


def _line(line: Series, x: _Scale, y: _Scale) -> str:
    points = [point for point in line.points if not y.log or point[1] > 0]
    path = " ".join(f"{'M' if i == 0 else 'L'}{x(p[0]):.1f} {y(p[1]):.1f}" for i, p in enumerate(points))
    dash = _DASHES[line.number % len(_DASHES)]
    parts = [f'<path class="line" d="{path}"' + (f' stroke-dasharray="{dash}"' if dash else "") + "/>"]
    # Lines that coincide stay apart by their intervals' feet, a few pixels aside.
    shift = (line.number % 3 - 1) * 3 if line.number else 0
    for at, value, low, high in points:
        if low is not None and high is not None and high > low and not (y.log and low <= 0):
            px = x(at) + shift
            top, bottom = max(y(high), _TOP - 4), min(y(low), HEIGHT - _BOTTOM + 2)
            parts.append(f'<path class="whisker" d="M{px:.1f} {bottom:.1f} V{top:.1f} M{px - 3:.1f} {bottom:.1f} h6 '
                         f'M{px - 3:.1f} {top:.1f} h6"/>')  # fmt: skip
        title = f"<title>{escape(f'{line.name}: {short_number(value)} at {short_number(at)}')}</title>"
        parts.append(f"<g>{_marker(x(at), y(value), line.number)}{title}</g>")
    return f'<g class="series c{line.number % COLOURS}">{"".join(parts)}</g>'


@dataclass(frozen=True)
class HeatCell:
    """One field of a heat map.

    Args:
        text: What stands in it.
        share: 0..1, how strong its colour is; None for a field without a figure.
        hint: What pointing at it says.
    """

    text: str
    share: float | None
    hint: str


def heat_map(
    title: str,
    columns: Sequence[str],
    rows: Sequence[str],
    cells: Sequence[Sequence[HeatCell]],
    x_label: str,
    y_label: str,
) -> str:
    """Draw a table of coloured fields.

    Args:
        title: What a screen reader says.
        columns: Labels below.
        rows: Labels at the left, top to bottom.
        cells: One sequence of fields per row.
        x_label: Text below the columns' labels.
        y_label: Text at the left of the rows' labels.
    """
    height_of_row = 30
    left, top = 62, 6
    wide = (WIDTH - left - 6) / len(columns)
    bottom = top + height_of_row * len(rows)
    parts = []
    for i, (row, fields) in enumerate(zip(rows, cells, strict=True)):
        parts.append(_text(left - 6, top + height_of_row * (i + 0.5) + 4, row, "end"))
        for j, cell in enumerate(fields):
            corner = f'x="{left + wide * j + 1:.1f}" y="{top + height_of_row * i + 1}"'
            box = f'{corner} width="{wide - 2:.1f}" height="{height_of_row - 2}" rx="3"'
            fill = '<rect class="void" ' + box + "/>"
            if cell.share is not None:
                fill = f'<rect class="cold" {box}/><rect class="hot" {box} fill-opacity="{cell.share:.3f}"/>'
            tone = "void-text" if cell.share is None else "value"
            text = _text(left + wide * (j + 0.5), top + height_of_row * (i + 0.5) + 4, cell.text, cls=tone)
            parts.append(f"<g><title>{escape(cell.hint)}</title>{fill}{text}</g>")
    for j, column in enumerate(columns):
        parts.append(_text(left + wide * (j + 0.5), bottom + 16, column))
    parts.append(_text(left + wide * len(columns) / 2, bottom + 34, x_label, cls="label"))
    middle = (top + bottom) / 2
    parts.append(_text(13, middle, y_label, cls="label", extra=f' transform="rotate(-90 13 {middle:.0f})"'))
    return _svg(title, "".join(parts), WIDTH, bottom + 42)


def _svg(title: str, body: str, width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><title>{escape(title)}</title>{body}</svg>'
    )


def legend_swatch(number: int) -> str:
    """Draw the line and marker that a model wears, for a legend."""
    dash = _DASHES[number % len(_DASHES)]
    line = '<path class="line" d="M1 7 H33"' + (f' stroke-dasharray="{dash}"' if dash else "") + "/>"
    return (
        f'<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true"><g class="series c{number % COLOURS}">'
        f"{line}{_marker(17, 7, number)}</g></svg>"
    )
