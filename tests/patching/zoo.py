"""Tiny random models of every architecture that Transformers registers."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

Task = Literal["causal", "masked", "seq2seq"]

MAPPINGS: dict[Task, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}

VOCAB = 64

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "decoder_vocab_size": VOCAB,
    "hidden_size": 32,
    "embedding_size": 32,
    "d_model": 32,
    "dim": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "hidden_dim": 48,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_head_dim": 8,
    "kv_channels": 8,
    "d_kv": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_mamba_heads": 2,
    "state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "sliding_window": 4,
    "attention_window_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "hidden_dropout": 0.0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_mem_blocks": 1,
    "use_mamba_kernels": False,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
"""Sizes by the names that configurations give them; each configuration takes those that it has."""

OVERRIDES: dict[str, dict[str, Any]] = {}
"""What single configurations need besides."""


def registered(task: Task) -> list[str]:
    """List the model types registered for a task."""
    return list(getattr(modeling_auto, MAPPINGS[task]))


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Build a configuration of a few thousand weights."""
    return _tiny(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}))


def _tiny(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    default = cls()
    own = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    for name, sub in (getattr(cls, "sub_configs", None) or {}).items():
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            own[name] = _tiny(type(value), {}).to_dict()
        elif (
            value is None
            and isinstance(sub, type)
            and issubclass(sub, PreTrainedConfig)
            and sub is not PreTrainedConfig
        ):
            own[name] = _tiny(sub, {}).to_dict()
    types = getattr(default, "layer_types", None)
    if isinstance(types, (list, tuple)) and "layer_types" not in overrides:
        kinds = list(dict.fromkeys(types))
        own["layer_types"] = [*kinds, "full_attention"][: max(2, len(kinds))] if len(kinds) > 1 else kinds * 2
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in own:
                own[name] = len(own["layer_types"])
    return cls(**(own | overrides))


def tiny_model(task: Task, model_type: str, **changes: Any) -> PreTrainedModel:
    """Build a model with weights large enough that attention matters, in eval mode."""
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    names = getattr(modeling_auto, MAPPINGS[task])[model_type]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    torch.manual_seed(0)
    return randomise(cls(config).eval())


@torch.no_grad()
def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Draw matrices with unit gain: freshly built models attend almost uniformly, and would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.tie_weights()
    return model


def parameters_of(modules: Iterator[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Name the parameters of several modules."""
    return {f"{i}.{name}": p for i, module in enumerate(modules) for name, p in module.named_parameters()}
