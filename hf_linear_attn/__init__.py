"""Turn pretrained softmax Transformers into linear-attention models, in place."""

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.feature_maps import available_feature_maps, register_feature_map
from hf_linear_attn.ops import LinearAttentionState, linear_attention
from hf_linear_attn.patching import from_pretrained, patch_model, unpatch_model

__version__ = "0.1.0"

__all__ = [
    "LinearAttentionConfig",
    "LinearAttentionState",
    "available_feature_maps",
    "from_pretrained",
    "linear_attention",
    "patch_model",
    "register_feature_map",
    "unpatch_model",
]
