"""Which keys are kept beyond a window, and which one goes when another comes."""

from hf_linear_attn.ops.kept.api import choose_kept
from hf_linear_attn.ops.kept.problem import Choice, Entering

__all__ = ["Choice", "Entering", "choose_kept"]
