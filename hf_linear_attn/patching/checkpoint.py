"""Load patched models.

The code file of saved folders imports :func:`linear_attention_class` from here.
"""

from pathlib import Path
from typing import Any, cast

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.patching.convert import linear_attention_class
from hf_linear_attn.patching.saving import PREFIX

__all__ = ["from_pretrained", "linear_attention_class"]


def from_pretrained(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a patched model that ``save_pretrained`` or ``push_to_hub`` wrote.

    Args:
        path: A folder, or a name on the hub.
        **kwargs: As for Transformers' ``from_pretrained``: ``dtype``, ``device_map``, ``revision``, fields of the
            config, ... Weights are read from safetensors only, and no code in the folder is run.

    Returns:
        The model, patched as it was when it was saved.

    Raises:
        CheckpointError: If the folder holds no patched model, comes from a newer version, or its weights are damaged
            or do not fit.
        ArgumentError: If an argument asks for code or weights that would be executed.
    """
    for argument in ("trust_remote_code", "weights_only"):
        if argument in kwargs and kwargs[argument] is not (argument == "weights_only"):
            raise ArgumentError(argument, "not be set", kwargs[argument], "Nothing in a checkpoint is executed here.")
    hub = {
        name: kwargs[name]
        for name in ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        if name in kwargs
    }
    # As Auto classes do: fields of the config are set there, and what concerns the weights is left for the model.
    weights = {name: kwargs[name] for name in ("dtype", "torch_dtype", "quantization_config") if name in kwargs}
    try:
        config = kwargs.pop("config", None)
        if config is None:
            fields = {name: value for name, value in kwargs.items() if name not in hub | weights}
            config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **hub, **fields)
            kwargs = rest | hub | weights
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "path", "be a folder or hub name with a config.json", str(path), str(error).split("\n")[0]
        ) from error
    if getattr(config, "linear_attention", None) is None:
        raise CheckpointError(
            "path",
            "hold a patched model",
            str(path),
            "Its config.json has no `linear_attention`; load it with Transformers and call patch_model.",
        )
    LinearAttentionConfig.from_dict(config.linear_attention)
    name = (config.architectures or [""])[0].removeprefix(PREFIX)
    base = getattr(transformers, name, None)
    if base is None:
        raise CheckpointError(
            "architectures",
            "name a class of the installed transformers",
            name,
            "Update transformers.",
        )
    cls: Any = linear_attention_class(base)
    try:
        return cast(PreTrainedModel, cls.from_pretrained(path, config=config, use_safetensors=True, **kwargs))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "path", "hold whole safetensors files", str(path), f"Reading them failed: {error}"
        ) from error
