"""The folder of a run: what it may be, how a run knows its own, what starting anew removes, and what is saved."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.distill.card import write_card
from hf_linear_attn.distill.checkpoint import NUMBERED, checkpoints
from hf_linear_attn.distill.result import DistillResult
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.encoders import copy_sentence_files
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.figures import Axes, Series, line_chart
from hf_linear_attn.evaluation.report import standalone
from hf_linear_attn.files import found_in, output_folder, paths_read, remove, whole_folder, write_atomic

RECORD = "distillation.json"
"""Settings and figures; begun with the run, so that it is known as one."""

READ = ("model", "student", "dataset", "feature_map_file", "chat_template")
"""Settings that name what is read, beside the teacher's logits."""

_MARKS = (RECORD, f"checkpoints/{NUMBERED}/meta.json")  # the latter of runs before there was a record at their start
_MADE = (
    RECORD,
    f"checkpoints/{NUMBERED}",
    f"checkpoints/.{NUMBERED}.tmp",
    "log.jsonl",
    "layers.json",
    "division.json",
    "loss.svg",
)
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
_WHOLE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)
"""What a student is saved as; one kind beside the other cannot be loaded."""

POINTS = 200
"""Most points of a line in the picture of losses."""


def check_run_folder(settings: DistillationSettings, **loaded: Any) -> None:
    """Check the folder of a run by :func:`hf_linear_attn.files.output_folder`."""
    stored = Path(settings.output_dir or "") / "checkpoints"
    if settings.overwrite and stored.is_symlink() and checkpoints(stored):
        # Nothing is removed elsewhere, and the run would go on from them.
        remedy = "Remove them, or the link, or choose another folder."
        raise ArgumentError("output_dir", "hold no checkpoints elsewhere", str(stored.resolve()), remedy)
    inputs = paths_read(settings, [*READ, "teacher_logits"], **loaded)
    output_folder(settings.output_dir or "", inputs=inputs, marks=_MARKS, overwrite=settings.overwrite)


def begin(settings: DistillationSettings, folder: Path) -> None:
    """Mark a locked folder as a run's; remove an earlier one where it is to be overwritten."""
    if settings.overwrite:
        if found_in(folder, _MARKS):
            as_adapters = settings.trainable == "lora" and not settings.merge_lora
            remove(folder, _WHOLE if as_adapters else _ADAPTERS)
        remove(folder, _MADE)
    if not (folder / RECORD).exists():
        write_atomic(folder / RECORD, json.dumps({"settings": settings.to_dict()}, indent=2))


def save_result(
    result: DistillResult, tokenizer: PreTrainedTokenizerBase, folder: Path, state: dict[str, Tensor] | None
) -> None:
    """Save the student with its tokenizer, figures, loss picture and model card.

    Where writing the model fails, as on a full disk, the folder holds no part of it.
    """
    with whole_folder(folder) as temporary:
        result.student.save_pretrained(temporary, state_dict=state)
        tokenizer.save_pretrained(temporary)
        if result.settings.encoder:
            copy_sentence_files(result.settings.model, temporary)
    draw_losses(result.history, folder / "loss.svg")
    names = ("metrics", "tokens", "elapsed_s", "trainable_parameters")
    record = {"settings": result.settings.to_dict(), **{name: getattr(result, name) for name in names}}
    write_atomic(folder / RECORD, json.dumps(record, indent=2))
    write_card(result, folder)


def draw_losses(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw loss against training tokens, a line per stage, on logarithmic axes; nothing where nothing was logged."""
    known = [record for record in history if record["loss_nats"] > 0]
    if not known:
        return
    lines, starts = [], []
    for number, stage in enumerate(dict.fromkeys(record["stage"] for record in known)):
        points = [(r["tokens"], r["loss_nats"], None, None) for r in known if r["stage"] == stage]
        lines.append(Series(stage, number, points[:: -(-len(points) // POINTS)]))
        starts.append((points[0][0], stage))
    axes = Axes("training tokens", "loss (nats; transfer: error over variance)", log_y=True, marks=starts)
    write_atomic(path, standalone(line_chart("Loss against training tokens", lines, axes)) + "\n")
