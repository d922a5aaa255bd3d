"""The baseline that a conversion has to beat: a window alone, of equal cache bytes."""

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching import LinearAttentionCacheLayer, returned_cache


@torch.no_grad()
def equal_cache_window(model: PreTrainedModel) -> int:
    """Return how many tokens a window alone may hold so that its cache is as large as a hybrid model's.

    The state of the linear branch, and all that is kept beyond the window, is exchanged for the keys and values of more
    tokens.

    Args:
        model: A model patched with a window.

    Returns:
        The window in tokens, rounded up in the window's favour; sinks stay as they are.

    Raises:
        ArgumentError: If the model has no layer with a window and something beyond it.
    """
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    cache = returned_cache(model(input_ids=tokens, use_cache=True))
    layers = [
        layer.tensors
        for layer in (() if cache is None else cache.layers)
        if isinstance(layer, LinearAttentionCacheLayer) and "near_k" in layer.tensors
    ]
    if not any({"kv", "kept_k"} & layer.keys() for layer in layers):
        raise ArgumentError(
            "model", "be patched with a window and something beyond it", type(model).__name__, "Set window=."
        )

    def size(*names: str) -> int:
        # What layers hold together counts once.
        held = {id(layer[name]): layer[name] for layer in layers for name in names if name in layer}
        return sum(x.nbytes for x in held.values())

    # The window, its sinks, and the slot where the next token goes, in the mean over layers.
    places = sum(layer["near_k"].shape[2] for layer in layers) / len(layers)
    settings = LinearAttentionConfig.from_dict(model.config.linear_attention)
    # The angles of the window's tokens are kept for the linear branch alone.
    kept = sorted({name for layer in layers for name in layer if name.startswith("kept_")})
    far, near = size("kv", "z", "far_keys", "near_turns", *kept), size("near_k", "near_v")
    return math.ceil(places - settings.sinks - 1 + far * places / near)


def window_alone(model: PreTrainedModel) -> dict[str, Any]:
    """Return how :func:`patch_model` makes the window alone whose cache is as large, divided among layers alike.

    Layers share it as they share the tokens of windows and what is kept beyond these.

    Args:
        model: As for :func:`equal_cache_window`.

    Returns:
        The arguments: ``window``, ``sinks``, ``mix`` and ``per_layer``.
    """
    settings = LinearAttentionConfig.from_dict(model.config.linear_attention)
    layers = {index: settings.of_layer(index) for index in settings.layers or ()}
    parts = {index: (part.window or 0) + part.kept for index, part in layers.items()}
    window, mean = equal_cache_window(model), sum(parts.values()) / len(parts)
    own = {index: {"window": round(window * size / mean)} for index, size in parts.items() if size != mean}
    return {"window": window, "sinks": settings.sinks, "mix": "window", "per_layer": own}
