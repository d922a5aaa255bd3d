"""Tiny random models of every architecture that Transformers registers."""

from typing import Any, Literal

import pytest
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

LATER = {"internlm3", "dory", "inkling2_text"}
"""Model types that the oldest supported Transformers does not register; where one is not, its tests are skipped."""

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
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_mamba_heads": 2,
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

REMOVE: Any = object()
"""In OVERRIDES: leave the configuration's own default."""

_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_SPARSE = {"index_head_dim": 8, "index_n_heads": 4, "index_topk": 4, "num_key_value_heads": 4, "qk_head_dim": 16}

OVERRIDES: dict[str, dict[str, Any]] = {
    "axk2": _SPARSE,
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "data2vec-text": {"pad_token_id": 0},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "deepseek_v32": _SPARSE,
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "encoder-decoder": {
        "encoder": {"model_type": "bert", **_BERT},
        "decoder": {"model_type": "bert", **_BERT, "is_decoder": True, "add_cross_attention": True},
    },
    "esmc": {"num_key_value_heads": 4},
    "falcon": {"alibi": False, "num_kv_heads": 4},
    "funnel": {"num_hidden_layers": REMOVE, "block_sizes": [1, 1], "d_head": 8, "d_inner": 48},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "glm_moe_dsa": _SPARSE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "neomme": {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_n_groups": 1,
        "n_groups": 1,
    },
    "phi4_multimodal": {"sliding_window": REMOVE},
    "prophetnet": {
        "num_hidden_layers": REMOVE,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 1,
        "ple_embed_dim": 32,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "max_position_embeddings": 512,
    },
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "xlnet": {"max_position_embeddings": REMOVE},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 2,
    },
    "zamba2": {
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
}
"""What single configurations need besides."""


def registered(task: Task) -> list[str]:
    """List the model types registered for a task."""
    return list(getattr(modeling_auto, MAPPINGS[task]))


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Build a configuration of a few thousand weights."""
    if model_type in LATER and model_type not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} registers no {model_type}")
    return _tiny(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}))


def _tiny(cls: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    default = cls()
    own = {name: value for name, value in SIZES.items() if _settable(default, name)}
    for name in getattr(cls, "sub_configs", None) or {}:
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig) and name not in overrides:
            own[name] = _tiny(type(value), OVERRIDES.get(value.model_type, {})).to_dict()
    own |= _short_layer_types(default)
    if own.get("kv_lora_rank"):
        own["num_key_value_heads"] = own["num_attention_heads"]
    for name, value in overrides.items():
        own[name] = own.get(name, {}) | value if isinstance(value, dict) and name in own else value
    return cls(**{name: value for name, value in own.items() if value is not REMOVE})


def _settable(config: PreTrainedConfig, name: str) -> bool:
    attribute = getattr(type(config), type(config).attribute_map.get(name, name), None)
    if isinstance(attribute, property) and attribute.fset is None:
        return False
    try:
        return getattr(config, name, REMOVE) is not REMOVE
    except RuntimeError:  # differs between layers
        return True


def _short_layer_types(config: PreTrainedConfig) -> dict[str, Any]:
    """Keep one layer of each type, and at least two."""
    if not _settable(config, "layer_types") or not isinstance(config.layer_types, (list, tuple)):
        return {}
    kinds = list(dict.fromkeys(config.layer_types))
    kinds = kinds * 2 if len(kinds) == 1 else kinds
    names = ("num_hidden_layers", "num_layers", "n_layer")
    return {"layer_types": kinds} | {name: len(kinds) for name in names if _settable(config, name)}


def tiny_model(task: Task, model_type: str, **changes: Any) -> PreTrainedModel:
    """Build a model with weights large enough that attention matters, in eval mode."""
    config = tiny_config(model_type)
    if task == "causal" and getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    for name, value in changes.items():
        setattr(config, name, value)
    names = getattr(modeling_auto, MAPPINGS[task])[model_type]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    if task == "causal" and not isinstance(config, cls.config_class):
        config = config.get_text_config(decoder=True)
    torch.manual_seed(0)
    return randomise(cls(config).eval())


@torch.no_grad()
def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Draw matrices with unit gain: freshly built models attend almost uniformly, and would hide mistakes."""
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.requires_grad:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        elif parameter.requires_grad and not parameter.any():
            parameter.normal_(0, 0.1)
    model.tie_weights()
    return model
