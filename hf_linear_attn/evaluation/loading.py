"""What every command does with what a user names: models, devices, folders and files; each is refused in one way."""

from __future__ import annotations

import re
from typing import Any, Literal

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

from hf_linear_attn.errors import ArgumentError, CheckpointError, explain
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
            explain(
                argument,
                "be a folder or hub name with a model's config.json",
                name,
                f"Loading it failed: {first_line(error)}",
            )
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
        raise ArgumentError(explain(argument, "be a softmax model, and this one is patched", name, remedy))
    if not patched and attention == "linear":
        raise ArgumentError(explain(argument, "be a patched model, and this one is softmax", name, remedy))
    load = from_pretrained if patched else AutoModelForCausalLM.from_pretrained
    try:
        return load(name, local_files_only=local_files_only, **options)
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            explain(
                argument,
                "be a causal language model that can be loaded",
                name,
                f"Loading it failed: {first_line(error)}",
            )
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
            explain(
                "tokenizer",
                "be loadable from the model's folder",
                name,
                f"Save it there; loading it failed: {first_line(error)}",
            )
        ) from error


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
