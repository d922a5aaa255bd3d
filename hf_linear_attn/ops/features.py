"""Features of queries and keys, for the kernels that read them: by a kernel of their own where there is one."""

from typing import Literal

from torch import Tensor

from hf_linear_attn.feature_maps import FeatureMap


def features_of(
    feature_map: FeatureMap, x: Tensor, side: Literal["q", "k"], positions: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Compute the features of queries or keys in their own dtype.

    Args:
        feature_map: The map.
        x: Queries ``[B, H, T, D]`` or keys ``[B, HKV, T, D]``.
        side: Which of both they are.
        positions: ``[B, T]`` int64; only position-dependent maps read them.
        backend: As in :func:`linear_attention`. Maps without a kernel of their own are PyTorch's with every backend.

    Returns:
        Features ``[B, H or HKV, T, F]``.
    """
    if backend == "triton" or (backend == "auto" and x.is_cuda):
        # Imported here so that the package needs neither Triton nor a GPU.
        from hf_linear_attn.ops import triton as triton_backend

        pair = feature_map.pair(side)
        if pair is not None and triton_backend.computes_features(x, pair):
            return triton_backend.features_triton(x, pair)
    phi = feature_map.phi_q if side == "q" else feature_map.phi_k
    return phi(x, positions).to(x.dtype)
