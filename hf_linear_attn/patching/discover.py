"""Which modules of a model attend, what they see, their sizes, and what linear attention cannot honour in them."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from torch import nn
from transformers import PreTrainedConfig

from hf_linear_attn.checks import check_type
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from hf_linear_attn.layers import Sizes

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
    """Tell from its source whether a module class attends from token to token by the AttentionInterface."""
    forward = inspect.unwrap(cast(type[nn.Module], cls).forward)
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        return False
    # A residual that attends to what earlier blocks made of the same token is told neither of tokens nor of a mask.
    given = inspect.signature(forward).parameters
    return "hidden_states" in given or any("mask" in x.name or x.kind == x.VAR_KEYWORD for x in given.values())


def passes_on(module: nn.Module) -> bool:
    """Tell whether a module hands its attention function whatever it is given by name beyond what it knows."""
    forward = inspect.unwrap(type(module).forward)
    return any(x.kind == x.VAR_KEYWORD for x in inspect.signature(forward).parameters.values())


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


def sizes_of(layer: AttentionLayer) -> Sizes:
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
    value_dim = getattr(module, "v_head_dim", None)
    if value_dim is None and (width := getattr(getattr(module, "v_proj", None), "out_features", None)):
        value_dim = width // kv_heads
    values = None if value_dim is None else int(value_dim)
    return Sizes(int(head_dim), int(heads), int(kv_heads), float(scaling or head_dim**-0.5), values)


def _unsupported(layer: AttentionLayer, reason: str) -> UnsupportedError:
    rule = "have attention that linear attention can stand in for"
    remedy = f"There is {reason}: leave the layer out with layers=, or pass allow_approximate=True to drop it."
    return UnsupportedError("model", rule, type(layer.module).__name__, remedy, where=layer.name)


def refuse_special(layer: AttentionLayer) -> None:
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


def is_looped(layer: AttentionLayer) -> bool:
    """Tell whether a model runs a layer several times for a token and keeps its keys apart for each, as Dory does."""
    config, index = getattr(layer.module, "config", None), getattr(layer.module, "layer_idx", None)
    looped, first = getattr(config, "n_recurrent_layers", 0), getattr(config, "n_input_layers", 0)
    return isinstance(index, int) and looped > 0 and first <= index < first + looped


def refuse_split_sharing(model: nn.Module, chosen: Iterable[AttentionLayer]) -> None:
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
    """Resolve a choice of layers, as of :func:`patch_model`.

    Raises:
        UnsupportedError: If the model, or its language part, has no layer to convert; says what was looked at.
        ArgumentError: If an index does not exist, or nothing is chosen.
    """
    found = attention_layers(model)
    candidates = [layer for layer in found if layer.kind != "cross"]
    if not candidates:
        classes = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
        seen = ", ".join(classes) if classes else "none named *Attention*"
        rule = "have self-attention layers that call Transformers' AttentionInterface"
        remedy = f"There is nothing to convert; classes looked at: {seen}."
        raise UnsupportedError("model", rule, type(model).__name__, remedy)
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
        try:
            indices = set(check_type("layers", list(layers), list[int]))
        except TypeError as error:
            raise ArgumentTypeError(
                "layers", "be 'all', indices, a callable or None", layers, "Pass a list of whole numbers."
            ) from error
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


def shares_keys(module: nn.Module) -> bool:
    """Tell whether an attention module reads keys and values that another one made."""
    # Asked for at every step: what a module does not have it looks for in many places.
    return bool(vars(module).get("is_kv_shared_layer", False))


def attends_causally(module: nn.Module) -> bool:
    """Tell whether a self-attention module is causal; some decoders do not say so where their mask does."""
    return bool(getattr(module, "is_causal", True) or getattr(module, "is_decoder", False))
