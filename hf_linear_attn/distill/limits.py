"""What the settings of a distillation may be: ranges, and what does not go together.

Each function takes a :class:`DistillationSettings`, which calls them when it is made.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.distill.registry import available_stages, stage_class
from hf_linear_attn.errors import ArgumentError

QUANTISED = ("int8", "int4", "nf4")
"""Dtypes that stand for a quantisation."""

COLUMNS = (
    "text", "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "history",
    "tools",
)  # fmt: skip
"""What columns may stand for."""

LEAST: dict[str, float] = {
    "block_tokens": 8, "rows": 1, "accumulation": 1, "calibration_batches": 0, "retain_steps": 0, "transfer_steps": 0,
    "distill_steps": 0, "extend_steps": 0, "extend_factor": 1, "context_parallel": 1, "lora_rank": 1,
    "answer_weight": 0, "rest_lr_share": 0, "weight_decay": 0, "max_grad_norm": 0, "heldout_rows": 0,
    "heldout_answers": 0, "log_every": 1, "checkpoint_every": 1, "keep_checkpoints": 2, "seed": 0,
}  # fmt: skip
SHARES = (
    "softmax_budget", "recall_share", "recall_text", "recall_text_from", "ce_share", "embedding_share",
    "window_dropout", "warmup_share", "teacher_share",
)  # fmt: skip

TIMES = 16
"""Moments of a text, evenly spaced, at which `retain` ranks keys by the attention that is still to come."""

OF_A_STUDENT = {"window", "sinks", "mix", "kept", "retention"}
"""What decides which stages have something to train, and of which texts. A student named by its folder has its own."""

OF_LANGUAGE_MODELS: dict[str, tuple[Any, str]] = {
    "recall_share": (0.0, "it predicts no next token, so it cannot be asked"),
    "recall_text": (0.0, "it predicts no next token, so it cannot be asked"),
    "softmax_budget": (0.0, "layers are ranked by next tokens"),
    "divide": ("evenly", "it has no window"),
    "teacher_logits": (None, "its hidden states are compared"),
    "shard": (False, "one GPU holds an encoder"),
    "context_parallel": (1, "its texts are short"),
}
"""Settings that an encoder has one value of, and why."""


def check_limits(settings: Any) -> dict[str, Any]:
    """Refuse settings that are out of range or do not go together.

    Returns:
        What takes the place of defaults that do not go with what was asked for.
    """
    _check_ranges(settings)
    _check_datasets(settings)
    if settings.model_dtype in QUANTISED and settings.trainable != "lora":
        rule = "be no quantisation where all weights are trained"
        raise ArgumentError("model_dtype", rule, settings.model_dtype, "Train adapters: trainable='lora'.")
    for name in ("optimizer", "master_weights"):
        value = getattr(settings, name)
        if settings.shard and value not in ("adamw", "fp32"):
            raise ArgumentError(name, "be the default where weights are sharded", value, "Leave it out.")
    forwards, factors = settings.rows * settings.accumulation, settings.factors()
    if not factors or any(factor < 1 or forwards % factor for factor in factors):
        rule = f"be divisors of `rows` times `accumulation`, {forwards}"
        remedy = "Leave it out, or raise `rows` or `accumulation`."
        raise ArgumentError("length_factors", rule, settings.length_factors, remedy)
    _check_recall(settings)
    _check_division(settings)
    _check_teacher_share(settings)
    unread = settings.student is not None and not settings.given >= OF_A_STUDENT
    stages = _stages(settings, unread)
    changes = {"stages": stages} | (_of_an_encoder(settings, stages) if settings.encoder else {})
    _check_split(settings, changes)
    least, longest = least_to_rank(settings.conversion), max(factors) * settings.block_tokens
    if "retain" in stages and longest < least and not unread:
        remedy = "It reads sequences of the largest of `length_factors`: raise that, or this."
        raise ArgumentError("block_tokens", f"give `retain` sequences of {least} tokens", longest, remedy)
    return changes


def least_to_rank(conversion: LinearAttentionConfig) -> int:
    """Return the tokens of the shortest text of which keys are ranked: of its last quarter none are."""
    return -(-4 * (conversion.longest_window + conversion.sinks + TIMES) // 3)


def _check_ranges(settings: Any) -> None:
    for name, low in LEAST.items():
        if getattr(settings, name) < low:
            raise ArgumentError(name, f"be at least {low}", getattr(settings, name), "Raise it.")
    for name in SHARES:
        if not 0 <= getattr(settings, name) <= 1:
            raise ArgumentError(name, "lie in 0..1", getattr(settings, name), "It is a share.")
    for name in ("map_lr", "retain_lr", "distill_lr", "lr_factor", "extend_lr"):
        lr = getattr(settings, name)
        if lr is not None and not 0 < lr < math.inf:
            raise ArgumentError(name, "be positive and finite", lr, "Leave it out for the default.")
    if len(settings.betas) != 2 or not all(0 <= beta < 1 for beta in settings.betas):
        raise ArgumentError("betas", "be two numbers from 0 to below 1", settings.betas, "The default is 0.9 0.95.")


def _check_recall(settings: Any) -> None:
    """Refuse settings of recall sequences where there are none, or none in text."""
    if settings.recall_text and not settings.recall_share:
        remedy = "There are no recall sequences: raise `recall_share`."
        raise ArgumentError("recall_text", "be 0 where `recall_share` is", settings.recall_text, remedy)
    if settings.recall_text_from and not settings.recall_text:
        remedy = "All recall sequences are in noise: raise `recall_text`."
        raise ArgumentError("recall_text_from", "be 0 where `recall_text` is", settings.recall_text_from, remedy)


def _check_division(settings: Any) -> None:
    """Refuse to divide keys where there are none, where it was done, or where layers cannot be measured."""
    if settings.divide == "evenly":
        return
    if settings.conversion.window is None:
        raise ArgumentError("divide", "be 'evenly' without a window", settings.divide, "There is nothing to divide.")
    if settings.conversion.per_layer:
        remedy = "That says how keys are divided: leave one of both out."
        raise ArgumentError("divide", "be 'evenly' with `per_layer`", settings.divide, remedy)
    reason, other = "with `divide`, for which the teacher is run whole", "divide='evenly'"
    _check_default(settings, ("shard", "teacher_logits", "context_parallel"), reason, other)


def _check_teacher_share(settings: Any) -> None:
    """Refuse a share of the teacher's weights where they are not at hand, whole and as numbers, when training ends."""
    if not settings.teacher_share or settings.trainable == "lora":
        return
    reason, other = "with `teacher_share`, which takes the weights of both models", "teacher_share=0"
    _check_default(settings, ("shard", "teacher_logits"), reason, other)
    if settings.teacher_dtype in QUANTISED:
        rule = "be no quantisation with `teacher_share`"
        raise ArgumentError("teacher_dtype", rule, settings.teacher_dtype, "Leave it out, or pass teacher_share=0.")


def _check_default(settings: Any, names: Iterable[str], reason: str, other: str) -> None:
    """Refuse another value than the default of settings that do not go with what ``reason`` says."""
    for name in names:
        value, default = getattr(settings, name), getattr(type(settings), name)
        if value != default:
            raise ArgumentError(name, f"be {default!r} {reason}", value, f"Leave it out, or pass {other}.")


def _stages(settings: Any, unread: bool) -> list[str]:
    """Return the stages without those that are there by default and have nothing to train, as far as is known."""
    known = available_stages()
    if not settings.stages or [s for s in known if s in settings.stages] != list(settings.stages):
        raise ArgumentError("stages", f"be some of {', '.join(known)}, in that order", settings.stages, "Reorder them.")
    serving = [stage for stage in settings.stages if unread or stage_class(stage).serves(settings)]
    idle = [stage for stage in settings.stages if stage not in serving]
    if idle and "stages" in settings.given:
        rule = f"be without `{idle[0]}`: {stage_class(idle[0]).idle}"
        raise ArgumentError("stages", rule, settings.stages, "Leave it out.")
    return serving


def _of_an_encoder(settings: Any, stages: list[str]) -> dict[str, Any]:
    """Return the values of settings that only a language model has others of."""
    if languages := [stage for stage in stages if stage_class(stage).encoder is False]:
        remedy = "An encoder's are `transfer` and `embed`."
        raise ArgumentError("stages", "all be an encoder's, or all a language model's", languages, remedy)
    for name, (value, reason) in OF_LANGUAGE_MODELS.items():
        if getattr(settings, name) != value and name in settings.given:
            raise ArgumentError(name, f"be {value} for an encoder", getattr(settings, name), f"Leave it out: {reason}.")
    return {name: value for name, (value, _) in OF_LANGUAGE_MODELS.items()}


def _check_split(settings: Any, changes: dict[str, Any]) -> None:
    parts = changes.get("context_parallel", settings.context_parallel)
    if parts == 1:
        return
    if not any(stage_class(stage).splits for stage in changes["stages"]):
        rule, remedy = "be 1 where no stage splits its sequences", "Those of `distill` and `extend` are split."
        raise ArgumentError("context_parallel", rule, parts, remedy)
    if settings.softmax_budget:
        remedy = "Softmax needs every earlier key, and ranks hand on none."
        raise ArgumentError("softmax_budget", "be 0 with context_parallel", settings.softmax_budget, remedy)


def _check_datasets(settings: Any) -> None:
    weights, count = settings.dataset_weights, len(settings.dataset or ())
    if weights is not None and (len(weights) != count or not all(0 < weight < math.inf for weight in weights)):
        remedy = "They need not add up to 1. Leave out a dataset that is not to be read."
        raise ArgumentError("dataset_weights", f"be one positive number for each of {count} datasets", weights, remedy)
    for name in ("dataset_config", "dataset_split"):
        values = getattr(settings, name)
        if values is not None and len(values) not in (1, count) and count:
            rule = f"be one for all datasets, or one for each of the {count}"
            raise ArgumentError(name, rule, values, "Write `none` for one that has none.")
    for text in settings.columns:
        name, equal, column = text.partition("=")
        if not (equal and column and name in COLUMNS):
            rule = "say what a column stands for"
            raise ArgumentError("columns", rule, text, "Write `text=body`", available=COLUMNS)


def conversion_value(name: str, value: Any) -> Any:
    """Return a value of the conversion as its dataclass has it: JSON and YAML know no tuples, flags no objects."""
    if name == "layers" and value is not None:
        return tuple(value)
    if name not in ("feature_map_options", "per_layer"):
        return value
    try:
        options = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        options = None
    if not isinstance(options, Mapping):
        raise ArgumentError(name, "be a JSON object", value, 'Write {"name": value}.')
    return dict(options)
