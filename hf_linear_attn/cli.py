"""The ``hf-linear-attn`` command: one subcommand for each thing that the package does."""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.flags import check_flags, meant
from hf_linear_attn.shell import next_step, shell

PROGRAM = "hf-linear-attn"


class Command(NamedTuple):
    """A subcommand: the function that runs it, imported when it is called, and the files that declare its flags."""

    function: str
    help: str
    settings: tuple[str, ...]
    goes_on: bool = False
    """Whether the same command goes on where it was stopped."""


_DISTILL = ("config.py", "distill/settings.py", "distill/cli.py")
_EVALUATE = ("evaluation/settings.py", "evaluation/suites/*.py")

COMMANDS = {
    "maps": Command("cli:list_maps", "list the feature maps", ("cli.py",)),
    "check": Command(
        "diagnostics.check:main", "check what this machine runs, and that it computes right", ("diagnostics/check.py",)
    ),
    "inspect": Command(
        "diagnostics.cli:main", "see how well feature maps stand in for a model's softmax", ("diagnostics/cli.py",)
    ),
    "plan": Command("distill.cli:plan", "compute what distilling a model needs, from its config alone", _DISTILL),
    "teacher-logits": Command(
        "distill.cli:teacher_logits", "run a teacher once and keep its logits on disk", _DISTILL, goes_on=True
    ),
    "distill": Command("distill.cli:main", "convert a softmax model and distil it", _DISTILL, goes_on=True),
    "evaluate": Command("evaluation.cli:main", "evaluate a model at long context", _EVALUATE, goes_on=True),
    "compare": Command("evaluation.cli:compare", "lay several evaluations side by side", ("evaluation/cli.py",)),
    "export": Command("export.cli:main", "write a model as a file that runs without this package", ("export/run.py",)),
}


@dataclass(frozen=True)
class MapsSettings:
    """Settings of the list of maps.

    Args:
        feature_map_file: Python file that registers feature maps of your own.
    """

    feature_map_file: str | None = None


def list_maps(argv: Sequence[str]) -> None:
    """Print each registered feature map with its formula."""
    from hf_linear_attn.arguments import CommandLine
    from hf_linear_attn.feature_maps import available_feature_maps, feature_map_class

    line = CommandLine(f"{PROGRAM} maps", "List the feature maps.", example=f"{PROGRAM} maps", config=False)
    settings = line.settings_from(argv, MapsSettings)
    if settings.feature_map_file is not None:
        from hf_linear_attn.loading import load_users_maps

        load_users_maps(settings.feature_map_file)
    for name in available_feature_maps():
        cls = feature_map_class(name)
        learned = "learned" if cls.learned else ""
        sys.stdout.write(f"{name:16} {learned:8} {cls.formula}  [{cls.paper}]\n")
    next_step(f"`{PROGRAM} inspect MODEL --text-file TEXT` compares them with a model's softmax.")


def _help() -> str:
    listed = "\n".join(f"  {name:<16}{command.help}" for name, command in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND [--setting value ...]\n\n"
        "Turn softmax Transformers into linear-attention models.\n\n"
        "example:\n"
        f"  {PROGRAM} distill --model your/model --output-dir runs/student\n"
        f"  {PROGRAM} evaluate --model runs/student --teacher your/model --output-dir runs/evaluation\n\n"
        f"commands:\n{listed}\n\n"
        f"`{PROGRAM} COMMAND --help` explains one; --version says which version this is.\n"
    )


def _named(argv: Sequence[str]) -> str:
    """Return the command that is named first."""
    name = argv[0] if argv else None
    known = (name or "").replace("_", "-")
    if known in COMMANDS:
        return known
    remedy = meant(known, COMMANDS) or "Use one of those"
    raise ArgumentError("command", "be known", name, remedy, available=COMMANDS)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the subcommand that ``argv`` names; exit as :func:`hf_linear_attn.shell.shell` says.

    Args:
        argv: Arguments without the program's name; those of the process where None.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_help())
        return
    if argv[:1] == ["--version"]:
        from hf_linear_attn import __version__

        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return
    with shell(PROGRAM):
        chosen = _named(argv)
    command = COMMANDS[chosen]
    with shell(f"{PROGRAM} {chosen}", **({} if command.goes_on else {"interrupted": ""})):
        if not {"-h", "--help"} & set(argv):
            check_flags(argv[1:], f"{PROGRAM} {chosen}", command.settings)
        module, _, name = command.function.partition(":")
        function: Callable[[Sequence[str]], object] = getattr(importlib.import_module(f"hf_linear_attn.{module}"), name)
        function(argv[1:])


if __name__ == "__main__":
    main()
