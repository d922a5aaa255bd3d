"""The attention function that Transformers calls in place of softmax attention."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.layers import Call, LinearAttention
from hf_linear_attn.ops.library import own_precision
from hf_linear_attn.patching.cache import RECORDED, LinearAttentionCacheLayer, cache_layer
from hf_linear_attn.patching.call_cache import own_cache
from hf_linear_attn.patching.discover import attends_causally, shares_keys
from hf_linear_attn.patching.masks import linear_attention_mask, padding_of
from hf_linear_attn.patching.scope import SCOPE, Seen, current, part_of
from hf_linear_attn.tracing import is_recorded

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


class Host(NamedTuple):
    """What the attention module of a converted layer gets back when the layer is taken out.

    Attributes:
        config: Its own config; masks are built for the implementation that it names.
        implementation: The attention implementation that it named before.
    """

    config: PreTrainedConfig
    implementation: str | None


def convert_cache(model: nn.Module, cache: Cache) -> None:
    """Put our layers into a fresh cache, for every patched layer that has a place there."""
    own = own_cache(cache)
    for module in model.modules():
        part, index = part_of(module), getattr(module, "layer_idx", None)
        # Encoder layers are numbered too, but have no place in a cache.
        if part is None or not isinstance(index, int) or not attends_causally(module):
            continue
        # Early exit drafts with the first layers alone, and a cache of only those.
        if index < len(own.layers) or own.layer_class_to_replicate is not None or shares_keys(module):
            cache_layer(cache, index, part.name, module)


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

    Tokens are ``query [B, H, T, D]``, ``key [B, HKV, T, D]`` and ``value [B, HKV, T, V]``, and :func:`padding_of` reads
    the mask. ``scaling`` is the factor on ``q.k`` in the exact branch; ``is_causal`` defaults to the module's own.
    There are no attention weights to drop: ``o [B, T, H, V]`` comes with None in their place.

    Raises:
        UnsupportedError: If the layer asks for something that linear attention does not have.
    """
    scope = kwargs.get(SCOPE, current.module)
    if scope is not None and scope.module is not module:
        scope = None
    part = part_of(module) if scope is None else scope.part
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
    if scope is None and part.undoes:
        rule = "be 'keep' where an attention module is not called through its hooks"
        remedy = "Call the module itself instead of its forward: the hooks see its rotation."
        raise UnsupportedError("rotary", rule, "undo", remedy, where=part.name)
    if scope is not None and scope.looks:
        raise Seen(query, key)
    layer = None if scope is None else scope.next_layer()
    key_mask = cu_seqlens = None
    if attention_mask is not None:
        start = 0 if layer is None else layer.length
        key_mask, cu_seqlens = padding_of(attention_mask, query, start, part, causal=causal)
    if cu_seqlens is None and kwargs.get("cu_seq_lens_q") is not None:
        cu_seqlens = _boundaries(kwargs["cu_seq_lens_q"], layer, part.name)
    state, rotation = None if layer is None else layer.state, None if scope is None else scope.rotation
    call = Call(key_mask, cu_seqlens, causal, scaling, state, rotation=rotation)
    o: Tensor
    with own_precision(query.device):
        if layer is not None and (layer.record_past or layer.unread):
            o = _attend_recorded(part, query, key, value, call, layer)
        elif cu_seqlens is not None and state is None and len(query) > 1 and part.shard is None:
            o = _attend_packed(part, query, key, value, call)
        else:
            o = part(query, key, value, call)
    return o.transpose(1, 2).contiguous(), None


def _attend_packed(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Call a layer with rows of packed texts, which are laid end to end."""
    batch, tokens = q.shape[0], q.shape[2]
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))
    rotation = None if call.rotation is None else call.rotation.flat(batch)
    o: Tensor = part(q, k, v, call._replace(key_mask=None, rotation=rotation))
    return torch.unflatten(o[0], 1, (batch, tokens)).transpose(0, 1)


def _attend_recorded(
    part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call, layer: LinearAttentionCacheLayer
) -> Tensor:
    """Read again what a rollback has left, and then the new tokens, which are kept where there may be another."""
    rotation, tokens = call.rotation, q.shape[2]
    # One step in place is all that a layer takes before the next layer: what they hold together moves on with it.
    ahead = call._replace(in_place=False)
    if unread := layer.take_unread():
        # Only the state is needed: the queries, and their outputs, do not matter.
        unused = q.new_zeros(*q.shape[:2], unread["k"].shape[2], q.shape[3])
        others = None if rotation is None else rotation.of_others(unread["turns"])
        part(unused, unread["k"], unread["v"], ahead._replace(key_mask=unread["mask"], rotation=others))
    if layer.record_past and tokens > RECORDED:
        # What lies so far back is not dropped any more.
        layer.forget_recorded()
        a = tokens - RECORDED
        before = part(q[:, :, :a], k[:, :, :a], v[:, :, :a], _cut(ahead, 0, a))
        after = _attend_recorded(part, q[:, :, a:], k[:, :, a:], v[:, :, a:], _cut(call, a, tokens), layer)
        return torch.cat([before, after], 2)
    if layer.record_past:
        mask = q.new_ones(len(q), tokens, dtype=torch.bool) if call.key_mask is None else call.key_mask
        turns = {} if rotation is None else {"turns": rotation.turns.expand(len(q), -1, -1)}
        layer.record(k=k, v=v, mask=mask, **turns)
    o: Tensor = part(q, k, v, call)
    return o


def _cut(call: Call, a: int, b: int) -> Call:
    """Return the call of the tokens from ``a`` to ``b`` alone."""
    key_mask = None if call.key_mask is None else call.key_mask[:, a:b]
    return call._replace(key_mask=key_mask, rotation=None if call.rotation is None else call.rotation.cut(a, b))


def _boundaries(bounds: Tensor, layer: LinearAttentionCacheLayer | None, name: str) -> Tensor | None:
    """Return boundaries of packed texts that a trainer passes; a text alone needs none."""
    if layer is None:
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
        remedy = "Linear attention has no attention weights; `hf-linear-attn inspect` shows what they would be."
        raise UnsupportedError("output_attentions", "be False", True, remedy, where=part.name)
    if query.shape[2] != key.shape[2]:
        rule = f"hold the {query.shape[2]} new tokens only"
        remedy = "Cross-attention and foreign caches cannot be converted; leave this layer out with layers=."
        raise UnsupportedError("key", rule, tuple(key.shape), remedy, where=part.name)
    if part.settings.window is not None and not torch.compiler.is_compiling() and is_recorded():
        # What leaves a window depends on numbers of tokens, which a trace would hold for every text to come.
        remedy = "Use torch.export, with use_cache=False, or `hf-linear-attn export`."
        raise UnsupportedError("window", "be None under torch.jit.trace", part.settings.window, remedy, where=part.name)
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
