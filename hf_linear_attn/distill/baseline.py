"""The baseline that a conversion has to beat: a window alone, of equal cache bytes."""

import math

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
        if isinstance(layer, LinearAttentionCacheLayer)
        and "near_k" in layer.tensors
        and {"kv", "kept_k"} & layer.tensors.keys()
    ]
    if not layers:
        raise ArgumentError(
            "model", "be patched with a window and something beyond it", type(model).__name__, "Set window=."
        )

    def size(*names: str) -> int:
        # What layers hold together counts once.
        held = {id(layer[name]): layer[name] for layer in layers for name in names if name in layer}
        return sum(x.nbytes for x in held.values())

    # The window, its sinks, and the slot where the next token goes.
    places = layers[0]["near_k"].shape[2]
    settings = LinearAttentionConfig.from_dict(model.config.linear_attention)
    # The angles of the window's tokens are kept for the linear branch alone.
    kept = sorted({name for layer in layers for name in layer if name.startswith("kept_")})
    far, near = size("kv", "z", "far_keys", "near_turns", *kept), size("near_k", "near_v")
    return int((settings.window or 0) + math.ceil(far * places / near))
