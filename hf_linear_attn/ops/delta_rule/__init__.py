"""The (gated) delta rule: the public function, its float64 reference, and its backends."""

from hf_linear_attn.ops.delta_rule.api import delta_rule
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState

__all__ = ["DeltaRuleState", "delta_rule"]
