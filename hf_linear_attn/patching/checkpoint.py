"""Load patched models.

The code file of saved folders imports :func:`linear_attention_class` from here.
"""

from pathlib import Path
from typing import Any, cast

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, CheckpointError, HFLinearAttnError
from hf_linear_attn.folder import HUB_OPTIONS, check_folder, check_weights, why_not_loaded
from hf_linear_attn.patching.convert import linear_attention_class
from hf_linear_attn.patching.saving import PREFIX, takes

__all__ = ["from_pretrained", "linear_attention_class"]

SAFE = {"trust_remote_code": False, "weights_only": True, "use_safetensors": True}
"""Arguments of Transformers' ``from_pretrained`` that could have code in a folder run, as they are always set here."""


def from_pretrained(path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a patched model that ``save_pretrained`` or ``push_to_hub`` wrote.

    Args:
        path: A folder, or a name on the hub.
        **kwargs: As for Transformers' ``from_pretrained``: ``dtype``, ``device_map``, ``revision``, fields of the
            config, ... Weights are read from safetensors only, and no code in the folder is run.
            ``ignore_mismatched_sizes=True`` lets weights outside of the converted layers be drawn at random where the
            folder has none that fit, as for a head of another number of labels.

    Returns:
        The model, patched as it was when it was saved; with ``output_loading_info=True`` what Transformers says of its
        weights, too.

    Raises:
        CheckpointError: If the folder holds no patched model, comes from a newer version, its config lacks settings, or
            its weights are missing, damaged or do not fit.
        ArgumentTypeError: If ``path`` is neither a text nor a path.
        ArgumentError: If an argument asks for code or weights that would be executed.
    """
    for argument, safe in SAFE.items():
        if kwargs.pop(argument, safe) is not safe:
            raise ArgumentError(argument, "not be set", not safe, "Nothing in a checkpoint is executed here.")
    kwargs["trust_remote_code"] = False
    hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
    check_folder(path, "path", **hub)
    # As Auto classes do: fields of the config are set there, and what concerns the weights is left for the model.
    weights = {name: kwargs[name] for name in ("dtype", "torch_dtype", "quantization_config") if name in kwargs}
    try:
        config = kwargs.pop("config", None)
        if config is None:
            fields = {name: value for name, value in kwargs.items() if name not in hub | weights}
            config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **hub, **fields)
            kwargs = rest | hub | weights | {"trust_remote_code": False}
    except Exception as error:  # whatever Transformers raises of values that none of its own configs has
        raise CheckpointError(
            "path", "be a folder or hub name with a model's config.json", str(path), why_not_loaded(path, error)
        ) from error
    if getattr(config, "linear_attention", None) is None:
        remedy = "Its config.json has no `linear_attention`; load it with Transformers and call patch_model."
        raise CheckpointError("path", "hold a patched model", str(path), remedy)
    LinearAttentionConfig.from_dict(config.linear_attention)
    base = class_of(config)
    cls: Any = linear_attention_class(base)
    may_draw, wants_info = (kwargs.pop(name, False) for name in ("ignore_mismatched_sizes", "output_loading_info"))
    kwargs |= {"config": config, "use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = cls.from_pretrained(path, **kwargs)
    except CheckpointError:
        raise
    except HFLinearAttnError as error:
        # What a caller would be told of an argument is, of a folder, its fault.
        raise CheckpointError(f"{error} ({path})") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "path", "hold whole safetensors files", str(path), f"Reading them failed: {error}"
        ) from error
    except Exception as error:  # whatever Transformers raises of a folder that is none of ours
        raise CheckpointError(
            "path", "be a patched model that can be loaded", str(path), why_not_loaded(path, error)
        ) from error
    if not may_draw:
        otherwise = ", or pass ignore_mismatched_sizes=True for a new head"
        check_weights(info, "path", "a patched model", path, cls.__name__, otherwise)
    return cast(PreTrainedModel, (model, info) if wants_info else model)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the softmax class that a patched folder's config names, if it is one of Transformers' for that config.

    Raises:
        CheckpointError: If it names anything else.
    """
    names = config.architectures
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    name = name.removeprefix(PREFIX)
    base = getattr(transformers, name, None) if name in dir(transformers) else None
    if not (isinstance(base, type) and issubclass(base, PreTrainedModel)):
        raise CheckpointError(
            "architectures", "name a model's class of the installed transformers", names, "Update transformers."
        )
    if not takes(base, config):
        raise CheckpointError(
            "architectures", f"name a class that takes a {type(config).__name__}", name, "Save the model again."
        )
    return base
