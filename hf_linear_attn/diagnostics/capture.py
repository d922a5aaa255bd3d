"""Queries, keys and values of a softmax model, as its attention layers see them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.patching import attention_layers, is_patched
from hf_linear_attn.patching.discover import AttentionLayer

IMPLEMENTATION = "hf_linear_attn_capture"
"""Name under which the observing attention function is registered while a capture runs."""


@dataclass(frozen=True)
class AttentionInputs:
    """What one attention layer computes with.

    Attributes:
        index: Place among the model's self-attention layers.
        name: Its module's name.
        q: Queries ``[B, H, T, D]``, after rotary embeddings.
        k: Keys ``[B, HKV, T, D]``.
        v: Values ``[B, HKV, T, V]``.
        scaling: Factor on ``q.k``.
        causal: Whether a query sees only keys up to its own.
    """

    index: int
    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    causal: bool


@contextmanager
def observe_attention(model: PreTrainedModel, callback: Callable[[AttentionInputs], None]) -> Iterator[PreTrainedModel]:
    """Call ``callback`` for every full self-attention layer of each forward within a ``with`` block.

    The model computes what it always does, through PyTorch's ``scaled_dot_product_attention``; nothing is
    kept, so the callback decides how much memory it takes. Its attention implementation is put back in the
    end.

    Args:
        model: A softmax model whose attention goes through the AttentionInterface.
        callback: Gets each layer's inputs.

    Raises:
        ArgumentError: If the model is patched.
        UnsupportedError: If no layer can be observed, or the model cannot use
            ``scaled_dot_product_attention``.
    """
    layers = observable_layers(model)

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = layers.get(id(module))
        if layer is not None and query.shape[2] == key.shape[2]:
            scaling, causal = kwargs.get("scaling"), kwargs.get("is_causal")
            callback(
                AttentionInputs(
                    layer.index,
                    layer.name,
                    query.detach(),
                    key.detach(),
                    value.detach(),
                    query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                    bool(getattr(module, "is_causal", True) if causal is None else causal),
                )
            )
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    configs: dict[int, PreTrainedConfig] = {
        id(layer.module.config): layer.module.config  # type: ignore[misc]
        for layer in attention_layers(model)
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    AttentionInterface.register(IMPLEMENTATION, forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    try:
        for config in configs.values():
            config._attn_implementation_internal = IMPLEMENTATION
        yield model
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def observable_layers(model: PreTrainedModel) -> dict[int, AttentionLayer]:
    """Return the layers that :func:`observe_attention` observes, by the identity of their modules."""
    if is_patched(model):
        raise ArgumentError(
            "model", "be a softmax model", f"a patched {type(model).__name__}", "Call unpatch_model first."
        )
    layers = {id(layer.module): layer for layer in attention_layers(model) if layer.kind == "full" and layer.index >= 0}
    if not layers:
        rule = "have full self-attention layers that call Transformers' AttentionInterface"
        raise UnsupportedError("model", rule, type(model).__name__, "There is nothing to look at.")
    if not getattr(model, "_supports_sdpa", False):
        remedy = "Its attention does more than softmax(scaling q.k) v, so maps cannot be compared with it."
        raise UnsupportedError("model", "support scaled_dot_product_attention", type(model).__name__, remedy)
    return layers
