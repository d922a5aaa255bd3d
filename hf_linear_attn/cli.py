"""The ``hf-linear-attn`` command: one subcommand for each thing that the package does."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_linear_attn.errors import one_line_errors


class Command(NamedTuple):
    """A subcommand; its module is imported when it is called."""

    module: str
    function: str
    help: str


COMMANDS = {
    "maps": Command("hf_linear_attn.cli", "list_maps", "list the feature maps"),
    "check": Command(
        "hf_linear_attn.diagnostics.check", "main", "check what this machine runs, and that it computes right"
    ),
    "inspect": Command(
        "hf_linear_attn.diagnostics.cli", "main", "see how well feature maps stand in for a model's softmax"
    ),
    "plan": Command(
        "hf_linear_attn.distill.cli", "plan", "compute what distilling a model needs, from its config alone"
    ),
    "teacher-logits": Command(
        "hf_linear_attn.distill.cli", "teacher_logits", "run a teacher once and keep its logits on disk"
    ),
    "distill": Command("hf_linear_attn.distill.cli", "main", "convert a softmax model and distil it"),
    "evaluate": Command("hf_linear_attn.evaluation.cli", "main", "evaluate a model at long context"),
    "compare": Command("hf_linear_attn.evaluation.cli", "compare", "lay several evaluations side by side"),
}


def list_maps(argv: Sequence[str]) -> None:
    """Print each registered feature map with its formula."""
    from hf_linear_attn.feature_maps import available_feature_maps, feature_map_class

    parser = argparse.ArgumentParser(prog="hf-linear-attn maps", description="List the feature maps.")
    parser.add_argument("--feature-map-file", help="Python file that registers feature maps of your own")
    arguments = parser.parse_args(argv)
    if arguments.feature_map_file is not None:
        from hf_linear_attn.loading import load_users_maps

        load_users_maps(arguments.feature_map_file)
    for name in available_feature_maps():
        cls = feature_map_class(name)
        learned = "learned" if cls.learned else ""
        sys.stdout.write(f"{name:16} {learned:8} {cls.formula}  [{cls.paper}]\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that ``argv`` names; exit with status 2 where an argument is wrong or a run cannot go on.

    Args:
        argv: Arguments without the program's name; those of the process where None.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="hf-linear-attn", description="Turn softmax Transformers into linear-attention models."
    )
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        choices.add_parser(name, help=command.help, add_help=False)
    chosen = parser.parse_args(argv[:1]).command
    command = COMMANDS[chosen]
    function: Callable[[Sequence[str]], object] = getattr(importlib.import_module(command.module), command.function)
    with one_line_errors(f"hf-linear-attn {chosen}"):
        function(argv[1:])


if __name__ == "__main__":
    main()
