"""What imports vLLM: nothing outside of this folder does."""

OPERATION = "vllm::hf_linear_attn_attend"
"""The operation by which vLLM's graphs call a converted layer."""

BACKEND = "HF_LINEAR_ATTN"
"""The backend by which it finds what builds a call's metadata."""
