"""Sharding a model over processes with torch's ``fully_shard`` (FSDP2)."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.errors import UnsupportedError


def shard(model: nn.Module, mixed_precision: str = "no") -> None:
    """Shard a model's parameters over all processes, layer by layer, in place.

    Feature maps and mixing weights stay whole on every process: attention transfer runs their backward inside the
    forward, when a sharded layer's parameters are not to be had.

    Args:
        model: A Transformers model, on its device.
        mixed_precision: ``"bf16"`` gathers and computes in bf16; gradients are reduced in fp32.

    Raises:
        UnsupportedError: If the model does not say which modules are its layers.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedError(
            "shard",
            "be False for a model that does not name its layers in _no_split_modules",
            True,
            "Leave it out, or shard the model yourself and pass it in.",
            where=type(model).__name__,
        )
    dtype = torch.bfloat16 if mixed_precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    maps = {p for part in linear_attention_parts(model) for p in part.parameters()}
    for module in (*layers, model):
        fully_shard(module, ignored_params=maps, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether any parameter is sharded."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Put the parameters of a sharded model back in place: after a forward without backward the root's are whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
