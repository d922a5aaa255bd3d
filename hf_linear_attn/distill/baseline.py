"""The baseline that a conversion has to beat: a window alone, of equal cache bytes."""

import math

import torch
from torch import Tensor, nn

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching import LinearAttentionCacheLayer


@torch.no_grad()
def equal_cache_window(model: nn.Module) -> int:
    """Return how many tokens a window alone may hold so that its cache is as large as a hybrid model's.

    The state of the linear branch is exchanged for the keys and values of more tokens.

    Args:
        model: A model patched with a window.

    Returns:
        The window in tokens, rounded up in the window's favour; sinks stay as they are.

    Raises:
        ArgumentError: If the model has no layer with both a window and a linear branch.
    """
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    cache = model(input_ids=tokens, use_cache=True).past_key_values
    layers = [
        layer.tensors
        for layer in cache.layers
        if isinstance(layer, LinearAttentionCacheLayer) and {"kv", "ring_k"} <= layer.tensors.keys()
    ]
    if not layers:
        raise ArgumentError(
            "model", "be patched with a window and a linear branch", type(model).__name__, "Set window=."
        )

    def size(*names: str) -> int:
        return sum(_bytes(layer[name]) for layer in layers for name in names if name in layer)

    window = layers[0]["ring_k"].shape[2]
    return int(window + math.ceil(size("kv", "z", "far_keys") * window / size("ring_k", "ring_v")))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
