"""Instruments: how well feature maps stand in for softmax, and what the branches of a patched model do."""

from hf_linear_attn.diagnostics.approximation import ApproximationSettings, measure_layer
from hf_linear_attn.diagnostics.branches import branch_usage
from hf_linear_attn.diagnostics.capture import AttentionInputs, observe_attention
from hf_linear_attn.diagnostics.inspection import inspect_model

__all__ = [
    "ApproximationSettings",
    "AttentionInputs",
    "branch_usage",
    "inspect_model",
    "measure_layer",
    "observe_attention",
]
