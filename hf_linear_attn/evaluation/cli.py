"""The command line of evaluation: `hf-linear-attn evaluate` and `compare`, examples/long_context_eval.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm.auto import tqdm

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.report import write_report
from hf_linear_attn.evaluation.run import compare as compare_runs
from hf_linear_attn.evaluation.run import evaluate
from hf_linear_attn.evaluation.settings import parse_arguments
from hf_linear_attn.loading import process_state


def main(
    argv: Sequence[str],
    *,
    prog: str = "hf-linear-attn evaluate",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run an evaluation and write `results.json`, `report.html` and `report.md`.

    Args:
        argv: Flags, or the path of one YAML or JSON file, without the program's name.
        prog: The program's name in the help text.
        defaults: Settings that apply where `argv` does not name them.

    Returns:
        The results.

    Raises:
        ArgumentError: If a setting cannot be used, or `output_dir` is not set.
    """
    settings = parse_arguments(argv, prog=prog, defaults=defaults)
    if settings.output_dir is None:
        raise ArgumentError("output_dir", "be set", None, "Name the folder for the reports.")
    results = evaluate(settings)
    if process_state().is_main_process:
        _say(results, write_report(results, settings.output_dir, plots=settings.plots))
    return results


def compare(argv: Sequence[str]) -> dict[str, Any]:
    """Lay the results of several runs side by side in one report.

    Args:
        argv: `results.json` files or the folders that hold one, and `--output-dir`.

    Returns:
        The combined results.
    """
    parser = argparse.ArgumentParser(
        prog="hf-linear-attn compare", description="Lay the results of several evaluations side by side."
    )
    parser.add_argument("results", nargs="+", help="results.json files, or the folders that hold one")
    parser.add_argument("--output-dir", "--output_dir", required=True, help="folder for the combined report")
    parser.add_argument("--no-plots", "--no_plots", action="store_true", help="leave the pictures out")
    arguments = parser.parse_args(argv)
    results = compare_runs(arguments.results, arguments.output_dir, plots=not arguments.no_plots)
    _say(results, Path(arguments.output_dir, "report.html"))
    return results


def _say(results: Mapping[str, Any], report: Path) -> None:
    """Write the summary and the report's path for the person who started this."""
    for sentence in [*results["summary"]["quality"], *results["summary"]["speed"]]:
        tqdm.write(sentence, file=sys.stdout)
    tqdm.write(f"Report: {report}", file=sys.stdout)
