"""The file of a context: tensors and metadata, under one checksum."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_linear_attn.checks import check_path
from hf_linear_attn.errors import CheckpointError
from hf_linear_attn.files import sync
from hf_linear_attn.ops.window import NOWHERE

FORMAT = "hf_linear_attn.context"

FORMAT_VERSION = 4
"""Version of the file; raised when older code could not read it."""

TENSORS_ALONE = 3
"""Last version whose checksum is of the tensors, and not of the metadata."""

UNFINISHED = ".unfinished"
"""Ends the name of a file that is still being written, beside the one that it will replace."""


def write_context_file(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write a safetensors file in place of the one that is there, if any: whole, or not at all.

    Tensors are contiguous, on the CPU, and metadata JSON values; the file's folder is made.

    Raises:
        ArgumentTypeError: If ``path`` is no path.
        CheckpointError: If it cannot be written.
    """
    about = {"format": FORMAT, "format_version": FORMAT_VERSION, **metadata}
    about["checksum"] = _checksum(tensors, about)
    # Behind a link, so that the link stays one.
    target = Path(os.path.realpath(check_path("path", path)))
    if target.is_dir():
        raise CheckpointError("path", "be a file", str(path), "It is a folder: name a file in it.")
    unfinished = target.with_name(f".{uuid4().hex}{UNFINISHED}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata={"about": json.dumps(about)})
        sync(unfinished)
        unfinished.replace(target)
    except (OSError, SafetensorError) as error:
        if target.parent.is_dir():
            unfinished.unlink(missing_ok=True)
        raise CheckpointError(
            "path", "be a file that can be written", str(path), f"Choose another: {error}."
        ) from error


def read_context_file(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_context_file` wrote, in this version or an earlier one; metadata have ``format_version``.

    Raises:
        ArgumentTypeError: If ``path`` is no path.
        CheckpointError: If it is no such file, of a newer version, damaged or changed.
    """
    if check_path("path", path).is_dir():
        raise CheckpointError("path", "be a file", str(path), "It is a folder: name a file that Context.save wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "path", "be a whole safetensors file", str(path), f"Reading it failed: {error}"
        ) from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError("path", "hold a saved context", str(path), "Make one with encode_context.")
    version = about.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        remedy = "Update hf_linear_attn to read this context."
        raise CheckpointError("format_version", f"be at most {FORMAT_VERSION}", version, remedy, where=str(path))
    found = about.pop("checksum", None)
    if found != _checksum(tensors, about if version > TENSORS_ALONE else {}) or not _is_whole(tensors, about):
        raise CheckpointError("path", "hold what was saved", str(path), "It was changed; encode the text again.")
    return tensors, about


def _is_whole(tensors: dict[str, Tensor], about: dict[str, Any]) -> bool:
    """Tell whether metadata have their types; up to version 3 nothing else speaks for them."""
    same, padded = about.get("same", {}), about.get("padded", [])
    return (
        "seen" in tensors
        and type(about.get("length")) is int
        and isinstance(same, dict)
        and all(isinstance(first, str) and first in tensors for first in same.values())
        and isinstance(padded, list)
    )


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    """Return a hash of metadata, where there are any, and of the tensors' names, shapes, dtypes and bytes."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode() if about else b"")
    for name in sorted(tensors):
        # A copy: a lone element may have any stride, contiguous or not.
        x = tensors[name].clone(memory_format=torch.contiguous_format)
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def in_ring_buffers(tensors: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Return the tensors of a file of the first format, which held the window in order, as they are held now."""
    found = {name: x for name, x in tensors.items() if name.split(".")[-1].split("_")[0] not in ("ring", "sink", "far")}
    found |= {name: x for name, x in tensors.items() if name.endswith(".far_keys")}
    for prefix in (name.removesuffix("ring_k") for name in tensors if name.endswith(".ring_k")):
        mask = tensors[prefix + "ring_far"]
        window = mask.shape[1]
        sinks = tensors[prefix + "sink_slot"].shape[1] if prefix + "sink_slot" in tensors else 0
        slots = sinks + (torch.arange(window) - window + length) % (window + 1)
        for name in ("k", "v"):
            x = tensors[f"{prefix}ring_{name}"]
            ring = x.new_zeros(*x.shape[:2], sinks + window + 1, x.shape[3])
            ring[:, :, slots] = x
            if sinks:
                ring[:, :, :sinks] = tensors[f"{prefix}sink_{name}"]
            found[f"{prefix}near_{name}"] = ring
        held = mask.new_zeros(len(mask), sinks + window + 1)
        held[:, slots] = mask
        if sinks:
            held[:, :sinks] = tensors[prefix + "sink_slot"] < NOWHERE
        found[prefix + "near_mask"] = held
    return found
