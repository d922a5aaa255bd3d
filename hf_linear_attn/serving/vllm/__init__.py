"""A plugin by which vLLM serves converted folders; vLLM finds it by itself, and nothing here imports vLLM before then.

vLLM's own model class is built, whatever its architecture. Then each converted layer's attention is replaced by one
that computes what :class:`LinearAttention` does and keeps its state in a page of vLLM's cache.
"""

from hf_linear_attn.serving.vllm.checks import SUPPORTED_VERSIONS, check_version, is_supported

__all__ = ["SUPPORTED_VERSIONS", "check_version", "is_supported", "register"]


def register() -> None:
    """Tell vLLM of converted models (entry point ``vllm.general_plugins``).

    With a version that is not supported other models are served as ever, and converted ones are refused by name.
    """
    from hf_linear_attn.serving.vllm.engine.registry import register_architectures

    register_architectures()
