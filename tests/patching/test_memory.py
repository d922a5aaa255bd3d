"""What the cache of a patched model holds on to."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linear_attn import patch_model
from hf_linear_attn.patching.call_cache import returned_cache


@pytest.mark.parametrize(
    "settings",
    [{}, {"feature_map": "hedgehog", "window": 8, "sinks": 2}, {"window": 8, "sinks": 2, "kept": 4}],
    ids=str,
)
def test_memory_held_does_not_grow_with_the_text(settings):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = patch_model(LlamaForCausalLM(config).eval(), **settings)

    def held_bytes(tokens: int) -> int:
        with torch.no_grad():
            cache = returned_cache(model(torch.ones(1, tokens, dtype=torch.long), use_cache=True))
        # Storages, not tensors: a view of one token keeps the whole text alive.
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in cache.layers[0].tensors.values()}
        return sum(storage.nbytes() for storage in storages.values())

    assert held_bytes(40) == held_bytes(400)
