"""The attention function of patched layers, and the module that holds what it needs."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.feature_maps import FeatureMap, get_feature_map
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops import LinearAttentionState, linear_attention
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.step import decode_step_
from hf_linear_attn.ops.window import OwnKey, key_product, running_sum, window_attention, window_sums
from hf_linear_attn.patching.cache import LinearAttentionCacheLayer, cache_layer
from hf_linear_attn.patching.masks import linear_attention_mask, padding_of

IMPLEMENTATION = "hf_linear_attn"
"""Name under which the attention and the mask function are registered with Transformers."""

IN_PLACE_TOKENS = 8
"""New tokens up to which the decode step, which reads them one by one, beats the chunked op."""

MIX_BIAS = {"key": 0.0, "gate": -3.0, "shared": math.log(0.1 / 0.9)}
"""Start of the bias by mixing rule: a score equal to the mean key's times their number; a share of sigmoid(-3) = 5%
for the linear branch; LoLCATs' factor of 0.1 for the window."""

UNSUPPORTED = {
    "softcap": "a soft-cap on the scores",
    "s_aux": "learned attention sinks",
    "position_bias": "a bias on the scores by position",
    "alibi": "a bias on the scores by position",
    "indices": "a sparse selection of keys",
}
"""Arguments of attention calls that act on the matrix of scores, which linear attention does not have."""

Branch = Literal["window", "sinks", "linear"]


class Geometry(NamedTuple):
    """Sizes of one attention layer."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    scaling: float


class Ring(NamedTuple):
    """Tokens of a layer with a window: those that the window held before, then the new ones.

    Attributes:
        k: Keys ``[B, HKV, S, D]``.
        v: Values ``[B, HKV, S, V]``.
        mask: ``[B, S]`` bool, True = a real token.
        far: Which tokens belong to the linear branch once they leave the window; sinks never do.
        position: Their numbers, as :func:`_positions` gives them.
    """

    k: Tensor
    v: Tensor
    mask: Tensor
    far: Tensor
    position: Tensor

    def after(self, held: Mapping[str, Tensor]) -> "Ring":
        """Put these tokens behind those that a cache layer holds."""
        parts = self._asdict().items()
        return Ring(*(torch.cat([held[f"ring_{name}"], x], dim=_token_dim(x)) for name, x in parts))

    def held(self, window: int) -> dict[str, Tensor]:
        """Return what a cache layer keeps: the last tokens, by name."""
        return {f"ring_{name}": _last(x, window) for name, x in self._asdict().items()}


class LinearAttention(nn.Module):
    """Compute one converted layer's attention, from projected queries, keys and values to the heads' outputs.

    It sits in the attention module as ``linear_attention``; everything that is learned lives here.

    Args:
        config: The settings.
        geometry: The layer's sizes.
        name: The layer's name, for messages.
    """

    def __init__(self, config: LinearAttentionConfig, geometry: Geometry, name: str) -> None:
        super().__init__()
        self.settings, self.geometry, self.name = config, geometry, name
        head_dim, heads, kv_heads, scaling = geometry
        self.feature_map: FeatureMap = get_feature_map(
            config.feature_map, head_dim, heads, kv_heads, scaling=scaling, **config.feature_map_options
        )
        # A map without parameters must leave a trace in a checkpoint too, so that software without this package
        # reports an unexpected weight instead of silently reading a softmax model.
        self.register_buffer("format_version", torch.tensor([config.format_version]))
        if config.window is not None and config.mix != "window":
            self.mix_bias = nn.Parameter(torch.full((heads,), MIX_BIAS[config.mix]))
            if config.mix != "shared":
                self.mix_weight = nn.Parameter(torch.zeros(heads, head_dim))
        self.disabled: frozenset[Branch] = frozenset()
        self.cache: LinearAttentionCacheLayer | None = None
        self.calls = 0
        """Attention calls so far in the module's forward: some models make several."""
        self.model_config: PreTrainedConfig | None = None
        """The attention module's own config, put back by unpatching; masks are built for what it names."""
        self.implementation: str | None = None
        """The attention implementation that it named before."""

    @property
    def mixed(self) -> bool:
        """Whether masks are those of softmax attention, as where softmax layers share them."""
        return self.model_config is not None and self.model_config._attn_implementation != IMPLEMENTATION

    def extra_repr(self) -> str:
        """Show the settings that matter in ``print(model)``."""
        return f"window={self.settings.window}, sinks={self.settings.sinks}, mix={self.settings.mix!r}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        causal: bool = True,
        scaling: float | None = None,
    ) -> Tensor:
        """Attend to the new tokens and to those in :attr:`cache`, and put the new ones there.

        Args:
            q: Queries ``[B, H, T, D]``.
            k: Keys of the new tokens ``[B, HKV, T, D]``.
            v: Values of the new tokens ``[B, HKV, T, V]``.
            key_mask: ``[B, T]`` bool, True = a real token.
            cu_seqlens: Boundaries of packed sequences, B = 1; without a cache only.
            causal: Whether a query sees only earlier keys and its own.
            scaling: Factor on ``q.k`` in the exact branch; defaults to the layer's.

        Returns:
            ``o [B, H, T, V]``.
        """
        scaling = self.geometry.scaling if scaling is None else scaling
        o: Tensor = self.feature_map(self._fold, q, k, v, key_mask, cu_seqlens, causal, scaling)
        return o

    def _fold(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
        scaling: float,
    ) -> Tensor:
        layer = self.cache
        if layer is not None and layer.unread:
            old = layer.take_unread()
            zeros = q.new_zeros(*q.shape[:2], old["k"].shape[2], q.shape[3])
            self._attend(zeros, old["k"], old["v"], old["mask"], None, True, scaling)
        if layer is not None and layer.record_past:
            layer.record(k=k, v=v, mask=_ones(q) if key_mask is None else key_mask)
        return self._attend(q, k, v, key_mask, cu_seqlens, causal, scaling)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
        scaling: float,
    ) -> Tensor:
        if self.settings.window is None:
            return self._linear(q, k, v, key_mask, cu_seqlens, causal)
        if not causal:
            raise UnsupportedError(
                "window",
                "be None for bidirectional attention",
                self.settings.window,
                "Leave the window out, or this layer with layers=.",
                where=self.name,
            )
        if cu_seqlens is None:
            return self._hybrid(q, k, v, key_mask, scaling, self.settings.window)
        bounds = cu_seqlens.tolist()
        pieces = [
            self._hybrid(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None, scaling, self.settings.window)
            for a, b in pairwise(bounds)
            if b > a
        ]
        return torch.cat(pieces, dim=2)

    def _linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
    ) -> Tensor:
        layer = self.cache
        seen = None if layer is None else layer.tensors.get("seen")
        if layer is not None and self._decodes_in_place(q, layer):
            return self._decode_(q, k, v, key_mask, layer)
        o, state = linear_attention(
            q,
            k,
            v,
            self.feature_map,
            causal=causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            state=None if layer is None else layer.state,
            eps=self.settings.eps,
            backend=self.settings.backend,
            positions=_positions(q, key_mask, seen),
        )
        if layer is not None:
            layer.store(q.shape[2], kv=state.kv, z=state.z, seen=_seen(q, key_mask, seen))
        return o

    def _decodes_in_place(self, q: Tensor, layer: LinearAttentionCacheLayer) -> bool:
        """Tell whether nobody can need the state from before these tokens: not autograd, and not a rollback."""
        return (
            "kv" in layer.tensors
            and q.shape[2] <= IN_PLACE_TOKENS
            and not torch.is_grad_enabled()
            and not layer.record_past
            and self.settings.backend != "reference"
        )

    def _decode_(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, layer: LinearAttentionCacheLayer
    ) -> Tensor:
        seen = layer.tensors["seen"]
        if self.feature_map.kernel is None:
            positions = _positions(q, key_mask, seen)
            q = features_of(self.feature_map, q, "q", positions, self.settings.backend)
            k = features_of(self.feature_map, k, "k", positions, self.settings.backend)
        o = self._step_(q, k, v, key_mask, layer.tensors)
        seen += q.shape[2] if key_mask is None else key_mask.sum(1)
        layer.advance(q.shape[2], q.device)
        return o

    def _step_(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Mapping[str, Tensor]) -> Tensor:
        """Fold new tokens into ``state`` in place; q and k are features where the kernels cannot compute them."""
        step = decode_opaque_ if torch.compiler.is_compiling() else _decode_step_
        phi = self.feature_map.kernel or "identity"
        return step(q, k, v, state["kv"], state["z"], key_mask, phi, self.settings.eps, self.settings.backend)

    def _hybrid(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scaling: float, window: int) -> Tensor:
        layer, tokens = self.cache, q.shape[2]
        old = {} if layer is None else layer.tensors
        start = 0 if layer is None else layer.length
        positions = _positions(q, key_mask, old.get("seen"))
        mask = _ones(q) if key_mask is None else key_mask
        far_mask = mask
        sinks = None
        if layer is not None and layer.sinks_read:
            sinks = old["sink_k"], old["sink_v"], old["sink_slot"]
        elif self.settings.sinks:
            far_mask = mask & (positions >= self.settings.sinks)
            sinks = self._sinks(k, v, mask & ~far_mask, positions, start, old)
        ring = Ring(k, v, mask, far_mask, positions)
        if old:
            ring = ring.after(old)
        visible_sinks = None
        if sinks is not None and "sinks" not in self.disabled:
            # A sink is shown apart once it has left the window.
            slots = start + torch.arange(tokens, device=q.device)
            visible_sinks = sinks[0], sinks[1], sinks[2][:, None] <= (slots - window)[None, :, None]
        in_place = layer is not None and self._decodes_in_place(q, layer)
        o, kept = self._mix(q, positions, ring, visible_sinks, old, scaling, window, in_place)
        if layer is not None:
            kept |= ring.held(window)
            if sinks is not None and not layer.sinks_read:
                kept |= dict(zip(("sink_k", "sink_v", "sink_slot"), sinks, strict=True))
            seen = _seen(q, key_mask, old.get("seen"))
            layer.store(tokens, **kept, seen=seen)
            self._look_for_sinks(layer, tokens, seen)
        return o

    def _look_for_sinks(self, layer: LinearAttentionCacheLayer, tokens: int, seen: Tensor) -> None:
        """Note when every row has read its sinks; a token at a time, ask only now and then, since that waits."""
        if layer.sinks_read or layer.static or not self.settings.sinks or torch.compiler.is_compiling():
            return
        if tokens > 1 or layer.length % (self.settings.window or 1) == 0:
            layer.sinks_read = bool((seen >= self.settings.sinks).all())

    def _sinks(
        self,
        k: Tensor,
        v: Tensor,
        is_sink: Tensor,
        positions: Tensor,
        start: int | Tensor,
        old: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collect the first real tokens: keys and values ``[B, HKV, n, *]``, and their slots ``[B, n]``."""
        number = torch.arange(self.settings.sinks, device=k.device)
        chosen = (positions[:, None] == number[None, :, None]) & is_sink[:, None]
        sink_k, sink_v = (chosen[:, None].to(x.dtype) @ x for x in (k, v))
        slots = (start + torch.arange(k.shape[2], device=k.device)).expand(chosen.shape)
        slot = slots.masked_fill(~chosen, NOWHERE).amin(-1)
        if old:
            sink_k, sink_v = old["sink_k"] + sink_k, old["sink_v"] + sink_v
            slot = torch.minimum(old["sink_slot"], slot)
        return sink_k, sink_v, slot

    def _mix(
        self,
        q: Tensor,
        positions: Tensor,
        ring: Ring,
        sinks: tuple[Tensor, Tensor, Tensor] | None,
        old: Mapping[str, Tensor],
        scaling: float,
        window: int,
        in_place: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Join the exact and the linear branch; return the output and what is new in the linear branch's state."""
        settings, (k, v, *_) = self.settings, ring
        exact: dict[str, Any] = {"window": window, "scaling": scaling, "key_mask": ring.mask, "sinks": sinks}
        fused = {**exact, "backend": settings.backend}
        if settings.mix == "window":
            return window_attention(q, k, v, **fused), {}
        # Keys that lag by the window lag by nothing where they begin a window earlier.
        tokens, past = q.shape[2], k.shape[2] - q.shape[2]
        delay = window - past
        far_k, far_v, far_mask = k[:, :, :tokens], v[:, :, :tokens], ring.far[:, :tokens]
        state = LinearAttentionState(old["kv"], old["z"]) if old else None
        # So many tokens have left the window by the end.
        left = max(tokens - delay, 0)
        number = running_sum(far_mask[:, :left], tokens - left, old.get("far_count"))
        kept = {"far_count": number[:, -1].clone()}
        if settings.mix == "key" and self.cache is not None:
            gone = far_k[:, :, :left] * far_mask[:, None, :left, None]
            sums = gone.sum(2, dtype=upcast(gone).dtype)
            kept["far_keys"] = sums + old["far_keys"] if old else sums
        phi: FeatureMap | None = self.feature_map
        far_q = q
        if self.feature_map.kernel is None or settings.mix == "shared":
            far_q = features_of(self.feature_map, q, "q", positions, settings.backend)
            far_k = features_of(self.feature_map, far_k, "k", ring.position[:, :tokens], settings.backend)
            phi = None
        if in_place and settings.mix != "shared":
            o_far = self._step_(far_q, far_k, far_v, far_mask, old)
        else:
            o_far, final = linear_attention(
                far_q,
                far_k,
                far_v,
                phi,
                key_mask=far_mask,
                state=state,
                delay=delay,
                eps=settings.eps,
                backend=settings.backend,
            )
            kept |= {"kv": final.kv, "z": final.z}
        if "window" in self.disabled:
            return o_far, kept
        if "linear" in self.disabled:
            return window_attention(q, k, v, **fused), kept
        if settings.mix == "shared":
            z = running_sum(upcast(far_k[:, :, :left]) * far_mask[:, None, :left, None], tokens - left, old.get("z"))
            far_den = key_product(far_q, z)
            num, den = window_sums(q, k, v, **exact)
            share = upcast(self.mix_bias).sigmoid()[:, None]
            den, far_num = share * den, upcast(o_far) * (far_den + settings.eps)[..., None]
            o = (share[..., None] * num + far_num) / (den + far_den + settings.eps)[..., None]
            return o.to(q.dtype), kept
        if settings.mix == "key":
            own_key = OwnKey(
                o_far, self.mix_bias, self.mix_weight, ring.far, number, old.get("far_keys"), kept.get("far_keys")
            )
            return window_attention(q, k, v, **fused, own_key=own_key), kept
        x = upcast(q)
        score = torch.einsum("bhtd,hd->bht", x, self.mix_weight.to(x.dtype)) + self.mix_bias[:, None]
        gate = (score.sigmoid() * (number > 0)[:, None])[..., None].to(q.dtype)
        return torch.lerp(window_attention(q, k, v, **fused), o_far, gate), kept


NOWHERE = 2**62
"""Slot of a sink that has not come yet."""


def _decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    key_mask: Tensor | None,
    phi: str,
    eps: float,
    backend: str,
) -> Tensor:
    """Run :func:`decode_step_` on plain tensors."""
    state = LinearAttentionState(kv, z)
    return decode_step_(q, k, v, state, phi=phi, key_mask=key_mask, eps=eps, backend=backend).contiguous()


decode_opaque_ = torch.library.custom_op("hf_linear_attn::decode_opaque_", _decode_step_, mutates_args=("kv", "z"))
"""The same as one node of a graph: what chooses a backend does not belong into it."""


@decode_opaque_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _ones(q: Tensor) -> Tensor:
    """Return the key mask ``[B, T]`` of tokens that are all real."""
    return q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool)


def _positions(q: Tensor, key_mask: Tensor | None, seen: Tensor | None) -> Tensor:
    """Number the real tokens, ``[B, T]`` int64; padding takes its neighbour's number."""
    if key_mask is None:
        positions = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1)
    else:
        positions = (key_mask.cumsum(1) - 1).clamp(min=0)
    return positions if seen is None else positions + seen[:, None]


def _seen(q: Tensor, key_mask: Tensor | None, seen: Tensor | None) -> Tensor:
    """Count the real tokens of each row so far, ``[B]`` int64."""
    new = key_mask.sum(1) if key_mask is not None else torch.full(q.shape[:1], q.shape[2], device=q.device)
    return new if seen is None else seen + new


def _token_dim(x: Tensor) -> int:
    return 1 if x.ndim == 2 else 2


def _last(x: Tensor, number: int) -> Tensor:
    """Return the last ``number`` tokens of ``x``, zeros before them where there are fewer; never a view of the rest."""
    dim = _token_dim(x)
    tokens = x.shape[dim]
    if tokens >= number:
        return x.narrow(dim, tokens - number, number).clone()
    return nn.functional.pad(x, [0, 0] * (x.ndim - dim - 1) + [number - tokens, 0])


def part_of(module: nn.Module) -> LinearAttention | None:
    """Return what is learned in a patched attention module; None where it is not patched."""
    part: Any = getattr(module, "linear_attention", None)
    if hasattr(part, "modules_to_save"):
        # PEFT trains a copy of it, kept in a wrapper beside the original.
        active = [] if part.disable_adapters else list(part.active_adapters)
        part = part.modules_to_save[active[0]] if active else part.original_module
    return part if isinstance(part, LinearAttention) else None


def find_cache(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Tell a patched layer, before its forward, which cache layer to fold its tokens into (a forward pre-hook)."""
    attention = part_of(module)
    if attention is None:
        return
    attention.cache, attention.calls = None, 0
    for value in (*kwargs.values(), *args):
        if isinstance(value, (Cache, EncoderDecoderCache)):
            # A block that a model uses at several depths is told which one it is at.
            index = kwargs.get("layer_idx", module.layer_idx) + kwargs.get("cycle_offset", 0)
            attention.cache = cache_layer(value, index, attention.name, shares_keys=shares_keys(module))
            return


def shares_keys(module: nn.Module) -> bool:
    """Tell whether an attention module reads keys and values that another one made."""
    return bool(getattr(module, "is_kv_shared_layer", False))


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


def release_cache(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Let go of the cache after a patched layer's forward (a forward hook)."""
    if (attention := part_of(module)) is not None:
        attention.cache = None


def attends_causally(module: nn.Module) -> bool:
    """Tell whether a self-attention module is causal; some decoders do not say so where their mask does."""
    return bool(getattr(module, "is_causal", True) or getattr(module, "is_decoder", False))


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
    attention = part_of(module)
    if attention is None:
        raise UnsupportedError(
            "attn_implementation",
            "be set by patch_model",
            IMPLEMENTATION,
            "Call patch_model(model); load a saved model with hf_linear_attn.from_pretrained or trust_remote_code, "
            "and give a trainer a patched ref_model. Softmax models built from a patched model's config take "
            "attn_implementation='sdpa'.",
            where=type(module).__name__,
        )
    _refuse_unsupported(attention, query, key, kwargs)
    causal = attends_causally(module) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[2] == 1 < query.shape[2]:
        # One row of mask for all queries: softmax layers would attend in both directions, whatever the module says.
        causal = False
    if query.dtype != value.dtype:
        # Norms in fp32 under autocast or PEFT leave q and k wider than v.
        query, key = query.to(value.dtype), key.to(value.dtype)
    batch, tokens = query.shape[0], query.shape[2]
    if attention.calls and attention.cache is not None:
        attention.cache = attention.cache.of_call(attention.calls)
    attention.calls += 1
    layer = attention.cache
    key_mask, cu_seqlens = padding_of(
        attention_mask,
        batch,
        tokens,
        start=0 if layer is None else layer.length,
        causal=causal,
        mixed=attention.mixed,
        strict=not attention.settings.allow_approximate,
        name=attention.name,
    )
    if cu_seqlens is None:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if layer is not None and cu_seqlens is not None:
            if len(cu_seqlens) > 2:
                raise UnsupportedError(
                    "cu_seq_lens_q",
                    "be left out where a cache is filled",
                    f"boundaries of {len(cu_seqlens) - 1} packed documents",
                    "A state is one text's; call the model with use_cache=False.",
                    where=attention.name,
                )
            cu_seqlens = None
    if cu_seqlens is not None and batch > 1:
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        o = attention(query, key, value, key_mask=key_mask, cu_seqlens=cu_seqlens, causal=causal, scaling=scaling)
    if cu_seqlens is not None and batch > 1:
        o = o[0].unflatten(1, (batch, tokens)).transpose(0, 1)
    return o.transpose(1, 2).contiguous(), None


def _refuse_unsupported(attention: LinearAttention, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions",
            "be False",
            True,
            "Linear attention has no attention weights; `hf-linear-attn inspect` shows what they would be.",
            where=attention.name,
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "key",
            f"hold the {query.shape[2]} new tokens only",
            tuple(key.shape),
            "Cross-attention and foreign caches cannot be converted; leave this layer out with layers=.",
            where=attention.name,
        )
    if not attention.settings.allow_approximate:
        for argument, meaning in UNSUPPORTED.items():
            if kwargs.get(argument) is not None:
                raise UnsupportedError(
                    argument,
                    "be None",
                    type(kwargs[argument]).__name__,
                    f"Linear attention cannot honour {meaning}; leave the layer out with layers=, or pass "
                    "allow_approximate=True to drop it.",
                    where=attention.name,
                )


@contextmanager
def disable_branch(model: nn.Module, branch: Branch) -> Iterator[None]:
    """Switch one branch of every patched layer off within a ``with`` block, to see what it contributes.

    Args:
        model: A patched model.
        branch: ``"window"``, ``"sinks"`` or ``"linear"``.

    Raises:
        ArgumentError: If there is no such branch, or no layer has a window.
    """
    if branch not in get_args(Branch):
        raise ArgumentError(
            "branch",
            "be a branch of a patched layer",
            branch,
            "Use one of those",
            available=get_args(Branch),
        )
    layers = [m for m in model.modules() if isinstance(m, LinearAttention) and m.settings.window is not None]
    if not layers:
        raise ArgumentError(
            "model",
            "be patched with a window",
            type(model).__name__,
            "Without one there is a single branch.",
        )
    before = [layer.disabled for layer in layers]
    for layer in layers:
        layer.disabled |= {branch}
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer.disabled = disabled


AttentionInterface.register(IMPLEMENTATION, linear_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, linear_attention_mask)
