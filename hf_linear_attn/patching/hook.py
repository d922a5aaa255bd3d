"""How a converted layer is reached: hooks that find its cache, and the attention function that Transformers calls."""

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.layers import Call, LinearAttention
from hf_linear_attn.ops.library import own_precision
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.patching.cache import LinearAttentionCacheLayer, cache_layer
from hf_linear_attn.patching.discover import attends_causally, shares_keys
from hf_linear_attn.patching.masks import linear_attention_mask, padding_of
from hf_linear_attn.patching.rotation import angles_of, find_layout, has_values, source_of, with_angles

IMPLEMENTATION = "hf_linear_attn"
"""Name under which the attention and the mask function are registered with Transformers."""

UNSUPPORTED = {
    "softcap": "a soft-cap on the scores",
    "s_aux": "learned attention sinks",
    "position_bias": "a bias on the scores by position",
    "alibi": "a bias on the scores by position",
    "indices": "a sparse selection of keys",
}
"""Arguments of attention calls that act on the matrix of scores, which linear attention does not have."""


class Scope:
    """What the attention calls in one forward of an attention module share.

    Attributes:
        module: The module.
        layer: The cache layer of its first call; None without a cache.
        calls: Attention calls so far: some modules make several.
        outer: The scope of the module around it.
        rotation: By which the module turns its queries and keys; None where it does not, or nobody asks.
        looks: Whether the forward runs only to see queries and keys, and ends there.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: LinearAttentionCacheLayer | None,
        outer: "Scope | None",
        rotation: Rotation | None,
        *,
        looks: bool = False,
    ) -> None:
        self.module, self.layer, self.outer, self.calls = module, layer, outer, 0
        self.rotation, self.looks = rotation, looks

    def next_layer(self) -> LinearAttentionCacheLayer | None:
        """Return the cache layer of the next call."""
        self.calls += 1
        return None if self.layer is None else self.layer.of_call(self.calls - 1)


class _Current(threading.local):
    # Not a context variable: torch.compile traces this, and not that. Nothing awaits within a module's forward.
    scope: Scope | None = None


_current = _Current()


def enter_module(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Note, before a patched module's forward, which cache layer its tokens belong to (a forward pre-hook)."""
    part = part_of(module)
    layer = None
    if part is not None:
        for value in (*kwargs.values(), *args):
            if isinstance(value, (Cache, EncoderDecoderCache)):
                # A block that a model uses at several depths is told which one it is at.
                index = kwargs.get("layer_idx", module.layer_idx) + kwargs.get("cycle_offset", 0)
                layer = cache_layer(value, index, part.name, shares_keys=shares_keys(module))
                break
    rotation = None
    if part is not None and part.undoes:
        rotation = _rotation(module, part, layer, args, kwargs)
    _current.scope = Scope(module, layer, _current.scope, rotation)


def _rotation(
    module: nn.Module,
    part: LinearAttention,
    layer: LinearAttentionCacheLayer | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Rotation | None:
    """Return the rotation of a call's tokens; at the first call, find how the module rotates."""
    angles = angles_of(part.name, args, kwargs)
    if angles is None:
        return None
    layout = part.layout
    if layout is None and not has_values(angles[0]):
        # Whatever it is, it takes as much memory and time.
        layout = Layout("half")
    elif layout is None:
        layout = part.layout = _layout_of(module, part.name, layer, args, kwargs)
    if layout is None or layout.pairs == "none":
        return None
    return Rotation.of(*angles, layout, source_of(args, kwargs))


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _layout_of(
    module: nn.Module,
    name: str,
    layer: LinearAttentionCacheLayer | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Layout | None:
    """Find how a module rotates by running it as far as its attention call; None where nothing can be told yet."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    shares = shares_keys(module)

    def without_cache(value: Any) -> Any:
        # A convolution in front of the queries would remember that it was asked. Keys of others are only read.
        return None if isinstance(value, (Cache, EncoderDecoderCache)) and not shares else value

    def look(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        others, named = with_angles(args, kwargs, cos, sin)
        before, _current.scope = _current.scope, Scope(module, layer, None, None, looks=True)
        try:
            # Adapters may drop at random: the same every time, and nobody else's numbers.
            with torch.random.fork_rng(devices):
                module.forward(
                    *(without_cache(x) for x in others), **{key: without_cache(x) for key, x in named.items()}
                )
        except Seen as seen:
            return seen.q, seen.k
        finally:
            _current.scope = before
        return None

    angles = angles_of(name, args, kwargs)
    return None if angles is None else find_layout(name, look, angles, shares_keys=shares)


class Seen(Exception):  # noqa: N818  # it tells of no error
    """End a forward that runs only as far as an attention call.

    Attributes:
        q: The call's queries.
        k: Its keys.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        super().__init__()
        self.q, self.k = q, k


def leave_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forget that after the forward, however it ended (a forward hook)."""
    scope = _current.scope
    _current.scope = None if scope is None else scope.outer


def part_of(module: nn.Module) -> LinearAttention | None:
    """Return what is learned in a patched attention module; None where it is not patched."""
    part: Any = getattr(module, "linear_attention", None)
    if isinstance(part, LinearAttention):
        return part
    if hasattr(part, "modules_to_save"):
        # PEFT trains a copy of it, kept in a wrapper beside the original.
        active = [] if part.disable_adapters else list(part.active_adapters)
        part = part.modules_to_save[active[0]] if active else part.original_module
    return part if isinstance(part, LinearAttention) else None


class Host(NamedTuple):
    """What the attention module of a converted layer gets back when the layer is taken out.

    Attributes:
        config: Its own config; masks are built for the implementation that it names.
        implementation: The attention implementation that it named before.
    """

    config: PreTrainedConfig
    implementation: str | None


def is_mixed(part: LinearAttention) -> bool:
    """Tell whether masks are those of softmax attention, as where softmax layers share them."""
    return part.host is not None and part.host.config._attn_implementation != IMPLEMENTATION


def convert_cache(model: nn.Module, cache: Cache) -> None:
    """Put our layers into a fresh cache, for every patched layer that has a place there."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    for module in model.modules():
        part, index = part_of(module), getattr(module, "layer_idx", None)
        # Encoder layers are numbered too, but have no place in a cache.
        if part is None or not isinstance(index, int) or not attends_causally(module):
            continue
        # Early exit drafts with the first layers alone, and a cache of only those.
        if index < len(own.layers) or own.layer_class_to_replicate is not None or shares_keys(module):
            cache_layer(cache, index, part.name, shares_keys=shares_keys(module))


def linear_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in a patched layer, with the signature of Transformers' AttentionInterface.

    Args:
        module: The attention module.
        query: ``[B, H, T, D]``.
        key: ``[B, HKV, T, D]``.
        value: ``[B, HKV, T, V]``.
        attention_mask: As :func:`padding_of` reads it.
        dropout: Not used: there are no attention weights to drop.
        scaling: Factor on ``q.k`` in the exact branch.
        is_causal: Whether a query sees only earlier keys; defaults to the module's own.
        **kwargs: What other implementations read.

    Returns:
        ``o [B, T, H, V]`` and None in place of attention weights.

    Raises:
        UnsupportedError: If the layer asks for something that linear attention does not have.
    """
    part = part_of(module)
    if part is None:
        raise UnsupportedError(
            "attn_implementation",
            "be set by patch_model",
            IMPLEMENTATION,
            "Call patch_model(model); load a saved model with hf_linear_attn.from_pretrained or trust_remote_code, "
            "and give a trainer a patched ref_model. Softmax models built from a patched model's config take "
            "attn_implementation='sdpa'.",
            where=type(module).__name__,
        )
    _refuse_unsupported(part, query, key, kwargs)
    causal = attends_causally(module) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[2] == 1 < query.shape[2]:
        # One row of mask for all queries: softmax layers would attend in both directions, whatever the module says.
        causal = False
    if query.dtype != value.dtype:
        # Norms in fp32 under autocast or PEFT leave q and k wider than v.
        query, key = query.to(value.dtype), key.to(value.dtype)
    scope = _scope_of(module, part)
    if scope is not None and scope.looks:
        raise Seen(query, key)
    layer = None if scope is None else scope.next_layer()
    key_mask = cu_seqlens = None
    if attention_mask is not None:
        key_mask, cu_seqlens = padding_of(
            attention_mask,
            query.shape[0],
            query.shape[2],
            start=0 if layer is None else layer.length,
            causal=causal,
            mixed=is_mixed(part),
            strict=not part.settings.allow_approximate,
            name=part.name,
        )
    if cu_seqlens is None:
        cu_seqlens = _boundaries(kwargs.get("cu_seq_lens_q"), layer, part.name)
    tokens = New(query, key, value, key_mask)
    rotation = None if scope is None else scope.rotation
    call = Call(cu_seqlens=cu_seqlens, causal=causal, scaling=scaling, rotation=rotation)
    with own_precision(query.device):
        o = _attend(part, tokens, call) if layer is None else _attend_after(part, tokens, call, layer)
    return o.transpose(1, 2).contiguous(), None


class New(NamedTuple):
    """The new tokens of a call: queries, keys, values and key mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def _attend(part: LinearAttention, new: New, call: Call) -> Tensor:
    """Attend to the new tokens alone; rows of packed texts are laid end to end."""
    q, k, v, mask = new
    if call.cu_seqlens is None or len(q) == 1 or part.shard is not None:
        alone: Tensor = part(q, k, v, call._replace(key_mask=mask))
        return alone
    batch, tokens = q.shape[0], q.shape[2]
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))
    if call.rotation is not None:
        call = call._replace(rotation=call.rotation.flat(batch))
    o: Tensor = part(q, k, v, call)
    return torch.unflatten(o[0], 1, (batch, tokens)).transpose(0, 1)


def _attend_after(part: LinearAttention, new: New, call: Call, layer: LinearAttentionCacheLayer) -> Tensor:
    """Attend to what a cache layer holds, too, and put the new tokens there."""
    q, k, v, mask = new
    call = call._replace(key_mask=mask, state=layer.state, in_place=not layer.record_past)
    if unread := layer.take_unread():
        # What a rollback has left is read again; nobody asks what it attends to.
        nobody = q.new_zeros(*q.shape[:2], unread["k"].shape[2], q.shape[3])
        rotation = call.rotation
        if rotation is not None:
            rotation = rotation.of_others(unread["turns"])
        part(nobody, unread["k"], unread["v"], call._replace(key_mask=unread["mask"], rotation=rotation))
    if layer.record_past:
        mask = q.new_ones(len(q), q.shape[2], dtype=torch.bool) if mask is None else mask
        turns = {} if call.rotation is None else {"turns": call.rotation.turns.expand(len(q), -1, -1)}
        layer.record(k=k, v=v, mask=mask, **turns)
        call = call._replace(key_mask=mask)
    o: Tensor = part(q, k, v, call)
    return o


def _scope_of(module: nn.Module, part: LinearAttention) -> Scope | None:
    """Return the scope of a module's call; None where nobody has entered it."""
    scope = _current.scope
    if scope is not None and scope.module is module:
        return scope
    if part.undoes:
        raise UnsupportedError(
            "rotary",
            "be 'keep' where an attention module is not called through its hooks",
            "undo",
            "Call the module itself instead of its forward: the hooks see its rotation.",
            where=part.name,
        )
    return None


def _boundaries(bounds: Tensor | None, layer: LinearAttentionCacheLayer | None, name: str) -> Tensor | None:
    """Return boundaries of packed texts that a trainer passes; a text alone needs none."""
    if bounds is None or layer is None:
        return bounds
    if len(bounds) > 2:
        raise UnsupportedError(
            "cu_seq_lens_q",
            "be left out where a cache is filled",
            f"boundaries of {len(bounds) - 1} packed documents",
            "A state is one text's; call the model with use_cache=False.",
            where=name,
        )
    return None


def _refuse_unsupported(part: LinearAttention, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions",
            "be False",
            True,
            "Linear attention has no attention weights; `hf-linear-attn inspect` shows what they would be.",
            where=part.name,
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "key",
            f"hold the {query.shape[2]} new tokens only",
            tuple(key.shape),
            "Cross-attention and foreign caches cannot be converted; leave this layer out with layers=.",
            where=part.name,
        )
    if part.settings.allow_approximate:
        return
    for argument, meaning in UNSUPPORTED.items():
        if kwargs.get(argument) is not None:
            raise UnsupportedError(
                argument,
                "be None",
                type(kwargs[argument]).__name__,
                f"Linear attention cannot honour {meaning}; leave the layer out with layers=, or pass "
                "allow_approximate=True to drop it.",
                where=part.name,
            )


AttentionInterface.register(IMPLEMENTATION, linear_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, linear_attention_mask)
