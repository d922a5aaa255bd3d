"""Layers that turn alike hold the angles of their windows' tokens together, and each for itself where they do not."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers import Common
from hf_linear_attn.patching import encode_context, load_context
from hf_linear_attn.patching.call_cache import NAME
from tests.distill.tiny import tiny_teacher

from .checks import close, prompt
from .zoo import tiny_model

SETTINGS = {"feature_map": "norm_preserving", "window": 3, "sinks": 2, "rotary": "undo"}


@pytest.fixture
def model():
    return patch_model(tiny_model("causal", "llama"), **SETTINGS)


@pytest.fixture
def ids():
    return prompt(20, rows=2)


def circles(cache):
    return [layer.tensors["near_turns"] for layer in cache.layers]


def together(cache):
    """Tell whether all layers hold one tensor."""
    return len(cache.layers) > 1 and len({id(x) for x in circles(cache)}) == 1


@torch.no_grad()
def read(model, cache, ids, lengths):
    """Return the logits of the last token, read in pieces."""
    start = 0
    for length in lengths:
        piece = ids[:, start : start + length]
        logits, start = model(piece, **{NAME: cache}, use_cache=True).logits, start + length
    return logits[:, -1]


@pytest.mark.parametrize("lengths", [[20], [1] * 20, [2, 1, 1, 3, 1, 7, 1, 4], [12, 8]])
def test_one_circle_serves_all_layers(model, ids, lengths):
    cache = DynamicCache(config=model.config)
    found = read(model, cache, ids, lengths)
    assert together(cache)
    close(found, model(ids, use_cache=False).logits[:, -1], "read in pieces")


@torch.no_grad()
def test_layers_of_one_window_hold_one_circle_whatever_others_have():
    model = patch_model(tiny_teacher(4), **SETTINGS, per_layer={1: {"window": 5}, 3: {"window": 5}})
    ids = torch.randint(5, 200, (2, 20))
    expected, cache = model(ids, use_cache=False).logits[:, -1], DynamicCache(config=model.config)
    close(read(model, cache, ids[:, :15], [2, 1, 9, 1, 1, 1]), model(ids[:, :15]).logits[:, -1], "read in pieces")
    cache.reorder_cache(torch.tensor([1, 0]))
    close(read(model, cache, ids[[1, 0], 15:], [1, 3, 1]), expected[[1, 0]], "after rows were chosen")
    held = circles(cache)
    assert held[0] is held[2]
    assert held[1] is held[3]
    assert held[0] is not held[1]


def test_copies_rows_and_files_hold_it_together(model, ids, tmp_path):
    context = encode_context(model, ids[:, :9], chunk_size=4)
    context.save(tmp_path / "text")
    loaded = load_context(tmp_path / "text", model)
    assert loaded.nbytes == context.nbytes
    assert together(loaded.copy())
    cache = copy.deepcopy(pickle.loads(pickle.dumps(context.copy())))
    assert together(cache)
    cache.batch_repeat_interleave(2)
    order = torch.tensor([3, 0, 1, 1])
    cache.reorder_cache(order)
    cache.batch_select_indices(torch.tensor([0, 1, 2]))
    assert together(cache)
    # Rows are those of texts 1, 0, 0 now.
    rows = ids[[1, 0, 0]]
    close(read(model, cache, rows[:, 9:], [1, 1, 5, 1, 3]), model(rows).logits[:, -1], "after rows were chosen")
    assert together(cache)


def test_a_file_of_each_ones_own_is_read_still(model, ids, tmp_path):
    """Before, a file held the angles of each layer."""
    context = encode_context(model, ids[:, :9])
    whole = context.nbytes
    for layer in context.release().layers[1:]:
        layer.tensors["near_turns"] = layer.tensors["near_turns"].clone()
    assert context.nbytes > whole
    context.save(tmp_path / "text")
    cache = load_context(tmp_path / "text", model).copy()
    assert not together(cache)
    close(read(model, cache, ids[:, 9:], [1, 6, 4]), model(ids).logits[:, -1], "each its own")


def turn_otherwise(model):
    """Let one layer turn by other angles than the others."""

    def other(_module, args, kwargs):
        cos, sin = kwargs["position_embeddings"]
        # A quarter turn more is as good a rotation.
        return args, kwargs | {"position_embeddings": (-sin, cos)}

    return model.model.layers[1].self_attn.register_forward_pre_hook(other, with_kwargs=True, prepend=True)


def test_layers_of_other_angles_hold_their_own(model, ids):
    turn_otherwise(model)
    cache = DynamicCache(config=model.config)
    found = read(model, cache, ids, [6, 1, 1, 5, 1, 6])
    assert not together(cache)
    assert not torch.equal(*circles(cache))
    close(found, model(ids, use_cache=False).logits[:, -1], "read in pieces")


def test_what_differed_once_stays_apart(model, ids):
    cache = DynamicCache(config=model.config)
    hook = turn_otherwise(model)
    read(model, cache, ids, [6])
    hook.remove()
    read(model, cache, ids[:, 6:], [2])
    assert not together(cache)
    assert not torch.equal(*circles(cache))


def test_static_states_hold_their_own(model, ids):
    cache = StaticCache(config=model.config, max_cache_len=32)
    found = read(model, cache, ids, [9, 1, 1, 5, 4])
    assert not together(cache)
    close(found, model(ids, use_cache=False).logits[:, -1], "static")


@pytest.mark.parametrize("otherwise", [False, True])
def test_a_rollback_parts_and_goes_on(model, ids, otherwise):
    if otherwise:
        turn_otherwise(model)
    cache = DynamicCache(config=model.config)
    read(model, cache, ids[:, :6], [6])
    cache.activate_past_recording()
    # Of what is drafted, two tokens are kept and read again.
    read(model, cache, torch.cat([ids[:, 6:8], ids[:, 3:5]], 1), [1, 3])
    for layer in cache.layers:
        layer.crop(-2)
        layer.record_past = False
    close(read(model, cache, ids[:, 8:], [1, 2, 1, 8]), model(ids).logits[:, -1], "after a rollback")


def test_what_differed_in_what_is_read_again_stays_apart(model, ids):
    cache = DynamicCache(config=model.config)
    read(model, cache, ids, [6])
    cache.activate_past_recording()
    hook = turn_otherwise(model)
    read(model, cache, ids[:, 6:], [3])
    hook.remove()
    for layer in cache.layers:
        layer.crop(-1)
        layer.record_past = False
    read(model, cache, ids[:, 8:], [1])
    assert not torch.equal(*circles(cache))


@pytest.mark.parametrize(("taken", "more"), [(2, 1), (1, 2)])
def test_a_layer_that_lags_is_refused(model, ids, taken, more):
    """Its angles were overwritten: the layer before it has read tokens that it has not."""
    cache = DynamicCache(config=model.config)
    read(model, cache, ids, [6])
    first, second = model.model.layers
    hidden, angles = model.model.embed_tokens(ids[:, 6:8]), model.model.rotary_emb(ids.float(), torch.tensor([[6, 7]]))
    with torch.no_grad():
        for place in range(taken):
            here = tuple(x[:, place : place + 1] for x in angles)
            first(hidden[:, place : place + 1], **{NAME: cache}, position_embeddings=here)
        here = tuple(x[:, :more] for x in angles)
        with pytest.raises(ArgumentError, match=rf"of which one layer has read 6 tokens and another one {6 + taken}"):
            second(hidden[:, :more], **{NAME: cache}, position_embeddings=here)


def test_what_is_made_of_the_same_parts_is_made_once():
    common, part, makes = Common(), torch.ones(2), []

    def make():
        makes.append(1)
        return torch.zeros(1)

    found = common.once("x", (part, 3), make)
    assert common.once("x", (part, 3), make) is found
    assert common.once("x", (torch.ones(2), 3), make) is not found
    assert common.once("x", (part, 3), make) is not found
    assert common.once("x", (part, 4), make) is not common.once("x", (part, torch.tensor(4)), make)
    assert len(makes) == 5
    # Nothing is kept alive: what no layer holds is made anew.
    common.once("x", (part, 3), make)
    common.once("x", (part, 3), make)
    assert len(makes) == 7
