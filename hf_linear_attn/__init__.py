"""Turn pretrained softmax Transformers into linear-attention models, in place."""

from hf_linear_attn.feature_maps import available_feature_maps, register_feature_map
from hf_linear_attn.ops import LinearAttentionState, linear_attention

__version__ = "0.1.0"

__all__ = [
    "LinearAttentionState",
    "available_feature_maps",
    "linear_attention",
    "register_feature_map",
]
