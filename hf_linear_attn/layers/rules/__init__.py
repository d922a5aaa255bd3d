"""Update rules; a new one is one new file here."""

from hf_linear_attn.layers.registry import discover
from hf_linear_attn.layers.rules.base import Reading, Rule, RuleCall, RuleStep, Sizes
from hf_linear_attn.layers.rules.gates import Gates

RULES = discover(__name__, __path__, Rule)  # type: ignore[type-abstract]

__all__ = ["RULES", "Gates", "Reading", "Rule", "RuleCall", "RuleStep", "Sizes"]
