"""Renew the pictures and the table of README.md from the measured results in docs/results.

    python -m tools.front            # write them
    python -m tools.front --check    # status 1 where they are not what the results say

Nothing here is a figure: change a result, run this, and the README says it.
"""

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_linear_attn.evaluation.figures import HEIGHT, WIDTH, Axes, Series, legend_swatch, line_chart

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
ASSETS = ROOT / "docs/assets"
BLOCK = re.compile(r"(<!-- front: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""What is made here inside a page: it stands between two comments."""
KIB = 1024
LEGEND_HEIGHT = 28
LEARNED = "keys that were learned to be kept"
ORDER = ("softmax (teacher)", LEARNED)
"""Of the table's rows; what has learned nothing comes last."""

Panel = tuple[str, str]
"""A heading and a chart."""


def label(model: dict[str, Any]) -> str:
    """Return what the README calls a model of the demo."""
    return {"model": LEARNED, "teacher": "softmax (teacher)"}.get(model["role"], str(model["name"]))


def standalone(panels: Sequence[Panel], legend: Sequence[tuple[int, str]], title: str) -> str:
    """Put charts side by side over one legend; the picture follows the reader's light or dark colours."""
    css = files("hf_linear_attn.evaluation").joinpath("report.css").read_text(encoding="utf-8")
    width, height = WIDTH * len(panels), HEIGHT + 30 + LEGEND_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}" font-family="system-ui, sans-serif">',
        f"<style>{css}</style>",
        '<rect width="100%" height="100%" rx="8" style="fill:var(--card)"/>',
    ]
    for number, (heading, chart) in enumerate(panels):
        parts.append(f'<text x="{WIDTH * number + 14}" y="22" font-weight="600">{escape(heading)}</text>')
        parts.append(f'<svg x="{WIDTH * number}" y="30" width="{WIDTH}" height="{HEIGHT}">{chart}</svg>')
    # A swatch, and some seven units a letter.
    shares = [50 + 7 * len(name) for _, name in legend]
    left = 14.0
    for (number, name), share in zip(legend, shares, strict=True):
        swatch = legend_swatch(number).replace(
            "<svg ", f'<svg x="{left:.0f}" y="{height - 22}" width="34" height="14" '
        )
        parts.append(f'{swatch}<text x="{left + 40:.0f}" y="{height - 11}">{escape(name)}</text>')
        left += share * (width - 14) / max(sum(shares), width - 14)
    return "\n".join([*parts, "</svg>\n"])


def line(name: str, number: int, points: Iterable[tuple[float, float]]) -> Series:
    """Return a line without intervals."""
    return Series(name, number, [(x, y, None, None) for x, y in sorted(points)])


def draw_cost(cpu: dict[str, Any], demo: dict[str, Any]) -> str:
    """Draw the time of one attention call and the cache of a sequence, by length."""
    times = [
        line(name, number, [(row["tokens"], row["forward"][key]["median_ms"]) for row in cpu["lengths"]])
        for number, (key, name) in enumerate([("softmax (SDPA)", "softmax"), ("linear attention", "linear")])
    ]
    subjects = {model["role"]: model["name"] for model in [demo["model"], *demo["references"]]}
    caches = [
        line(
            name,
            number,
            [(row["length"], cache_kib(row)) for row in measured(demo, "latency", subjects[role])],
        )
        for number, (role, name) in enumerate([("teacher", "softmax"), ("model", "linear")])
    ]
    panels = [
        ("Time of one attention call", line_chart("Time by length", times, Axes("tokens", "ms", log_y=True))),
        ("Cache of one sequence", line_chart("Cache by length", caches, Axes("tokens", "KiB", log_y=True))),
    ]
    legend = [(0, "softmax attention"), (1, "linear attention; right, the demo's model")]
    return standalone(panels, legend, "Time and cache of softmax and linear attention by length")


def cache_kib(row: dict[str, Any]) -> float:
    """Return the cache of one of a row's sequences."""
    return float(row["cache_bytes"]) / row["batch_size"] / KIB


def measured(demo: dict[str, Any], kind: str, model: str) -> list[dict[str, Any]]:
    """Return the demo's finished cells of a model."""
    return [row for row in demo[kind] if row["model"] == model and row["status"] == "ok"]


PANELS = (("capital in text", "Forms held out of training, in text"), ("kv_recall", "Trained pairs, in noise"))
"""Tasks of the second picture, and their headings."""


def draw_recall(demo: dict[str, Any]) -> str:
    """Draw the share of facts that are found again, by length, for each model of the demo."""
    models = sorted([demo["model"], *demo["references"]], key=lambda model: model["role"] != "teacher")
    panels = []
    for task, heading in PANELS:
        lines = []
        for number, model in enumerate(models):
            cells = [cell for cell in measured(demo, "cells", model["name"]) if cell["task"] == task]
            lengths = sorted({cell["length"] for cell in cells})
            score = {n: statistics.fmean(cell["score"] for cell in cells if cell["length"] == n) for n in lengths}
            lines.append(line(label(model), number, score.items()))
        axes = Axes("tokens", "found", y_range=(0, 1.04), percent=True)
        panels.append((heading, line_chart(heading, lines, axes)))
    legend = [(number, label(model)) for number, model in enumerate(models)]
    return standalone(panels, legend, "Facts found again by length")


def table(demo: dict[str, Any]) -> str:
    """Return the models of the demo, with what they cost and what they know at the longest lengths measured."""
    models = {label(model): model["name"] for model in [demo["model"], *demo["references"]]}
    length = max(cell["length"] for cell in demo["cells"])
    longest = max(row["length"] for row in demo["latency"])
    lines = [
        f"| at {length:,} tokens | text, loss in [nats](docs/glossary.md#nats) | finds a fact of a form never trained, "
        "in text | finds a trained [passkey](docs/glossary.md#passkey), in noise | finds a trained value by its key, "
        f"in noise | cache at {longest:,} tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for head in sorted(models, key=lambda x: ORDER.index(x) if x in ORDER else len(ORDER)):
        name = models[head]
        text = next(row["nll_nats"] for row in demo["perplexity"]["windows"] if at(row, name, length))
        found = [
            statistics.fmean(x["score"] for x in demo["cells"] if at(x, name, length) and x["task"] == task)
            for task in ("capital in text", "passkey", "kv_recall")
        ]
        cache = next(cache_kib(row) for row in demo["latency"] if at(row, name, longest))
        shown = f"**{head}**, equal cache bytes" if head == LEARNED else head
        if head not in ORDER:
            shown = head.replace("window", "[window](docs/glossary.md#window)", 1) + ", equal cache bytes"
        lines.append(f"| {shown} | {text:.3f} | {' | '.join(f'{x:.0%}' for x in found)} | {cache:,.0f} KiB |")
    return "\n".join(lines)


def at(row: dict[str, Any], model: str, length: int) -> bool:
    """Tell whether a finished row is that of a model at a length."""
    return bool(row["status"] == "ok" and row["model"] == model and row["length"] == length)


def cost(cpu: dict[str, Any], demo: dict[str, Any]) -> str:
    """Say what the longest lengths of the first picture show."""
    last, decode = cpu["lengths"][-1], cpu["decode_us"][-1]
    ratio = last["forward"]["ratio"]
    step = decode["softmax (SDPA)"] / decode["linear attention"]
    names = {model["role"]: model["name"] for model in [demo["model"], *demo["references"]]}
    longest = max(row["length"] for row in demo["latency"])
    caches = [
        next(row["cache_bytes"] for row in measured(demo, "latency", names[role]) if row["length"] == longest)
        for role in ("teacher", "model")
    ]
    made = f"{cpu['provenance']['processor']}, {cpu['provenance']['threads']} threads"
    return textwrap.fill(
        f"*Left, one attention call on a CPU ({made}): {ratio:.0f} times as fast as softmax at {last['tokens']:,} "
        f"tokens, and {step:.0f} times as fast for one more token after them. It is faster from "
        f"{cpu['break_even']['forward']:.0f} tokens on. Right, the demo's model: its "
        f"[cache](docs/glossary.md#cache) is {caches[0] / caches[1]:.0f} times smaller at {longest:,} tokens. "
        "[Measured so](docs/results/cpu.md).*",
        120,
        break_long_words=False,
        break_on_hyphens=False,
    )


def models() -> str:
    """Say how many architectures are converted, as the sweep counted them."""
    page = (RESULTS / "architectures.md").read_text()
    counts = {
        row[0].strip(): (int(re.findall(r"\d+", row[2])[0]), int(row[5]))
        for row in (line.strip("|").split("|") for line in page.splitlines() if line.startswith("| "))
        if len(row) == 6 and re.match(r" ?\d+", row[2])
    }
    version = re.search(r"Transformers ([\d.]+),", page)
    if version is None or len(counts) != 3:
        sys.exit("docs/results/architectures.md is not as `make sweep` writes it.")
    (causal, encoders, both), failures = (n for n, _ in counts.values()), sum(f for _, f in counts.values())
    return textwrap.fill(
        f"Of what Transformers {version[1]} registers, {causal} causal architectures, {encoders} encoders and {both} "
        f"encoder-decoders are converted and checked, with {failures} failures: Llama, Qwen, Mistral, Gemma, GPT-2, "
        "BERT, BART and [all of these](docs/results/architectures.md).",
        120,
    )


def renewed() -> dict[Path, str]:
    """Return every file that is made here, with what the results say it should hold."""
    cpu, demo = (json.loads((RESULTS / name).read_text()) for name in ("cpu.json", "quickstart/results.json"))
    blocks = {"cost": cost(cpu, demo), "table": table(demo), "models": models()}
    readme = BLOCK.sub(lambda m: f"{m[1]}{blocks[m[2]]}\n{m[3]}", (ROOT / "README.md").read_text())
    return {
        ASSETS / "cost.svg": draw_cost(cpu, demo),
        ASSETS / "recall.svg": draw_recall(demo),
        ROOT / "README.md": readme,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a file is out of date")
    check = parser.parse_args(argv).check
    stale = {path: text for path, text in renewed().items() if not path.exists() or path.read_text() != text}
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"out of date: {names}. Run `python -m tools.front`.")
    for path, text in ({} if check else stale).items():
        path.write_text(text)


if __name__ == "__main__":
    main()
