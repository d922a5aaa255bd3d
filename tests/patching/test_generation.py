"""What `generate` and caches can do, on windowed, plain and mixed models."""

import copy
from itertools import pairwise

import pytest
import torch
import transformers
from packaging.version import Version
from peft import PrefixTuningConfig, get_peft_model
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.patching import LinearAttentionCacheLayer
from hf_linear_attn.patching.call_cache import NAME
from hf_linear_attn.patching.masks import linear_attention_mask

from .checks import SETTINGS, Graphs, Subject, close, left_padding, patched
from .zoo import tiny_model


@pytest.fixture(params=SETTINGS)
def subject(request):
    return Subject(patched(tiny_model("causal", "llama"), **SETTINGS[request.param]), "causal")


def padded(subject):
    ids = subject.tokens(9)
    mask = left_padding(ids, 4)
    return ids * mask, mask


def layers_of(cache):
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayer)]


@pytest.mark.parametrize(
    "more", [{}, {"num_return_sequences": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str
)
def test_sampling_with_a_cache_equals_that_without(subject, more):
    ids, mask = padded(subject)
    drawn = []
    for cached in (True, False):
        torch.manual_seed(0)
        drawn.append(subject.generate(ids, attention_mask=mask, do_sample=True, use_cache=cached, **more))
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        pytest.param({"cache_implementation": "offloaded"}, marks=pytest.mark.gpu),
        {"prefill_chunk_size": 4},
    ],
    ids=str,
)
def test_other_caches_generate_the_same(subject, options):
    ids, mask = padded(subject)
    if options.get("cache_implementation") == "offloaded":
        subject.model.to("cuda")
        ids, mask = ids.to("cuda"), mask.to("cuda")
    expected = subject.generate(ids, attention_mask=mask)
    assert torch.equal(subject.generate(ids, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
def test_beams_over_every_cache(subject, options):
    ids, mask = padded(subject)
    expected = subject.generate(ids, attention_mask=mask, num_beams=3, use_cache=False)
    assert torch.equal(subject.generate(ids, attention_mask=mask, num_beams=3, **options), expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("subject", ["plain", "window"], indirect=True)
def test_steps_are_compiled_once(subject):
    compiled = Graphs()
    # A function, of which Transformers makes no copy.
    config = CompileConfig(fullgraph=True, backend=lambda *given: compiled(*given), mode=None)
    config._compile_all_devices = True
    ids, mask = padded(subject)
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8}
    output = subject.generate(ids, cache_implementation="static", compile_config=config, **options)
    # Before 5.23 `generate` hands over a mask that grows: its second length compiles a graph for all others.
    assert len(compiled) <= (1 if Version(transformers.__version__) >= Version("5.23") else 2)
    assert compiled
    assert torch.equal(output, subject.generate(ids, use_cache=False, **options))


def test_a_static_state_stays_at_its_address(subject):
    cache = StaticCache(config=subject.model.config, max_cache_len=16)
    ids = subject.tokens(6)
    subject.logits(ids, **{NAME: cache})
    before = [{name: x.data_ptr() for name, x in layer.tensors.items()} for layer in layers_of(cache)]
    # Else a compiled step that writes to them is not captured as a graph: Transformers marks its own alike.
    for layer in layers_of(cache):
        for x in (*layer.tensors.values(), layer.state.length):
            assert hasattr(x, "_dynamo_static_input_type")
    last = subject.logits(ids[:, :1], **{NAME: cache})
    assert before == [{name: x.data_ptr() for name, x in layer.tensors.items()} for layer in layers_of(cache)]
    close(last, subject.logits(torch.cat([ids, ids[:, :1]], 1), use_cache=False)[:, -1:], "the last of 7 tokens")


@pytest.mark.parametrize(
    "settings",
    [{}, {"feature_map": "hedgehog", "window": 8, "sinks": 2}, {"window": 8, "sinks": 2, "kept": 4}],
    ids=str,
)
def test_memory_held_does_not_grow_with_the_text(settings):
    subject = Subject(patch_model(tiny_model("causal", "llama", max_position_embeddings=512), **settings), "causal")

    def held_bytes(tokens):
        cache = DynamicCache(config=subject.model.config)
        subject.logits(subject.tokens(tokens, rows=1), **{NAME: cache})
        # Storages, not tensors: a view of one token keeps the whole text alive.
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in cache.layers[0].tensors.values()}
        return sum(storage.nbytes() for storage in storages.values())

    assert held_bytes(40) == held_bytes(400)


def test_a_cache_carries_a_chat(subject):
    first = subject.tokens(5)
    cache = DynamicCache(config=subject.model.config)
    said = subject.generate(first, cache=cache)
    history = torch.cat([said, subject.tokens(4, seed=9)], dim=1)
    assert torch.equal(subject.generate(history, cache=cache), subject.generate(history, use_cache=False))


def test_a_copied_cache_is_independent(subject):
    ids = subject.tokens(6)
    cache = DynamicCache(config=subject.model.config)
    subject.logits(ids, **{NAME: cache})
    copied = copy.deepcopy(cache)
    expected = subject.logits(subject.tokens(3, seed=4), **{NAME: copy.deepcopy(cache)})
    subject.logits(subject.tokens(3, seed=5), **{NAME: cache})
    assert torch.equal(subject.logits(subject.tokens(3, seed=4), **{NAME: copied}), expected)


def test_padding_that_leaves_the_window_in_a_step_is_not_read(subject):
    ids, real = subject.tokens(14), 2
    mask = left_padding(ids, 7 - real)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=subject.model.config)
    steps = [
        subject.logits(ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b], **{NAME: cache})
        for a, b in pairwise([0, *range(7, 15)])
    ]
    alone = subject.logits(ids[1:, 7 - real :], use_cache=False)
    close(torch.cat(steps, 1)[1:, 7 - real :], alone, "a row after padding")


def test_crop_after_selecting_rows(subject):
    ids = subject.tokens(9)
    cache = DynamicCache(config=subject.model.config)
    cache.activate_past_recording()
    subject.logits(ids[:1, :5], **{NAME: cache})
    cache.activate_past_recording()
    cache.batch_repeat_interleave(2)
    subject.logits(ids[:1, 5:8].expand(2, -1), **{NAME: cache})
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-2)
    a = subject.logits(ids[:1, 6:].expand(2, -1), **{NAME: cache})
    close(a, subject.logits(ids[:1].expand(2, -1), use_cache=False)[:, 6:], "after rows were selected")


def test_crop_without_a_record_is_refused():
    model = patch_model(tiny_model("causal", "llama"), "elu")
    subject = Subject(model, "causal")
    cache = DynamicCache(config=model.config)
    subject.logits(subject.tokens(5), **{NAME: cache})
    cache.crop(0)
    with pytest.raises(
        ArgumentError, match=r"`tokens_to_remove` must be from 0 to 0, .*, got -2\. Call cache.activate"
    ):
        cache.crop(-2)


def test_reset_forgets_everything(subject):
    ids = subject.tokens(6)
    cache = DynamicCache(config=subject.model.config)
    subject.logits(subject.tokens(5, seed=3), **{NAME: cache})
    cache.reset()
    assert all(layer.get_seq_length() == 0 for layer in layers_of(cache))
    if any(layer.get_seq_length() for layer in cache.layers):
        pytest.skip("Transformers' own layers keep their tokens before 5.23")
    close(subject.logits(ids, **{NAME: cache}), subject.logits(ids, use_cache=False), "after a reset")


def test_assisted_decoding_equals_greedy(subject):
    ids = subject.tokens(7)[:1]
    expected = subject.generate(ids, use_cache=False, max_new_tokens=10)
    assert torch.equal(subject.generate(ids, max_new_tokens=10, prompt_lookup_num_tokens=3), expected)
    for helper in (patch_model(tiny_model("causal", "llama"), "elu", window=2), subject.model):
        assert torch.equal(subject.generate(ids, max_new_tokens=10, assistant_model=helper), expected)


def test_drafts_by_the_first_layers_equal_greedy(subject):
    ids, layers = subject.tokens(5, rows=1), subject.model.config.num_hidden_layers
    assert torch.equal(subject.generate(ids, assistant_early_exit=1), subject.generate(ids))
    assert subject.model.config.num_hidden_layers == layers


def test_a_cache_that_softmax_filled_is_refused():
    model = tiny_model("causal", "llama")
    subject = Subject(model, "causal")
    cache = DynamicCache(config=model.config)
    subject.logits(subject.tokens(5), **{NAME: cache})
    patch_model(model, "elu")
    with pytest.raises(ArgumentError, match=r"`cache` must be empty or filled by this .*DynamicLayer of 5"):
        subject.logits(subject.tokens(2), **{NAME: cache})


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")
def test_prefix_tuning_is_refused():
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = get_peft_model(patch_model(tiny_model("causal", "llama"), "elu"), prefix)
    with pytest.raises(ArgumentError, match=r"`cache` must be .*prefix tuning puts keys into one: take LoRA"):
        model(Subject(model, "causal").tokens(5))


def test_paged_attention_is_refused():
    model = patch_model(tiny_model("causal", "llama"), "elu")
    with pytest.raises(UnsupportedError, match=r"`model` must be a softmax model for continuous batching, got 'Llama"):
        model.generate_batch([[5, 6, 7]])
    with pytest.raises(UnsupportedError, match=r"`attn_implementation` must not be set on a model whose attention is"):
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_steps_mask_looks_the_same_at_every_length(rows):
    """On a GPU, where nobody waits for what it holds: with a longer mask's strides each step was captured anew."""
    wholes = [torch.ones(rows, length, dtype=torch.bool, device="meta") for length in (50, 51)]
    masks = [linear_attention_mask(rows, 1, x.shape[1], x.shape[1] - 1, attention_mask=x) for x in wholes]
    assert {(mask.shape, mask.stride()) for mask in masks} == {((rows, 1), (1, 1))}
