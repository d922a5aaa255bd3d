"""The command lines of distillation: `hf-linear-attn distill`, `hf-linear-attn plan` and examples/distill.py."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import HfArgumentParser

from hf_linear_attn.distill.plan import main as plan
from hf_linear_attn.distill.run import DistillResult, distill
from hf_linear_attn.distill.settings import DistillationSettings, available_presets, preset, read_settings

__all__ = ["main", "plan"]


def make_parser(
    description: str | None, defaults: Mapping[str, Any]
) -> tuple[HfArgumentParser, argparse.ArgumentParser]:
    """Return the parser of all settings, and one of the two flags that change its defaults."""
    first = argparse.ArgumentParser(add_help=False)
    start = first.add_mutually_exclusive_group()
    start.add_argument("--preset", choices=available_presets(), help="start from a named recipe")
    start.add_argument("--config", help="start from the settings in a YAML or JSON file")
    parser = HfArgumentParser(
        DistillationSettings,  # type: ignore[arg-type]
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[first],
    )
    documented = setting_help()
    for action in parser._actions:
        if action.dest in documented:
            # argparse formats help texts with %.
            action.help = documented[action.dest].replace("%", "%%")
    parser.set_defaults(**defaults)
    return parser, first


def parse(
    arguments: Sequence[str] | None, description: str | None, defaults: Mapping[str, Any], start: str = "recommended"
) -> DistillationSettings:
    """Read settings from flags, over those of a file or preset, over ``defaults``; ``start`` is the usual preset."""
    parser, first = make_parser(description, defaults)
    known, _ = first.parse_known_args(arguments)
    if known.config is not None:
        parser.set_defaults(**read_settings(known.config))
    else:
        parser.set_defaults(**preset(known.preset or start))
    values = vars(parser.parse_args(arguments))
    values.pop("preset")
    values.pop("config")
    return DistillationSettings(**values)


def setting_help() -> dict[str, str]:
    """Read the settings' descriptions off the dataclass's docstring, their one place."""
    lines = (DistillationSettings.__doc__ or "").split("Args:\n")[1].split("\n\n")[0].splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        head, colon, rest = line.strip().partition(": ")
        if colon and head.isidentifier() and line.startswith(" " * 8) and not line.startswith(" " * 9):
            name, found[head] = head, rest
        else:
            found[name] += " " + line.strip()
    return {key: text.replace("``", "") for key, text in found.items()}


def main(
    arguments: Sequence[str] | None = None,
    *,
    description: str | None = "Distil a softmax model into a linear-attention model.",
    defaults: Mapping[str, Any] | None = None,
    start: str = "recommended",
) -> DistillResult:
    """Run a distillation from the command line.

    Args:
        arguments: Flags; defaults to those of the process.
        description: Shown by ``--help``.
        defaults: Settings that apply where neither flags nor a file or preset name them.
        start: Preset to start from where the flags name none.

    Returns:
        The result.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    settings = parse(arguments, description, defaults or {}, start)
    result = distill(settings)
    logging.getLogger(__name__).info("student saved in %s", settings.output_dir)
    return result
