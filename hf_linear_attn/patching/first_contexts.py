"""Contexts of the first format, which held the tokens of a window in order."""

import torch
from torch import Tensor

from hf_linear_attn.ops.window import NOWHERE


def in_ring_buffers(tensors: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Return the tensors of a file of the first format, which held the window in order, as they are held now."""
    found = {name: x for name, x in tensors.items() if name.split(".")[-1].split("_")[0] not in ("ring", "sink", "far")}
    found |= {name: x for name, x in tensors.items() if name.endswith(".far_keys")}
    for prefix in (name.removesuffix("ring_k") for name in tensors if name.endswith(".ring_k")):
        mask = tensors[prefix + "ring_far"]
        window = mask.shape[1]
        sinks = tensors[prefix + "sink_slot"].shape[1] if prefix + "sink_slot" in tensors else 0
        slots = sinks + (torch.arange(window) - window + length) % (window + 1)
        for name in ("k", "v"):
            x = tensors[f"{prefix}ring_{name}"]
            ring = x.new_zeros(*x.shape[:2], sinks + window + 1, x.shape[3])
            ring[:, :, slots] = x
            if sinks:
                ring[:, :, :sinks] = tensors[f"{prefix}sink_{name}"]
            found[f"{prefix}near_{name}"] = ring
        held = mask.new_zeros(len(mask), sinks + window + 1)
        held[:, slots] = mask
        if sinks:
            held[:, :sinks] = tensors[prefix + "sink_slot"] < NOWHERE
        found[prefix + "near_mask"] = held
    return found
