"""The command line of evaluation: `hf-linear-attn evaluate` and `compare`, examples/long_context_eval.py."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm.auto import tqdm

from hf_linear_attn.arguments import CommandLine
from hf_linear_attn.errors import ArgumentError, renamed
from hf_linear_attn.evaluation.report import headlines, write_report
from hf_linear_attn.evaluation.run import compare as compare_runs
from hf_linear_attn.evaluation.run import evaluate
from hf_linear_attn.evaluation.settings import parse_arguments
from hf_linear_attn.evaluation.suite import load_users_suites
from hf_linear_attn.loading import process_state, progress_bars
from hf_linear_attn.shell import WITHOUT_OVERWRITE, command, next_step


def main(
    argv: Sequence[str],
    *,
    prog: str = "hf-linear-attn evaluate",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run an evaluation and write `results.json`, `report.html` and `report.md`.

    Args:
        argv: Flags, and the path of a YAML or JSON file if there is one, without the program's name.
        prog: The program's name in the help text.
        defaults: Settings that apply where `argv` does not name them.

    Returns:
        The results.

    Raises:
        ArgumentError: If a setting cannot be used, or `output_dir` is not set.
    """
    _load_suites(argv)
    settings = parse_arguments(argv, prog=prog, defaults=defaults)
    if settings.output_dir is None:
        raise ArgumentError("output_dir", "be set", None, "Name the folder for the reports: --output-dir FOLDER.")
    try:
        with progress_bars(shown=settings.progress):
            results = evaluate(settings)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(WITHOUT_OVERWRITE if settings.overwrite else "") from None
    if process_state().is_main_process:
        _say(results, write_report(results, settings.output_dir, plots=settings.plots))
        words = ["compare", settings.output_dir, "OTHER", "--output-dir", "BOTH"]
        next_step(f"open the report; `{command(*words)}` lays runs side by side.")
    return results


def _load_suites(argv: Sequence[str]) -> None:
    """Register the suites of the user's own before the flags are read: they bring flags of their own."""
    for at, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") == "--suite-file":
            load_users_suites(value or "".join(argv[at + 1 : at + 2]))


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison.

    Args:
        results: results.json files, or the folders that hold one; the first one's model leads the report.
        output_dir: Folder for the combined report.
        overwrite: Replace an earlier report in the output folder.
        plots: Draw the pictures.
    """

    results: tuple[str, ...]
    output_dir: str
    overwrite: bool = False
    plots: bool = True


def compare(argv: Sequence[str]) -> dict[str, Any]:
    """Lay the results of several runs side by side in one report.

    Args:
        argv: `results.json` files or the folders that hold one, and `--output-dir`.

    Returns:
        The combined results.
    """
    line = CommandLine(
        "hf-linear-attn compare",
        "Lay the results of several evaluations side by side in one report.",
        example="hf-linear-attn compare runs/a runs/b --output-dir runs/both",
        positional="results",
    )
    settings = line.settings_from(argv, CompareSettings)
    options = {"plots": settings.plots, "overwrite": settings.overwrite}
    with renamed(paths="results"):
        results = compare_runs(settings.results, settings.output_dir, **options)
    _say(results, Path(settings.output_dir, "report.html"))
    next_step("open the report.")
    return results


def _say(results: Mapping[str, Any], report: Path) -> None:
    """Write the figures of the first screen and the report's path for the person who started this."""
    for one in headlines(results):
        tqdm.write(str(one), file=sys.stdout)
    tqdm.write(f"Report: {report}", file=sys.stdout)
