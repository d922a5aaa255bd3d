"""A layer with a window as one operation: window, sinks and state, read together."""

from hf_linear_attn.ops.hybrid.api import (
    KEEPS,
    PREFILLS,
    STEPS,
    hybrid_obstacle,
    hybrid_prefill,
    hybrid_step_,
    hybrid_train,
    prefill_obstacle,
)
from hf_linear_attn.ops.hybrid.problem import Geometry, HeadState, HybridParams, HybridState, Key, Tokens
from hf_linear_attn.ops.hybrid.records import HybridStep, KeptPrefill, KeptStep, Prefill
from hf_linear_attn.ops.hybrid.reference import hybrid_reference

__all__ = [
    "KEEPS",
    "PREFILLS",
    "STEPS",
    "Geometry",
    "HeadState",
    "HybridParams",
    "HybridState",
    "HybridStep",
    "KeptPrefill",
    "KeptStep",
    "Key",
    "Prefill",
    "Tokens",
    "hybrid_obstacle",
    "hybrid_prefill",
    "hybrid_reference",
    "hybrid_step_",
    "hybrid_train",
    "prefill_obstacle",
]
