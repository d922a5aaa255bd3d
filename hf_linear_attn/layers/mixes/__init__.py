"""Mixing rules; a new one is one new file here."""

from hf_linear_attn.layers.mixes.base import Far, LastToken, Mix, Near
from hf_linear_attn.layers.registry import discover

MIXES = discover(__name__, __path__, Mix)

__all__ = ["MIXES", "Far", "LastToken", "Mix", "Near"]
