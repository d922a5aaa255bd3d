"""The attention operations and their backends."""

from hf_linear_attn.ops.delta_rule import DeltaRuleState, delta_rule
from hf_linear_attn.ops.linear_attention import linear_attention
from hf_linear_attn.ops.state import LinearAttentionState

__all__ = ["DeltaRuleState", "LinearAttentionState", "delta_rule", "linear_attention"]
