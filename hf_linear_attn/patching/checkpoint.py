"""Save and load patched models."""

import json
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.auto import modeling_auto

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, CheckpointError, UnsupportedError

CODE_FILE = "modeling_linear_attention.py"
"""Written beside the weights, so that Auto classes can load the folder with ``trust_remote_code=True``."""

CODE = '''\
"""Load this folder through Transformers' Auto classes; needs `pip install hf_linear_attn`."""

import transformers

from hf_linear_attn.patching.checkpoint import linear_attention_class

'''

PREFIX = "LinearAttention"
"""Put before the class's name in a folder's config: what looks for that class in Transformers, to load the folder as a
softmax model, does not find it."""

LESS_TELLING = ("AutoModelForMaskedLM", "AutoModelForPreTraining")
"""Auto classes that encoder-decoders are registered for, too."""

CARD = """\
---
library_name: transformers
tags:
- linear-attention
- hf_linear_attn
---

# {name} with linear attention

A softmax model whose attention layers were converted by hf_linear_attn: time grows linearly with the context, and the
generation state has a constant size. Without that package the folder loads as a softmax model again, with a report of
unexpected weights, and its answers are worthless. Load it so:

```python
from hf_linear_attn import from_pretrained

model = from_pretrained("this/folder")
```

or with `{auto}.from_pretrained("this/folder", trust_remote_code=True)`.

## How it was converted

```json
{settings}
```
"""

BaseT = TypeVar("BaseT", bound=PreTrainedModel)


class PatchedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Mixed into the class of a patched model: builds itself patched, and saves what others need to load it."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        settings = getattr(config, "linear_attention", None)
        if settings is not None:
            from hf_linear_attn.patching.patch import apply_config

            apply_config(self, LinearAttentionConfig.from_dict(settings))

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Put our layers into the cache before `generate` configures it: recording, compiling and resetting."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        from hf_linear_attn.patching.attention import convert_cache

        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, Cache):
            convert_cache(self, cache)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()  # type: ignore[no-untyped-call]

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as Transformers does; after a context, ``inputs`` are only the tokens that follow it."""
        from hf_linear_attn.patching.context import ContextCache

        cache = kwargs.get("past_key_values")
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(cache, ContextCache) and ids is not None:
            if cache.get_seq_length() != cache.context_mask.shape[1]:
                raise ArgumentError(
                    "past_key_values",
                    f"be a fresh copy of a context of {cache.context_mask.shape[1]} tokens",
                    f"a cache of {cache.get_seq_length()}",
                    "Call context.copy() for each answer.",
                )
            if (rows := cache.context_mask.shape[0]) != ids.shape[0]:
                raise ArgumentError(
                    "past_key_values",
                    f"hold a context for each of the {ids.shape[0]} inputs",
                    rows,
                    "Call context.copy(repeats) for several inputs after one text; generate repeats rows for beams "
                    "by itself.",
                )
            mask = kwargs.get("attention_mask")
            if mask is None:
                mask = torch.ones_like(ids)
            past = cache.context_mask.to(mask)
            if mask.shape[1] == ids.shape[1]:
                mask = torch.cat([past, mask], dim=1)
            elif mask.shape[1] != past.shape[1] + ids.shape[1] or not torch.equal(mask[:, : past.shape[1]], past):
                raise ArgumentError(
                    "attention_mask",
                    f"cover the {ids.shape[1]} new tokens, or begin with the context's mask of {past.shape[1]}",
                    tuple(mask.shape),
                    "Leave it out where the new tokens are not padded.",
                )
            kwargs["attention_mask"] = mask
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:
        """Repeat a context with the inputs, for beams and for several sequences to return."""
        from hf_linear_attn.patching.context import ContextCache

        cache = kwargs.get("past_key_values")
        if isinstance(cache, ContextCache) and expand_size > 1:
            cache.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)  # type: ignore[misc]

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Let go of the mask and positions of a context that only states remember.

        The next step reads the last ones. To append to all would copy them, in time that grows with the context.
        """
        from hf_linear_attn.patching.context import ContextCache

        cache, positions = model_kwargs.get("past_key_values"), model_kwargs.get("position_ids")
        # Where positions are not passed on, a model may read them off the whole mask.
        if isinstance(cache, ContextCache) and cache.forgets_tokens and positions is not None:
            model_kwargs["position_ids"] = positions[..., -1:]
            # `generate` drops a mask of ones by itself.
            if (mask := model_kwargs.get("attention_mask")) is not None:
                model_kwargs["attention_mask"] = mask[:, :0]
        update: Any = super()._update_model_kwargs_for_generation  # type: ignore[misc]
        return cast(dict[str, Any], update(outputs, model_kwargs, *args, **kwargs))

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Choose how the remaining softmax layers attend; converted layers stay converted.

        Raises:
            UnsupportedError: If no softmax layer shares a config with them, so that they would change.
        """
        from hf_linear_attn.patching.attention import IMPLEMENTATION, LinearAttention

        parts = [part for part in self.modules() if isinstance(part, LinearAttention)]
        if attn_implementation != IMPLEMENTATION and not all(part.mixed for part in parts):
            raise UnsupportedError(
                "attn_implementation",
                "not be set on a model whose attention is converted",
                attn_implementation,
                "Call unpatch_model first.",
                where=type(self).__name__,
            )
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: continuous batching keeps pages of keys and values, which linear attention does not have.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "model",
            "be a softmax model for continuous batching",
            type(self).__name__,
            "Its cache is made of pages of keys and values, and a linear-attention state has none; call generate "
            "with a padded batch.",
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load as Transformers does, and refuse weights that do not fit the converted layers.

        Raises:
            CheckpointError: If tensors of converted layers are missing, left over or of another shape.
        """
        load: Any = super().from_pretrained
        model, info = load(path, *args, output_loading_info=True, **kwargs)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            keys = [str(key) for key in info[problem] if "linear_attention." in str(key)]
            if keys:
                raise CheckpointError(
                    "path",
                    f"hold the tensors of every patched layer, without {problem.replace('_', ' ')}",
                    str(path),
                    f"Save the model again; first of {len(keys)}: {sorted(keys)[0]}.",
                    where=cls.__name__,
                )
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: Transformers would copy the softmax model's source file beside the weights."""

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Save as Transformers does, with the code file and a model card beside the weights."""
        if getattr(self.config, "linear_attention", None) is None:
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
            return
        # torch's fully_shard puts its name before the class's.
        cls, name = type(self), type(self).__name__.removeprefix("FSDP")
        if is_main_process:
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            autos = _auto_classes(self.config, name)
            self.config.auto_map = {auto: f"{Path(CODE_FILE).stem}.{loaded}" for auto, loaded in autos.items()}
            classes = "".join(f"{x} = linear_attention_class(transformers.{x})\n" for x in sorted({*autos.values()}))
            (folder / CODE_FILE).write_text(CODE + classes)
            if not (folder / "README.md").exists():
                settings = json.dumps(self.config.linear_attention, indent=2, sort_keys=True)
                auto = next((auto for auto, loaded in autos.items() if loaded == name), "AutoModel")
                (folder / "README.md").write_text(CARD.format(name=name, auto=auto, settings=settings))
        # Transformers writes the class's name into the config while it saves, and uploads it at once.
        self.__class__ = type(PREFIX + name, (cls,), {"__module__": cls.__module__})
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.__class__ = cls

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle by the softmax class, since this one is made at run time."""
        return _rebuild, (softmax_class(type(self)),), self.__dict__


def _rebuild(base: type[PreTrainedModel]) -> PreTrainedModel:
    cls = linear_attention_class(base)
    return cls.__new__(cls)


_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def linear_attention_class(base: type[BaseT]) -> type[BaseT]:
    """Return the class of a patched ``base``, always the same: its name, its methods, built and saved patched.

    Args:
        base: A softmax model's class, or such a class already.
    """
    if issubclass(base, PatchedModel):
        return base
    if base not in _CLASSES:
        body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _CLASSES[base] = type(base.__name__, (PatchedModel, base), body)
    return cast(type[BaseT], _CLASSES[base])


def softmax_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class that ``cls`` was made from by :func:`linear_attention_class`."""
    return cls.__bases__[1] if PatchedModel in cls.__bases__ else cls


def _auto_classes(config: PreTrainedConfig, name: str) -> dict[str, str]:
    """Return every Auto class that loads a config, and the name of the class that it loads: ``name`` where it can.

    Those that load the class of that name come first, the most telling ones before the others.
    """
    found: dict[str, str] = {}
    for auto in modeling_auto.__all__:
        mapping = getattr(getattr(modeling_auto, auto), "_model_mapping", None)
        classes: Any = None if mapping is None else mapping.get(type(config), None)
        # A class of a part, like a multimodal model's decoder, has another config.
        names = [
            cls.__name__
            for cls in (classes if isinstance(classes, (list, tuple)) else [classes])
            if isinstance(config, getattr(cls, "config_class", ()) or ())
        ]
        if names:
            found[auto] = name if name in names else names[0]
    order = sorted(found, key=lambda auto: (found[auto] != name, auto in LESS_TELLING))
    return {auto: found[auto] for auto in order}


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
