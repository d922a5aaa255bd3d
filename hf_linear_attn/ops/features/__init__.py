"""Features of queries and keys, for the kernels that read them: by a kernel of their own where there is one."""

from typing import Literal

import torch
from torch import Tensor

from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.dispatch import device_obstacle, wants_kernels
from hf_linear_attn.ops.rotation import Rotation

LARGEST_PAIR = 128
"""Dimensions up to which the weights of paired maps fit into shared memory."""


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
        if pair is not None and computes_features(x, pair):
            # Imported here so that the package needs neither Triton nor a GPU.
            from hf_linear_attn.ops.features.triton.op import features_triton

            return features_triton(x, pair, rotation)
    x = x if rotation is None else rotation.undo(x, backend)
    features: Tensor = feature_map(x, side, positions)
    return features.to(x.dtype)


def computes_features(x: Tensor, pair: Pair) -> bool:
    """Tell whether a kernel can compute these features here."""
    largest = max(pair.weight.shape[1:])
    # Weights that are kept elsewhere come with the map's own forward.
    here = pair.weight.device == x.device
    return here and device_obstacle(x.device) is None and x.dtype != torch.float64 and largest <= LARGEST_PAIR
