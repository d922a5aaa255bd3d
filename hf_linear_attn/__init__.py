"""Turn pretrained softmax Transformers into linear-attention models, in place."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_linear_attn.config import LinearAttentionConfig
    from hf_linear_attn.feature_maps import available_feature_maps, register_feature_map
    from hf_linear_attn.ops import DeltaRuleState, LinearAttentionState, delta_rule, linear_attention
    from hf_linear_attn.patching import (
        Context,
        ContextStore,
        encode_context,
        from_pretrained,
        load_context,
        patch_model,
        unpatch_model,
    )

__version__ = "0.1.0"

__all__ = [
    "Context",
    "ContextStore",
    "DeltaRuleState",
    "LinearAttentionConfig",
    "LinearAttentionState",
    "available_feature_maps",
    "delta_rule",
    "encode_context",
    "from_pretrained",
    "linear_attention",
    "load_context",
    "patch_model",
    "register_feature_map",
    "unpatch_model",
]

_MODULES = {
    # Where it is once what knows its rules is there too, and refuses others.
    "layers": ("LinearAttentionConfig",),
    "feature_maps": ("available_feature_maps", "register_feature_map"),
    "ops": ("DeltaRuleState", "LinearAttentionState", "delta_rule", "linear_attention"),
    "patching": (
        "Context",
        "ContextStore",
        "encode_context",
        "from_pretrained",
        "load_context",
        "patch_model",
        "unpatch_model",
    ),
}
"""Where each name lives. It is imported when it is first asked for: a command's help need not wait for torch."""


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"hf_linear_attn.{module}"), name)
            return value
    raise AttributeError(f"module 'hf_linear_attn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
