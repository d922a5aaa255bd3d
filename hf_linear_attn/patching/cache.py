"""The cache layer of a converted attention layer: its size does not depend on the number of tokens read."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, StaticLayer

from hf_linear_attn.errors import ArgumentError, explain
from hf_linear_attn.ops.state import LinearAttentionState


class LinearAttentionCacheLayer(CacheLayerMixin):
    """Hold the state of one converted layer.

    ``update`` returns only the new keys and values; the attention function folds them in afterwards with
    :meth:`store`. Everything else is a batch-first tensor in :attr:`tensors`, so that beams, batches and devices are
    handled in one place.

    Attributes:
        tensors: The state by name: ``kv`` and ``z``, and with a window ``ring_k, ring_v, ring_mask`` (its tokens in
            order), ``sink_k, sink_v, sink_position``; ``seen`` counts the real tokens of each row.
        static: Whether tensors stay at fixed addresses, as compiled generation needs.
    """

    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_length: int | None = None) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.static = max_length is not None
        self.is_compileable = self.static
        self.max_length = -1 if max_length is None else max_length
        self.length: int | Tensor = torch.tensor(0) if self.static else 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the attention function allocates what it needs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are; :meth:`store` follows."""
        return key_states, value_states

    def store(self, tokens: int, **tensors: Tensor) -> None:
        """Take over the state after ``tokens`` more tokens."""
        if isinstance(self.length, Tensor):
            device = next(iter(tensors.values())).device
            if self.length.device != device:
                self.length = self.length.to(device)
            self.length.add_(tokens)
        else:
            self.length += tokens
        for name, x in tensors.items():
            old = self.tensors.get(name)
            if self.static and old is not None:
                old.copy_(x)
            else:
                # A static tensor must not be one that the caller goes on to write to.
                self.tensors[name] = x.clone() if self.static else x

    @property
    def state(self) -> LinearAttentionState | None:
        """The linear branch's state, None before the first token."""
        return LinearAttentionState(self.tensors["kv"], self.tensors["z"]) if "kv" in self.tensors else None

    def get_seq_length(self) -> int:
        """Return the number of tokens read, padding included."""
        return self.length  # type: ignore[return-value]  # static layers return a tensor here, as Transformers' own do

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask that softmax layers beside this one need."""
        return (self.max_length if self.static else self.length + query_length), 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Return the length of the cache that this layer replaced, -1 where it had no limit."""
        return self.max_length

    def _apply(self, function: Any) -> None:
        self.tensors = {name: function(x) for name, x in self.tensors.items()}

    def reset(self) -> None:
        """Forget every token."""
        if self.static:
            for x in self.tensors.values():
                x.zero_()
            self.length.zero_()  # type: ignore[union-attr]
        else:
            self.tensors, self.length = {}, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, as beam search does."""
        self._apply(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._apply(lambda x: x[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: a sum of tokens cannot give one back.

        Raises:
            ArgumentError: If any token is to be removed.
        """
        if tokens_to_remove:
            raise ArgumentError(
                explain(
                    "tokens_to_remove",
                    "be 0, for a linear-attention state cannot forget its last tokens",
                    tokens_to_remove,
                    "Copy the cache before reading tokens that may be dropped.",
                )
            )

    def offload(self) -> None:
        """Do nothing: the state is small and needed at each token."""

    def prefetch(self) -> None:
        """Do nothing; see :meth:`offload`."""


def cache_layer(cache: Cache | EncoderDecoderCache, index: int, name: str) -> LinearAttentionCacheLayer:
    """Return the cache's layer for a converted attention layer, putting ours in place of a fresh softmax one.

    Args:
        cache: The cache that the model was called with.
        index: The attention layer's index in it.
        name: The attention layer's name, for messages.

    Raises:
        ArgumentError: If the cache holds tokens that an unpatched model read.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, LinearAttentionCacheLayer):
        return layer
    if layer.is_initialized and layer.keys is not None and layer.get_seq_length() > 0:
        raise ArgumentError(
            explain(
                "past_key_values",
                "be empty or filled by this patched model",
                f"a {type(layer).__name__} of {int(layer.get_seq_length())} tokens",
                "Start from a new cache.",
                where=name,
            )
        )
    ours = LinearAttentionCacheLayer(layer.max_cache_len if isinstance(layer, StaticLayer) else None)
    cache.layers[index] = ours
    return ours
