"""The command lines of distillation: `hf-linear-attn distill`, `plan`, `teacher-logits`, and examples/distill.py."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.distill.data import load_data
from hf_linear_attn.distill.models import fit_positions, load_teacher, model_name
from hf_linear_attn.distill.plan import main as plan
from hf_linear_attn.distill.run import DistillResult, distill
from hf_linear_attn.distill.settings import (
    DistillationSettings,
    available_presets,
    known_settings,
    preset,
    read_settings,
)
from hf_linear_attn.distill.teacher_logits import TOP_K, write_teacher_logits
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.settings import accept_none
from hf_linear_attn.loading import load_tokenizer

__all__ = ["main", "plan", "teacher_logits"]


def make_parser(
    description: str | None,
    others: Sequence[argparse.ArgumentParser],
    command: str | None,
) -> tuple[HfArgumentParser, argparse.ArgumentParser]:
    """Return the parser of all settings and others, and one of the two flags that change its defaults."""
    first = argparse.ArgumentParser(add_help=False)
    start = first.add_mutually_exclusive_group()
    start.add_argument("--preset", choices=available_presets(), help="start from a named recipe")
    start.add_argument("--config", help="start from the settings in a YAML or JSON file")
    hints = known_settings()
    defaults = DistillationSettings().to_dict() | {"feature_map_options": "{}"}
    # Of a table of values a flag takes JSON, of several values a list.
    types = {"feature_map_options": str, "layers": list[int] | None}
    described = [
        (
            name,
            types.get(name, hint),
            field(default_factory=defaults[name].copy)
            if isinstance(defaults[name], list)
            else field(default=defaults[name]),
        )
        for name, hint in hints.items()
    ]
    flags = make_dataclass("Settings", described)
    parser = HfArgumentParser(
        flags,  # type: ignore[arg-type]
        prog=command,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[first, *others],
    )
    documented = setting_help()
    for action in parser._actions:
        if action.option_strings and action.option_strings[0].startswith("--no_"):
            action.help = f"The opposite of --{action.dest}."
        elif action.dest in documented:
            # argparse formats help texts with %.
            action.help = documented[action.dest].replace("%", "%%")
    accept_none(parser, flags)
    return parser, first


def parse(
    arguments: Sequence[str] | None,
    description: str | None,
    defaults: Mapping[str, Any],
    start: str = "recommended",
    others: Sequence[argparse.ArgumentParser] = (),
    command: str | None = None,
) -> DistillationSettings:
    """Read settings from flags, over those of a file or preset, over ``defaults``; ``start`` is the usual preset."""
    parser, first = make_parser(description, others, command)
    known, _ = first.parse_known_args(arguments)
    named = read_settings(known.config) if known.config is not None else preset(known.preset or start)
    # What nobody names is left to the dataclass, which treats its defaults otherwise than what was asked for.
    settings = known_settings()
    for action in parser._actions:
        if action.dest in settings:
            action.default = argparse.SUPPRESS
    parser.set_defaults(**(dict(defaults) | named))
    values = vars(parser.parse_args(arguments))
    # Of a list each word is read by itself.
    found: dict[str, Any] = {
        name: None if value == [None] else value for name, value in values.items() if name in settings
    }
    return DistillationSettings(**found)


def setting_help() -> dict[str, str]:
    """Read the settings' descriptions off the docstrings of their dataclasses, their one place."""
    described = _described(DistillationSettings)
    of_conversion = _described(LinearAttentionConfig)
    return {name: described.get(name, of_conversion.get(name, "")) for name in known_settings()}


def _described(settings: type) -> dict[str, str]:
    lines = (settings.__doc__ or "").split("Args:\n")[1].split("\n\n")[0].splitlines()
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
        arguments: Flags; defaults to those of the process, which is a script then.
        description: Shown by ``--help``.
        defaults: Settings that apply where neither flags nor a file or preset name them.
        start: Preset to start from where the flags name none.

    Returns:
        The result.

    Raises:
        ArgumentError: If a setting cannot be used, or no folder is named.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    command = None if arguments is None else "hf-linear-attn distill"
    settings = parse(arguments, description, defaults or {}, start, command=command)
    if settings.output_dir is None:
        raise ArgumentError("output_dir", "be the folder to write", None, "Pass --output-dir.")
    result = distill(settings)
    logging.getLogger(__name__).info("student saved in %s", settings.output_dir)
    return result


def teacher_logits(arguments: Sequence[str] | None = None) -> None:
    """Run a distillation's teacher once, and keep its likeliest next tokens on disk.

    Args:
        arguments: Flags; defaults to those of the process.

    Raises:
        ArgumentError: If a setting cannot be used, or no folder is named.
        CheckpointError: If the folder cannot be written.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--top-k", type=int, default=TOP_K, help="next tokens kept per token; default %(default)s")
    own.add_argument("--processes", type=int, default=1, help="of the distillation; default %(default)s")
    settings = parse(
        arguments,
        "Run the teacher over what a distillation with the same flags will read, and keep its likeliest next\n"
        "tokens in the folder that --teacher-logits names.",
        {},
        others=[own],
        command="hf-linear-attn teacher-logits",
    )
    flags = own.parse_known_args(arguments)[0]
    if settings.teacher_logits is None:
        raise ArgumentError(
            "teacher_logits", "be the folder to write", None, "Pass --teacher-logits, here and to distill."
        )
    folder = Path(settings.teacher_logits)
    if flags.processes < 1:
        raise ArgumentError("processes", "be at least 1", flags.processes, "Leave it out for one process.")
    # One process: a teacher that is too large for one accelerator is spread over all.
    teacher = load_teacher(settings, **({"device_map": "auto"} if torch.accelerator.is_available() else {}))
    settings = fit_positions(settings, teacher)
    data, _ = load_data(settings, load_tokenizer(model_name(settings)), processes=flags.processes)
    write_teacher_logits(settings, teacher, data, folder, top_k=flags.top_k, processes=flags.processes)
