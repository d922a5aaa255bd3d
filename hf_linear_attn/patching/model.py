"""The class of a patched model: what `generate`, saving and loading do differently."""

import inspect
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_linear_attn.errors import CheckpointError, UnsupportedError
from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.patching.call_cache import NAME, cache_of
from hf_linear_attn.patching.context import Context, ContextCache, mask_after
from hf_linear_attn.patching.hook import IMPLEMENTATION, convert_cache
from hf_linear_attn.patching.saving import (
    PREFIX,
    register_names_in_files,
    replace_generated_card,
    write_companions,
)
from hf_linear_attn.patching.scope import is_patched

logger = getLogger(__name__)


class PatchedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Mixed into the class of a patched model: what `generate`, saving and loading do differently."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Put our layers into the cache before `generate` configures it: recording, compiling and resetting."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        cache = cache_of(model_kwargs)
        if cache is not None:
            convert_cache(self, cache)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()  # type: ignore[no-untyped-call]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as Transformers does; after a context, the inputs are only the tokens that follow it.

        ``cache=`` is understood by every version of Transformers, also by those that call it ``past_key_values``.
        """
        generate: Any = super().generate  # type: ignore[misc]
        if NAME not in kwargs and "cache" in kwargs:
            kwargs[NAME] = kwargs.pop("cache")
        for x in kwargs.values():
            if isinstance(x, Context):
                x.get_seq_length()
        cache = cache_of(kwargs)
        if isinstance(cache, ContextCache):
            # Classes call their first argument what they read: inputs, input_features, pixel_values.
            first = next(iter(inspect.signature(generate).parameters))
            given = [*args[:1], kwargs.get(first), kwargs.get("inputs"), kwargs.get("input_ids")]
            ids = next((x for x in given if x is not None), None)
            if ids is not None:
                kwargs["attention_mask"] = mask_after(cache, ids, kwargs.get("attention_mask"))
        drafts = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if drafts and "input_ids" in kwargs and kwargs.get("attention_mask") is None:
            # No mask means no padding. Left to itself, Transformers takes a padding token that was answered for some.
            kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
        return generate(*args, **kwargs)

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:
        """Repeat a context with the inputs, for beams and for several sequences to return."""
        cache = cache_of(kwargs)
        if isinstance(cache, ContextCache) and expand_size > 1:
            cache.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)  # type: ignore[misc]

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Let go of the mask and positions of a context that only states remember.

        The next step reads the last ones. To append to all would copy them, in time that grows with the context.
        """
        cache, positions = cache_of(model_kwargs), model_kwargs.get("position_ids")
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
        hosts = [part.host for part in self.modules() if isinstance(part, LinearAttention)]
        # Where softmax layers share a config, it names their implementation.
        shared = all(host is not None and host.config._attn_implementation != IMPLEMENTATION for host in hosts)
        if attn_implementation != IMPLEMENTATION and not shared:
            rule, remedy = "not be set on a model whose attention is converted", "Call unpatch_model first."
            raise UnsupportedError("attn_implementation", rule, attn_implementation, remedy, where=type(self).__name__)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: continuous batching keeps pages of keys and values, which linear attention does not have."""
        raise UnsupportedError(
            "model",
            "be a softmax model for continuous batching",
            type(self).__name__,
            "Its cache is made of pages of keys and values, and a linear-attention state has none; call generate "
            "with a padded batch.",
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load as Transformers does, and refuse weights that do not fit the converted layers.

        Raises:
            CheckpointError: If tensors of converted layers are missing, left over or of another shape.
        """
        load: Any = super().from_pretrained
        model, info = load(*args, output_loading_info=True, **kwargs)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            keys = [str(key) for key in info[problem] if "linear_attention." in str(key)]
            if keys:
                raise CheckpointError(
                    "path",
                    f"hold the tensors of every patched layer, without {problem.replace('_', ' ')}",
                    str(args[0] if args else kwargs.get("pretrained_model_name_or_path")),
                    f"Save the model again; first of {len(keys)}: {sorted(keys)[0]}.",
                    where=cls.__name__,
                )
        return (model, info) if output_loading_info else model

    def _upload_modified_files(  # type: ignore[override]
        self, working_dir: str | Path, *args: Any, **kwargs: Any
    ) -> Any:
        """Upload as Transformers does; the card says how to load the model, also where the hub has none yet."""
        if getattr(self.config, "linear_attention", None) is not None:
            name = type(self).__name__.removeprefix(PREFIX).removeprefix("FSDP")
            replace_generated_card(self.config, name, Path(working_dir))
        upload: Any = super()._upload_modified_files
        return upload(working_dir, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: Transformers would copy the softmax model's source file beside the weights."""

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Save as Transformers does, with the code file and a model card beside the weights."""
        if getattr(self.config, "linear_attention", None) is None:
            if is_patched(self):
                message = "%s: its own config does not name its converted layers, so it loads as a softmax model; "
                logger.warning(message + "save the whole model instead", type(self).__name__)
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
            return
        # torch's fully_shard puts its name before the class's.
        cls, name = type(self), type(self).__name__.removeprefix("FSDP")
        if is_main_process:
            write_companions(self.config, name, Path(save_directory))
        # Transformers writes the class's name into the config while it saves, and uploads it at once.
        register_names_in_files(name)
        self.__class__ = type(PREFIX + name, (cls,), {"__module__": cls.__module__})
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.__class__ = cls
