"""Patching Transformers models in place, and everything that then has to go on working."""

from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.layers.disable import disable_branch
from hf_linear_attn.patching.cache import LinearAttentionCacheLayer
from hf_linear_attn.patching.call_cache import cache_argument, returned_cache
from hf_linear_attn.patching.checkpoint import from_pretrained
from hf_linear_attn.patching.context import Context, encode_context, load_context
from hf_linear_attn.patching.convert import patch_model, unpatch_model
from hf_linear_attn.patching.discover import attention_layers
from hf_linear_attn.patching.hook import convert_cache
from hf_linear_attn.patching.scope import is_patched, part_of
from hf_linear_attn.patching.store import ContextStore
from hf_linear_attn.patching.teacher import softmax, teacher_of

__all__ = [
    "Context",
    "ContextStore",
    "LinearAttention",
    "LinearAttentionCacheLayer",
    "attention_layers",
    "cache_argument",
    "convert_cache",
    "disable_branch",
    "encode_context",
    "from_pretrained",
    "is_patched",
    "load_context",
    "part_of",
    "patch_model",
    "returned_cache",
    "softmax",
    "teacher_of",
    "unpatch_model",
]
