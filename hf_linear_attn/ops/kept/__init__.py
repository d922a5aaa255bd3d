"""Which keys are kept beyond a window, and which one goes when another comes."""

from hf_linear_attn.ops.kept.api import choice_obstacle, choose_kept
from hf_linear_attn.ops.kept.problem import AGES, Choice, Entering
from hf_linear_attn.ops.kept.torch import at_age

__all__ = ["AGES", "Choice", "Entering", "at_age", "choice_obstacle", "choose_kept"]
