"""Which recipes a GPU holds, and what would help where it holds none."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from hf_linear_attn.distill.plan import GIB, Planner, check_machine
from hf_linear_attn.distill.planned import SLACK, Plan
from hf_linear_attn.distill.presets import preset
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.view import markdown_table

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "recommended": ("recommended", {"gradient_checkpointing": True}),
    "recommended, lean": (
        "recommended",
        {
            "gradient_checkpointing": True,
            "model_dtype": "bfloat16",
            "optimizer": "adamw_8bit",
            "master_weights": "compensated",
        },
    ),
    "recommended, sharded": (
        "recommended",
        {"gradient_checkpointing": True, "mixed_precision": "bf16", "shard": True},
    ),
    "lolcats": ("lolcats", {"gradient_checkpointing": True, "model_dtype": "bfloat16"}),
    "single_gpu": ("single_gpu", {}),
    "single_gpu, nf4": ("single_gpu", {"model_dtype": "nf4"}),
}
"""What is looked through for a GPU: a preset, and what is changed in it."""

MADE_BY = ("trainable", "model_dtype", "optimizer", "master_weights", "shard")
"""Settings that make a recipe what it is."""


def recipes_for(
    config: PreTrainedConfig,
    given: Mapping[str, Any],
    gpu_memory: float,
    *,
    tokens: float | None,
    gpus: int,
    tflops: float,
    utilisation: float,
) -> dict[str, Plan]:
    """Return the plans of recipes by name, those that fit GPUs of so many GiB and those that do not.

    All recipes have the given settings; one that is made by another value of them is left out. Where none fits, the
    error says what would.
    """
    check_machine(tokens, gpus, tflops, utilisation, gpu_memory)
    flops = tflops * 1e12 * utilisation
    planners = {
        name: Planner(config, DistillationSettings(**{**recipe, **given}))
        for name, recipe in recipes().items()
        if all(given.get(key, recipe[key]) == recipe[key] for key in MADE_BY if key in recipe)
        and (gpus > 1 or not recipe.get("shard"))
    }
    plans = {name: planner.plan(gpus, tokens, flops) for name, planner in planners.items()}
    if any(found.fits(gpu_memory) for found in plans.values()):
        return plans
    name = min(plans, key=lambda name: plans[name].total_gib)
    shorter = shorter_sequences(planners[name], gpu_memory)
    remedy = (
        f"{shorter} Its flags, beside yours: {flags_of(name)}."
        if shorter
        else _sharded(config, given, gpu_memory, gpus)
    )
    rule = f"hold the leanest recipe, {name!r}, which needs {plans[name].total_gib / SLACK:.1f} GiB on each GPU"
    raise ArgumentError("gpu_memory", rule, gpu_memory, remedy)


def recipes() -> dict[str, dict[str, Any]]:
    """Return the settings of all recipes by name."""
    return {name: {**preset(start), **changes} for name, (start, changes) in RECIPES.items()}


def shorter_sequences(planner: Planner, gpu_memory: float) -> str | None:
    """Say how short sequences have to be, or return None where that does not help."""
    settings = planner.settings
    fixed = min(sum(planner.memory(stage, 1).values()) - held.most for stage, (held, _) in planner.held.items())
    if fixed > SLACK * gpu_memory * GIB:
        return None
    tokens, least = settings.block_tokens // 2, max(16, 2 * (settings.conversion.window or 8))
    while tokens >= least:
        shorter = Planner(planner.config, settings.with_changes(block_tokens=tokens), planner.device)
        if shorter.plan(1, None, 1.0).fits(gpu_memory):
            return f"Pass --block-tokens {tokens}."
        tokens //= 2
    return None


def check_fits(config: PreTrainedConfig, settings: DistillationSettings, found: Plan, gpu_memory: float) -> None:
    """Refuse a GPU memory that does not hold a plan."""
    if found.fits(gpu_memory):
        return
    remedy = None if found.sharded else shorter_sequences(Planner(config, settings), gpu_memory)
    rule = f"hold this run, which needs {found.total_gib / SLACK:.1f} GiB on each GPU"
    remedy = remedy or "Leave out recipe and preset: `plan` then looks for recipes that fit."
    raise ArgumentError("gpu_memory", rule, gpu_memory, remedy)


def _sharded(config: PreTrainedConfig, given: Mapping[str, Any], gpu_memory: float, gpus: int) -> str:
    """Say over how many GPUs a model has to be sharded."""
    other = {name: value for name, value in given.items() if name not in MADE_BY}
    planner = Planner(config, DistillationSettings(**{**recipes()["recommended, sharded"], **other}))
    for more in (gpus * 2**power for power in range(1, 9)):
        if planner.plan(more, None, 1.0).fits(gpu_memory):
            return (
                f"Shard it over {more} GPUs (--shard --gradient-checkpointing --gpus {more}), or take a smaller model."
            )
    return "Take a smaller model."


def recipes_table(plans: Mapping[str, Plan], gpu_memory: float) -> str:
    """Return which recipes fit, and the flags of each, as a Markdown table."""
    first = next(iter(plans.values()))
    many = f"{first.gpus} GPUs" if first.gpus > 1 else "one GPU"
    title = f"{first.model}: {first.parameters / 1e9:.2f}B parameters, {many} of {gpu_memory:g} GiB"
    heads = ["recipe", "fits", "GiB per GPU", "by stage", "tokens", "hours", "flags of distill"]
    rows = []
    for name, found in plans.items():
        fits = "yes" if found.fits(gpu_memory) else "no"
        by_stage = ", ".join(f"{stage.stage} {stage.total_gib:.1f}" for stage in found.stages)
        tokens, hours = (sum(getattr(stage, key) for stage in found.stages) for key in ("tokens", "hours"))
        figures = f"{found.total_gib:.1f}", by_stage, f"{tokens / 1e6:.1f}M", f"{hours:.2f}"
        rows.append([name, fits, *figures, f"`{flags_of(name)}`"])
    return "\n".join([title, "", markdown_table(heads, rows)])


def flags_of(recipe: str) -> str:
    """Return the flags with which `distill` runs a recipe."""
    start, changes = RECIPES[recipe]
    flags = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return " ".join([f"--preset {start}", *(flag if x is True else f"{flag} {x}" for flag, x in flags.items())])
