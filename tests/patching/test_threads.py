"""Several threads share one model, and every answer is the one given alone: nothing of a call is kept on a module."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

from hf_linear_attn import patch_model
from hf_linear_attn.patching.call_cache import NAME

from .checks import some
from .zoo import tiny_model

MIXED = {"feature_map": "hedgehog", "window": 3, "sinks": 2, "layers": [1]}
SETTINGS = some("plain", "window", "kept", "gated_delta") | {"mixed": MIXED}
THREADS = 6


def build(setting):
    torch.set_num_threads(1)
    return patch_model(tiny_model("causal", "llama"), **SETTINGS[setting])


def prompts(number):
    rng = random.Random(0)
    return [torch.tensor([[rng.randrange(3, 60) for _ in range(rng.randrange(4, 15))]]) for _ in range(number)]


def check_all_alike(answer, ids, atol=0.0):
    """Answer every prompt alone, then in threads at once."""
    alone = [answer(x) for x in ids]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(answer, ids))
    for n, (x, expected) in enumerate(zip(found, alone, strict=True)):
        torch.testing.assert_close(x, expected, rtol=0, atol=atol, msg=lambda text, n=n: f"prompt {n}: {text}")


@pytest.mark.parametrize("setting", SETTINGS)
def test_generations_in_threads(setting):
    model = build(setting)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    check_all_alike(lambda ids: model.generate(ids, **options), prompts(24))


@pytest.mark.parametrize("setting", ["plain", "window"])
def test_a_model_that_drafts_for_itself_in_threads(setting):
    model = build(setting)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "assistant_model": model}
    check_all_alike(lambda ids: model.generate(ids, **options), prompts(12))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_compiled_steps_in_threads():
    # While one thread compiles, torch tells every thread so (`torch.compiler.is_compiling()` is of the process), and a
    # call beyond its limit of recompilations runs uncompiled: then loops take the place of PyTorch's operations, or the
    # reverse, and add in another order. Answers of two prompts are 1 and more apart.
    model = build("window")
    compiled = torch.compile(model, backend="aot_eager")

    @torch.no_grad()
    def answer(ids):
        cache = DynamicCache(config=model.config)
        logits = model(ids, **{NAME: cache}).logits[:, -1:]
        for _ in range(5):
            logits = compiled(logits.argmax(-1), **{NAME: cache}).logits[:, -1:]
        return logits

    check_all_alike(answer, prompts(12), atol=1e-5)
