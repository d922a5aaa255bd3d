"""The (gated) delta rule: the public function, its float64 reference, and its backends."""

from hf_linear_attn.ops.delta_rule.api import delta_rule
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.delta_rule.step import delta_opaque_, delta_step_

__all__ = ["DeltaRuleState", "delta_opaque_", "delta_rule", "delta_step_"]
