"""Exact softmax over the last W tokens, a few sink tokens and a key of each query's own, in O(T W) time."""

from hf_linear_attn.ops.window.api import (
    OwnKey,
    key_product,
    running_sum,
    window_attention,
    window_obstacle,
    window_sums,
)
from hf_linear_attn.ops.window.problem import NOWHERE, KeptKeys

__all__ = [
    "NOWHERE",
    "KeptKeys",
    "OwnKey",
    "key_product",
    "running_sum",
    "window_attention",
    "window_obstacle",
    "window_sums",
]
