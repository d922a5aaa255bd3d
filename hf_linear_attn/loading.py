"""What every command does with what a user names: models, devices, folders and files; each is refused in one way."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as of_transformers

from hf_linear_attn.errors import ArgumentError, CheckpointError, HFLinearAttnError, first_line, renamed
from hf_linear_attn.feature_maps import load_feature_maps
from hf_linear_attn.folder import check_folder, check_weights, no_model, why_not_loaded
from hf_linear_attn.patching import from_pretrained

_POOLER = re.compile(r"(^|\.)pooler\.")
_POSITION_TABLE = re.compile(r"(^|\.)(wpe|(embed_)?pos\w*)$")


def load_config(name: str, argument: str = "model", *, local_files_only: bool = False) -> PreTrainedConfig:
    """Load the config of a model, of a folder, a config.json or a hub name.

    Raises:
        CheckpointError: If there is none, or it is not to be trusted, see :func:`check_folder`.
    """
    check_folder(name, argument, local_files_only=local_files_only)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            name, local_files_only=local_files_only, trust_remote_code=False
        )
    except Exception as error:  # whatever Transformers raises of values that none of its own configs has
        raise no_model(argument, name, why_not_loaded(name, error)) from error
    return config


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a causal language model without weights, on the meta device.

    Raises:
        ArgumentError: If the config is not a causal language model's, or no model can be built of it.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
            return model
    except Exception as error:  # whatever a model's class raises of sizes that do not fit
        raise ArgumentError(
            "config", "be a causal language model's", type(config).__name__, first_line(error)
        ) from error


Kind = Literal["causal", "encoder"]

CALLED: dict[Kind, str] = {"causal": "a causal language model", "encoder": "an encoder"}
"""What messages call the kinds of models."""


def load_model(
    name: str,
    argument: str = "model",
    *,
    kind: Kind = "causal",
    attention: Literal["softmax", "linear", "any"] = "any",
    remedy: str = "Check the path.",
    local_files_only: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a model with all its weights, patched if it was saved patched.

    Args:
        name: A folder or hub name.
        argument: What the caller calls it, for messages.
        kind: ``causal`` loads a causal language model; ``encoder`` the class that the checkpoint names, so that a head
            that was trained stays, or the model without a head.
        attention: What is asked for: loaded by Transformers, a patched folder would be a softmax model of worthless
            weights.
        remedy: What to do with a model of the other kind.
        local_files_only: Never reach for a network.
        **options: More of Transformers' ``from_pretrained``.

    Raises:
        ArgumentError: If the model is of another kind than asked for.
        CheckpointError: If there is no model of that kind, or it is damaged, or weights are missing in it: those would
            be drawn at random, and nothing can be learned from them or measured.
    """
    config = load_config(name, argument, local_files_only=local_files_only)
    patched = getattr(config, "linear_attention", None) is not None
    if patched and attention == "softmax":
        raise ArgumentError(argument, "be a softmax model, and this one is patched", name, remedy)
    if not patched and attention == "linear":
        raise ArgumentError(argument, "be a patched model, and this one is softmax", name, remedy)
    auto: Any = AutoModelForCausalLM if kind == "causal" else _named_class(config)
    load: Any = from_pretrained if patched else auto.from_pretrained
    # Weights that do not fit are refused below, with those that are missing.
    options |= {"local_files_only": local_files_only, "output_loading_info": True, "ignore_mismatched_sizes": True}
    options |= {"trust_remote_code": False, "use_safetensors": True}
    try:
        with renamed(path=argument):
            model, info = load(name, **options)
        if kind == "encoder" and info["missing_keys"] and all(_POOLER.search(key) for key in info["missing_keys"]):
            # Nothing reads it.
            model, info = load(name, **options, add_pooling_layer=False)
    except HFLinearAttnError:
        raise
    except Exception as error:  # whatever Transformers raises of a folder that is none of its own
        raise CheckpointError(
            argument, f"be {CALLED[kind]} that can be loaded", name, why_not_loaded(name, error)
        ) from error
    check_weights(info, argument, CALLED[kind], name, type(model).__name__)
    found: PreTrainedModel = model
    return found


def _named_class(config: PreTrainedConfig) -> Any:
    """Return the class of an encoder that a config names, or the one without a head."""
    name = next(iter(config.architectures or ()), "")
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else AutoModel


def load_tokenizer(name: str, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        CheckpointError: If there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=local_files_only, trust_remote_code=False)
    except Exception as error:  # whatever Transformers raises of files that are none of its own
        remedy = f"Save it there; loading it failed: {first_line(error)}"
        raise CheckpointError("tokenizer", "be loadable from the model's folder", name, remedy) from error


def process_state() -> PartialState:
    """Return which of how many processes this is, and its device; started by any of Accelerate's launchers or alone.

    Raises:
        ArgumentError: If a launcher was asked for several processes, and this one is alone or does not know the others.
    """
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    if state.num_processes == 1:
        asked = int(os.environ.get("WORLD_SIZE") or 1)
        # For one process Accelerate's launcher names no address.
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
        if asked > 1 or (launched and "RANK" not in os.environ):
            raise ArgumentError(
                "num_processes",
                "be 1, as the launcher has started one process that knows of no other",
                asked if asked > 1 else "several",
                "Start N with `accelerate launch --config_file examples/accelerate/cpu.yaml --num_processes N` and "
                "without --cpu, or with `torchrun --nproc-per-node N`.",
            )
    return state


def find_device(name: str) -> torch.device:
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
            "device", "be a device that can be used here", name, "Use one of those", available=usable
        ) from error
    return device


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
def progress_bars(*, shown: bool) -> Iterator[None]:
    """Leave the progress bars of Transformers and datasets as they are, or show none within the block."""
    if shown:
        yield
        return
    import datasets

    libraries = [library for library in (of_transformers, datasets) if library.is_progress_bar_enabled()]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()


@contextmanager
def users_code(file: str | Path, argument: str) -> Iterator[None]:
    """Say in one line what is wrong with a Python file of the user's that runs within the block.

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
        remedy = f"Correct it, {type(error).__name__} in line {line}: {first_line(error)}"
        raise ArgumentError(argument, "run without an error", str(file), remedy) from error


def trained_positions(model: PreTrainedModel) -> int | None:
    """Return the length of the longest texts that a rotary model was trained on, as its config declares it.

    Beyond it such a model computes on, at rotations that it never saw. None where nothing is declared.
    """
    declared = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(declared) if declared and declared > 0 else None


def load_users_maps(file: str | Path | None) -> None:
    """Run the Python file that `--feature-map-file` names, if it names one.

    Raises:
        ArgumentError: If it fails, or registers no feature map.
    """
    if file is None:
        return
    with users_code(file, "feature_map_file"), renamed(file="feature_map_file"):
        load_feature_maps(file)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of positions a table of a language model holds, or None where positions do not run out."""
    # Towers for images and sound have positions of their own.
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    tables = [
        # RoBERTa keeps the rows up to padding's for itself.
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
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
    declared = trained_positions(model)
    return min([*tables, *([declared] if tables and declared else [])], default=None)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the numbers of a query in a model's language model, D.

    Raises:
        ArgumentError: If it has no attention.
    """
    text = config.get_text_config()
    head_dim: int | None = getattr(text, "head_dim", None)
    heads = getattr(text, "num_attention_heads", None)
    if head_dim is None and not heads:
        found = type(config).__name__
        raise ArgumentError("model", "have attention to convert", found, "Choose a softmax Transformer.")
    return head_dim or text.hidden_size // heads
