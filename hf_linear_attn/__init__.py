"""Turn pretrained softmax Transformers into linear-attention models, in place."""

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.feature_maps import available_feature_maps, register_feature_map
from hf_linear_attn.ops import LinearAttentionState, linear_attention
from hf_linear_attn.patching import (
    Context,
    encode_context,
    from_pretrained,
    load_context,
    patch_model,
    unpatch_model,
)

__version__ = "0.1.0"

__all__ = [
    "Context",
    "LinearAttentionConfig",
    "LinearAttentionState",
    "available_feature_maps",
    "encode_context",
    "from_pretrained",
    "linear_attention",
    "load_context",
    "patch_model",
    "register_feature_map",
    "unpatch_model",
]
