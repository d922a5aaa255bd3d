"""The entry point: from a softmax checkpoint to a distilled student."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import get_available_trackers
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.distill.calibrate import LONGEST_LOOK, calibrate
from hf_linear_attn.distill.data import Batch, Data, Row, load_data
from hf_linear_attn.distill.divide import LONGEST, TEXTS, Division, divide
from hf_linear_attn.distill.folder import begin, check_run_folder, save_result
from hf_linear_attn.distill.forward import linear_attention_parts, map_parameters
from hf_linear_attn.distill.lora import add_lora
from hf_linear_attn.distill.measure import measure, measure_encoders
from hf_linear_attn.distill.models import Models, is_quantised, load_models, load_student, place
from hf_linear_attn.distill.precision import let_autocast_cast, raise_precision, restore_precision
from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.distill.result import DistillResult
from hf_linear_attn.distill.retention import start_scores
from hf_linear_attn.distill.selection import Selection, select_by_kl, select_by_recall
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.sharding import whole_state
from hf_linear_attn.distill.stages import Stage
from hf_linear_attn.distill.teacher import SharedTeacher
from hf_linear_attn.distill.teacher_logits import TeacherLogits
from hf_linear_attn.distill.trainer import OnStep, Trainer, readers
from hf_linear_attn.encoders import pooling_of
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.files import locked
from hf_linear_attn.loading import load_users_maps, process_state

logger = logging.getLogger(__name__)


def distill(
    settings: DistillationSettings,
    teacher: PreTrainedModel | None = None,
    student: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    data: tuple[Data, Data] | None = None,
    on_step: OnStep | None = None,
) -> DistillResult:
    """Distil a softmax model into a linear-attention one.

    Args:
        settings: What to do; see :class:`DistillationSettings`.
        teacher: The softmax model; None to load ``settings.model``.
        student: A patched model with the teacher's weights; None to load ``settings.student``, or else to patch a
            copy of the teacher.
        tokenizer: Its tokenizer; None to load it from ``settings.model``.
        data: Training and held-out data, as :func:`load_data` returns them; None to load them.
        on_step: Called with every log record on the main process.

    Returns:
        The student, with history and figures.

    Raises:
        ArgumentError: If models, tokenizer, data and settings do not fit together, or the output folder holds what is
            read, or files that are no run's.
        CheckpointError: If a model cannot be loaded, or the output folder is in use, full, or holds only damaged
            checkpoints.
        TrainingError: If the loss becomes infinite or NaN, or the data cannot be read.
    """
    check_trackers(settings)
    process_state()
    accelerator = launch(settings)
    load_users_maps(settings.feature_map_file)
    folder = None if settings.output_dir is None else Path(settings.output_dir)
    if folder is not None and accelerator.is_main_process:
        check_run_folder(settings, teacher=teacher, student=student, tokenizer=tokenizer)
    with torch.random.fork_rng(), ExitStack() as held:
        models = load_models(settings, teacher, student, tokenizer, accelerator)
        settings = models.settings
        train, heldout = data or load_data(settings, models.tokenizer, processes=readers(settings, accelerator))
        # Nothing is written before all that can be refused was.
        held.enter_context(locked(folder if accelerator.is_main_process else None))
        if folder is not None and accelerator.is_main_process:
            begin(settings, folder)
        # Others look for checkpoints when those of an earlier run are gone.
        accelerator.wait_for_everyone()
        if settings.trackers:
            accelerator.init_trackers("hf_linear_attn")
        dtypes = prepare_models(models, (train, heldout), accelerator)
        source = models.source if settings.teacher_logits is None else TeacherLogits(Path(settings.teacher_logits))
        trainer = Trainer(settings, models.student, train, source, accelerator, on_step)
        trainer.run(partial(prepare_stage, settings))
        counts = count_parameters(trainer.student)
        distilled, metrics = finish_models(models, trainer.student, dtypes, heldout, accelerator)
        result = DistillResult(
            student=distilled,
            settings=settings,
            history=trainer.history,
            metrics=metrics,
            tokens=trainer.tokens,
            elapsed_s=trainer.elapsed_s,
            trainable_parameters=counts,
            output_dir=folder,
        )
        if settings.trackers:
            accelerator.end_training()
        # Gathering a sharded model takes all processes.
        state = whole_state(result.student, accelerator.is_main_process)
        if folder is not None and accelerator.is_main_process:
            save_result(result, models.tokenizer, folder, state)
        accelerator.wait_for_everyone()
    return result


def launch(settings: DistillationSettings) -> Accelerator:
    """Return what knows of the run's processes, if settings and the way in which they were launched fit."""
    # Its precision is one per process; ours is one per run, so it is left to autocast.
    accelerator = Accelerator(log_with=settings.trackers or None, project_dir=settings.output_dir)
    if accelerator.mixed_precision not in ("no", settings.mixed_precision) and (
        accelerator.mixed_precision != "bf16" or settings.mixed_precision != "auto"
    ):
        rule = f"be the launcher's, {accelerator.mixed_precision!r}"
        remedy = "Pass --mixed-precision to the script; it knows 'no' and 'bf16'."
        raise ArgumentError("mixed_precision", rule, settings.mixed_precision, remedy)
    if accelerator.distributed_type == DistributedType.FSDP:
        remedy = "Launch with MULTI_GPU and pass --shard: maps stay whole then."
        raise ArgumentError("distributed_type", "not be FSDP", "FSDP", remedy)
    if settings.shard and not torch.distributed.is_initialized():
        raise ArgumentError("shard", "be False for a process alone", True, "Start several with `accelerate launch`.")
    return accelerator


def prepare_models(models: Models, data: tuple[Data, Data], accelerator: Accelerator) -> dict[str, torch.dtype]:
    """Make student and shared teacher ready for training; return the dtypes that the student's parameters had."""
    settings = models.settings
    chooses = [keep_softmax] * bool(settings.softmax_budget) + [divide_keys] * (settings.divide == "kl")
    for choose in chooses if models.made else ():
        if not is_quantised(models.student):
            models.student.to(accelerator.device)  # type: ignore[arg-type]
        models.student = choose(models, data)
    student = models.student
    dtypes = {name: p.dtype for name, p in student.named_parameters()}
    if settings.mixed_precision == "no" or (settings.shard and settings.trainable == "full"):
        # What is sharded is sharded in the dtype that it is kept in.
        raise_precision(student.parameters())
    place(student, settings, accelerator)
    if models.shared:
        models.source = SharedTeacher(student)
    if models.made and settings.calibration_batches and not settings.encoder:
        # A run that goes on from a checkpoint finds its gates there.
        start_gates(settings, student, data[0])
    if models.made and "retain" in settings.stages:
        start_scores(settings, student, data[0])
    return dtypes


def finish_models(
    models: Models, trained: nn.Module, dtypes: dict[str, torch.dtype], heldout: Data, accelerator: Accelerator
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Make the student what is saved, and return it with both models' figures on held-out text."""
    settings, source, metrics = models.settings, models.source, {}
    figures = partial(
        measure,
        data=heldout,
        tokenizer=models.tokenizer,
        rows=settings.heldout_rows,
        length=settings.block_tokens,
        seed=settings.seed,
        answers=settings.heldout_answers,
        progress=settings.progress and accelerator.is_main_process,
    )
    if settings.heldout_rows and source is not None and not settings.encoder:
        # Before the adapters, which may be off while the student is the teacher, are merged.
        with source.running() as model:
            metrics["teacher"] = figures(model, branches=False)
    distilled: Any = trained
    if isinstance(trained, PeftModel):
        weaken(trained, settings.teacher_share)
        if settings.merge_lora:
            distilled = trained.merge_and_unload()
    elif settings.teacher_share and source is not None:
        with source.running() as model:
            toward(distilled, model, settings.teacher_share)
    restore_precision(distilled, dtypes)
    let_autocast_cast(distilled, autocast=False)
    distilled.train(False)
    for parameter in distilled.parameters():
        # Integers, which are quantised weights, have no gradients.
        parameter.requires_grad_(parameter.is_floating_point() and not is_quantised(models.student))
    if settings.encoder and settings.heldout_rows:
        measured = {} if source is None else {"teacher": source.predictor.model}
        metrics = measure_encoders(
            measured | {"student": distilled},
            heldout,
            models.tokenizer,
            pooling_of(settings.model, settings.pooling),
            rows=settings.heldout_rows,
            lengths=[factor * settings.block_tokens for factor in settings.factors()],
        )
    elif settings.heldout_rows:
        metrics["student"] = figures(distilled)
    known = models.student.config.linear_attention
    known["trained_length"] = max(known.get("trained_length") or 0, settings.trained_length())
    return distilled, metrics


@torch.no_grad()
def toward(student: nn.Module, teacher: nn.Module, share: float) -> None:
    """Move the weights that a student has in common with its teacher by a share of the way to the teacher's."""
    own = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        if name in own:
            parameter.lerp_(own[name].to(parameter), share)


@torch.no_grad()
def weaken(student: PeftModel, share: float) -> None:
    """Move what adapters make of the teacher's weights by a share of the way back: what they add is linear in B."""
    for name, parameter in student.named_parameters():
        if ".lora_B." in name:
            parameter.mul_(1 - share)


def start_gates(settings: DistillationSettings, student: PreTrainedModel, train: Data) -> None:
    """Start the gates of a merely patched student's update rule from the teacher's attention."""
    if not any(part.learned["rule"] for part in linear_attention_parts(student)):
        return
    starts = range(0, settings.calibration_batches * settings.rows, settings.rows)
    length = min(settings.block_tokens, LONGEST_LOOK)
    batches = [train.batch(range(n, n + settings.rows), length).to(student.device) for n in starts]
    for found in calibrate(student, batches):
        logger.info(
            "%s: attention beyond the window rests %s tokens away, in the mean of each key head",
            found.part.name,
            [round(float(x)) for x in found.half_life.nan_to_num()],
        )


def check_trackers(settings: DistillationSettings) -> None:
    """Refuse trackers that are unknown to Accelerate, or not installed."""
    installed = [str(tracker) for tracker in get_available_trackers()]
    if missing := sorted(set(settings.trackers) - {"all", *installed}):
        rule, remedy = "be trackers that Accelerate knows and that are installed", "Install them, or leave them out"
        raise ArgumentError("trackers", rule, missing, remedy, available=installed)


def keep_softmax(models: Models, data: tuple[Data, Data]) -> PreTrainedModel:
    """Make the student anew, without the layers that are best kept softmax; a run that resumes reads what it saved."""
    settings = models.settings
    selection = Selection.of_run(settings.output_dir, lambda: select_layers(models, data))
    if selection.by != settings.softmax_by:
        rule = f"be what chose the layers in {Path(str(settings.output_dir)) / Selection.FILE}, {selection.by!r}"
        raise ArgumentError("softmax_by", rule, settings.softmax_by, "Restore it, or choose another `output_dir`.")
    converted = models.student.config.linear_attention["layers"]
    kept = [layer for place, layer in enumerate(converted) if place not in selection.chosen]
    logger.info("layers kept softmax: %s", [converted[place] for place in selection.chosen])
    return load_student(settings.with_changes(layers=kept), teacher=models.given)


def select_layers(models: Models, data: tuple[Data, Data]) -> Selection:
    """Find the layers to keep softmax, on a student after attention transfer, if that is among the stages."""
    settings, student, heldout = models.settings, models.student, data[1]
    if "transfer" in settings.stages:
        changes: dict[str, Any] = {"output_dir": None, "heldout_rows": 0, "softmax_budget": 0.0, "shard": False}
        quick = settings.with_changes(stages=["transfer"], **changes)
        student = distill(quick, None, student, models.tokenizer, data=data).student
    length, starts = settings.block_tokens, range(0, settings.heldout_rows or 8, settings.rows)
    numbers = [range(start, start + settings.rows) for start in starts]

    def batches(row: Callable[[int, int], Row]) -> list[Batch]:
        rows = [[row(number, length) for number in each] for each in numbers]
        return [heldout.collate(each, length).to(student.device) for each in rows]

    shown: dict[str, Any] = {"budget": settings.softmax_budget, "progress": settings.progress}
    if settings.softmax_by == "recall":
        return select_by_recall(student, batches(heldout.text_row), batches(heldout.recall_row), **shown)
    mixed = [heldout.batch(each, length).to(student.device) for each in numbers]
    return select_by_kl(student, models.source or SharedTeacher(models.student), mixed, **shown)


def divide_keys(models: Models, data: tuple[Data, Data]) -> PreTrainedModel:
    """Make the student anew, with as many keys in each layer as it needs; a run that resumes reads what it saved."""
    settings, student = models.settings, models.student

    def measure_keys() -> Division:
        length = min(settings.trained_length(), LONGEST)
        starts = range(0, TEXTS, settings.rows)
        batches = [data[0].batch(range(n, min(n + settings.rows, TEXTS)), length).to(student.device) for n in starts]
        return divide(student, models.source or SharedTeacher(student), batches, progress=settings.progress)

    division = Division.of_run(settings.output_dir, measure_keys)
    logger.info("keys of layers that have others than the rest: %s", division.per_layer)
    layers = student.config.linear_attention["layers"]
    changes = {"layers": layers, "per_layer": division.per_layer, "divide": "evenly"}
    return load_student(settings.with_changes(**changes), teacher=models.given)


def prepare_stage(settings: DistillationSettings, stage: str, student: nn.Module) -> nn.Module:
    """Put LoRA into the student before the first stage that trains it; recompute activations where there are any."""
    kind: type[Stage] = stage_class(stage)
    if settings.gradient_checkpointing:
        recompute_activations(student, kind.recomputes)
    if settings.trainable == "full" or not kind.lora or isinstance(student, PeftModel):
        return student
    # A resumed run draws the same adapters.
    torch.manual_seed(settings.seed)
    peft_student = add_lora(student, rank=settings.lora_rank, alpha=settings.lora_alpha)  # type: ignore[arg-type]
    let_autocast_cast(peft_student, settings.mixed_precision == "bf16")
    trainable, total = peft_student.get_nb_trainable_parameters()
    logger.info("LoRA trains %s of %s parameters", f"{trainable:,}", f"{total:,}")
    return peft_student


def recompute_activations(model: nn.Module, enable: bool) -> None:
    """Make a model recompute activations in its backward pass, or not."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    verb = "enable" if enable else "disable"
    # Renamed in Transformers 5.23.
    names = (f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}")
    next(getattr(whole, name) for name in names if hasattr(whole, name))()


def count_parameters(student: nn.Module) -> dict[str, int]:
    """Count a student's parameters: all, trained by the last stage, and those of feature maps and mixing weights."""
    return {
        "all": sum(p.numel() for p in student.parameters()),
        "trained": sum(p.numel() for p in student.parameters() if p.requires_grad),
        "feature_maps": sum(p.numel() for p in map_parameters(student)),
    }
