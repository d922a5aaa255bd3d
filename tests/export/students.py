"""Small converted models that are exported, and what they write."""

import random
import subprocess
import sys

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_linear_attn import patch_model
from tests.evaluation.helpers import BOS, EOS, VOCABULARY, byte_tokenizer

SHAPES = ("llama", "qwen3", "gpt2")
RECOMMENDED = {"feature_map": "norm_preserving", "window": 16, "sinks": 4, "rotary": "auto"}
KEPT = {**RECOMMENDED, "kept": 8}
RECIPES = {
    "recommended": RECOMMENDED,
    "kept": KEPT,
    "kept_learned": {**KEPT, "retention": "learned"},
    "kept_window": {**KEPT, "mix": "window"},
    "kept_window_learned": {
        **KEPT,
        "mix": "window",
        "retention": "learned",
        "per_layer": {1: {"window": 24, "kept": 5}},
    },
    "elu": {"feature_map": "elu"},
    "decay": {"feature_map": "elu", "update_rule": "decay"},
    "delta": {"feature_map": "elu", "update_rule": "delta"},
    "gated_delta": {"feature_map": "elu", "update_rule": "gated_delta"},
}

BARE = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
for name in REFUSED:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported")
written = runpy.run_path(sys.argv[1])["write"]
for line in sys.stdin:
    print(*written([int(word) for word in line.split()], 40))
"""
"""A process that runs an example's function where some packages cannot be imported."""


def softmax(shape, depth=2):
    torch.manual_seed(0)
    ends = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "initializer_range": 0.2}
    if shape == "gpt2":
        sizes = {"n_embd": 32, "n_layer": depth, "n_head": 4, "n_positions": 256}
        return GPT2LMHeadModel(GPT2Config(**ends, **sizes)).eval()
    sizes = {"hidden_size": 32, "num_hidden_layers": depth, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 512, "head_dim": 8}
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[shape]
    return model(config(**ends, **sizes)).eval()


def student(shape, recipe, depth=2, **settings):
    """Return a converted model whose gates, biases and maps have moved from where they start."""
    model = patch_model(softmax(shape, depth), **{**RECIPES[recipe], **settings})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".linear_attention." in name:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.eval()


def save(model, folder, tokenizer=True):
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def prompts(number=20, longest=70):
    chance = random.Random(0)
    return [[chance.randrange(BOS) for _ in range(chance.randrange(1, longest))] for _ in range(number)]


def generated(model, prompt, tokens=40):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return found[0, len(prompt) :].tolist()


def written_alone(example, texts, refused):
    """Return what an example writes after each prompt in a process without the packages that are refused."""
    code = f"REFUSED = {tuple(refused)!r}\n{BARE}"
    lines = "\n".join(" ".join(map(str, text)) for text in texts)
    done = subprocess.run(
        [sys.executable, "-c", code, str(example)], input=lines, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
