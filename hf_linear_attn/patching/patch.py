"""Patch a model in place, and undo it."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_linear_attn.config import LinearAttentionConfig, Mix
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from hf_linear_attn.feature_maps import feature_map_class
from hf_linear_attn.patching.attention import (
    IMPLEMENTATION,
    Geometry,
    LinearAttention,
    attends_causally,
    find_cache,
    release_cache,
    shares_keys,
)
from hf_linear_attn.patching.checkpoint import linear_attention_class, softmax_class
from hf_linear_attn.patching.masks import note_packing

ModelT = TypeVar("ModelT", bound=PreTrainedModel)
LayerChoice = Literal["all"] | Iterable[int] | Callable[[int, str, nn.Module], bool] | None
Kind = Literal["full", "sliding", "chunked", "cross"]


@dataclass(frozen=True)
class AttentionLayer:
    """A module that attends through Transformers' AttentionInterface."""

    index: int
    """Place among the model's self-attention layers; -1 for cross-attention."""
    name: str
    module: nn.Module
    kind: Kind
    """What it sees; only full attention is converted by default."""


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """List the modules of ``model`` that attend through the AttentionInterface, in the order of ``named_modules()``."""
    layers: list[AttentionLayer] = []
    index = 0
    for name, module in model.named_modules():
        if not _uses_interface(type(module)):  # type: ignore[arg-type]  # classes are hashable
            continue
        kind = _kind(name, module)
        layers.append(AttentionLayer(-1 if kind == "cross" else index, name, module, kind))
        index += kind != "cross"
    return layers


@cache
def _uses_interface(cls: Callable[..., nn.Module]) -> bool:
    """Tell from its source whether a module class calls the AttentionInterface in its forward."""
    try:
        source = inspect.getsource(inspect.unwrap(cast(type[nn.Module], cls).forward))
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source


def _kind(name: str, module: nn.Module) -> Kind:
    names = f"{type(module).__name__} {' '.join(name.split('.')[-2:])}".lower()
    if getattr(module, "is_cross_attention", False) or any(
        word in names for word in ("cross", "encoder_attn", "encdec")
    ):
        return "cross"
    # Some modules know the model's sliding window though they themselves see everything.
    if getattr(module, "is_sliding", getattr(module, "sliding_window", None) is not None):
        return "sliding"
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if isinstance(types, (list, tuple)):
        named = types[index] if isinstance(index, int) and index < len(types) else ""
        return next((kind for kind in ("sliding", "chunked") if kind in named), "full")
    # Without a list of types all layers are alike, as where Transformers builds a cache.
    if getattr(config, "sliding_window", None) is not None:
        return "sliding"
    return "full" if getattr(config, "attention_chunk_size", None) is None else "chunked"


def geometry_of(layer: AttentionLayer) -> Geometry:
    """Read an attention layer's sizes off its attributes and its config.

    Raises:
        UnsupportedError: If its head count or head dim cannot be found.
    """
    module = layer.module
    config = getattr(module, "config", None)

    def first(*names: str) -> Any:
        for holder in (module, config):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    return value
        return None

    heads = first("num_heads", "num_attention_heads", "n_heads", "n_head")
    if heads is None:
        raise _unsupported(layer, "a head count could not be found")
    head_dim = first("qk_head_dim", "head_dim", "attention_head_size", "dim_per_head", "d_head", "key_value_proj_dim")
    if head_dim is None:
        hidden = first("embed_dim", "hidden_size", "d_model")
        if hidden is None:
            raise _unsupported(layer, "a head dim could not be found")
        head_dim = hidden // heads
    groups = getattr(module, "num_key_value_groups", None)
    width = getattr(getattr(module, "k_proj", None), "out_features", None)
    if groups:
        kv_heads = heads // groups
    elif width:
        kv_heads = width // head_dim
    else:
        kv_heads = first("num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    scaling = first("scaling", "scale", "softmax_scale")
    return Geometry(int(head_dim), int(heads), int(kv_heads), float(scaling or head_dim**-0.5))


def _unsupported(layer: AttentionLayer, reason: str) -> UnsupportedError:
    return UnsupportedError(
        "model",
        "have attention that linear attention can stand in for",
        type(layer.module).__name__,
        f"There is {reason}: leave the layer out with layers=, or pass allow_approximate=True to drop it.",
        where=layer.name,
    )


def _refuse_special(layer: AttentionLayer) -> None:
    """Raise where a layer has something that acts on the matrix of scores."""
    config = getattr(layer.module, "config", None)
    for holder in (layer.module, config):
        if getattr(holder, "attn_logit_softcapping", None) is not None:
            raise _unsupported(layer, "a soft-cap on the scores (attn_logit_softcapping)")
        if getattr(holder, "alibi", False) is True:
            raise _unsupported(layer, "a bias on the scores by distance (ALiBi)")
    if isinstance(getattr(layer.module, "sinks", None), nn.Parameter):
        raise _unsupported(layer, "a learned attention sink (sinks)")
    if getattr(layer.module, "has_relative_attention_bias", False):
        raise _unsupported(layer, "a relative position bias on the scores")
    for part, meaning in (
        ("indexer", "an indexer that selects keys for each query"),
        ("compressor", "a compressor of keys over several tokens"),
    ):
        if isinstance(getattr(layer.module, part, None), nn.Module):
            raise _unsupported(layer, f"{meaning} ({part})")


def _refuse_split_sharing(model: nn.Module, chosen: Iterable[AttentionLayer]) -> None:
    """Raise where one of several layers that share keys and values would be converted and another not."""
    converted = {id(layer.module) for layer in chosen}
    groups: dict[tuple[int, str], list[AttentionLayer]] = defaultdict(list)
    for layer in attention_layers(model):
        module: Any = layer.module
        if shares_keys(module) or getattr(module, "store_full_length_kv", False):
            groups[id(module.config), module.config.layer_types[module.layer_idx]].append(layer)
    for group in groups.values():
        states = [id(layer.module) in converted for layer in group]
        if any(states) and not all(states):
            left = next(layer for layer, state in zip(group, states, strict=True) if not state)
            raise UnsupportedError(
                "layers",
                f"hold all layers that share keys and values, {[layer.index for layer in group]}, or none of them",
                [layer.index for layer, state in zip(group, states, strict=True) if state],
                "A layer that reads another's keys cannot read them off its state.",
                where=left.name,
            )


def choose_layers(model: nn.Module, layers: LayerChoice) -> list[AttentionLayer]:
    """Resolve a choice of layers.

    Args:
        model: The model.
        layers: As in :func:`patch_model`.

    Raises:
        UnsupportedError: If the model, or its language part, has no layer to convert; says what was looked at.
        ArgumentError: If an index does not exist, or nothing is chosen.
    """
    found = attention_layers(model)
    candidates = [layer for layer in found if layer.kind != "cross"]
    if not candidates:
        classes = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
        seen = ", ".join(classes) if classes else "none named *Attention*"
        raise UnsupportedError(
            "model",
            "have self-attention layers that call Transformers' AttentionInterface",
            type(model).__name__,
            f"There is nothing to convert; classes looked at: {seen}.",
        )
    if layers is None:
        texts = _text_model_types(model)
        text = [layer for layer in candidates if getattr(layer.module.config, "model_type", None) in texts]
        if not text:
            raise UnsupportedError(
                "model",
                "have a language model whose layers call Transformers' AttentionInterface",
                type(model).__name__,
                f"Only towers for images or sound do; name layers of those with layers=, first: {candidates[0].name}.",
            )
        chosen = [layer for layer in text if layer.kind == "full"]
        way = "'all'" if text == candidates else f"range({text[0].index}, {text[-1].index + 1})"
        remedy = f"All {len(text)} layers of the language model are sliding or chunked; layers={way} converts them."
    elif isinstance(layers, str):
        if layers != "all":
            raise ArgumentError("layers", "be 'all', indices, a callable or None", layers, "Use 'all'.")
        return candidates
    elif callable(layers):
        chosen = [layer for layer in candidates if layers(layer.index, layer.name, layer.module)]
        remedy = f"The callable chose none of the {len(candidates)} attention layers."
    else:
        indices = set(layers)
        if missing := sorted(i for i in indices if not 0 <= i < len(candidates)):
            raise ArgumentError("layers", f"be indices from 0 to {len(candidates) - 1}", missing, "Leave those out.")
        chosen = [layer for layer in candidates if layer.index in indices]
        remedy = "Name at least one layer."
    if not chosen:
        raise ArgumentError("layers", "choose at least one layer", layers, remedy, where=type(model).__name__)
    return chosen


def _text_model_types(model: nn.Module) -> set[str]:
    """Name the configurations of a model's language part: towers for images and sound have others."""
    config: PreTrainedConfig = model.config  # type: ignore[assignment]
    parts = [config, config.get_text_config(decoder=True), config.get_text_config(encoder=True)]
    return {part.model_type for part in parts}


def is_patched(model: nn.Module) -> bool:
    """Return whether any layer of ``model`` is converted."""
    return any(isinstance(module, LinearAttention) for module in model.modules())


def patch_model(
    model: ModelT,
    feature_map: str = "elu",
    *,
    layers: LayerChoice = None,
    window: int | None = None,
    sinks: int = 0,
    mix: Mix = "key",
    feature_map_options: Mapping[str, Any] | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
    allow_approximate: bool = False,
) -> ModelT:
    """Turn a softmax model into a linear-attention model, in place.

    Its class, its weights and its other instances stay as they are. A model that is merely patched is a poor one:
    softmax and linear attention are different functions, so distil it next. ``feature_map="elu"`` has nothing to
    learn and recalls little of what lies far back; learned maps (``"norm_preserving"``, ``"hedgehog"``) with a window
    recall most, see docs/feature-maps.md.

    Args:
        model: A Transformers model whose attention goes through the AttentionInterface.
        feature_map: A registered name, see :func:`available_feature_maps`.
        layers: ``"all"``; indices among the self-attention layers; a callable ``(index, name, module) -> bool``; or
            None for every full-attention layer of the language model, leaving sliding-window and chunked ones and the
            towers of multimodal models. Cross-attention always stays.
        window: Attend exactly to the last ``window`` tokens, >= 1; None for linear attention throughout.
        sinks: Attend exactly to the first ``sinks`` tokens too; needs a window.
        mix: How exact and linear branch are joined, see :class:`LinearAttentionConfig`.
        feature_map_options: The map's own settings.
        eps: Added to the normaliser, > 0.
        backend: As in :func:`linear_attention`.
        allow_approximate: Drop what linear attention cannot honour instead of raising.

    Returns:
        The model itself.

    Raises:
        ArgumentTypeError: If ``model`` is no Transformers model.
        ArgumentError: If a setting is out of range, a name unknown, or the model is patched already.
        UnsupportedError: If nothing can be converted, or a layer has what linear attention cannot honour.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linear_attn import patch_model, unpatch_model
        >>> sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        >>> model = patch_model(model, feature_map="elu")
        >>> model = unpatch_model(model)
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentTypeError(
            "model",
            "be a Transformers PreTrainedModel",
            type(model).__name__,
            "Pass the model itself: of PEFT's wrapper, peft_model.get_base_model(), best before it is wrapped.",
        )
    config = LinearAttentionConfig(
        feature_map=feature_map,
        feature_map_options=dict(feature_map_options or {}),
        window=window,
        sinks=sinks,
        mix=mix,
        eps=eps,
        backend=backend,
        allow_approximate=allow_approximate,
    )
    return apply_config(model, config, layers)


def apply_config(model: ModelT, config: LinearAttentionConfig, layers: LayerChoice = None) -> ModelT:
    """Patch ``model`` as ``config`` says; ``layers`` overrides its layers. See :func:`patch_model`."""
    feature_map_class(config.feature_map)
    if is_patched(model):
        raise ArgumentError(
            "model",
            "be a softmax model",
            f"a patched {type(model).__name__}",
            "Call unpatch_model first.",
        )
    chosen = choose_layers(model, config.layers if layers is None else layers)
    # Everything that can fail comes before the first change.
    _refuse_split_sharing(model, chosen)
    parts: list[tuple[AttentionLayer, LinearAttention]] = []
    for layer in chosen:
        if layer.kind == "chunked":
            # Not to be dropped either: the masks of a chunk's start and of a packed document's look alike.
            raise UnsupportedError(
                "layers",
                "leave layers out whose attention restarts at each chunk (attention_chunk_size)",
                layer.index,
                "The default leaves them softmax.",
                where=layer.name,
            )
        if not config.allow_approximate:
            _refuse_special(layer)
        if config.window is not None and not attends_causally(layer.module):
            raise ArgumentError(
                "window",
                "be None for bidirectional attention",
                config.window,
                "Leave the window out, or this layer with layers=.",
                where=layer.name,
            )
        part = LinearAttention(config, geometry_of(layer), layer.name)
        # An unpatched checkpoint may be int8 or the like: learned features need a floating dtype.
        weight = next((p for p in layer.module.parameters() if p.ndim >= 2 and p.is_floating_point()), None)
        if weight is not None:
            part.to(device=weight.device, dtype=weight.dtype)
        parts.append((layer, part.train(layer.module.training)))
    _own_configs(model)
    for layer, part in parts:
        layer.module.linear_attention = part
        layer.module.register_forward_pre_hook(find_cache, with_kwargs=True)
        layer.module.register_forward_hook(release_cache)
    for holder in _models_of(model):
        holder.register_forward_pre_hook(note_packing, with_kwargs=True)
    _set_implementation(model)
    config = replace(config, layers=tuple(layer.index for layer in chosen))
    model.config.linear_attention = config.to_dict()
    model.__class__ = linear_attention_class(type(model))
    return model


def _models_of(model: nn.Module) -> list[nn.Module]:
    """List the models, in a model, that have patched layers: any of them may build masks."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel) and is_patched(part)]


def _own_configs(model: nn.Module) -> None:
    """Give a model configs of its own: other models may have been built from the same objects."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, memo))
    for module in model.modules():
        # A patched model's config, from which this one was built, names our attention.
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == IMPLEMENTATION:
            usual = module.get_correct_attn_implementation(None, is_init_check=True)
            module.config._attn_implementation_internal = usual


def _set_implementation(model: nn.Module) -> None:
    """Make patched layers call our attention function.

    They get a copy of their config that names it. Masks are built for the implementation that the model's own config
    names: ours too where all layers that share it are patched, so that masks are 2-D.
    """
    groups: dict[int, list[nn.Module]] = defaultdict(list)
    for layer in attention_layers(model):
        groups[id(layer.module.config)].append(layer.module)
    for modules in groups.values():
        found = ((module, getattr(module, "linear_attention", None)) for module in modules)
        parts = [(module, part) for module, part in found if isinstance(part, LinearAttention)]
        if not parts:
            continue
        config: PreTrainedConfig = parts[0][0].config  # type: ignore[assignment]
        before, own = config._attn_implementation, copy.copy(config)
        own._attn_implementation_internal = IMPLEMENTATION
        if len(parts) == len(modules):
            config._attn_implementation_internal = IMPLEMENTATION
        for module, part in parts:
            part.model_config, part.implementation = config, before
            module.config = own  # type: ignore[assignment]


def unpatch_model(model: ModelT) -> ModelT:
    """Undo :func:`patch_model`: the model computes exactly what it did before, with the weights it has now.

    Args:
        model: A patched model.

    Returns:
        The model itself; what the feature maps learned is dropped.

    Raises:
        ArgumentError: If the model is not patched.
    """
    if not is_patched(model):
        raise ArgumentError("model", "be patched", type(model).__name__, "Only patch_model's result can be unpatched.")
    for holder in _models_of(model):
        _remove_hooks(holder)
    for module in model.modules():
        # Where PEFT trains a copy, the copy's config is one too.
        held = getattr(module, "linear_attention", None)
        part = getattr(held, "original_module", held)
        if not isinstance(part, LinearAttention):
            continue
        if (config := part.model_config) is not None:
            module.config = config  # type: ignore[assignment]
            if config._attn_implementation == IMPLEMENTATION:
                config._attn_implementation_internal = part.implementation
        del module.linear_attention
        _remove_hooks(module)
    for holder in model.modules():
        # A part of the model may have been patched by itself.
        if isinstance(holder, PreTrainedModel):
            for name in ("linear_attention", "auto_map"):
                holder.config.__dict__.pop(name, None)
            holder.__class__ = softmax_class(type(holder))  # type: ignore[assignment]
    return model


def _remove_hooks(module: nn.Module) -> None:
    """Take our hooks off a module, and leave others' there."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook in (find_cache, note_packing):
            module._forward_pre_hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, hook in list(module._forward_hooks.items()):
        if hook is release_cache:
            module._forward_hooks.pop(key)
