"""Small converted models with random weights, and what Transformers answers with them."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen3Config

from hf_linear_attn import from_pretrained, patch_model

LENGTHS = (1, 3, 7, 60, 64, 65, 100, 500, 1500)
NEW = 48
VOCAB = 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    # Answers then are no loops of a token or two.
    "initializer_range": 0.2,
}
GPT2_SIZES = {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 4096}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama, one key head": lambda: LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen3": lambda: Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32),
    "gpt2": lambda: GPT2Config(**GPT2_SIZES, initializer_range=0.2),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES),
}
STUDENT = {"feature_map": "norm_preserving", "window": 64, "sinks": 4}
CONVERSIONS = {
    "plain": {"feature_map": "elu"},
    "key": STUDENT,
    "gate": {"feature_map": "hedgehog", "window": 32, "sinks": 2, "mix": "gate"},
    "shared": {"feature_map": "hedgehog", "window": 32, "mix": "shared"},
    "window": {"window": 32, "sinks": 4, "mix": "window"},
    "kept": {**STUDENT, "kept": 32},
    "learned": {
        **{"window": 32, "sinks": 4, "mix": "window", "rotary": "undo"},
        **{"kept": 32, "retention": "learned", "retention_units": 16},
        "per_layer": {1: {"window": 24, "kept": 64}},
    },
    "mixed": {**STUDENT, "layers": [1, 3]},
    "undo": {**STUDENT, "rotary": "undo"},
    "decay": {**STUDENT, "update_rule": "decay"},
    "delta": {**STUDENT, "update_rule": "delta"},
    "gated_delta": {**STUDENT, "update_rule": "gated_delta"},
}


def prompts(lengths=LENGTHS, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def teacher(architecture):
    torch.manual_seed(0)
    config = CONFIGS[architecture]()
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    return AutoModelForCausalLM.from_config(config).eval()


def write(folder, architecture, conversion):
    """Save a model; where it is converted, with weights that somebody might have learned."""
    model = teacher(architecture)
    if conversion != "softmax":
        model = patch_model(model, **CONVERSIONS[conversion])
        for name, weight in model.named_parameters():
            if "linear_attention." in name:
                weight.data.add_(torch.randn_like(weight), alpha=0.3)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def answers(folder, texts, new=NEW):
    """Return greedy tokens, and by how much each was ahead of the next best."""
    model = from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for ids in texts:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        output = model.generate(torch.tensor([ids]), **options, output_scores=True, return_dict_in_generate=True)
        best = torch.stack(output.scores)[:, 0].topk(2).values
        found.append((output.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return found
