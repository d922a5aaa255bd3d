"""What tells a model from others."""

import hashlib
import json

from transformers import PreTrainedModel

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers import LinearAttention

SAMPLES = 64
"""Values of each weight that enter a model's fingerprint."""


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of a patched model's settings and of values of each of its weights.

    Raises:
        ArgumentError: If the model is not patched.
    """
    settings = getattr(getattr(model, "config", None), "linear_attention", None)
    if settings is None or not any(isinstance(module, LinearAttention) for module in model.modules()):
        raise ArgumentError("model", "be patched", type(model).__name__, "Call patch_model first; softmax states grow.")
    text = hashlib.sha256(json.dumps([type(model).__name__, settings], sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].double().cpu()
        text.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.numpy().tobytes())
    return text.hexdigest()
