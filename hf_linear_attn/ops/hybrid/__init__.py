"""A layer with a window as one operation: window, sinks and state, read together."""

from hf_linear_attn.ops.hybrid.problem import Geometry, HeadState, HybridParams, HybridState, Key, Tokens
from hf_linear_attn.ops.hybrid.reference import hybrid_reference

__all__ = ["Geometry", "HeadState", "HybridParams", "HybridState", "Key", "Tokens", "hybrid_reference"]
