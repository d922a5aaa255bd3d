"""The attention operation and its backends."""

from hf_linear_attn.ops.linear_attention import linear_attention
from hf_linear_attn.ops.state import LinearAttentionState

__all__ = ["LinearAttentionState", "linear_attention"]
