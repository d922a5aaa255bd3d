"""The command lines of distillation: `hf-linear-attn distill`, `plan`, `teacher-logits`, and examples/distill.py."""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TypeVar

import torch

from hf_linear_attn.arguments import CommandLine, Given, Setting, settings_of
from hf_linear_attn.distill.data import load_data
from hf_linear_attn.distill.models import fit_positions, load_teacher, model_name
from hf_linear_attn.distill.plan import H100_TFLOPS
from hf_linear_attn.distill.plan import plan as compute_plan
from hf_linear_attn.distill.planned import Plan
from hf_linear_attn.distill.presets import CONVERSION, available_presets, over_preset, preset
from hf_linear_attn.distill.recipes import check_fits, recipes_for, recipes_table
from hf_linear_attn.distill.result import DistillResult
from hf_linear_attn.distill.run import distill
from hf_linear_attn.distill.settings import DistillationSettings, declared_settings
from hf_linear_attn.distill.teacher_logits import TOP_K, logits_folder, write_teacher_logits
from hf_linear_attn.errors import ArgumentError, renamed
from hf_linear_attn.loading import load_config, load_tokenizer, process_state, progress_bars
from hf_linear_attn.shell import WITHOUT_OVERWRITE, command, next_step

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROGRAM = "hf-linear-attn distill"
EXAMPLE = (
    "hf-linear-attn distill --model your/model --dataset your.jsonl --output-dir runs/student\n"
    "hf-linear-attn distill recipe.yaml --model your/model --rows 8"
)
GROUPS = {
    "models": ("model", "student", "teacher_logits", "teacher_dtype", "output_dir", "overwrite"),
    "conversion": (*CONVERSION, "feature_map_file", "softmax_budget", "softmax_by", "divide"),
    "data": ("dataset", "streaming", "pack", "recall", "answer", "block", "length", "rows", "accumulation"),
    "stages": ("stages", "retain", "transfer", "distill", "extend"),
    "the run": ("seed", "heldout", "log", "checkpoint", "keep", "trackers", "progress"),
}
"""Headings of the help, with the settings below each, or the words that their names begin with."""


@dataclass(frozen=True)
class LogitsSettings:
    """What storing a teacher's logits takes beside the settings of the distillation.

    Args:
        top_k: Next tokens kept per token.
        processes: Processes of the distillation.
    """

    top_k: int = TOP_K
    processes: int = 1


@dataclass(frozen=True)
class PlanSettings:
    """What a plan takes beside the settings of the distillation.

    Args:
        gpu_memory: Memory of one GPU in GiB. Without a recipe or preset, recipes are looked through for those that fit.
        tokens: Training tokens per stage; None for what the settings' steps read.
        gpus: GPUs. Each holds the whole, unless ``--shard`` spreads it over them.
        tflops: Peak of one in bf16, in TFLOP/s.
        utilisation: Share of it that is reached.
        lora: Train adapters instead of all weights, as ``--trainable lora`` does.
    """

    gpu_memory: float | None = None
    tokens: float | None = None
    gpus: int = 1
    tflops: float = H100_TFLOPS
    utilisation: float = 0.4
    lora: bool = False


def _heading(name: str) -> str:
    for heading, words in GROUPS.items():
        if name in words or (heading != "conversion" and name.split("_")[0] in words):
            return heading
    return "training"


def command_line(
    program: str,
    summary: str,
    example: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    start: str = "recommended",
    positional: str = "config",
    others: Mapping[str, type] | None = None,
) -> CommandLine:
    """Return what a command of distillation takes: settings of its own, and those of a distillation in groups.

    Its own are dataclasses by heading. ``defaults`` are shown in place of the settings' own; ``start`` is the preset
    where none is named.
    """
    line = CommandLine(program, summary, example=example, positional=positional)
    names = Setting("preset", Literal[available_presets()], start, "Named recipe to start from.")
    for heading, cls in (others or {}).items():
        line.add(heading, settings_of(cls))
    declared = declared_settings({**preset(start), **(defaults or {})})
    for heading in (*GROUPS, "training"):
        line.add(heading, [setting for setting in declared if _heading(setting.name) == heading])
        if heading == "models":
            line.add("models", [names])
    return line


def settings_from(
    given: Given, defaults: Mapping[str, Any] | None = None, start: str = "recommended"
) -> DistillationSettings:
    """Return the settings of what a user named: flags over the file, that over a preset, that over ``defaults``."""
    values, known = given.values, {setting.name for setting in declared_settings()}
    named = {name: value for name, value in values.items() if name in known}
    return DistillationSettings(**over_preset(values.get("preset", start), named, defaults))


def _own(given: Given, cls: type[T]) -> T:
    """Return a command's own settings of what a user named."""
    names = {setting.name for setting in settings_of(cls)}
    return cls(**{name: value for name, value in given.values.items() if name in names})


def main(
    arguments: Sequence[str] | None = None,
    *,
    description: str = "Convert a softmax model to linear attention, and teach it what the original knew. A run that "
    "was stopped goes on where it was when the same command is given again.",
    example: str = EXAMPLE,
    defaults: Mapping[str, Any] | None = None,
    start: str = "recommended",
) -> DistillResult:
    """Run a distillation from the command line.

    Args:
        arguments: Flags; defaults to those of the process, which is a script then.
        description: What ``--help`` says that it does.
        example: Commands that ``--help`` begins with.
        defaults: Settings that apply where neither flags nor a file or preset name them.
        start: Preset to start from where none is named.

    Returns:
        The result.

    Raises:
        ArgumentError: If a setting cannot be used, or no folder is named.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    program = Path(sys.argv[0]).name if arguments is None else PROGRAM
    line = command_line(program, description, example, defaults=defaults, start=start)
    given = line.read(sys.argv[1:] if arguments is None else arguments)
    settings = settings_from(given, defaults, start)
    if settings.output_dir is None:
        raise ArgumentError("output_dir", "be the folder to write", None, "Pass --output-dir.")
    values = settings.to_dict()
    recipe = {name: values[name] for name in sorted(settings.given)}
    if process_state().is_main_process:
        logger.info("settings that are not the defaults: %s", json.dumps(recipe, default=str))
    try:
        with progress_bars(shown=settings.progress):
            result = distill(settings)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(WITHOUT_OVERWRITE if settings.overwrite else "") from None
    if process_state().is_main_process:
        sys.stdout.write(f"Student: {settings.output_dir}\n")
        next_step(_after(settings, Path(settings.output_dir)))
    return result


def _after(settings: DistillationSettings, folder: Path) -> str:
    """Say what to do with the student in a folder."""
    if not (folder / "config.json").exists():
        # Adapters alone, which no command loads.
        return f"{folder / 'README.md'} says how to load the adapters on {settings.model or 'their base'}."
    beside = ["--teacher", settings.model] if settings.model else []
    suite = ["--suite", "embedding"] if settings.encoder else []
    words = ["evaluate", "--model", str(folder), *beside, *suite, "--output-dir", f"{folder}-evaluation"]
    return f"`{command(*words)}` measures what was kept and what was gained."


def teacher_logits(arguments: Sequence[str]) -> None:
    """Run a distillation's teacher once, and keep its likeliest next tokens on disk.

    Raises:
        ArgumentError: If a setting cannot be used, or no folder is named.
        CheckpointError: If the folder cannot be written.
    """
    line = command_line(
        "hf-linear-attn teacher-logits",
        "Run the teacher over what a distillation with the same flags will read, and keep its likeliest next tokens in "
        "the folder that --teacher-logits names.",
        "hf-linear-attn teacher-logits --model your/model --dataset your.jsonl --teacher-logits runs/logits",
        others={"what is kept": LogitsSettings},
    )
    given = line.read(arguments)
    settings = settings_from(given)
    flags = _own(given, LogitsSettings)
    if settings.teacher_logits is None:
        remedy = "Pass --teacher-logits, here and to distill."
        raise ArgumentError("teacher_logits", "be the folder to write", None, remedy)
    folder = Path(settings.teacher_logits)
    if flags.processes < 1:
        raise ArgumentError("processes", "be at least 1", flags.processes, "Leave it out for one process.")
    logits_folder(settings, folder)
    # One process: a teacher that is too large for one accelerator is spread over all.
    with progress_bars(shown=settings.progress):
        teacher = load_teacher(settings, **({"device_map": "auto"} if torch.accelerator.is_available() else {}))
        settings = fit_positions(settings, teacher)
        data, _ = load_data(settings, load_tokenizer(model_name(settings)), processes=flags.processes)
        write_teacher_logits(settings, teacher, data, folder, top_k=flags.top_k, processes=flags.processes)
    next_step(f"`hf-linear-attn distill` with the same settings, `--teacher-logits {quote(str(folder))}` among them.")


def plan(arguments: Sequence[str]) -> dict[str, Plan]:
    """Print the plan of a distillation, or which recipes fit a GPU; return the plans by name, `plan` for a given run.

    Raises:
        ArgumentError: If a setting cannot be used, no model is named, or a GPU's memory is too small.
        CheckpointError: If there is no such config.
    """
    line = command_line(
        "hf-linear-attn plan",
        "Compute memory and hours of a distillation from the model's config alone. It takes the settings of distill.",
        "hf-linear-attn plan your/model --gpu-memory 80\n"
        "hf-linear-attn plan recipe.yaml --model your/model --gpus 8 --shard",
        positional="model",
        others={"the machine": PlanSettings},
    )
    given = line.read(arguments)
    own = _own(given, PlanSettings)
    if own.lora:
        given.flags["trainable"] = "lora"
    settings = settings_from(given)
    if settings.model is None:
        raise ArgumentError("model", "be given", None, "Name a folder, a config.json or a hub name.")
    config = load_config(settings.model, "model")
    machine: dict[str, Any] = {name: getattr(own, name) for name in ("tokens", "gpus", "tflops", "utilisation")}
    searched = own.gpu_memory is not None and not given.file and "preset" not in given.values
    # Who splits sequences knows the recipe, and asks how long they may be.
    if own.gpu_memory is not None and searched and settings.context_parallel == 1:
        named = {name: value for name, value in given.values.items() if name in settings.given}
        with renamed(config="model"):
            plans = recipes_for(config, named, own.gpu_memory, **machine)
        sys.stdout.write(recipes_table(plans, own.gpu_memory) + "\n")
        next_step("`hf-linear-attn distill` with a recipe's settings runs it.")
        return plans
    with renamed(config="model"):
        found = compute_plan(config, settings, **machine, gpu_memory=own.gpu_memory)
    sys.stdout.write(found.table() + "\n")
    if own.gpu_memory is not None:
        check_fits(config, settings, found, own.gpu_memory)
    next_step("`hf-linear-attn distill` with the same settings runs it.")
    return {"plan": found}
