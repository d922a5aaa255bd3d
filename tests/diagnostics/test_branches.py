import math

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.diagnostics import branch_usage
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching import disable_branch

T, WINDOW, SINKS = 50, 8, 2
IDS = (torch.arange(T)[None] * 37) % 256


def patched(llama, **options):
    return patch_model(llama, **({"feature_map": "elu", "window": WINDOW, "sinks": SINKS} | options))


def uniform(model, bias):
    """Let softmax weigh all keys alike, and the linear branch count as much as a bias says."""
    for layer in model.model.layers:
        layer.self_attn.linear_attention.mix_bias.data.fill_(bias)
        layer.self_attn.q_proj.weight.data.zero_()
    return model


def test_the_linear_share_is_the_gate(llama):
    model = patched(llama, mix="gate")
    for layer in model.model.layers:
        gates = torch.linspace(0.1, 0.7, 4)
        layer.self_attn.linear_attention.mix_bias.data = gates.logit()
    report = branch_usage(model, IDS)
    # The linear branch sees its first token once that has left the window, and sinks are not its own.
    beyond = 1 - (WINDOW + SINKS) / T
    for layer in report["layers"]:
        assert layer["linear"] == pytest.approx((gates * beyond).tolist(), abs=1e-4)
        for shares in zip(layer["window"], layer["sinks"], layer["linear"], strict=True):
            assert sum(shares) == pytest.approx(1)


def test_the_share_of_sinks_is_their_weight(llama):
    model = uniform(patched(llama), -100.0)
    seen = [max(0, min(SINKS, i - WINDOW + 1)) for i in range(T)]
    expected = sum(s / (s + min(i + 1, WINDOW)) for i, s in enumerate(seen)) / T
    for layer in branch_usage(model, IDS)["layers"]:
        assert layer["sinks"] == pytest.approx([expected] * 4, rel=1e-4)
        assert layer["linear"] == pytest.approx([0.0] * 4, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"update_rule": "decay"}, {"update_rule": "gated_delta"}, {"kept": 5, "retention": "learned"}, {"mix": "shared"}],
    ids=str,
)
def test_gates_and_choices_are_those_of_the_model_s_own_values(llama, options):
    model = uniform(patched(llama, **options), -100.0 if options.get("mix") != "shared" else 100.0)
    report = branch_usage(model, IDS)
    for layer in report["layers"]:
        for shares in zip(*(layer[name] for name in layer if name != "name"), strict=True):
            assert sum(shares) == pytest.approx(1, abs=1e-5)
            assert min(shares) > -1e-4


@pytest.mark.parametrize("kept", [5, 20])
def test_the_share_of_kept_keys_is_their_weight(llama, kept):
    model = uniform(patched(llama, kept=kept), -100.0)
    seen = [max(0, min(kept, i - WINDOW - SINKS + 1)) for i in range(T)]
    expected = sum(s / (s + min(i + 1, WINDOW + SINKS)) for i, s in enumerate(seen)) / T
    report = branch_usage(model, IDS)
    for layer in report["layers"]:
        assert layer["kept"] == pytest.approx([expected] * 4, rel=1e-4)
        for shares in zip(*(layer[name] for name in ("window", "sinks", "kept", "linear")), strict=True):
            assert sum(shares) == pytest.approx(1)
    with disable_branch(model, "kept"):
        without = model(input_ids=IDS, labels=IDS).loss.item()
    assert report["loss_nats_without"]["kept"] == pytest.approx(without, rel=1e-5)
    assert not math.isclose(without, report["loss_nats"], rel_tol=1e-6)


@pytest.mark.parametrize("kept", [5, 60])
def test_kept_keys_are_those_that_a_cache_holds(llama, kept):
    model = patched(llama, kept=kept)
    found = branch_usage(model, IDS)["kept_at"]
    with torch.no_grad():
        _, cache = model(input_ids=IDS, use_cache=True, logits_to_keep=1).to_tuple()
    left = T - WINDOW - SINKS
    for heads, layer in zip(found.values(), cache.layers, strict=True):
        held = layer.tensors["kept_at"][0, :, : min(kept, left)].sort().values
        assert heads == held.tolist()
        assert all(SINKS <= position < T - WINDOW for head in heads for position in head)


def test_a_window_alone_has_no_linear_share(llama):
    report = branch_usage(patched(llama, mix="window"), IDS)
    assert all(layer["linear"] == [0.0] * 4 for layer in report["layers"])
    assert report["loss_nats_without"]["linear"] == pytest.approx(report["loss_nats"])


def test_linear_attention_throughout_is_one_branch(llama):
    report = branch_usage(patched(llama, window=None, sinks=0), IDS)
    assert all(layer["linear"] == [1.0] * 4 for layer in report["layers"])
    assert "loss_nats_without" not in report


@pytest.mark.parametrize("mix", ["key", "gate", "shared"])
@torch.no_grad()
def test_losses_are_those_of_the_model(llama, mix):
    model = patched(llama, mix=mix)
    for layer in model.model.layers:
        layer.self_attn.linear_attention.mix_bias.data.fill_(0.5)
    report = branch_usage(model, IDS)
    assert report["loss_nats"] == pytest.approx(model(input_ids=IDS, labels=IDS).loss.item(), rel=1e-5)
    for branch in ("window", "sinks", "linear"):
        with disable_branch(model, branch):
            loss = model(input_ids=IDS, labels=IDS).loss.item()
        assert report["loss_nats_without"][branch] == pytest.approx(loss, rel=1e-5)
        assert not math.isclose(loss, report["loss_nats"], rel_tol=1e-6)
    late = IDS.clone()
    late[:, : WINDOW + SINKS + 1] = -100
    beyond = model(input_ids=IDS, labels=late).loss.item()
    assert report["loss_nats_beyond"] == pytest.approx(beyond, rel=1e-5)
    assert all(0 <= s <= 1 for layer in report["layers"] for s in layer["linear"])


def test_measuring_leaves_no_trace(llama):
    model = patched(llama)
    before, hooks = model(input_ids=IDS).logits, [len(m._forward_hooks) for m in model.modules()]
    branch_usage(model, IDS)
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks


def test_what_does_not_fit_is_named(llama):
    with pytest.raises(ArgumentError, match="`model` must be patched, got 'LlamaForCausalLM'"):
        branch_usage(llama, IDS)
    with pytest.raises(ArgumentError, match="`input_ids` must be one sequence"):
        branch_usage(patched(llama), IDS.expand(2, -1))
