"""The window alone that a conversion is held against has the cache bytes of that conversion."""

import copy

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.distill.baseline import equal_cache_window
from hf_linear_attn.patching.call_cache import returned_cache

IDS = torch.arange(3, 83)[None]


def cache_bytes(model):
    layers = returned_cache(model(input_ids=IDS, use_cache=True)).layers
    names = ("kv", "z", "far_keys", "near_k", "near_v", "near_turns")
    return sum(x.nbytes for layer in layers for name, x in layer.tensors.items() if name in names)


@pytest.mark.parametrize(("mix", "rotary"), [("key", "keep"), ("gate", "keep"), ("key", "undo")])
@torch.no_grad()
def test_it_is_the_smallest_window_of_no_fewer_bytes(teacher, mix, rotary):
    settings = {"feature_map": "hedgehog", "window": 4, "sinks": 1, "mix": mix, "rotary": rotary}
    hybrid = patch_model(copy.deepcopy(teacher), **settings)
    window = equal_cache_window(hybrid)
    sizes = [
        cache_bytes(patch_model(copy.deepcopy(teacher), window=size, sinks=1, mix="window"))
        for size in (window - 1, window)
    ]
    assert sizes[0] < cache_bytes(hybrid) <= sizes[1]
