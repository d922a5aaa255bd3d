"""Distillation of a softmax checkpoint into a linear-attention one."""

from hf_linear_attn.distill.data import Data, load_data
from hf_linear_attn.distill.measure import measure
from hf_linear_attn.distill.presets import available_presets
from hf_linear_attn.distill.result import DistillResult
from hf_linear_attn.distill.run import distill
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages import Stage, available_stages, register_stage

__all__ = [
    "Data",
    "DistillResult",
    "DistillationSettings",
    "Stage",
    "available_presets",
    "available_stages",
    "distill",
    "load_data",
    "measure",
    "register_stage",
]
