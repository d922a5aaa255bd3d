"""The loss picture, drawn as SVG without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from hf_linear_attn.files import write_atomic

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 360, 64, 44, 28, 16
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#4a5568")


def draw_losses(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw loss against training tokens, a line per run and stage, on a logarithmic axis.

    Args:
        runs: Histories by name; a record holds ``stage``, ``tokens`` and ``loss_nats``.
        path: The SVG file.
    """
    lines: list[tuple[str, list[tuple[float, float]]]] = []
    for name, history in runs.items():
        for stage in dict.fromkeys(record["stage"] for record in history):
            points = [(r["tokens"], r["loss_nats"]) for r in history if r["stage"] == stage and r["loss_nats"] > 0]
            if points:
                lines.append((f"{name}: {stage}" if len(runs) > 1 else stage, points))
    if not lines:
        return
    x_most = max(x for _, points in lines for x, _ in points)
    losses = [y for _, points in lines for _, y in points]
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))
    high = max(high, low + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_most * (WIDTH - LEFT - RIGHT)
        up = (math.log10(y) - low) / (high - low)
        return across, HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for power in range(low, high + 1):
        _, y = place(0, 10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, _ = place(share * x_most, 10.0**low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{share * x_most:,.0f}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">training tokens</text>')
    parts.append(f'<text x="{LEFT}" y="16">loss (nats; transfer: error over variance)</text>')
    for index, (name, points) in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        path_points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{TOP + 14 * (index + 1)}" text-anchor="end" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    write_atomic(path, "\n".join([*parts, "</svg>\n"]))
