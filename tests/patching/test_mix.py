"""Mixing rules and update rules in half precision, at extremes and in part; tests/ops/test_hybrid.py has the rest."""

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops.hybrid import Tokens
from hf_linear_attn.patching import LinearAttentionCacheLayer, disable_branch
from tests.ops.hybrid import defined

B, H, HKV, T, D, V = 2, 4, 2, 23, 6, 5
WINDOW, SINKS, SCALING = 5, 2, 0.3


def attention(mix, seed=0, **options):
    config = LinearAttentionConfig(feature_map="hedgehog", window=WINDOW, sinks=SINKS, mix=mix, **options)
    module = LinearAttention(config, Sizes(D, H, HKV, SCALING, V), "layer")
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator)
    return module


def inputs(dtype=torch.float64, tokens=T, seed=1):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, h, tokens, d, generator=generator).to(dtype) for h, d in ((H, D), (HKV, D), (HKV, V)))
    mask = torch.ones(B, tokens, dtype=torch.bool)
    mask[0, : min(4, tokens - 1)] = False
    return 3 * q, k, v, mask


def expected(module, q, k, v, mask):
    """Return what the definition gives, ``o [B, H, T, V]``; rows of padding are zero."""
    with torch.no_grad():
        return defined(module, Tokens(q=q, k=k, v=v, key_mask=mask))[0]


MIXES = ["key", "gate", "shared", "window"]


def attend(module, q, k, v, mask, pieces):
    """Read tokens in pieces, with a cache where they are several; rows of padding are zero. Without any, no mask."""
    state = State() if len(pieces) > 1 else None
    found = []
    for n, tokens in enumerate(pieces):
        part = slice(sum(pieces[:n]), sum(pieces[:n]) + tokens)
        with torch.no_grad():
            call = Call(None if mask.all() else mask[:, part], state=state)
            found.append(module(q[:, :, part], k[:, :, part], v[:, :, part], call))
    return torch.cat(found, 2) * mask[:, None, :, None]


RULED = [("decay", mix) for mix in MIXES[:3]] + [(rule, mix) for rule in ("delta", "gated_delta") for mix in MIXES[:2]]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near(mix, dtype):
    module = attention(mix).to(dtype)
    q, k, v, mask = inputs(dtype)
    with torch.no_grad():
        o = module(q, k, v, Call(mask)) * mask[:, None, :, None]
    assert o.dtype == dtype
    reference = expected(module.double(), q, k, v, mask)
    # Values near 1, weights and features rounded once or twice each.
    assert (o.double() - reference).abs().max() < 8 * torch.finfo(dtype).eps * reference.abs().max()


@pytest.mark.parametrize(("rule", "mix"), [("additive", mix) for mix in MIXES] + RULED)
def test_weights_of_half_precision_are_computed_with_in_full(rule, mix):
    """They are rounded once, when they are stored: of tokens in fp32 nothing else is."""
    module = attention(mix, update_rule=rule, backend="torch").bfloat16()
    q, k, v, mask = inputs(torch.float32)
    mask[:] = True
    o = attend(module, q, k, v, mask, [9, *[1] * 14])
    torch.testing.assert_close(o.double(), expected(module.double(), q, k, v, mask), atol=2e-5, rtol=2e-5)


def test_large_scores_do_not_overflow():
    """A score of its own far above or below the others takes all or nothing, and nothing is lost but that."""
    q, k, v, mask = inputs(torch.float32)
    for bias in (-300.0, 300.0):
        module = attention("key")
        module.mix_bias.data.fill_(bias)
        with torch.no_grad():
            o = module(q, k, v, Call(mask)) * mask[:, None, :, None]
        torch.testing.assert_close(o.double(), expected(module, q, k, v, mask), atol=1e-5, rtol=1e-4)


def test_equal_keys_have_their_true_mass():
    """Where keys beyond the window are all alike, their mean stands for them exactly: patched = softmax."""
    module = LinearAttention(
        LinearAttentionConfig(feature_map="hedgehog", window=WINDOW), Sizes(D, H, HKV, SCALING), "layer"
    ).double()
    q, k, v, _ = inputs()
    k, v = (x[:, :, :1].expand(-1, -1, T, -1) for x in (k, v))
    v = v + 0 * k[..., :V]
    k = k.clone()
    k[:, :, -WINDOW:] += 1
    v = v.clone()
    v[:, :, -WINDOW:] += 1
    with torch.no_grad():
        o = module(q, k, v)[:, :, -1]
    groups = H // HKV
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    softmax = (SCALING * torch.einsum("bhd,bhsd->bhs", q[:, :, -1], k)).softmax(-1)
    torch.testing.assert_close(o, torch.einsum("bhs,bhsv->bhv", softmax, v), atol=1e-5, rtol=1e-5)


def test_branches_can_be_switched_off():
    module = attention("key").double()
    q, k, v, mask = inputs()
    with torch.no_grad():
        with disable_branch(module, "linear"):
            near = module(q, k, v, Call(mask))
        alone = attention("window").double()(q, k, v, Call(mask))
    torch.testing.assert_close(near, alone)


def test_sinks_are_looked_for_until_every_row_has_read_them():
    module = attention("key").double()
    q, k, v, mask = inputs()
    layer = LinearAttentionCacheLayer()

    def read(end, in_place=True):
        part = slice(layer.length, end)
        call = Call(mask[:, part], state=layer.state, in_place=in_place)
        module(q[:, :, part], k[:, :, part], v[:, :, part], call)
        return end - part.start

    with torch.no_grad():
        # Row 0 begins with four tokens of padding, and has one of its two sinks after five.
        for end, known in ((4, False), (5, False), (6, True), (8, True)):
            tokens = read(end)
            # A token at a time, it need not be asked each time.
            assert layer.state.first_read == known or (known and tokens == 1)
        before = {name: x.clone() for name, x in layer.tensors.items()}
        layer.activate_past_recording()
        layer.record(k=k[:, :, 8:11], v=v[:, :, 8:11], mask=mask[:, 8:11])
        read(11, in_place=False)
        layer.crop(-3)
        assert not layer.state.first_read
        assert all(torch.equal(x, layer.tensors[name]) for name, x in before.items())
        layer.reset()
        assert not layer.state.first_read
