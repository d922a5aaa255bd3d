"""What tells a model and a file's tensors from others."""

import hashlib
import json

import torch
from torch import Tensor
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
    settings = getattr(model.config, "linear_attention", None)
    if settings is None or not any(isinstance(module, LinearAttention) for module in model.modules()):
        raise ArgumentError("model", "be patched", type(model).__name__, "Call patch_model first; softmax states grow.")
    text = hashlib.sha256(json.dumps([type(model).__name__, settings], sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].double().cpu()
        text.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.numpy().tobytes())
    return text.hexdigest()


def checksum(tensors: dict[str, Tensor]) -> str:
    """Return a hash of tensors: their names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        # A copy: a lone element may have any stride, contiguous or not.
        x = tensors[name].clone(memory_format=torch.contiguous_format)
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
