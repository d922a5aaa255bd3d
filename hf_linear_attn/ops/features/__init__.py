"""Features of queries and keys, for the kernels that read them: by a kernel of their own where there is one."""

from typing import Literal

import torch
from torch import Tensor

from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.dispatch import LARGEST_HEAD, tensor_obstacle, wants_kernels, warn_fallback
from hf_linear_attn.ops.rotation import Rotation

LARGEST_PAIR = LARGEST_HEAD
"""Dimensions up to which the kernels hold what the weights of paired maps give."""


def features_of(
    feature_map: FeatureMap,
    x: Tensor,
    side: Literal["q", "k"],
    positions: Tensor | None = None,
    backend: str = "auto",
    rotation: Rotation | None = None,
) -> Tensor:
    """Compute the features of queries or keys in their own dtype.

    Args:
        feature_map: The map.
        x: Queries ``[B, H, T, D]`` or keys ``[B, HKV, T, D]``.
        side: Which of both they are.
        positions: ``[B, T]`` int64; only position-dependent maps read them.
        backend: As in :func:`linear_attention`. Maps without a kernel of their own are PyTorch's with every backend.
        rotation: By which ``x`` is turned, where the features are those of what it was before.

    Returns:
        Features ``[B, H or HKV, T, F]``.
    """
    if wants_kernels(backend, x.device) and not feature_map.hooked:
        pair = feature_map.pair(side)
        reason = None if pair is None else feature_obstacle(x, pair)
        if reason is not None:
            warn_fallback(reason)
        elif pair is not None:
            # Imported here so that the package needs neither Triton nor a GPU.
            from hf_linear_attn.ops.features.triton.op import features_triton

            return features_triton(x, pair, rotation)
    x = x if rotation is None else rotation.undo(x, backend)
    features: Tensor = feature_map(x, side, positions)
    return features.to(x.dtype)


def feature_obstacle(x: Tensor, pair: Pair) -> str | None:
    """Say why no kernel can compute these features here, or None where one can."""
    return weights_obstacle(x.device, pair.weight) or tensor_obstacle(x)


def weights_obstacle(device: torch.device, *weights: Tensor) -> str | None:
    """Say why no kernel can take weights of paired maps on a device, or None where one can."""
    if any(weight.device != device for weight in weights):
        # They come with the map's own forward.
        return "the map's weights are kept elsewhere"
    largest = max(size for weight in weights for size in weight.shape[1:])
    if largest > LARGEST_PAIR:
        return f"the map's weights have size {largest}, and the kernels hold at most {LARGEST_PAIR}"
    return None
