"""The models of a run: how they are loaded and converted, and what is refused."""

import copy
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TorchAoConfig

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.distill.limits import QUANTISED
from hf_linear_attn.distill.precision import resolve
from hf_linear_attn.distill.presets import CHOSEN
from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.distill.settings import DistillationSettings, conversion_values
from hf_linear_attn.distill.sharding import is_sharded, shard
from hf_linear_attn.distill.teacher import LiveTeacher, ModelTeacher
from hf_linear_attn.encoders import is_encoder
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.generation import accepts
from hf_linear_attn.loading import (
    Kind,
    head_dim_of,
    load_config,
    load_model,
    load_tokenizer,
    position_limit,
    trained_positions,
)
from hf_linear_attn.patching import is_patched

logger = logging.getLogger(__name__)

PATCHED_REMEDY = "Pass it as `student`, or name the softmax checkpoint that it was made from."


def with_own_conversion(settings: DistillationSettings, student: PreTrainedModel) -> DistillationSettings:
    """Return the settings with the conversion of a student that was converted before; refuse another."""
    conversion = LinearAttentionConfig.from_dict(student.config.linear_attention)
    asked = conversion_values(settings.conversion_for(head_dim_of(student.config)))
    # Its softmax layers were chosen, and its keys divided, when it was made.
    own = conversion_values(conversion) | CHOSEN
    for name in settings.given & own.keys():
        value = getattr(settings, name) if name in CHOSEN else asked[name]
        if name == "layers":
            value = own[name] if value is None else sorted(set(value))
        if value != own[name]:
            remedy = "Leave it out, or convert `model` anew in place of `student`."
            raise ArgumentError(name, f"be the student's own, {own[name]!r}", value, remedy)
    return settings.with_changes(**own)


def fit_positions(settings: DistillationSettings, model: PreTrainedModel) -> DistillationSettings:
    """Return the settings within the positions that a model has, saying in the log what was left out."""
    limit = position_limit(model)
    fitting = settings.within(limit)
    if fitting != settings:
        longest = max(fitting.factors()) * settings.block_tokens
        logger.info("the model has %d positions, so the longest sequences have %d tokens", limit, longest)
    return fitting


def check_lengths(settings: DistillationSettings, model: PreTrainedModel) -> None:
    """Refuse sequences of which the linear branch sees nothing; warn of positions that the model never saw."""
    longest, near = settings.trained_length(), settings.conversion.longest_window + settings.conversion.sinks
    if longest <= near and settings.conversion.mix != "window":
        remedy = "The linear branch would see nothing and learn nothing: raise it, or lower `window`."
        raise ArgumentError("block_tokens", f"reach beyond the window and its sinks, {near} tokens", longest, remedy)
    if settings.block_tokens <= near and settings.conversion.mix != "window":
        logger.warning(
            "sequences of %d tokens end within the window and its sinks: only longer ones teach the linear branch",
            settings.block_tokens,
        )
    positions = trained_positions(model)
    if positions is not None and longest > positions:
        logger.warning(
            "sequences of %d tokens reach beyond the %d positions that %s was trained on: what it says there, and what "
            "is learned from it, is not to be trusted",
            longest,
            positions,
            type(model).__name__,
        )


def load_teacher(settings: DistillationSettings, **options: Any) -> PreTrainedModel:
    """Load the softmax model that the settings name, in the dtype that they name.

    Raises:
        ArgumentError: If they name none, or a patched one, or an encoder for stages of a language model.
        CheckpointError: If it cannot be loaded.
    """
    dtype = settings.teacher_dtype or settings.model_dtype
    teacher = _load_model(settings, **loading_options("teacher_dtype", dtype), **options)
    check_direction(settings, teacher)
    return teacher


def loading_options(argument: str, dtype: str | None) -> dict[str, Any]:
    """Return Transformers' options for loading a model in a dtype or a quantisation, which ``argument`` has named."""
    if dtype is None or dtype not in QUANTISED:
        return {} if dtype is None else {"dtype": getattr(torch, dtype)}
    package = "bitsandbytes" if dtype == "nf4" else "torchao"
    if importlib.util.find_spec(package) is None:
        remedy = f"Run `pip install {package}`, or `pip install 'hf_linear_attn[quantised]'` for all of them."
        raise ArgumentError(argument, f"be a dtype where {package} is not installed", dtype, remedy)
    config: Any
    if dtype == "nf4":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        config = BitsAndBytesConfig(**settings)  # type: ignore[no-untyped-call]
    else:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerGroup

        int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))  # type: ignore[attr-defined]
        config = TorchAoConfig(Int8WeightOnlyConfig() if dtype == "int8" else int4)
    options = {"quantization_config": config, "dtype": torch.bfloat16}
    # Such a model cannot be moved.
    return options if not torch.accelerator.is_available() else options | {"device_map": {"": 0}}


def is_quantised(model: PreTrainedModel) -> bool:
    """Tell whether Transformers quantised a model's weights."""
    return getattr(model, "hf_quantizer", None) is not None


def check_quantised(settings: DistillationSettings, student: PreTrainedModel) -> DistillationSettings:
    """Return the settings for a model whose weights may be quantised; it is then saved as an adapter."""
    if not is_quantised(student):
        return settings
    quantizer: Any = student.hf_quantizer
    kind = type(quantizer).__name__
    if settings.trainable != "lora":
        raise ArgumentError("trainable", "be 'lora' for a quantised model", settings.trainable, f"It has {kind}.")
    if not quantizer.is_trainable and settings.model_dtype not in QUANTISED:
        rule = "have a quantisation that adapters can be trained on"
        raise ArgumentError("model", rule, kind, "Use model_dtype int8, int4 or nf4.")
    if settings.mixed_precision == "no":
        raise ArgumentError("mixed_precision", "be 'auto' or 'bf16' for a quantised model", "no", "Leave it out.")
    if settings.merge_lora and "merge_lora" in settings.given:
        rule = "be False for a quantised model: merged weights would be rounded again, which loses what was learned"
        remedy = "Load the adapter on the model in bf16 and merge it there: "
        remedy += "PeftModel.from_pretrained(patched, folder).merge_and_unload()."
        raise ArgumentError("merge_lora", rule, True, remedy)
    return settings.with_changes(merge_lora=False)


def shares_weights(settings: DistillationSettings) -> bool:
    """Tell whether a student made from the teacher has all its weights, so that one copy serves both."""
    # The figures of encoders compare the two side by side.
    own = settings.trainable == "lora" and not settings.encoder
    return own and settings.teacher_dtype in (None, settings.model_dtype)


def check_teacher(settings: DistillationSettings) -> PreTrainedConfig:
    """Return the config of the teacher that will be loaded where it is needed; refuse a patched one."""
    config = load_config(model_name(settings))
    if getattr(config, "linear_attention", None):
        rule = "be a softmax model, and this one is patched"
        raise ArgumentError("model", rule, settings.model, PATCHED_REMEDY)
    return config


def model_name(settings: DistillationSettings) -> str:
    """Return the softmax checkpoint that the settings name; refuse ones that name none."""
    if settings.model is None:
        raise ArgumentError("model", "be a folder or hub name", None, "Name a softmax checkpoint, or pass teacher=.")
    return settings.model


def _load_model(settings: DistillationSettings, **options: Any) -> PreTrainedModel:
    kind: Kind = "encoder" if settings.encoder else "causal"
    return load_model(model_name(settings), kind=kind, attention="softmax", remedy=PATCHED_REMEDY, **options)


def load_student(settings: DistillationSettings, teacher: PreTrainedModel | None) -> PreTrainedModel:
    """Load the student that the settings name, or else patch a copy of the teacher, loaded anew where None."""
    if settings.student is not None:
        kind: Kind = "encoder" if settings.encoder else "causal"
        remedy = "Pass it as `model` to convert it."
        return load_model(settings.student, "student", kind=kind, attention="linear", remedy=remedy)
    options = loading_options("model_dtype", settings.model_dtype)
    student = _load_model(settings, **options) if teacher is None else copy.deepcopy(teacher)
    # Before its conversion: what that asks of an encoder, the preset sees to.
    check_direction(settings, student)
    # What feature maps draw at their start is the same in every run.
    torch.manual_seed(settings.seed)
    return settings.convert(student)


def check_direction(settings: DistillationSettings, model: PreTrainedModel) -> None:
    """Refuse to teach an encoder to predict next tokens, which it sees."""
    if is_encoder(model) and not settings.encoder:
        rule = "be an encoder's, `transfer` and `embed`"
        raise ArgumentError("stages", rule, settings.stages, "Use the preset `encoder`.", where=type(model).__name__)


def check_pair(
    teacher: PreTrainedModel | PreTrainedConfig | None, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a teacher, or one of that config, and a student that cannot belong together."""
    if not is_patched(student):
        remedy = "Call patch_model on a copy of the teacher."
        raise ArgumentError("student", "be patched", type(student).__name__, remedy)
    vocabulary = student.config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        remedy = "Use the tokenizer that the teacher was trained with."
        raise ArgumentError("tokenizer", f"have at most the models' {vocabulary} tokens", len(tokenizer), remedy)
    if teacher is None:
        return
    config: PreTrainedConfig = teacher.config if isinstance(teacher, PreTrainedModel) else teacher
    if isinstance(teacher, PreTrainedModel) and is_patched(teacher):
        raise ArgumentError("teacher", "be a softmax model", type(teacher).__name__, "Pass the unpatched original.")
    if config.model_type != student.config.model_type:
        rule = f"have the teacher's architecture, {config.model_type!r}"
        raise ArgumentError("student", rule, student.config.model_type, "Patch a copy of the teacher.")
    expected = config.get_text_config().vocab_size
    if expected != vocabulary:
        remedy = "Distillation compares next-token distributions: use models with one tokenizer."
        raise ArgumentError("student", f"have the teacher's tokenizer and vocabulary of {expected}", vocabulary, remedy)


@dataclass
class Models:
    """The models of a run.

    Attributes:
        settings: The run's, with what models decide filled in.
        student: The model to be trained.
        tokenizer: Its tokenizer.
        given: The teacher that the caller has; None where it is loaded.
        made: Whether the student is made here, from the teacher.
        shared: Whether the student itself is its teacher, with its layers softmax for once.
        source: The teacher that is run; None without one, and where it is shared and not there yet.
    """

    settings: DistillationSettings
    student: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    given: PreTrainedModel | None
    made: bool
    shared: bool
    source: ModelTeacher | None


def load_models(
    settings: DistillationSettings,
    teacher: PreTrainedModel | None,
    student: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    accelerator: Accelerator,
) -> Models:
    """Load what the caller does not have, as for :func:`distill`, and check that all of it fits together."""
    made = student is None and settings.student is None
    asked = needs_teacher(settings, made)
    shared = asked and made and teacher is None and shares_weights(settings)
    own_config = check_teacher(settings) if asked and teacher is None and not shared else None
    tokenizer = tokenizer or load_tokenizer(settings.model or settings.student or model_name(settings))
    student = student or load_student(settings, teacher=teacher)
    check_pair(teacher or own_config, student, tokenizer)
    check_direction(settings, student)
    settings = check_quantised(settings, student)
    settings = fit_positions(settings if made else with_own_conversion(settings, student), student)
    settings = resolve(settings, student, accelerator.mixed_precision)
    check_lengths(settings, student)
    if settings.pack and not settings.encoder and not accepts(student, "position_ids"):
        remedy = "It takes no position_ids, so packed documents would see each other: pass --no-pack."
        raise ArgumentError("pack", f"be False for {type(student).__name__}", settings.pack, remedy)

    def load() -> PreTrainedModel:
        return place(load_teacher(settings) if teacher is None else teacher, settings, accelerator)

    source = LiveTeacher(load) if asked and not shared else None
    return Models(settings, student, tokenizer, teacher, made, shared, source)


def place(model: PreTrainedModel, settings: DistillationSettings, accelerator: Accelerator) -> PreTrainedModel:
    """Move a model to its device: layer by layer where it is sharded, as the whole need not fit there."""
    if settings.shard and not is_sharded(model):
        shard(model, settings.mixed_precision)
    return model if is_quantised(model) else model.to(accelerator.device)  # type: ignore[arg-type]


def needs_teacher(settings: DistillationSettings, made: bool) -> bool:
    """Tell whether the teacher is run: in training, or to choose layers of a student made from it and to measure it."""
    learns_from_it = any(stage_class(stage).needs_teacher(settings) for stage in settings.stages)
    by_kl = settings.divide == "kl" or (settings.softmax_budget and settings.softmax_by == "kl")
    compared = bool(settings.heldout_rows or by_kl)
    # Adapters are weakened without it.
    trained = settings.trainable == "full" and any(stage_class(stage).lora for stage in settings.stages)
    goes_back = bool(settings.teacher_share) and trained
    return goes_back or (learns_from_it and settings.teacher_logits is None) or (made and compared)
