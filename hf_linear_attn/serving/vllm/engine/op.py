"""The name of the operation by which vLLM's graphs call a converted layer."""

NAME = "vllm::hf_linear_attn_attend"
