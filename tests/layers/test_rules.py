"""Update rules: names, what they refuse and what they learn; tests/patching/test_mix.py has what they compute."""

import math
import re
import subprocess
import sys

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig, patch_model
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.baseline import equal_cache_window
from hf_linear_attn.distill.plan import plan
from hf_linear_attn.errors import ArgumentError, CheckpointError, UnsupportedError
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from tests.patching.zoo import tiny_config, tiny_model

LEARNING = ("decay", "delta", "gated_delta")


def layer(rule, **settings):
    config = LinearAttentionConfig(update_rule=rule, **settings)
    return LinearAttention(config, Sizes(8, 4, 2, 1.0), "layer")


def draw(tokens=6, values=8):
    return [torch.randn(1, heads, tokens, dim) for heads, dim in ((4, 8), (2, 8), (2, values))]


@pytest.mark.parametrize(("alias", "name"), [("linear", "additive"), ("gated", "decay"), ("delta", "delta")])
def test_words_of_others_name_the_same_rules(alias, name):
    config = LinearAttentionConfig(update_rule=alias)
    assert config == LinearAttentionConfig(update_rule=name)
    assert LinearAttentionConfig.from_dict(config.to_dict()).update_rule == name


def test_an_unknown_rule_is_refused_by_whatever_reads_it():
    """Also where a config is the first thing that is asked of the package."""
    message = "`update_rule` must be a known rule, got 'kda'. Use one of those; available: additive, decay, delta"
    with pytest.raises(ArgumentError, match=message):
        patch_model(tiny_model("causal", "llama"), update_rule="kda")
    with pytest.raises(CheckpointError, match=message):
        LinearAttentionConfig.from_dict(LinearAttentionConfig().to_dict() | {"update_rule": "kda"})
    code = "from hf_linear_attn import LinearAttentionConfig\nLinearAttentionConfig(update_rule='kda')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(message, found.stderr)


def test_a_mix_that_needs_the_mass_is_refused_beside_a_rule_without():
    LinearAttentionConfig(window=4, mix="shared", update_rule="decay")
    for rule in ("delta", "gated_delta"):
        message = f"`mix` must be one that needs no mass, which update_rule='{rule}' has not, got 'shared'.*gate, key"
        with pytest.raises(ArgumentError, match=message):
            LinearAttentionConfig(window=4, mix="shared", update_rule=rule)


@pytest.mark.parametrize("rule", LEARNING)
def test_bidirectional_attention_is_refused(rule):
    message = "`update_rule` must be 'additive' for bidirectional attention, got .*leave this layer out with layers="
    with pytest.raises(UnsupportedError, match=message):
        patch_model(tiny_model("masked", "bert"), update_rule=rule)
    with pytest.raises(UnsupportedError, match=message):
        layer(rule)(*draw(), Call(causal=False))


@pytest.mark.parametrize("rule", LEARNING)
def test_values_of_another_size_are_refused(rule):
    message = r"`update_rule` must have gates of the layer's \[HKV, D, V\] = \(2, 8, 6\), got \(2, 8, 8\).*'additive'"
    with pytest.raises(UnsupportedError, match=message):
        layer(rule)(*draw(values=6))


def test_values_may_have_a_size_of_their_own():
    """Gates of latent attention, whose values are wider than what its queries and keys share, are found."""
    model = patch_model(tiny_model("causal", "deepseek_v3"), update_rule="gated_delta")
    part = model.model.layers[0].self_attn.linear_attention
    assert part.sizes.values == part.rule_beta_value.shape[1] == 16


def test_a_start_forgets_little_and_replaces_half():
    part = layer("gated_delta")
    with torch.no_grad():
        gates = part.gates(*draw()[1:])
    assert torch.allclose(gates.beta, torch.tensor(0.5))
    assert 700 < -math.log(2) / float(gates.log_decay[0, 0, 0]) < 800
    assert not part.rule_decay_key.any()
    assert part.rule_scale.eq(1).all()


# A gate has 17 numbers a key head.
@pytest.mark.parametrize(
    ("rule", "numbers"),
    [("additive", 0), ("decay", 34), ("delta", 34 + 4), ("gated_delta", 2 * 34 + 4)],
)
def test_what_is_learned_is_listed(rule, numbers):
    part, usual = layer(rule, window=4), layer("additive", window=4)
    assert sum(p.numel() for p in part.parameters()) == sum(p.numel() for p in usual.parameters()) + numbers
    alone = layer(rule, window=4, mix="window")
    assert not [name for name, _ in alone.named_parameters() if name.startswith("rule_")]


def test_what_is_learned_is_trained_and_planned():
    settings = DistillationSettings(block_tokens=8, window=4, update_rule="gated_delta")
    found, without = (
        plan(tiny_config("llama"), settings.with_changes(update_rule=rule), device="cpu")
        for rule in ("gated_delta", "additive")
    )
    for stage, other in zip(found.stages, without.stages, strict=True):
        assert stage.trained_parameters == other.trained_parameters + 2 * 72


def test_a_state_without_a_normaliser_is_smaller():
    additive, delta = (
        equal_cache_window(patch_model(tiny_model("causal", "llama"), window=9, mix="gate", update_rule=rule))
        for rule in ("additive", "delta")
    )
    # A head's state is 8 x 8 numbers, and 8 more with a normaliser; its keys and values are 16 numbers a token.
    assert (additive, delta) == (9 + 5, 9 + 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on the CPU")
@pytest.mark.parametrize("mix", ["gate", "window"])
@pytest.mark.parametrize("rule", LEARNING)
def test_a_step_of_bf16_joins_what_kernels_read(rule, mix, monkeypatch):
    """A kernel answers in the dtype of its tokens, PyTorch's step in that of the state."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = {}
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        config = LinearAttentionConfig(update_rule=rule, mix=mix, window=4, sinks=1, backend=backend)
        one = LinearAttention(config, Sizes(16, 4, 2, 0.25), "layer")
        tokens = [torch.randn(1, heads, 12, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
        call = Call(state=State())
        with torch.no_grad():
            one(*(x[:, :, :8] for x in tokens), call)
            steps = [one(*(x[:, :, t : t + 1] for x in tokens), call) for t in range(8, 12)]
        found[backend] = torch.cat(steps, 2)
        assert found[backend].dtype == torch.bfloat16
    torch.testing.assert_close(found["triton"], found["torch"], atol=0.02, rtol=0.02)
