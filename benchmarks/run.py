"""Run a benchmark suite: ``python benchmarks/run.py --suite cpu``; ``--list`` names them all.

A suite is one file in ``benchmarks/suites`` whose ``main(argv)`` parses the remaining arguments, measures, and writes
its result; nothing else needs to know of it.
"""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linear_attn.shell import shell

SUITES = Path(__file__).with_name("suites")


def available() -> dict[str, str]:
    """Return each suite's name and the first line of its docstring."""
    files = sorted(path for path in SUITES.glob("*.py") if not path.stem.startswith("_"))
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0] for path in files}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite that was asked for."""
    suites = available()
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--suite", choices=sorted(suites), metavar="NAME", help=f"one of {', '.join(suites)}")
    parser.add_argument("--list", action="store_true", help="list the suites")
    parser.add_argument("-h", "--help", action="store_true", help="this help, or a suite's own with --suite")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.suite is None:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        parser.print_help() if not arguments.list else None
        for name, summary in suites.items():
            print(f"{name:10} {summary}")
        return 0 if arguments.list or arguments.help else 2
    if arguments.help:
        rest.append("--help")
    # Suites import what they share from this folder, also when they are run from another program.
    sys.path.insert(0, str(SUITES.parent))
    sys.argv = [sys.argv[0], *rest]
    with shell(f"run.py --suite {arguments.suite}", interrupted=""):
        importlib.import_module(f"suites.{arguments.suite}").main(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
