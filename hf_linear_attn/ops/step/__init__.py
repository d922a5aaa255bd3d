"""Generation a token at a time, against a state that is updated in place, at fixed addresses."""

from hf_linear_attn.ops.step.checks import HYBRID_MIXES
from hf_linear_attn.ops.step.copies import copies_of
from hf_linear_attn.ops.step.decode import (
    constant,
    decode_opaque_,
    decode_plain_,
    decode_state,
    decode_step_,
    fade_,
    fold_and_read_,
)
from hf_linear_attn.ops.step.hybrid import hybrid_obstacle, hybrid_step_
from hf_linear_attn.ops.step.problem import HybridStep

__all__ = [
    "HYBRID_MIXES",
    "HybridStep",
    "constant",
    "copies_of",
    "decode_opaque_",
    "decode_plain_",
    "decode_state",
    "decode_step_",
    "fade_",
    "fold_and_read_",
    "hybrid_obstacle",
    "hybrid_step_",
]
