"""What the calls within one forward share: of a model, and of one attention module in it."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.patching.cache import LinearAttentionCacheLayer, cache_layer
from hf_linear_attn.patching.call_cache import cache_of
from hf_linear_attn.patching.discover import shares_keys
from hf_linear_attn.patching.rotation import ARGUMENT, angles_of, find_layout, has_values, rotation_in, with_angles


@dataclass(eq=False)
class ModelScope:
    """What the layers of a model share in one forward.

    Attributes:
        mask: The mask that the model was called with.
        cache: The cache.
        outer: The scope of the model around it.
        one_sequence: Whether the model's arguments leave no room for packed sequences; read while a graph is traced.
        rotations: Those of the tokens so far, by the argument that tells of one and by layout; with the argument
            itself, for as long as it is held nothing else goes by its number.
    """

    mask: Any
    cache: Any
    outer: "ModelScope | None"
    one_sequence: bool
    rotations: dict[tuple[int, Layout], tuple[Any, Rotation]] = field(default_factory=dict)


@dataclass(eq=False)
class ModuleScope:
    """What the attention calls in one forward of an attention module share.

    Attributes:
        module: The module.
        part: What is learned in it; None where it is switched off.
        layer: The cache layer of its first call; None without a cache.
        outer: The scope of the module around it.
        rotation: By which the module rotates its queries and keys; None where it does not, or where it is not needed.
        looks: Whether the forward runs only to see queries and keys, and ends there.
        calls: Attention calls so far: some modules make several.
    """

    module: nn.Module
    part: LinearAttention | None
    layer: LinearAttentionCacheLayer | None
    outer: "ModuleScope | None"
    rotation: Rotation | None
    looks: bool = False
    calls: int = 0

    def next_layer(self) -> LinearAttentionCacheLayer | None:
        """Return the cache layer of the next call."""
        number, self.calls = self.calls, self.calls + 1
        return self.layer.of_call(number) if number and self.layer is not None else self.layer


class _Current(threading.local):
    # Not a context variable: torch.compile traces this, and not that. Nothing awaits within a module's forward.
    def __init__(self) -> None:
        # In every thread from the start: a graph that were the first to set one would be compiled for its absence.
        self.model: ModelScope | None = None
        self.module: ModuleScope | None = None


current = _Current()
"""What this thread runs now."""


SCOPE = "linear_attention_scope"
"""The argument by which a module hands its attention calls what they share."""


def enter_module(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Note, before a patched module's forward, which cache layer its tokens belong to (a forward pre-hook)."""
    current.module = _scope_of(module, args, kwargs)


def enter_passing_module(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Do the same before one that passes on whatever it is given: see :func:`passes_on`.

    Where a graph recomputes activations, what is computed again may change nothing outside of it. So what
    :data:`current` holds elsewhere goes by an argument there.
    """
    scope = _scope_of(module, args, kwargs)
    if module.training and torch.compiler.is_compiling():
        return args, {**kwargs, SCOPE: scope}
    current.module = scope
    return None


def _scope_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleScope:
    part, layer, rotation = part_of(module), None, None
    if part is not None:
        cache = cache_of(kwargs, args)
        if cache is not None:
            # A block that a model uses at several depths is told which one it is at.
            index = kwargs.get("layer_idx", module.layer_idx) + kwargs.get("cycle_offset", 0)
            layer = cache_layer(cache, index, part.name, module)
        if part.undoes:
            rotation = _rotation(module, part, layer, args, kwargs)
    return ModuleScope(module, part, layer, current.module, rotation)


def _rotation(
    module: nn.Module,
    part: LinearAttention,
    layer: LinearAttentionCacheLayer | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Rotation | None:
    """Return the rotation of a call's tokens; at the first call, find how the module rotates."""
    told, layout, known = kwargs.get(ARGUMENT), part.layout, None
    if told is None:
        told = rotation_in(args)
    if told is None:
        return None
    # A graph has no use for them: what it computes twice, compilers find. Nor is it told of the scope, which is over
    # where activations are recomputed.
    if not torch.compiler.is_compiling() and current.model is not None:
        known = current.model.rotations
    if known is not None and layout is not None and (id(told), layout) in known:
        return known[id(told), layout][1]
    cos, sin = angles_of(part.name, told)
    if layout is None and not has_values(cos):
        # Whatever it is, it takes as much memory and time.
        layout = Layout("half")
    elif layout is None:
        layout = part.layout = _layout_of(module, part, layer, told, args, kwargs)
    if layout is None or layout.pairs == "none":
        return None
    # Layers of a model know by its cosines, or both as one tensor, that they turn alike.
    rotation = Rotation.of(cos, sin, layout, told if isinstance(told, Tensor) else told[0])
    if known is not None:
        known[id(told), layout] = told, rotation
    return rotation


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _layout_of(
    module: nn.Module,
    part: LinearAttention,
    layer: LinearAttentionCacheLayer | None,
    told: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Layout | None:
    """Find how a module rotates by running it as far as its attention call; None where nothing can be told yet."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    shares = shares_keys(module)

    def without_cache(value: Any) -> Any:
        # A convolution in front of the queries would remember that it was asked. Keys of others are only read.
        return None if isinstance(value, Cache) and not shares else value

    def look(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        others, named = with_angles(args, kwargs, cos, sin)
        before, current.module = current.module, ModuleScope(module, part, layer, None, None, looks=True)
        try:
            # Adapters may drop at random: the same every time, and without touching the global generator.
            with torch.random.fork_rng(devices):
                module.forward(
                    *(without_cache(x) for x in others), **{key: without_cache(x) for key, x in named.items()}
                )
        except Seen as seen:
            return seen.q, seen.k
        finally:
            current.module = before
        return None

    return find_layout(part.name, look, angles_of(part.name, told), shares_keys=shares)


class Seen(Exception):  # noqa: N818  # it tells of no error
    """End a forward that runs only as far as an attention call, with the call's queries and keys."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.q, self.k = q, k


def leave_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Clear that after the forward, however it ended (a forward hook)."""
    if current.module is not None and current.module.module is module:
        current.module = current.module.outer


def is_patched(model: nn.Module) -> bool:
    """Return whether any layer of ``model`` is converted."""
    return any(isinstance(module, LinearAttention) for module in model.modules())


def part_of(module: nn.Module) -> LinearAttention | None:
    """Return what is learned in a patched attention module; None where it is not patched."""
    # A module's own table of its parts: to ask the module takes ten times as long, and every layer of a step asks.
    part: Any = module._modules.get("linear_attention")
    if isinstance(part, LinearAttention):
        return part
    if hasattr(part, "modules_to_save"):
        # PEFT trains a copy of it, kept in a wrapper beside the original.
        active = [] if part.disable_adapters else list(part.active_adapters)
        part = part.modules_to_save[active[0]] if active else part.original_module
    return part if isinstance(part, LinearAttention) else None
