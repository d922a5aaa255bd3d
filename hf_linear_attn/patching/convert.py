"""Patch a model in place, and undo it."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, wraps
from logging import getLogger
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, UnsupportedError, first_line
from hf_linear_attn.feature_maps import feature_map_class
from hf_linear_attn.layers import LinearAttention, check_parts
from hf_linear_attn.layers.attention import reads_plain_keys
from hf_linear_attn.layers.rules import RULES
from hf_linear_attn.ops.dispatch import check_backend
from hf_linear_attn.patching.discover import (
    AttentionLayer,
    LayerChoice,
    attends_causally,
    attention_layers,
    choose_layers,
    is_looped,
    passes_on,
    refuse_special,
    refuse_split_sharing,
    sizes_of,
)
from hf_linear_attn.patching.hook import IMPLEMENTATION, Host
from hf_linear_attn.patching.hook_tables import add_hooks, remove_hooks
from hf_linear_attn.patching.masks import enter_model, leave_model
from hf_linear_attn.patching.model import PatchedModel
from hf_linear_attn.patching.rotation import UnknownRotationError, has_values, is_rotated
from hf_linear_attn.patching.scope import enter_module, enter_passing_module, is_patched, leave_module

logger = getLogger(__name__)

ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""What configs call the dropout of attention weights."""

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def patch_model(
    model: ModelT,
    feature_map: str = "elu",
    *,
    layers: LayerChoice = None,
    window: int | None = None,
    sinks: int = 0,
    kept: int = 0,
    retention: str = "redundancy",
    retention_units: int = 64,
    per_layer: Mapping[int, Mapping[str, int]] | None = None,
    mix: str = "key",
    update_rule: str = "additive",
    rotary: str = "keep",
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
        kept: Attend exactly, too, to so many keys of each key head that have left the window; needs one.
        retention: Which of those goes when another comes, ``"redundancy"`` or ``"learned"``, see there.
        retention_units: Units of the learned rule's net, for each key head.
        per_layer: What single layers have in place of ``window`` and ``kept``, by index: ``{1: {"window": 192}}``.
        mix: How exact and linear branch are joined, see :class:`LinearAttentionConfig`.
        update_rule: How the linear branch's state takes in keys, see there.
        rotary: Whether the linear branch reads queries and keys rotated by their positions, ``"keep"``, or with the
            rotation undone, ``"undo"``, or whichever can be had, ``"auto"``, see there.
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
        BackendError: If the backend is asked for by name and runs nowhere on this machine.

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
            "Pass the model itself, best before anything wraps it: patch first, torch.compile(model) then. Of PEFT's "
            "wrapper it is peft_model.get_base_model(), of torch.compile's compiled._orig_mod.",
        )
    config = LinearAttentionConfig(
        feature_map=feature_map,
        feature_map_options={} if feature_map_options is None else feature_map_options,
        window=window,
        sinks=sinks,
        kept=kept,
        retention=retention,
        retention_units=retention_units,
        per_layer={} if per_layer is None else per_layer,
        mix=mix,
        update_rule=update_rule,
        rotary=rotary,
        eps=eps,
        backend=backend,
        allow_approximate=allow_approximate,
    )
    check_backend(config.backend)
    model = apply_config(model, config, layers)
    text_config = model.config.get_text_config()
    for name in ATTENTION_DROPOUT:
        if getattr(text_config, name, 0):
            _warn_of_dropout(type(model).__name__, name, getattr(text_config, name))
    return model


@cache
def _warn_of_dropout(model: str, name: str, value: float) -> None:
    """Say it once of a class: many a checkpoint has it, and few are trained with it again."""
    logger.warning(
        "%s: %s=%s has no effect on converted layers, which compute no attention weights to drop", model, name, value
    )


def apply_config(model: ModelT, config: LinearAttentionConfig, layers: LayerChoice = None) -> ModelT:
    """Patch ``model`` as ``config`` says; ``layers`` overrides its layers. See :func:`patch_model`."""
    if config.rotary == "auto":
        return _with_known_rotation(model, config, layers)
    feature_map_class(config.feature_map)
    # It may have been made before there was anyone to refuse its rules.
    check_parts(config)
    if is_patched(model):
        remedy = "Call unpatch_model first."
        raise ArgumentError("model", "be a softmax model", f"a patched {type(model).__name__}", remedy)
    chosen = choose_layers(model, config.layers if layers is None else layers)
    # Everything that can fail comes before the first change.
    if unknown := sorted(config.per_layer.keys() - {layer.index for layer in chosen}):
        remedy, known = "Remove those", [str(layer.index) for layer in chosen]
        raise ArgumentError("per_layer", "be about layers that are converted", unknown, remedy, available=known)
    refuse_split_sharing(model, chosen)
    parts: list[tuple[AttentionLayer, LinearAttention]] = []
    for layer in chosen:
        if layer.kind == "chunked":
            # Not to be dropped either: the masks of a chunk's start and of a packed document's look alike.
            rule = "leave layers out whose attention restarts at each chunk (attention_chunk_size)"
            raise UnsupportedError("layers", rule, layer.index, "The default leaves them softmax.", where=layer.name)
        if is_looped(layer):
            rule = "leave layers out that the model runs several times for a token, with keys of each time"
            raise UnsupportedError("layers", rule, layer.index, "Name others with layers=.", where=layer.name)
        if not config.allow_approximate:
            refuse_special(layer)
        _refuse_bidirectional(layer, config)
        rotated = config.rotary == "undo" and is_rotated(layer.module, layer.name)
        part = LinearAttention(config.of_layer(layer.index), sizes_of(layer), layer.name, rotated=rotated)
        # An unpatched checkpoint may be int8 or the like: learned features need a floating dtype.
        weight = next((p for p in layer.module.parameters() if p.ndim >= 2 and p.is_floating_point()), None)
        if weight is not None:
            part.to(device=weight.device, dtype=weight.dtype)
        parts.append((layer, part.train(layer.module.training)))
    if config.rotary == "undo" and not any(part.undoes for _, part in parts):
        logger.warning("%s: no layer that is converted has a rotation to undo", type(model).__name__)
    _own_configs(model)
    for layer, part in parts:
        layer.module.linear_attention = part
        add_hooks(layer.module, enter_passing_module if passes_on(layer.module) else enter_module, leave_module)
    for holder in _models_of(model):
        add_hooks(holder, enter_model, leave_model)
    _set_implementation(model)
    config = replace(config, layers=tuple(layer.index for layer in chosen))
    model.config.linear_attention = config.to_dict()
    for holder in _models_of(model):
        # Saved alone, the model without its head writes how to load it, too.
        holder.__class__ = linear_attention_class(type(holder))  # type: ignore[assignment]
    return model


@torch.no_grad()
def _with_known_rotation(model: ModelT, config: LinearAttentionConfig, layers: LayerChoice) -> ModelT:
    """Patch a model with its rotation undone where that is known, beside a window, which knows positions; else kept."""
    keep, undo = replace(config, rotary="keep"), replace(config, rotary="undo")
    if config.window is None or not reads_plain_keys(config):
        return apply_config(model, keep, layers)
    try:
        chosen = choose_layers(model, config.layers if layers is None else layers)
        if not any(is_rotated(layer.module, layer.name) for layer in chosen):
            return apply_config(model, keep, layers)
        _find_rotations(apply_config(model, undo, layers))
    except UnknownRotationError as error:
        if is_patched(model):
            unpatch_model(model)
        logger.warning("%s: feature maps see rotated queries and keys: %s", type(model).__name__, first_line(error))
        return apply_config(model, keep, layers)
    return model


def _find_rotations(model: PreTrainedModel) -> None:
    """Call a model on a few tokens, so that every layer finds out how it rotates."""
    weight = next(model.parameters())
    device = weight.device
    if not has_values(weight):
        return
    tokens = {name: x.to(device) for name, x in model.dummy_inputs.items() if isinstance(x, Tensor)}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            model(**tokens)
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnknownRotationError(
                "rotary",
                "be 'keep' or 'undo' where a model cannot be called on a few tokens",
                "auto",
                f"It ended with {type(error).__name__}: {first_line(error)}.",
            ) from error


def _refuse_bidirectional(layer: AttentionLayer, config: LinearAttentionConfig) -> None:
    """Raise where a layer sees both ways, and settings go by the order of keys."""
    if attends_causally(layer.module):
        return
    if config.window is not None:
        remedy = "Leave the window out, or this layer with layers=."
        raise ArgumentError("window", "be None for bidirectional attention", config.window, remedy, where=layer.name)
    if RULES[config.update_rule].ordered:
        rule = "be 'additive' for bidirectional attention"
        remedy = "Others go by the order of keys: use that one, or leave this layer out with layers=."
        raise UnsupportedError("update_rule", rule, config.update_rule, remedy, where=layer.name)


def _models_of(model: nn.Module) -> list[PreTrainedModel]:
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
            part.host = Host(config, before)
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
        remove_hooks(holder)
    for module in model.modules():
        # Where PEFT trains a copy, the copy's config is one too.
        held = getattr(module, "linear_attention", None)
        part = getattr(held, "original_module", held)
        if not isinstance(part, LinearAttention):
            continue
        if part.host is not None:
            config = module.config = part.host.config
            if config._attn_implementation == IMPLEMENTATION:
                config._attn_implementation_internal = part.host.implementation
        del module.linear_attention
        remove_hooks(module)
    for module in model.modules():
        # A part of the model may have been patched by itself.
        if isinstance(module, PreTrainedModel):
            for name in ("linear_attention", "auto_map"):
                vars(module.config).pop(name, None)
            module.__class__ = softmax_class(type(module))  # type: ignore[assignment]
    return model


class _Convertible(PatchedModel):  # type: ignore[no-untyped-call]
    """The part of a patched class that builds it patched."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        settings = getattr(config, "linear_attention", None)
        if settings is not None:
            apply_config(self, LinearAttentionConfig.from_dict(settings))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle by the softmax class, since this one is made at run time."""
        return _rebuild, (softmax_class(type(self)),), self.__dict__


def _rebuild(base: type[PreTrainedModel]) -> PreTrainedModel:
    cls = linear_attention_class(base)
    return cls.__new__(cls)


_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def linear_attention_class(base: type[ModelT]) -> type[ModelT]:
    """Return the class of a patched ``base``, always the same: its name, its methods, built and saved patched."""
    if issubclass(base, PatchedModel):
        return base
    if base not in _CLASSES:
        body: dict[str, Any] = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
        for name in ("__init__", "from_pretrained", "generate", "save_pretrained"):
            if hasattr(base, name):
                own, original = (inspect.getattr_static(cls, name) for cls in (_Convertible, base))
                body[name] = _with_signature(own, original)
        _CLASSES[base] = type(base.__name__, (_Convertible, base), body)
    return cast(type[ModelT], _CLASSES[base])


def _with_signature(own: Any, original: Any) -> Any:
    """Return our method with the signature of the one that it stands for, which tools inspect."""
    if isinstance(own, classmethod):
        return classmethod(_with_signature(own.__func__, inspect.unwrap(original.__func__)))

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return method


def softmax_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class that ``cls`` was made from by :func:`linear_attention_class`."""
    return cls.__bases__[1] if _Convertible in cls.__bases__ else cls
