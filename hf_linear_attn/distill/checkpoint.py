"""Checkpoints of a run, written so that a kill at any moment leaves whole ones only."""

import json
import shutil
import zlib
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_linear_attn.config import LATER
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.errors import CheckpointError
from hf_linear_attn.files import sync

logger = getLogger(__name__)

MODEL, OPTIMIZER, META = "model.safetensors", "optimizer.pt", "meta.json"

NUMBERED = "step-" + 8 * "[0-9]"
"""Names of checkpoints; what else is in their folder is somebody else's."""


class Checkpoint(NamedTuple):
    """What a run goes on from."""

    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]
    meta: dict[str, Any]
    path: Path


def save_checkpoint(
    folder: Path,
    number: int,
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    keep: int,
) -> None:
    """Write a checkpoint to a temporary folder, rename it, and remove all but the newest ``keep``.

    Its number, the steps done over all stages, orders the checkpoints. ``meta`` is of plain JSON values.

    Raises:
        CheckpointError: If writing fails, for instance on a full disk; what was there before is still whole.
    """
    final = folder / f"step-{number:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, temporary / MODEL)
        torch.save(dict(optimizer), temporary / OPTIMIZER)
        sums = {name: _crc32(temporary / name) for name in (MODEL, OPTIMIZER)}
        (temporary / META).write_text(json.dumps({**meta, "crc32": sums}))
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        # A full disk shows as RuntimeError from torch and as SafetensorError from safetensors.
        shutil.rmtree(temporary, ignore_errors=True)
        free_mib = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 2**20
        last = next(reversed(checkpoints(folder)), None)
        rule = "have room for a checkpoint"
        remedy = f"Writing failed ({error}); make room and run again to go on from the last good one: {last}."
        raise CheckpointError("output_dir", rule, f"{free_mib:.0f} MiB free", remedy, where=str(folder)) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    return sorted(folder.glob(NUMBERED))


def load_newest(folder: Path) -> Checkpoint | None:
    """Load the newest checkpoint that is whole; a damaged one is passed over, with a warning.

    Raises:
        CheckpointError: If there are checkpoints, and every one is damaged.
    """
    found = checkpoints(folder)
    for path in reversed(found):
        try:
            meta = json.loads((path / META).read_text())
            for name, expected in meta.pop("crc32").items():
                if _crc32(path / name) != expected:
                    raise OSError(f"{name} is damaged")
            optimizer = torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu")
            return Checkpoint(load_file(path / MODEL), optimizer, meta, path)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            logger.warning("checkpoint %s cannot be read (%s); trying the one before it", path, error)
    if found:
        rule, remedy = "hold a readable checkpoint", "All are damaged: empty the folder to start over."
        raise CheckpointError("output_dir", rule, [path.name for path in found], remedy, where=str(folder))
    return None


def settings_then(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint was written with, in today's form.

    What an older run did not know of was as it is by default, or was then.
    """
    settings = json.loads(json.dumps(DistillationSettings().to_dict())) | LATER | written
    if isinstance(settings["feature_map_options"], str):
        settings["feature_map_options"] = json.loads(settings["feature_map_options"])
    if (column := settings.pop("text_column", "text")) != "text":
        settings["columns"] = [f"text={column}"]
    for name in ("dataset", "dataset_config", "dataset_split"):
        if isinstance(settings[name], str):
            settings[name] = [settings[name]]
    return dict(settings)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(2**22):
            value = zlib.crc32(piece, value)
    return value
