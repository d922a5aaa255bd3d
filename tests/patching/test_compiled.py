"""Prompts and training steps of many lengths through `torch.compile`: one graph serves them all."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_linear_attn.distill.run import recompute_activations
from hf_linear_attn.patching.call_cache import NAME

from .checks import Graphs, close, left_padding, loss_and_gradients, patched, prompt, same_gradients
from .zoo import tiny_model

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SLOW = pytest.mark.slow
LENGTHS = (9, 70, 14, 23, 12, 40, 17, 31, 55, 26)
"""Shorter than the window and longer, than a block of queries too; a graph of the first one's own may be one of two."""

RECIPE = {"feature_map": "norm_preserving", "window": 16, "sinks": 4, "rotary": "undo", "layers": "all"}
SETTINGS = {
    "recommended": RECIPE,
    "kept": RECIPE | {"kept": 3},
    "learned": {"window": 16, "mix": "window", "kept": 3, "retention": "learned", "layers": "all"},
    "by position": {
        "feature_map": "cosformer",
        "feature_map_options": {"max_length": 80},
        "window": 16,
        "layers": "all",
    },
    "plain": {"feature_map": "hedgehog", "layers": "all"},
}


def texts(masked):
    """Yield what a model is called with, for each length."""
    for length in LENGTHS:
        ids = prompt(length, seed=length, rows=2)
        mask = left_padding(ids, 3)
        yield {"input_ids": ids} | ({"attention_mask": mask} if masked else {})


def build(setting):
    """Return a model that has been called: that is when it finds how it rotates."""
    model = patched(tiny_model("causal", "llama"), **SETTINGS[setting])
    with torch.no_grad():
        model(prompt(5), use_cache=False)
    return model


def shown(logits, text):
    return logits[text["attention_mask"].bool()] if "attention_mask" in text else logits


@pytest.mark.parametrize(
    ("setting", "masked", "dynamic"),
    [
        ("recommended", True, None),
        *(pytest.param("recommended", *case, marks=SLOW) for case in ((True, True), (False, None), (False, True))),
        *(
            pytest.param("kept", *case, marks=SLOW)
            for case in ((False, True), (True, True), (True, None), (False, None))
        ),
        ("learned", False, True),
        ("by position", False, True),
        *(pytest.param(name, True, None, marks=SLOW) for name in ("learned", "by position")),
        *(pytest.param("plain", *case, marks=SLOW) for case in ((True, None), (False, None))),
    ],
)
def test_prompts_of_all_lengths_share_a_graph(setting, masked, dynamic):
    model, graphs = build(setting), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for text in texts(masked):
            past = DynamicCache(config=model.config)
            found = compiled(**text, use_cache=True, **{NAME: past}).logits
            close(shown(found, text), shown(model(**text, use_cache=False).logits, text), "compiled")
            assert past.get_seq_length() == text["input_ids"].shape[1]
        for _ in range(8):
            text = {name: torch.cat([x, x[:, -1:]], 1) for name, x in text.items()}
            new = text | {"input_ids": text["input_ids"][:, -1:]}
            close(model(**new, **{NAME: past}).logits, model(**text, use_cache=False).logits[:, -1:], "a step after it")
    assert len(graphs) <= (1 if dynamic else 2)


@pytest.mark.parametrize(
    ("setting", "masked", "dynamic"),
    [
        ("recommended", True, True),
        *(pytest.param("recommended", *case, marks=SLOW) for case in ((True, None), (False, None), (False, True))),
        *(pytest.param("kept", *case, marks=SLOW) for case in ((True, None), (False, True))),
        *(pytest.param("plain", *case, marks=SLOW) for case in ((True, None), (False, None))),
    ],
)
def test_training_steps_of_all_lengths_share_a_graph(setting, masked, dynamic):
    model, graphs = build(setting), Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=dynamic)
    for text in texts(masked):
        expected, found = (loss_and_gradients(called, **text, use_cache=False)[1] for called in (model, compiled))
        same_gradients(found, expected)
    assert len(graphs) <= (1 if dynamic else 2)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("setting", ["recommended", "kept", pytest.param("plain", marks=SLOW)])
def test_layers_that_are_compiled_one_by_one_share_a_graph(setting, recomputed):
    """As Accelerate compiles regions; where activations are recomputed, a graph holds the layer's twice."""
    # More than a compiler makes graphs of one function.
    model = patched(tiny_model("causal", "llama", num_hidden_layers=10), **SETTINGS[setting]).train()
    ids, graphs = prompt(23, rows=2), Graphs()
    _, expected = loss_and_gradients(model, input_ids=ids, use_cache=False)
    recompute_activations(model, recomputed)
    for layer in model.model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    same_gradients(loss_and_gradients(model, input_ids=ids, use_cache=False)[1], expected)
    assert len(graphs) == 1


def test_a_graph_of_the_whole_model_recomputes_activations():
    model, ids = build("recommended").train(), prompt(23, rows=2)
    recompute_activations(model, True)
    losses = [
        called(ids, labels=ids, use_cache=False).loss
        for called in (model, torch.compile(model, backend=Graphs(), fullgraph=True))
    ]
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("setting", ["recommended", pytest.param("plain", marks=SLOW)])
def test_static_caches_of_other_lengths_share_a_graph(setting):
    model, graphs, ids = build(setting), Graphs(), prompt(12, rows=2)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for size in (16, 24, 20):
            past = StaticCache(config=model.config, max_cache_len=size)
            found = [compiled(ids[:, a:b], **{NAME: past}).logits for a, b in ((0, 9), (9, 10), (10, 11), (11, 12))]
            close(torch.cat(found, 1), expected, f"a cache of {size}")
    # Of prompts and of steps, of the first length and of every other one.
    assert len(graphs) <= 4


def test_the_first_call_of_a_thread_may_be_a_compiled_one():
    model, graphs, ids = patched(tiny_model("causal", "llama"), **SETTINGS["plain"]), Graphs(), prompt(9)

    @torch.no_grad()
    def call():
        return torch.compile(model, backend=graphs, fullgraph=True)(ids, use_cache=False).logits

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(call).result()
    with torch.no_grad():
        close(found, model(ids, use_cache=False).logits, "compiled from the first call")
    assert len(graphs) == 1


@SLOW
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor wants a C++ compiler")
@pytest.mark.parametrize("masked", [True, False])
def test_inductor_takes_prompts_and_training_steps_of_kernels(masked):
    model = patched(tiny_model("causal", "llama"), **RECIPE, backend="triton")
    text = next(text for text in texts(masked) if text["input_ids"].shape[1] == 23)
    model(**text, use_cache=False)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        expected = model(**text, use_cache=True).logits
        close(shown(compiled(**text, use_cache=True).logits, text), shown(expected, text), "a prompt")
    gradients = [loss_and_gradients(called, **text, use_cache=False)[1] for called in (model, compiled)]
    torch.testing.assert_close(*(x["model.embed_tokens.weight"] for x in gradients), rtol=1e-3, atol=1e-5)
