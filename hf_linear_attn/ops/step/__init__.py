"""A step without a window, against a state that is updated in place, at fixed addresses."""

from hf_linear_attn.ops.step.decode import (
    constant,
    copies_of,
    decode_opaque_,
    decode_plain_,
    decode_state,
    decode_step_,
    fade_,
    fold_and_read_,
)

__all__ = [
    "constant",
    "copies_of",
    "decode_opaque_",
    "decode_plain_",
    "decode_state",
    "decode_step_",
    "fade_",
    "fold_and_read_",
]
