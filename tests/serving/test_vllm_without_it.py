"""The parts of the vLLM plugin that need no vLLM: pages, weights, and what is refused before weights are loaded."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.errors import CheckpointError, UnsupportedError
from hf_linear_attn.layers import LinearAttention, Sizes
from hf_linear_attn.layers.pool import pool_slots
from hf_linear_attn.serving.vllm import SUPPORTED_VERSIONS, check_version, is_supported
from hf_linear_attn.serving.vllm.checks import check_attention, check_serving, settings_of
from hf_linear_attn.serving.vllm.layer_types import mark_converted, own_layer_types
from hf_linear_attn.serving.vllm.pages import ALIGNMENT, page_of
from hf_linear_attn.serving.vllm.weights import key_of, take_own

SETTINGS = LinearAttentionConfig(window=8, sinks=2, layers=(0, 2))


def config(**more):
    return LlamaConfig(num_hidden_layers=3, linear_attention=SETTINGS.to_dict(), **more)


def test_the_plugin_is_imported_without_vllm():
    module = importlib.import_module("hf_linear_attn.serving.vllm")
    assert callable(module.register)
    assert "vllm" not in sys.modules


def test_versions():
    assert all(is_supported(version) for version in (*SUPPORTED_VERSIONS, f"{SUPPORTED_VERSIONS[0]}+cpu"))
    check_version(SUPPORTED_VERSIONS[0])
    with pytest.raises(UnsupportedError, match=r"`vllm` must be a version .* got '0.1.0'.*available: 0\."):
        check_version("0.1.0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 8, "sinks": 3},
        {"window": 5, "mix": "window"},
        {"window": 5, "mix": "gate", "feature_map": "hedgehog"},
        {"window": 8, "rotary": "undo"},
        {"window": 8, "kept": 3, "rotary": "undo"},
        {"window": 8, "kept": 3, "retention": "learned", "mix": "window"},
    ],
)
def test_tensors_of_all_pages_are_aligned(settings, dtype):
    layer = LinearAttention(LinearAttentionConfig(**settings), Sizes(6, 4, 2, 1.0), "layer", rotated=True)
    slots = pool_slots(layer, 5)
    page = page_of(slots, dtype)
    size = sum(part.nbytes for part in page)
    assert size % ALIGNMENT == 0
    assert {part.name for part in page} - {"padding"} == set(slots)
    pages = torch.zeros(3, size, dtype=torch.int8)
    start = 0
    for part in page:
        view = pages[:, start : start + part.nbytes].view(part.dtype).view(3, *part.shape)
        assert view.dtype == part.dtype
        start += part.nbytes


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (None, r"`linear_attention` must stand in config.json of a converted folder.*\(the/folder\)"),
        ({"format_version": 99}, "`format_version` must be at most .* got 99"),
        ({"format_version": 1, "mystery": 1}, "must hold known settings only"),
        ({"format_version": 1}, "`linear_attention` must hold every setting of its format"),
        (SETTINGS.to_dict() | {"layers": None}, "`layers` must be named by a converted folder"),
    ],
)
def test_folders_that_are_refused(values, error):
    folder = LlamaConfig()
    if values is not None:
        folder.linear_attention = values
    with pytest.raises(CheckpointError, match=error):
        settings_of(folder, "the/folder")


def test_settings_are_those_of_the_folder():
    assert settings_of(config(), "the/folder") == SETTINGS


def request(**more):
    """Return vLLM's configuration as far as it is looked at."""
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    cache = {"enable_prefix_caching": False, "mamba_cache_mode": "none"}
    rest = {"speculative_config": None, "lora_config": None, "kv_transfer_config": None}
    found = SimpleNamespace(model="the/folder", **parallel | cache | rest | more)
    # Each of its parts is asked for names of its own.
    found.parallel_config = found.cache_config = found.model_config = found
    return found


# vLLM names the model itself there.
NGRAM = SimpleNamespace(method="ngram", draft_model_config=SimpleNamespace(model="the/folder"))
DRAFTS = SimpleNamespace(method="draft_model", draft_model_config=SimpleNamespace(model="the/folder"))


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"pipeline_parallel_size": 2}, "`pipeline_parallel_size` must be 1, got 2"),
        ({"decode_context_parallel_size": 2}, "`decode_context_parallel_size` must be 1"),
        ({"lora_config": object()}, "`enable_lora` must be off.*Merge the adapter"),
        ({"kv_transfer_config": object()}, "`kv_transfer_config` must be left out"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "must use a method that was tested, ngram.*'eagle'"),
        ({"speculative_config": DRAFTS}, "`speculative_config` must name a softmax model as the one that drafts, got"),
        ({"speculative_config": NGRAM, "enable_prefix_caching": True}, "`enable_prefix_caching` must be off where"),
        ({"mamba_cache_mode": "all"}, "`mamba_cache_mode` must be 'none' or 'align', got 'all'"),
    ],
)
def test_ways_to_serve_that_are_refused(more, error):
    with pytest.raises(UnsupportedError, match=error) as raised:
        check_serving(request(**more))
    assert "the/folder" in str(raised.value)


@pytest.mark.parametrize(
    "more", [{}, {"speculative_config": NGRAM}, {"enable_prefix_caching": True, "mamba_cache_mode": "align"}]
)
def test_ways_to_serve(more):
    check_serving(request(**more))


def attention(**more):
    impl = {"scale": 0.5, "logits_soft_cap": 0, "alibi_slopes": None, "sinks": None}
    rest = {"attn_type": "decoder", "kv_sharing_target_layer_name": None}
    found = SimpleNamespace(head_size=8, head_size_v=6, num_heads=4, num_kv_heads=2, **impl | rest | more)
    found.impl = found
    return found


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"logits_soft_cap": 30.0}, "soft-cap"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sinks": torch.zeros(4)}, "learned attention sink"),
        ({"attn_type": "encoder"}, "no decoder's self-attention"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "reads keys of another layer"),
    ],
)
def test_attention_that_is_refused(more, error):
    with pytest.raises(UnsupportedError, match=rf"(?s)stand in for.*layers\.1\.attn.*{error}|{error}"):
        check_attention(attention(**more), SETTINGS, "layers.1.attn")


def test_sizes_of_attention():
    assert check_attention(attention(), SETTINGS, "layer") == Sizes(8, 4, 2, 0.5, 6)
    approximate = LinearAttentionConfig(allow_approximate=True)
    assert check_attention(attention(logits_soft_cap=30.0), approximate, "layer") == Sizes(8, 4, 2, 0.5, 6)


def test_layer_types_are_marked_and_a_model_is_built_by_its_own():
    plain, typed = config(), config()
    typed.layer_types = ["full_attention"] * 3
    for folder in (plain, typed):
        before = getattr(folder, "layer_types", None)
        mark_converted(folder, (0, 2))
        assert folder.layer_types == ["linear_attention", "full_attention", "linear_attention"]
        with own_layer_types(folder):
            assert getattr(folder, "layer_types", None) == before
        assert folder.layer_types[0] == "linear_attention"
    hybrid = config()
    hybrid.layer_types = ["mamba", "full_attention", "mamba"]
    mark_converted(hybrid, (0,))
    assert hybrid.layer_types == ["mamba", "full_attention", "mamba"]


def test_weights_find_their_layer_and_their_heads():
    own = {(0, "mix_bias"): torch.zeros(2), (10, "phi.weight"): torch.zeros(1, 3)}
    bias, weight = torch.arange(4.0), torch.arange(6.0).view(2, 3)
    folder = [
        ("model.layers.0.self_attn.q_proj.weight", torch.zeros(1)),
        ("model.layers.0.self_attn.linear_attention.mix_bias", bias),
        ("model.layers.10.self_attn.linear_attention.phi.weight", weight),
    ]
    assert [name for name, _ in take_own(folder, own, 1, 2)] == [folder[0][0]]
    assert own[0, "mix_bias"].tolist() == [2.0, 3.0]
    assert own[10, "phi.weight"].tolist() == [[3.0, 4.0, 5.0]]
    # Four ranks share two key heads.
    shared = {(0, "x"): torch.zeros(1)}
    found = []
    for rank in range(4):
        assert not list(take_own([("h.0.linear_attention.x", torch.tensor([1.0, 2.0]))], shared, rank, 4))
        found.append(shared[0, "x"].item())
    assert found == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "x", "error"),
    [
        ("h.0.linear_attention.other", torch.zeros(2), "belong to layers that config.json converts"),
        ("h.0.linear_attention.x", torch.zeros(1), r"have shape \(2,\), got \(1,\)"),
        ("h.0.attn.weight", torch.zeros(1), r"got 'no x' \(layer 0\)"),
        ("h.linear_attention.x", torch.zeros(2), "name the layer"),
    ],
)
def test_weights_that_do_not_fit_are_refused(name, x, error):
    with pytest.raises(CheckpointError, match=error):
        list(take_own([(name, x)], {(0, "x"): torch.zeros(2)}, 0, 1))


def test_a_number_is_that_of_the_layer():
    assert key_of("model.language_model.layers.12.attn.linear_attention.feature_map.q.0") == (12, "feature_map.q.0")
