"""What every command does with what a user names: models, devices, folders and files; each is refused in one way."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_linear_attn.errors import ArgumentError, CheckpointError, HFLinearAttnError
from hf_linear_attn.feature_maps import load_feature_maps
from hf_linear_attn.patching import from_pretrained

_POSITION_TABLE = re.compile(r"(^|\.)(wpe|(embed_)?pos\w*)$")
_LOADING_ERRORS = (OSError, ValueError, SafetensorError, StrictDataclassError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says anything."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def load_config(name: str, argument: str = "model", *, local_files_only: bool = False) -> PreTrainedConfig:
    """Load the config of a model.

    Args:
        name: A folder, a config.json or a hub name.
        argument: What the caller calls it, for messages.
        local_files_only: Never reach for a network.

    Raises:
        CheckpointError: If there is none.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, local_files_only=local_files_only)
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            argument,
            "be a folder or hub name with a model's config.json",
            name,
            f"Loading it failed: {first_line(error)}",
        ) from error
    return config


def load_model(
    name: str,
    argument: str = "model",
    *,
    attention: Literal["softmax", "linear", "any"] = "any",
    remedy: str = "Check the path.",
    local_files_only: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a causal language model, patched if it was saved patched.

    Args:
        name: A folder or hub name.
        argument: What the caller calls it, for messages.
        attention: What is asked for: loaded by Transformers, a patched folder would be a softmax model of worthless
            weights.
        remedy: What to do with a model of the other kind.
        local_files_only: Never reach for a network.
        **options: More of Transformers' ``from_pretrained``.

    Raises:
        ArgumentError: If the model is of another kind than asked for.
        CheckpointError: If there is no causal language model, or it is damaged.
    """
    patched = bool(getattr(load_config(name, argument, local_files_only=local_files_only), "linear_attention", None))
    if patched and attention == "softmax":
        raise ArgumentError(argument, "be a softmax model, and this one is patched", name, remedy)
    if not patched and attention == "linear":
        raise ArgumentError(argument, "be a patched model, and this one is softmax", name, remedy)
    load = from_pretrained if patched else AutoModelForCausalLM.from_pretrained
    try:
        return load(name, local_files_only=local_files_only, **options)
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            argument,
            "be a causal language model that can be loaded",
            name,
            f"Loading it failed: {first_line(error)}",
        ) from error


def load_tokenizer(name: str, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        CheckpointError: If there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=local_files_only)
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            "tokenizer",
            "be loadable from the model's folder",
            name,
            f"Save it there; loading it failed: {first_line(error)}",
        ) from error


def find_device(name: str, argument: str = "device") -> torch.device:
    """Return a device that torch can use.

    Raises:
        ArgumentError: If there is none of that name.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        usable = ["cpu", *([accelerator.type] if accelerator else [])]
        raise ArgumentError(
            argument, "be a device that can be used here", name, "Use one of those", available=usable
        ) from error
    return device


def make_folder(path: str | Path, argument: str = "output_dir") -> Path:
    """Make a folder if need be, and see that it can be written.

    Raises:
        ArgumentError: If it cannot.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ArgumentError(
            argument, "be a folder that can be written", str(path), f"Choose another: {error.strerror}."
        ) from error
    return folder


def read_text(path: str | Path, argument: str = "text_file") -> str:
    """Read a text.

    Raises:
        ArgumentError: If it cannot be read as UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(argument, "be a readable UTF-8 text", str(path), f"Check the file: {error}.") from error


@contextmanager
def users_code(file: str | Path, argument: str) -> Iterator[None]:
    """Say in one line what is wrong with a Python file of the user's that runs within the block.

    Args:
        file: The file.
        argument: What the caller calls it, for messages.

    Raises:
        ArgumentError: If it fails.
    """
    try:
        yield
    except HFLinearAttnError:
        raise
    except Exception as error:  # whatever a user's code may raise
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == Path(file).resolve()
        ]
        line = error.lineno if isinstance(error, SyntaxError) else next(reversed(lines), None)
        raise ArgumentError(
            argument,
            "run without an error",
            str(file),
            f"Correct it, {type(error).__name__} in line {line}: {first_line(error)}",
        ) from error


def load_users_maps(file: str | Path) -> None:
    """Run the Python file that `--feature-map-file` names.

    Raises:
        ArgumentError: If it fails, or registers no feature map.
    """
    with users_code(file, "feature_map_file"):
        load_feature_maps(file)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of positions a table of a language model holds, or None where positions do not run out."""
    # Towers for images and sound have positions of their own.
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    tables = [
        module.num_embeddings
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Embedding) and _POSITION_TABLE.search(name)
    ]
    # GPT-J looks rotations up in a buffer.
    tables += [
        buffer.shape[0]
        for name, buffer in decoder.named_buffers()
        if buffer.ndim == 2 and buffer.is_floating_point() and _POSITION_TABLE.search(name)
    ]
    # OPT and BART keep two rows for themselves; the configuration knows how many remain.
    declared = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min([*tables, *([declared] if tables and declared else [])], default=None)
