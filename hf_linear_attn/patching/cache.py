"""The cache layer of a converted attention layer: its size does not depend on the number of tokens read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.layers import Common, State
from hf_linear_attn.ops.library import is_exporting
from hf_linear_attn.patching.call_cache import own_cache
from hf_linear_attn.patching.discover import shares_keys

RECORDED = 512
"""Tokens, of those read while the past is recorded, that a rollback can always drop. At most twice as many are held.

It is more than anybody drafts at once, and few beside a long prompt.
"""


class LinearAttentionCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Hold the state of one converted layer.

    ``update`` returns only the new keys and values; the attention function folds them into :attr:`state` afterwards.

    Assisted decoding reads tokens that it may drop. A sum cannot give them back, so after
    :meth:`activate_past_recording` the state of the last :meth:`crop` is kept, with the keys and values read since:
    :meth:`crop` goes back, and the tokens that remain are read again with the next ones. Of many tokens the last
    :data:`RECORDED` are kept so, and the state before them.

    Attributes:
        state: What was read.
        recent: Keys, values and mask of the last tokens since the last crop, while the past is recorded.
        unread: Those of ``recent`` that a crop has left, to be read again before the next tokens.
        bases: Copies of the state, each with the number of tokens of ``recent`` before it, the first with 0.
        others: Layers of the second and later attention calls in one module, in models that call it more than once.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Some models ask for the number of elements of another layer's keys.
        self.keys = self.values = torch.empty(0)
        self.state = State(static=max_length is not None)
        self.recent: dict[str, Tensor] = {}
        self.unread: dict[str, Tensor] = {}
        self.bases: list[tuple[int, dict[str, Tensor]]] = []
        self.record_past = False
        self.is_compileable = self.state.static
        self.max_length = -1 if max_length is None else max_length
        self.others: list[LinearAttentionCacheLayer] = []
        self.is_initialized = True

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether :meth:`crop` can go back, as far as tokens were recorded."""
        return self.record_past

    @property
    def static(self) -> bool:
        """Whether tensors stay at fixed addresses, as compiled generation needs."""
        return self.state.static

    @property
    def length(self) -> int | Tensor:
        """Tokens read, padding included; a tensor in a static cache."""
        return self.state.length

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors by name."""
        return self.state.tensors

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the attention function allocates what it needs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are."""
        return key_states, value_states

    def of_call(self, number: int) -> "LinearAttentionCacheLayer":
        """Return the layer for the attention call of that number, from 0, in one forward of the module."""
        while len(self.others) < number:
            other = LinearAttentionCacheLayer(self.max_length if self.static else None)
            other.record_past, other.state.common = self.record_past, self.state.common
            self.others.append(other)
        return self.others[number - 1] if number else self

    @property
    def recorded(self) -> int:
        """Number of tokens that :meth:`crop` can drop."""
        return self.recent["mask"].shape[1] if self.recent else 0

    def record(self, **tokens: Tensor) -> None:
        """Keep keys, values and mask of new tokens ``[B, ..., T, *]``, T <= :data:`RECORDED`, before they are read."""
        total = self.recorded + tokens["mask"].shape[1]
        if not self.bases or total - self.bases[-1][0] > RECORDED:
            self.bases.append((self.recorded, self._copy()))
        while len(self.bases) > 1 and total - self.bases[1][0] >= RECORDED:
            start = self.bases[1][0]
            left = self.recorded - start
            # A part of a longer tensor would keep all of it.
            self.recent = {name: x.narrow(_token_dim(name), start, left).clone() for name, x in self.recent.items()}
            self.bases = [(before - start, base) for before, base in self.bases[1:]]
            total -= start
        self.recent = {
            name: torch.cat([self.recent[name], x], dim=_token_dim(name)) if self.recent else x.clone()
            for name, x in tokens.items()
        }

    def _copy(self) -> dict[str, Tensor]:
        """Return the state's tensors in a copy, which steps in place leave as it is."""
        state = self.state
        return {
            name: state.once((f"{name} before", x.shape[1]), (x, state.length), x.clone)
            if state.slots[name].common
            else x.clone()
            for name, x in state.tensors.items()
        }

    def forget_recorded(self) -> None:
        """Stop keeping the tokens that were recorded."""
        self.recent, self.bases = {}, []

    def take_unread(self) -> dict[str, Tensor]:
        """Return the tokens to be read again, and count them as not read."""
        unread, self.unread = self.unread, {}
        if unread:
            self.state.advance(-unread["mask"].shape[1], unread["mask"].device)
        return unread

    def get_seq_length(self) -> int:
        """Return the number of tokens read, padding included."""
        return self.state.length  # type: ignore[return-value]  # static layers return a tensor here, as Transformers' own do

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask that softmax layers beside this one need."""
        state = self.state
        return (self.max_length if state.static else state.length + query_length), 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Return the length of the cache that this layer replaced, -1 where it had no limit."""
        return self.max_length

    def _apply(self, function: Callable[[Tensor], Tensor], by: Tensor | int) -> None:
        self.state.apply(function, by)
        for held in (self.recent, self.unread, *(base for _, base in self.bases)):
            held.update({name: function(x) for name, x in held.items()})
        for other in self.others:
            other._apply(function, by)

    def reset(self) -> None:
        """Clear the state."""
        self.unread = {}
        self.forget_recorded()
        self.state.reset()
        for other in self.others:
            other.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, as beam search does."""
        self._apply(lambda x: x.index_select(0, beam_idx.to(x.device)), beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0), repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._apply(lambda x: x[indices], indices)

    def activate_past_recording(self) -> None:
        """Keep the tokens read from now on, so that :meth:`crop` can drop the last of them."""
        self.record_past = True
        for other in self.others:
            other.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens read since the last crop, and stop keeping the others.

        Args:
            tokens_to_remove: Minus their number, <= 0.

        Raises:
            ArgumentError: If it is positive, or reaches back beyond what was recorded.
        """
        kept = self.recorded
        if tokens_to_remove > 0 or -tokens_to_remove > kept:
            raise ArgumentError(
                "tokens_to_remove",
                f"be from {-kept} to 0, for a sum over tokens can only forget those that were kept apart",
                tokens_to_remove,
                "Call cache.activate_past_recording() before reading tokens that may be dropped, and after the cache "
                "knows its model: convert_cache(model, cache), or a first forward; or copy the cache.",
            )
        if tokens_to_remove:
            left = kept + tokens_to_remove
            start, base = next(held for held in reversed(self.bases) if held[0] <= left)
            self.unread = {
                name: x.narrow(_token_dim(name), start, left - start) for name, x in self.recent.items() if left > start
            }
            self.state.restore(base)
            self.state.advance(tokens_to_remove, self.recent["mask"].device)
        self.forget_recorded()
        for other in self.others:
            other.crop(tokens_to_remove)

    def offload(self) -> None:
        """Do nothing: the state is small and needed at each token."""

    def prefetch(self) -> None:
        """Do nothing; see :meth:`offload`."""


class HybridCacheLayer(LinearAttentionLayer, LinearAttentionCacheLayer):  # type: ignore[no-untyped-call,override,misc]
    """Hold a converted layer's state beside the convolution's and recurrence's of the same model layer.

    Args:
        layer: The cache layer that it replaces; what its recurrent part has read is taken over.
    """

    is_compileable = False
    # The layer that this one replaced had no limit; both parts are small, and needed at each token.
    get_max_length = LinearAttentionCacheLayer.get_max_length
    offload = LinearAttentionCacheLayer.offload
    prefetch = LinearAttentionCacheLayer.prefetch

    def __init__(self, layer: LinearAttentionCacheLayerMixin) -> None:
        LinearAttentionCacheLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=layer.number_of_states)
        for name in vars(self).keys() & vars(layer).keys() - {"keys", "values", "is_initialized"}:
            setattr(self, name, getattr(layer, name))
        self.is_compileable = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the recurrent part; the attention part needs nothing."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether both parts can go back."""
        return self.record_past and bool(super().is_croppable)

    def reset(self) -> None:
        """Clear the state."""
        LinearAttentionLayer.reset(self)
        LinearAttentionCacheLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows in both parts."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        LinearAttentionCacheLayer.reorder_cache(self, beam_idx)

    def activate_past_recording(self) -> None:
        """Keep the past in both parts."""
        LinearAttentionLayer.activate_past_recording(self)  # type: ignore[no-untyped-call]
        LinearAttentionCacheLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens in both parts, where the recurrent one can."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        LinearAttentionCacheLayer.crop(self, tokens_to_remove)


def _token_dim(name: str) -> int:
    return 2 if name in ("k", "v") else 1


def cache_layer(cache: Cache, index: int, name: str, module: nn.Module) -> LinearAttentionCacheLayer:
    """Return the cache's layer for a converted attention layer, putting ours in place of a fresh softmax one.

    Where the attention module shares the keys of another one, the cache may have no place for it.

    Raises:
        ArgumentError: If the cache holds tokens that an unpatched model read.
    """
    cache = own_cache(cache)
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    while len(cache.layers) <= index and shares_keys(module):
        cache.layers.append(_with_others(cache, LinearAttentionCacheLayer(_static_length(cache))))
    if index >= len(cache.layers):
        raise ArgumentError(
            "cache",
            f"have a layer {index}",
            f"a {type(cache).__name__} of {len(cache.layers)} layers",
            "Build it with this model's config.",
            where=name,
        )
    # Any: its classes have no attribute in common that says what they hold.
    layer: Any = cache.layers[index]
    if isinstance(layer, LinearAttentionCacheLayer):
        return layer
    if is_exporting():
        _refuse_export(name)
    keys = getattr(layer, "keys", None)
    if keys is not None and layer.get_seq_length() > 0:
        raise ArgumentError(
            "cache",
            "be empty or filled by this patched model",
            f"a {type(layer).__name__} of {int(layer.get_seq_length())} tokens",
            "Start from a new cache. PEFT's prefix tuning puts keys into one: take LoRA in its place.",
            where=name,
        )
    ours: LinearAttentionCacheLayer
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        ours = HybridCacheLayer(layer)
    else:
        ours = LinearAttentionCacheLayer(_static_length(cache) if isinstance(layer, StaticLayer) else None)
        # Full layers of Transformers keep all, and note nothing; others of the cache do.
        ours.record_past = any(getattr(x, "record_past", False) for x in cache.layers)
    cache.layers[index] = _with_others(cache, ours)
    return ours


def _with_others(cache: Cache, layer: LinearAttentionCacheLayer) -> LinearAttentionCacheLayer:
    """Let a layer hold in common with the others what is the same in all of them."""
    if not layer.state.static:
        held = (x.state.common for x in cache.layers if isinstance(x, LinearAttentionCacheLayer))
        layer.state.common = next((x for x in held if x is not None), None) or Common()
    return layer


# What a tracer asks of this is its answer: an error of its own it could not raise.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_export(name: str) -> None:
    rule = "be None while a model is exported"
    remedy = "Exporters hand keys and values from step to step, and a state is neither: export with use_cache=False."
    raise UnsupportedError("cache", rule, "a cache of keys and values", remedy, where=name)


def _static_length(cache: Cache) -> int | None:
    """Return how many tokens a static cache holds, None where the cache grows."""
    # A static sliding layer is shorter than the text; masks for full layers are built from ours too.
    lengths = [x.max_cache_len for x in cache.layers if isinstance(x, StaticLayer)]
    lengths += [x.max_length for x in cache.layers if isinstance(x, LinearAttentionCacheLayer) and x.static]
    # Compilers that take lengths for symbols know no default.
    return max(lengths) if lengths else None
