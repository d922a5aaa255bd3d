"""The entry point: from a softmax checkpoint to a distilled student."""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.distill.card import write_card
from hf_linear_attn.distill.checkpoint import write_atomic
from hf_linear_attn.distill.data import Batch, Data, load_data
from hf_linear_attn.distill.measure import measure
from hf_linear_attn.distill.picture import draw_losses
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages import linear_attention_parts, predictions
from hf_linear_attn.distill.trainer import OnStep, Trainer, locked
from hf_linear_attn.errors import ArgumentError, explain
from hf_linear_attn.patching import from_pretrained, is_patched, patch_model

logger = logging.getLogger(__name__)


@dataclass
class DistillResult:
    """What :func:`distill` returns.

    Args:
        student: The distilled model, in evaluation mode.
        settings: The settings it was made with.
        history: One record per logged step: ``stage``, ``step``, ``loss_nats``, ``tokens``, ``tokens_per_s``, ...
        metrics: ``teacher`` and ``student`` as :func:`measure` returns them, empty with ``heldout_rows=0``.
        tokens: Tokens trained on.
        elapsed_s: Seconds trained.
        trainable_parameters: Parameters that were trained, by kind.
        output_dir: Where the student was saved, or None.
    """

    student: PreTrainedModel
    settings: DistillationSettings
    history: list[dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    elapsed_s: float = 0.0
    trainable_parameters: dict[str, int] = field(default_factory=dict)
    output_dir: Path | None = None


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
        ArgumentError: If models, tokenizer, data and settings do not fit together.
        CheckpointError: If the output folder is in use, full, or holds only damaged checkpoints.
        TrainingError: If the loss becomes infinite or NaN, or the data cannot be read.
    """
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision, log_with=settings.trackers or None, project_dir=settings.output_dir
    )
    folder = None if settings.output_dir is None else Path(settings.output_dir)
    torch.manual_seed(settings.seed)
    teacher = load_teacher(settings) if teacher is None else teacher
    tokenizer = AutoTokenizer.from_pretrained(settings.model) if tokenizer is None else tokenizer
    student = load_student(settings, teacher) if student is None else student
    check_pair(teacher, student, tokenizer)
    teacher.to(accelerator.device).eval().requires_grad_(False)
    student.to(accelerator.device)
    if settings.gradient_checkpointing:
        student.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
    with locked(folder if accelerator.is_main_process else None), torch.random.fork_rng():
        train, heldout = data or load_data(settings, tokenizer, processes=accelerator.num_processes)
        if settings.trackers:
            accelerator.init_trackers("hf_linear_attn")
        trainer = Trainer(
            settings, student, train, teacher_function(teacher), accelerator, student.config.hidden_size, on_step
        )
        trainer.run()
        student.train(False)
        result = DistillResult(
            student=student,
            settings=settings,
            history=trainer.history,
            tokens=trainer.tokens,
            elapsed_s=trainer.elapsed_s,
            trainable_parameters=count_parameters(student, trainer.trained),
            output_dir=folder,
        )
        if settings.heldout_rows:
            result.metrics = {
                name: measure(
                    model,
                    heldout,
                    tokenizer,
                    rows=settings.heldout_rows,
                    length=settings.block_tokens,
                    seed=settings.seed,
                )
                for name, model in (("teacher", teacher), ("student", student))
            }
        if settings.trackers:
            accelerator.end_training()
        if folder is not None and accelerator.is_main_process:
            save_result(result, tokenizer, folder)
    return result


def load_teacher(settings: DistillationSettings) -> PreTrainedModel:
    """Load the softmax model that the settings name.

    Raises:
        ArgumentError: If there is none, or it is patched already.
    """
    if settings.model is None:
        raise ArgumentError(
            explain("model", "be a folder or hub name", None, "Name a softmax checkpoint, or pass teacher=.")
        )
    options = {} if settings.teacher_dtype is None else {"dtype": getattr(torch, settings.teacher_dtype)}
    try:
        model = AutoModelForCausalLM.from_pretrained(settings.model, **options)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            explain(
                "model",
                "be a causal language model's folder or hub name",
                settings.model,
                f"Loading it failed: {str(error).splitlines()[0]}",
            )
        ) from error
    return model


def load_student(settings: DistillationSettings, teacher: PreTrainedModel) -> PreTrainedModel:
    """Load the student that the settings name, or patch a copy of the teacher."""
    if settings.student is not None:
        return from_pretrained(settings.student)
    student = copy.deepcopy(teacher)
    if settings.mixed_precision != "no":
        # Mixed precision keeps master weights in fp32.
        student.to(dtype=torch.float32)
    head_dim = getattr(student.config, "head_dim", None) or (
        student.config.hidden_size // student.config.num_attention_heads
    )
    return patch_model(
        student,
        feature_map=settings.feature_map,
        feature_map_options=settings.map_options(head_dim),
        layers=settings.layers,
        window=settings.window,
        sinks=settings.sinks,
        mix=settings.mix,
    )


def check_pair(teacher: PreTrainedModel, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a teacher and a student that cannot belong together.

    Raises:
        ArgumentError: If one of them is patched wrongly, or architectures or vocabularies differ.
    """
    if is_patched(teacher):
        raise ArgumentError(
            explain("teacher", "be a softmax model", type(teacher).__name__, "Pass the unpatched original.")
        )
    if not is_patched(student):
        raise ArgumentError(
            explain("student", "be patched", type(student).__name__, "Call patch_model on a copy of the teacher.")
        )
    if teacher.config.model_type != student.config.model_type:
        raise ArgumentError(
            explain(
                "student",
                f"have the teacher's architecture, {teacher.config.model_type!r}",
                student.config.model_type,
                "Patch a copy of the teacher.",
            )
        )
    if teacher.config.vocab_size != student.config.vocab_size:
        raise ArgumentError(
            explain(
                "student",
                f"have the teacher's tokenizer and vocabulary of {teacher.config.vocab_size}",
                student.config.vocab_size,
                "Distillation compares next-token distributions: use models with one tokenizer.",
            )
        )
    if len(tokenizer) > teacher.config.vocab_size:
        raise ArgumentError(
            explain(
                "tokenizer",
                f"have at most the models' {teacher.config.vocab_size} tokens",
                len(tokenizer),
                "Use the tokenizer that the teacher was trained with.",
            )
        )


def teacher_function(teacher: nn.Module) -> Callable[[Batch, list[int]], Tensor]:
    """Return a function that gives the teacher's logits at a batch's weighted tokens."""

    def logits(batch: Batch, numbers: list[int]) -> Tensor:
        with torch.no_grad():
            return predictions(teacher, batch)[2]

    return logits


def count_parameters(student: nn.Module, trained: set[str]) -> dict[str, int]:
    """Count a student's parameters: all, trained, and those of feature maps and gates."""
    maps = {id(p) for part in linear_attention_parts(student) for p in part.parameters()}
    named = dict(student.named_parameters())
    return {
        "all": sum(p.numel() for p in named.values()),
        "trained": sum(p.numel() for name, p in named.items() if name in trained),
        "feature_maps": sum(p.numel() for p in named.values() if id(p) in maps),
    }


def save_result(result: DistillResult, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the student with its tokenizer, figures, loss picture and model card."""
    result.student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw_losses({"student": result.history}, folder / "loss.svg")
    write_atomic(
        folder / "distillation.json",
        json.dumps(
            {
                "settings": result.settings.to_dict(),
                "metrics": result.metrics,
                "tokens": result.tokens,
                "elapsed_s": result.elapsed_s,
                "trainable_parameters": result.trainable_parameters,
            },
            indent=2,
        ),
    )
    write_card(result, folder)
