"""Collect the rows of the sweep, from all workers, and write them to a page of docs/results."""

import platform
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

RESULTS = Path(__file__).parents[2] / "docs/results"
LEAST = {"causal": 130, "masked": 20, "seq2seq": 10}
TITLES = {
    "causal": "Causal language models",
    "masked": "Encoders (masked language models)",
    "seq2seq": "Encoder-decoders",
}

rows: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        rows.extend(value for name, value in report.user_properties if name == "row")


def pytest_sessionfinish(session: pytest.Session) -> None:
    from .test_sweep import ALL

    if hasattr(session.config, "workerinput") or len(rows) != len(ALL):
        return
    counts = {task: Counter(row["status"] for row in rows if row["task"] == task) for task in TITLES}
    # Decoders that read sound are registered among sequence-to-sequence models.
    counts["seq2seq"]["converted"] -= sum(
        row.get("decoder_only", False) for row in rows if row["status"] == "converted"
    )
    rule, rotary = (session.config.getoption(name) for name in ("update_rule", "rotary"))
    changes = [f"--{name} {value}" for name, value, usual in
               (("update-rule", rule, "additive"), ("rotary", rotary, "keep")) if value != usual]  # fmt: skip
    name = "-".join(["architectures", *(change.split()[1] for change in changes)])
    (RESULTS / f"{name}.md").write_text(_page(counts, changes))
    if not changes and any(counts[task]["converted"] < least for task, least in LEAST.items()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _page(counts: dict[str, Counter[str]], changes: list[str]) -> str:
    command = f'make sweep SWEEP="{" ".join(changes)}"' if changes else "make sweep"
    settings = [change.removeprefix("--").replace("-", "_").replace(" ", "=") for change in changes]
    lines = [
        "# Architectures" + (" with " + " and ".join(settings) if settings else ""),
        "",
        "Every configuration that Transformers registers for a language task, converted as a tiny model in fp32.",
        f"`{command}` writes this page.",
        "",
        f"Transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, Python "
        f"{platform.python_version()}, {date.today().isoformat()}, CPU.",
        "",
        "| task | registered | converted | refused, with the reason | not run | fails |",
        "|---|---|---|---|---|---|",
    ]
    for task, title in TITLES.items():
        c = counts[task]
        total = sum(row["task"] == task for row in rows)
        note = ""
        if extra := sum(row["task"] == task and row.get("decoder_only", False) for row in rows):
            note = f" (and {extra} decoders that read sound)"
        figures = [f"{c['converted']}{note}", *(c[key] for key in ("refused", "not run", "fails"))]
        lines.append(f"| {title} | {total} | {' | '.join(map(str, figures))} |")
    lines += [
        "",
        "**yes**: it holds. **own**: it does not, and neither does it of the softmax model as Transformers builds it",
        "(no padding by position ids, no exact cache of its recurrent part, ...). **no**: it does not, for the",
        "reason beside it. The properties: later tokens do not change earlier logits (causality), or the last one does",
        "change the first (bidirectionality); token by token with a cache = one pass; prefill in two pieces = one;",
        "greedy and beam search = those without a cache; a padded row = the row alone; saved and loaded = the same",
        "logits and no weight missing or left over; patching changes the logits, leaves another model of the class",
        "alone, and is undone to the bit; a gradient reaches every parameter of every converted layer, with a learned",
        "map and, where causal, a window with sinks; and token by token = one pass with that window too.",
    ]
    for task, title in TITLES.items():
        mine = sorted((row for row in rows if row["task"] == task), key=lambda row: row["model_type"])
        names = list(dict.fromkeys(name for row in mine for name in row["checks"]))
        lines += ["", f"## {title}: converted", ""]
        heads = [name.replace("_", " ") for name in names]
        lines += [f"| model type | layers | {' | '.join(heads)} | note |", "|" + "---|" * (len(names) + 3)]
        for row in mine:
            if row["status"] in ("converted", "fails"):
                marks = [row["checks"].get(name, "") for name in names]
                lines.append(f"| {row['model_type']} | {row['converted']} | {' | '.join(marks)} | {_cell(row)} |")
        lines += ["", f"## {title}: refused or not run", "", "| model type | outcome | reason |", "|---|---|---|"]
        for row in mine:
            if row["status"] in ("refused", "not run"):
                lines.append(f"| {row['model_type']} | {row['status']} | {_cell(row)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    return row["reason"].replace("|", "/").replace("\n", " ")
