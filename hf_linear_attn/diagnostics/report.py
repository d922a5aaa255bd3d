"""The report of an inspection: one HTML file that needs nothing else, and a table."""

import base64
import html
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_linear_attn.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURED_MAPS = 6
PICTURED_TOKENS = 64

LARGEST_ERROR = 1.5
"""End of the scale of errors; 1 is the error of an output of zeros."""

EXACT = "exact softmax attention"
"""What the model itself computes; not to be taken for the map called softmax."""

COLUMNS = {
    "feature_dim": ("features", "F, the size of the state per value"),
    "output_error": ("output error", "|o' - o| / |o| of the attention output, before the output projection"),
    "weights_error": ("weights error", "|A' - A| / |A| of the attention matrix"),
    "rank_correlation": ("monotone", "Spearman correlation of weights and q.k; 1 = monotone"),
    "entropy_nats": ("entropy", "of the weights of a query, nats; lower = spikier"),
    "effective_rank": ("effective rank", "of the attention matrix of the first tokens"),
    "mass_beyond_window": ("beyond window", "weight on tokens beyond the window"),
    "mass_on_first_tokens": ("on first tokens", "weight on the first tokens, where they are beyond the window"),
    "negative_share": ("negative", "share of negative weights"),
}

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --rule: #d5d5d5; --soft: #666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --rule: #3a3d44; --soft: #a0a0a0; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 68rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p, figcaption { color: var(--soft); max-width: 50rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; border-radius: 4px; }
@media print { body { max-width: none; } .wide { overflow: visible; } table { font-size: .65rem; } }
"""


Matrices = dict[tuple[int, int], dict[str, Tensor]]
"""Attention matrices to show: ``[n, n]`` weights of the first tokens, by (layer, head), then by map."""


def can_draw() -> bool:
    """Tell whether matplotlib is there, without which a report has tables alone."""
    return importlib.util.find_spec("matplotlib") is not None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:d}" if isinstance(value, int) else f"{value:.3f}"


def _rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the summary."""
    if "branches" in results:
        branches = results["branches"]
        head = ["branch off", "loss (nats)", "loss beyond window (nats)"]
        rows = [["none", _number(branches["loss_nats"]), _number(branches.get("loss_nats_beyond"))]]
        for branch, loss in branches.get("loss_nats_without", {}).items():
            rows.append([branch, _number(loss), _number(branches["loss_nats_beyond_without"][branch])])
        return head, rows
    head = ["map", *(title for title, _ in COLUMNS.values())]
    return head, [
        [name, *(_number(means.get(key)) for key in COLUMNS)]
        for name, means in [(EXACT, results["summary"]["exact"]), *results["summary"]["maps"].items()]
    ]


def summary_table(results: Mapping[str, Any]) -> str:
    """Return the summary as a Markdown table."""
    head, rows = _rows(results)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _figure(figure: "Figure", text: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    data = base64.b64encode(buffer.getvalue()).decode()
    alt = html.escape(text)
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"><figcaption>{alt}</figcaption></figure>'


def write_report(results: Mapping[str, Any], matrices: Matrices, path: Path) -> None:
    """Write what :func:`inspect_model` found, and pictures of attention matrices, as one HTML file."""
    parts = _branch_parts(results) if "branches" in results else _approximation_parts(results, matrices)
    title = f"Attention of {html.escape(str(results['model']))}"
    facts = f"{html.escape(results['architecture'])}, {results['tokens']} tokens."
    write_atomic(
        path,
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1><p>{facts}</p>"
        + "\n".join(parts)
        + "</body></html>\n",
    )


def _branch_parts(results: Mapping[str, Any]) -> list[str]:
    branches = results["branches"]
    head = ["layer", *(name for name in branches["layers"][0] if name != "name")]
    rows = [[layer["name"], *(f"{fmean(layer[branch]):.1%}" for branch in head[1:])] for layer in branches["layers"]]
    return [
        "<h2>Loss with each branch switched off</h2>",
        _html_table(*_rows(results)),
        "<h2>Share of each branch in the attention output, mean over heads and tokens</h2>",
        _html_table(head, rows),
        *(_kept_parts(results["kept"]) if "kept" in results else ()),
    ]


def _kept_parts(kept: Mapping[str, Any]) -> list[str]:
    depths, tokens = kept["by_depth"], kept["tokens"]
    ends = [f"{100 * n // len(depths)}% to {100 * (n + 1) // len(depths)}%" for n in range(len(depths))]
    return [
        "<h2>Where the keys stand that are kept at the end, all layers and key heads</h2>",
        _html_table(
            ["depth in the text", "share of kept keys"], list(zip(ends, map("{:.1%}".format, depths), strict=True))
        ),
        "<h2>Tokens that most key heads keep</h2>",
        _html_table(
            ["token", "position", "key heads"],
            [[repr(x["token"]), str(x["position"]), f"{x['heads']:.0%}"] for x in tokens],
        ),
    ]


def _approximation_parts(results: Mapping[str, Any], matrices: Matrices) -> list[str]:
    settings = results["settings"]
    notes = "; ".join(f"{title}: {text}" for title, text in COLUMNS.values())
    parts = [
        "<h2>Feature maps beside softmax, mean over layers and heads</h2>",
        f"<p>{html.escape(notes)}. Window {settings['window']}, first tokens {settings['sinks']}. "
        "Learned maps as they start, before training.</p>",
        _html_table(*_rows(results)),
        *(_drawn(results, matrices) if can_draw() else ()),
    ]
    measured = [key for key in COLUMNS if key in results["layers"][0]["exact"]]
    head = ["layer", *(COLUMNS[key][0] for key in measured)]
    rows = [[layer["name"], *(_number(fmean(layer["exact"][key])) for key in measured)] for layer in results["layers"]]
    return [*parts, "<h2>Softmax by layer, mean over heads</h2>", _html_table(head, rows)]


def _drawn(results: Mapping[str, Any], matrices: Matrices) -> list[str]:
    """Return the parts that are pictures."""
    parts = [
        "<h2>Error by layer and head</h2>",
        _figure(
            _by_layer(results),
            "Error of the attention output by layer, mean over heads; 1 is that of an output of zeros.",
        ),
        _figure(_by_head(results), "Error of the attention output by layer (down) and head (across)."),
        "<h2>Error by length</h2>",
        _figure(
            _by_length(results),
            "Error of the attention output for queries up to each length, past the one before; mean over layers and "
            "heads. A line that rises accumulates error.",
        ),
    ]
    if matrices:
        parts += [
            "<h2>Attention matrices</h2>",
            _figure(
                _heat_maps(results, matrices),
                f"Weights among the first {PICTURED_TOKENS} tokens: exact softmax attention and the maps nearest "
                "to it, in the spikiest head of some layers; every row is scaled by softmax's largest weight there.",
            ),
        ]
    return parts


def _lines(title: str, rows: Mapping[str, Sequence[float]], ticks: Sequence[int]) -> "Figure":
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=title, ylabel="output error", ylim=(0, LARGEST_ERROR))
    colors = colormaps["tab20"]
    for number, (name, values) in enumerate(rows.items()):
        axes.plot(range(len(values)), values, label=name, color=colors(number % 20), marker=".")
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _by_layer(results: Mapping[str, Any]) -> "Figure":
    layers, maps = results["layers"], results["summary"]["maps"]
    rows = {name: [fmean(layer["maps"][name]["output_error"]) for layer in layers] for name in maps}
    return _lines("layer", rows, [layer["index"] for layer in layers])


def _by_length(results: Mapping[str, Any]) -> "Figure":
    layers = results["layers"]
    edges = layers[0]["length_edges"]
    rows = {}
    for name in results["summary"]["maps"]:
        columns = zip(
            *(head for layer in layers for head in layer["maps"][name]["output_error_by_length"]), strict=True
        )
        rows[name] = [
            fmean(known) if (known := [e for e in column if e is not None]) else float("nan") for column in columns
        ]
    return _lines("queries up to this position", rows, edges)


def _by_head(results: Mapping[str, Any]) -> "Figure":
    from matplotlib.figure import Figure

    names = list(results["summary"]["maps"])
    columns = min(6, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(9, 1.6 * rows + 0.6), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip(every.flat, names, strict=False):
        errors = [layer["maps"][name]["output_error"] for layer in results["layers"]]
        width = max(len(row) for row in errors)
        # Layers may differ in their number of heads.
        grid = [row + [float("nan")] * (width - len(row)) for row in errors]
        picture = axes.imshow(grid, vmin=0, vmax=LARGEST_ERROR, cmap="viridis", aspect="auto")
        axes.set_title(name, fontsize="small")
    for axes in every.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    for axes in every.flat[len(names) :]:
        axes.set_visible(False)
    figure.colorbar(picture, ax=every.ravel().tolist(), extend="max")
    return figure


def _heat_maps(results: Mapping[str, Any], matrices: Matrices) -> "Figure":
    from matplotlib.figure import Figure

    names = [EXACT, *list(results["summary"]["maps"])[:PICTURED_MAPS]]
    figure = Figure(figsize=(9, 1.45 * len(matrices) + 0.3), layout="constrained")
    every = figure.subplots(len(matrices), len(names), squeeze=False)
    for axes, name in zip(every[0], names, strict=True):
        axes.set_title("softmax" if name == EXACT else name, fontsize="small")
    for line, ((layer, head), weights) in zip(every, matrices.items(), strict=True):
        largest = weights[EXACT].amax(-1, keepdim=True)
        for axes, name in zip(line, names, strict=True):
            axes.imshow((weights[name] / largest).numpy(), vmin=0, vmax=1, cmap="magma", interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
        line[0].set_ylabel(f"layer {layer}\nhead {head}", fontsize="x-small")
    return figure
