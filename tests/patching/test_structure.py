"""Special structure: what is honoured, what is refused by name, and layers that stay softmax."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache

from hf_linear_attn import patch_model, unpatch_model
from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.patching import LinearAttention, LinearAttentionCacheLayer, attention_layers, is_patched
from hf_linear_attn.patching.call_cache import NAME

from . import checks
from .checks import Subject, left_padding
from .zoo import randomise, tiny_config, tiny_model


def parts_of(model):
    return [m for m in model.modules() if isinstance(m, LinearAttention)]


@pytest.mark.parametrize("setting", [{}, {"feature_map": "hedgehog", "window": 3, "sinks": 1}], ids=["plain", "window"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "diffllama", "zamba", "falcon_h1"])
def test_unusual_layers_decode_as_they_read(model_type, setting):
    """Latent attention with v wider than q; two calls per layer; one block at two depths; a cache that also recurs."""
    subject = Subject(patch_model(tiny_model("causal", model_type), **setting), "causal")
    checks.cached_decoding(subject)
    checks.causality(subject)


def test_latent_attention_keeps_its_sizes():
    config = tiny_config("deepseek_v3")
    model = patch_model(tiny_model("causal", "deepseek_v3"))
    cache = DynamicCache(config=model.config)
    Subject(model, "causal").logits(torch.tensor([[5, 6, 7]]), **{NAME: cache})
    state = cache.layers[0].tensors
    assert state["kv"].shape == (1, 4, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)


def test_the_layers_own_scaling_is_used():
    model = tiny_model("causal", "granite", attention_multiplier=0.7)
    parts = parts_of(patch_model(model, "hedgehog", window=2))
    assert {part.sizes.scaling for part in parts} == {0.7}
    assert {part.feature_map.scaling for part in parts} == {0.7}


def shared():
    return tiny_model("causal", "gemma3n_text", num_kv_shared_layers=2)


def test_layers_that_share_keys_are_converted_together():
    model = patch_model(shared())
    assert model.config.linear_attention["layers"] == [1, 3]
    checks.cached_decoding(Subject(model, "causal"))
    with pytest.raises(
        UnsupportedError, match=r"`layers` must hold all layers that share .*\[1, 3\], .*, got \[1\] \("
    ):
        patch_model(shared(), layers=[1])


@pytest.mark.parametrize("cls", [DynamicCache, StaticCache])
def test_a_cache_may_have_no_place_for_layers_that_share_keys(cls):
    # As before Transformers 5.23.
    model = patch_model(shared())
    subject = Subject(model, "causal")
    cache = cls(config=model.config, **({"max_cache_len": 12} if cls is StaticCache else {}))
    del cache.layers[2:]
    ids = subject.tokens(12)
    steps = [subject.logits(ids[:, a:b], **{NAME: cache}) for a, b in pairwise([0, 5, *range(6, 13)])]
    checks.close(torch.cat(steps, 1), subject.logits(ids, use_cache=False), "a cache of two layers")
    assert {layer.static for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayer)} == {
        cls is StaticCache
    }


@pytest.mark.parametrize(
    ("task", "model_type", "layers", "reason"),
    [
        ("causal", "gemma2", None, r"a soft-cap on the scores \(attn_logit_softcapping\)"),
        ("causal", "gpt_oss", None, r"a learned attention sink \(sinks\)"),
        ("causal", "deepseek_v32", None, r"an indexer that selects keys for each query \(indexer\)"),
        ("seq2seq", "t5", None, r"a relative position bias on the scores"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(task, model_type, layers, reason):
    with pytest.raises(UnsupportedError, match=rf"`model` must have attention that linear .* There is {reason}: leave"):
        patch_model(tiny_model(task, model_type), layers=layers)


@pytest.mark.parametrize("allow_approximate", [False, True])
def test_chunked_layers_are_never_converted(allow_approximate):
    with pytest.raises(
        UnsupportedError, match=r"`layers` must leave layers out whose attention restarts at each chunk"
    ):
        patch_model(tiny_model("causal", "llama4_text"), layers="all", allow_approximate=allow_approximate)


def test_a_bias_on_the_scores_is_refused_when_it_comes():
    subject = Subject(patch_model(tiny_model("causal", "inkling_text")), "causal")
    with pytest.raises(
        UnsupportedError, match=r"`position_bias` must be None, got 'Tensor' \(model.layers.1.self_attn\)"
    ):
        subject.logits(subject.tokens())


def test_it_can_be_dropped_on_request():
    subject = Subject(patch_model(tiny_model("causal", "gemma2"), allow_approximate=True), "causal")
    checks.cached_decoding(subject)


def test_a_model_without_attention_is_refused_with_what_was_looked_at():
    with pytest.raises(
        UnsupportedError, match=r"`model` must have self-attention layers .*'BloomForCausalLM'.*BloomAtt"
    ):
        patch_model(tiny_model("causal", "bloom"))
    with pytest.raises(UnsupportedError, match=r"classes looked at: none named \*Attention\*"):
        patch_model(tiny_model("causal", "mamba"))
    with pytest.raises(UnsupportedError, match=r"`model` must have a language model whose .*first: git.image_encoder"):
        patch_model(tiny_model("causal", "git"))


def passes(model, ids, mask, cache):
    """Return the logits of one pass; with a cache, of a prefill in two pieces, a step and a last piece."""
    logits = Subject(model, "causal").logits
    if cache is None:
        return [logits(ids, use_cache=False, **({} if mask is None else {"attention_mask": mask}))]
    found, cache = [], DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, 16)
    for start, end in ((0, 5), (5, 8), (8, 9), (9, 12)):
        more = {} if mask is None else {"attention_mask": mask[:, :end]}
        found.append(logits(ids[:, start:end], **{NAME: cache}, **more))
    return found


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("layers", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("model_type", ["gemma3_text", "llama", "gpt2"])
def test_layers_that_stay_softmax_are_exact(model_type, layers, padded, cache):
    """Where a converted layer has no effect, before, between or after others, logits are the softmax model's bits."""
    kinds = ["sliding_attention" if model_type == "gemma3_text" and i != 1 else "full_attention" for i in range(3)]
    softmax, mixed = (tiny_model("causal", model_type, num_hidden_layers=3, layer_types=kinds) for _ in range(2))
    for model in (softmax, mixed):
        for layer in attention_layers(model):
            if layer.index in layers:
                layer.module.register_forward_hook(lambda module, args, output: (output[0] * 0, *output[1:]))
    patch_model(mixed, "hedgehog", window=3, sinks=2, layers=layers)
    ids = Subject(mixed, "causal").tokens(12)
    mask = left_padding(ids, 4) if padded else None
    for a, b in zip(*(passes(model, ids, mask, cache) for model in (mixed, softmax)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_layers_that_stay_softmax_are_exact_in_generation(options):
    def build():
        model = tiny_model("causal", "gemma3_text")
        converted = next(layer for layer in attention_layers(model) if layer.kind == "full")
        torch.nn.init.zeros_(converted.module.o_proj.weight)
        return model, converted.index

    (softmax, index), (mixed, _) = build(), build()
    patch_model(mixed, layers=[index])
    ids = Subject(mixed, "causal").tokens()
    mask = left_padding(ids, 4)
    kwargs = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True, **options}
    a, b = (Subject(m, "causal").generate(ids, **kwargs).logits for m in (mixed, softmax))
    assert torch.equal(torch.stack(a), torch.stack(b))


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "phi3", "starcoder2"])
def test_layers_whose_config_alone_says_that_they_slide_stay_softmax(model_type):
    """Their attention modules have no word for it, and their configs no list of layer types."""
    assert {layer.kind for layer in attention_layers(tiny_model("causal", model_type))} == {"sliding"}
    with pytest.raises(ArgumentError, match=r"All 2 layers of the language model are sliding .* layers='all' converts"):
        patch_model(tiny_model("causal", model_type))
    assert patch_model(tiny_model("causal", model_type), layers="all").config.linear_attention["layers"] == [0, 1]
    whole = patch_model(tiny_model("causal", model_type, sliding_window=None))
    assert whole.config.linear_attention["layers"] == [0, 1]


def test_sliding_layers_beside_towers_are_told_by_their_indices():
    model = tiny_model("causal", "phi4_multimodal")
    model.model.config.sliding_window = 4
    with pytest.raises(ArgumentError, match=r"sliding or chunked; layers=range\(0, 2\) converts them"):
        patch_model(model)
    assert patch_model(model, layers=range(2)).config.linear_attention["layers"] == [0, 1]


def test_a_full_layer_that_knows_of_a_sliding_window_is_converted():
    model = tiny_model("causal", "exaone4")
    assert [layer.kind for layer in attention_layers(model)] == ["sliding", "full"]
    assert patch_model(model).config.linear_attention["layers"] == [1]


def test_towers_are_left_alone():
    model = patch_model(tiny_model("causal", "gemma3"))
    assert {part.name.split(".")[1] for part in parts_of(model)} == {"language_model"}


@pytest.fixture
def shared_config():
    return tiny_config("llama")


def test_models_that_share_a_config_are_patched_one_by_one(shared_config):
    a, b = (randomise(LlamaForCausalLM(shared_config).eval()) for _ in range(2))
    ids = Subject(a, "causal").tokens()
    before = [Subject(model, "causal").logits(ids) for model in (a, b)]
    patch_model(a)
    assert torch.equal(Subject(b, "causal").logits(ids), before[1])
    assert not hasattr(shared_config, "linear_attention")
    patch_model(b)
    linear = Subject(b, "causal").logits(ids)
    unpatch_model(a)
    assert torch.equal(Subject(b, "causal").logits(ids), linear)
    unpatch_model(b)
    for model, logits in zip((a, b), before, strict=True):
        assert torch.equal(Subject(model, "causal").logits(ids), logits)


def test_what_is_set_in_the_config_of_a_patched_model_stays_when_it_is_unpatched(shared_config):
    model = patch_model(LlamaForCausalLM(shared_config))
    model.config.use_cache = False
    assert model.model.config.use_cache is False
    assert unpatch_model(model).config.use_cache is False


def test_a_model_built_from_a_patched_models_config_is_none_until_it_is_patched_too():
    patched = patch_model(tiny_model("causal", "llama"))
    ids = Subject(patched, "causal").tokens()
    linear = Subject(patched, "causal").logits(ids)
    other = randomise(LlamaForCausalLM(patched.config).eval())
    with pytest.raises(UnsupportedError, match=r"must be set by patch_model.* from a patched model's config .*'sdpa'"):
        Subject(other, "causal").logits(ids)
    unpatch_model(patch_model(other))
    assert other.config._attn_implementation == "sdpa"
    softmax = LlamaForCausalLM(tiny_config("llama")).eval()
    softmax.load_state_dict(other.state_dict())
    assert torch.equal(Subject(other, "causal").logits(ids), Subject(softmax, "causal").logits(ids))
    assert torch.equal(Subject(patched, "causal").logits(ids), linear)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_another_implementation_in_the_config_does_not_turn_converted_layers_back(padded):
    """Transformers writes it there when it builds another model from that config."""
    patched = patch_model(tiny_model("causal", "llama"))
    ids = Subject(patched, "causal").tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 1 - padded
    linear = Subject(patched, "causal").logits(ids, attention_mask=mask)
    other = AutoModelForCausalLM.from_config(patched.config, attn_implementation="sdpa").eval()
    assert Subject(other, "causal").logits(ids).isfinite().all()
    again = Subject(patched, "causal").logits(ids, attention_mask=mask)
    checks.close(again[mask.bool()], linear[mask.bool()], "after another model was built from its config")


def test_a_patched_class_builds_from_a_patched_models_config():
    patched = patch_model(tiny_model("causal", "llama"), layers=[1])
    twin = type(patched)(patched.config)
    assert twin.config is not patched.config
    assert [part.name for part in parts_of(twin)] == [part.name for part in parts_of(patched)]
    assert unpatch_model(twin).config._attn_implementation == "sdpa"
    assert is_patched(patched)


def test_a_part_that_was_patched_by_itself_is_unpatched_with_the_whole():
    model = tiny_model("causal", "llama")
    inner, ids = type(model.model), Subject(model, "causal").tokens()
    before = Subject(model, "causal").logits(ids)
    patch_model(model.model)
    assert not torch.equal(Subject(model, "causal").logits(ids), before)
    unpatch_model(model)
    assert torch.equal(Subject(model, "causal").logits(ids), before)
    assert type(model.model) is inner
    assert not hasattr(model.model.config, "linear_attention")
