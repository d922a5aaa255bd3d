"""Normalised linear attention: the public function, its float64 reference, and its backends."""

from hf_linear_attn.ops.linear_attention.api import linear_attention

__all__ = ["linear_attention"]
