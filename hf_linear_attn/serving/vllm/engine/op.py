"""What vLLM knows of a converted layer by name."""

NAME = "vllm::hf_linear_attn_attend"
"""The operation by which its graphs call the layer."""

BACKEND = "HF_LINEAR_ATTN"
"""The backend by which it finds what builds a call's metadata."""

BACKEND_CLASS = "hf_linear_attn.serving.vllm.engine.layer.Backend"
