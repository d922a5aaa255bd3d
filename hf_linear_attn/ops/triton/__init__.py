"""The Triton backend; importing this package imports neither Triton nor CUDA."""

from torch import Tensor

from hf_linear_attn.ops.state import LinearAttentionState


def obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why the Triton backend cannot take these tensors here, or None where it can."""
    return "the kernels are not built yet"


def linear_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, **settings: object
) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention with Triton kernels."""
    raise NotImplementedError
