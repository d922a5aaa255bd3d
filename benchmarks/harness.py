"""What suites share: provenance, timing by turns, and results as JSON, Markdown and a picture."""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers

import hf_linear_attn


class Parser(argparse.ArgumentParser):
    """A suite's flags, written as those of the commands: dashes or underscores, lists with commas or spaces."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read flags, those of the process where there are none."""
        return super().parse_known_args(self._plain(sys.argv[1:] if args is None else args), namespace)

    def _plain(self, words: Sequence[str]) -> list[str]:
        found: list[str] = []
        action = None
        for word in words:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                name = name.replace("_", "-")
                action = self._option_string_actions.get(name)
                # argparse takes one value after an equals sign, however many a flag may have.
                found += [name, value] if equals else [name]
                word = found.pop() if equals else ""
            if word:
                is_list = action is not None and action.nargs is not None and word not in (action.choices or ())
                found += [part for part in word.split(",") if part] if is_list else [word]
        return found

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line."""
        self.exit(2, f"{self.prog}: {message}; --help lists the flags\n")


def suite_parser(suite: str, about: str | None, output: bool = True) -> Parser:
    """Return the parser of a suite, whose help is ``about``; with ``output`` it has that flag and its default."""
    help_as_written = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"run.py --suite {suite}", description=about, formatter_class=help_as_written)
    if output:
        default = Path(f"docs/results/{suite}.json")
        parser.add_argument("--output", type=Path, default=default, help="result (%(default)s)")
    return parser


def provenance(suite: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return what is needed to repeat a measurement."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    facts: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/run.py", "--suite", suite, *argv]),
        "commit": git("rev-parse", "HEAD") or None,
        "uncommitted_changes": bool(git("status", "--porcelain", "--", "hf_linear_attn", "benchmarks")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hf_linear_attn": hf_linear_attn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numba": version("numba"),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        import triton

        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "triton": triton.__version__,
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "driver": _driver(),
        }
    return facts


def version(package: str) -> str | None:
    """Return a package's version, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, None where its tool is not there."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.split()[0]


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())


def by_turns(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Time functions in turn, so that a busy machine is busy for all of them.

    Args:
        functions: What to time, by name.
        repeats: Rounds, after one that does not count.

    Returns:
        Per name ``median_ms``, ``min_ms`` and ``max_ms``.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(repeats + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if i:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: {"median_ms": statistics.median(x), "min_ms": min(x), "max_ms": max(x)} for name, x in times.items()}


def spread(times_ms: Sequence[float]) -> dict[str, Any]:
    """Return the median of times, their quartiles and number."""
    quartiles = statistics.quantiles(times_ms, n=4, method="inclusive") if len(times_ms) > 1 else list(times_ms) * 3
    return {"median_ms": quartiles[1], "iqr_ms": [quartiles[0], quartiles[2]], "repeats": len(times_ms)}


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a table; floats with three digits, missing cells as a dash."""
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def cell(x: object) -> str:
        if isinstance(x, float):
            return f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"
        return "-" if x is None else str(x)

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def facts_line(facts: Mapping[str, Any]) -> str:
    """Return provenance as one paragraph."""
    numba = f", Numba {facts['numba']}" if facts.get("numba") and "gpu" not in facts else ""
    gpu = f"driver {facts['driver']}, Triton {facts['triton']}, " if "gpu" in facts else ""
    return (
        f"`{facts['command']}` at commit {(facts['commit'] or 'unknown')[:10]}"
        f"{' with uncommitted changes' if facts['uncommitted_changes'] else ''}, {facts['date']}; "
        f"{facts.get('gpu') or facts['processor']}, {gpu}{facts['threads']} threads, torch {facts['torch']}{numba}, "
        f"Transformers {facts['transformers']}, Python {facts['python']}, load average {facts['load_average']}.\n"
    )


def earlier(output: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier run on the same machine and software left in ``output``, or nothing."""
    if not output.exists():
        return {}
    found: dict[str, Any] = json.loads(output.read_text())
    names = ("hf_linear_attn", "torch", "transformers", "triton", "gpu", "driver", "processor")
    return found if all(found["provenance"].get(name) == facts.get(name) for name in names) else {}


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that a kill at any moment leaves the old text or the new one.

    Several runs may write the same file: each has a temporary file of its own, and the last one stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def once(path: Path, make: Callable[[], Any]) -> Any:
    """Return what a JSON file keeps; measure it first where there is none, and say how long that took."""
    if not path.exists():
        started = time.perf_counter()
        replace_text(path, json.dumps(make()))
        print(f"{path.stem}: {time.perf_counter() - started:.0f} s", flush=True)
    return json.loads(path.read_text())


def write(output: Path, result: Mapping[str, Any], page: str) -> None:
    """Write ``output`` (JSON) and the page beside it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, json.dumps(result, indent=1) + "\n")
    replace_text(output.with_suffix(".md"), page)


def break_even(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the length from which on ``ours`` is faster, on log axes; None where it is not at the longest."""
    ratios = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if ratios[-1] >= 0:
        return None
    last = max((i for i, ratio in enumerate(ratios) if ratio >= 0), default=-1)
    if last < 0:
        return float(lengths[0])
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    return float(lengths[last] * (lengths[last + 1] / lengths[last]) ** share)


def gap_closed(value: float | None, teacher: float | None, baseline: float | None) -> float | None:
    """Return the share of the way from baseline to teacher; None where they do not differ or were not measured."""
    if value is None or teacher is None or baseline is None or teacher == baseline:
        return None
    return (value - baseline) / (teacher - baseline)


def picture(
    output: Path,
    lengths: Sequence[int],
    curves: Mapping[str, Mapping[str, Sequence[float | None]]],
    ours: str,
    softmax: str,
) -> None:
    """Draw time by length on log axes, a panel per pass, with the break-even against softmax marked.

    Args:
        output: The PNG file.
        lengths: Tokens.
        curves: Per panel, per name, times in ms; None where there is none.
        ours: Name of our curve.
        softmax: Name of the curve to break even with.
    """
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(5.5 * len(curves), 4), squeeze=False)
    for panel, (title, named) in zip(panels[0], curves.items(), strict=True):
        for name, times in named.items():
            points = [(n, t) for n, t in zip(lengths, times, strict=True) if t is not None]
            panel.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        both = [
            (n, a, b)
            for n, a, b in zip(lengths, named[ours], named.get(softmax, [None] * len(lengths)), strict=True)
            if a is not None and b is not None
        ]
        at = break_even(*zip(*both, strict=True)) if both else None
        if at is not None:
            panel.axvline(at, color="grey", linestyle=":", label=f"break-even at {at:.0f}")
        panel.set(title=title, xlabel="tokens", ylabel="ms")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    plt.close(figure)
