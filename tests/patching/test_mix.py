"""Every mixing rule and every update rule against its definition: query by query, key by key, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.patching import LinearAttentionCacheLayer, disable_branch

B, H, HKV, T, D, V = 2, 4, 2, 23, 6, 5
WINDOW, SINKS, SCALING = 5, 2, 0.3


def attention(mix, seed=0, rotated=False, **options):
    config = LinearAttentionConfig(feature_map="hedgehog", window=WINDOW, sinks=SINKS, mix=mix, **options)
    module = LinearAttention(config, Sizes(D, H, HKV, SCALING, V), "layer", rotated=rotated)
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


def expected(module, q, k, v, mask, plain=None):
    """Return o [B, H, T, V]; rows of padding are zero. Feature maps read other queries and keys, where given."""
    plain_q, plain_k = (x.detach().double() for x in ((q, k) if plain is None else plain))
    q, k, v = (x.detach().double() for x in (q, k, v))
    phi_q, phi_k = (x.detach() for x in (module.feature_map.phi_q(plain_q), module.feature_map.phi_k(plain_k)))
    o = torch.zeros(B, H, q.shape[2], V, dtype=torch.float64)
    for b in range(B):
        real = mask[b].nonzero()[:, 0].tolist()
        for h in range(H):
            g = h // (H // HKV)
            for i in real:
                near = [j for n, j in enumerate(real) if j <= i and (j > i - WINDOW or n < SINKS)]
                far = [j for j in real if j <= i and j not in near]
                branch = linear_branch(module, h, phi_q[b, h, i], phi_k[b, g], plain_k[b, g], v[b, g], far)
                o[b, h, i] = joined(module, h, q[b, h, i], k[b, g], v[b, g], near, far, *branch)
    return o


def linear_branch(module, h, phi_q, phi_k, k, v, far):
    """Return the numerator and the denominator of the keys beyond the window, read one after the other."""
    rule = module.settings.update_rule
    gates = {
        name.removeprefix("rule_"): p.detach().double() for name, p in module.named_parameters() if "rule_" in name
    }
    g = h // (H // HKV)

    def gate(name, j):
        return gates[f"{name}_bias"][g] + gates[f"{name}_key"][g] @ k[j] + gates[f"{name}_value"][g] @ v[j]

    if "delta" in rule:
        phi_q, phi_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (phi_q, phi_k))
    kv, z = torch.zeros(len(phi_q), V, dtype=torch.float64), torch.zeros(len(phi_q), dtype=torch.float64)
    for j in far:
        a = (-F.softplus(gate("decay", j))).exp() if "decay_bias" in gates else 1
        kv, z = a * kv, a * z + phi_k[j]
        old, share = (phi_k[j] @ kv, gate("beta", j).sigmoid()) if "delta" in rule else (0, 1)
        kv = kv + share * phi_k[j][:, None] * (v[j] - old)
    if "delta" in rule:
        return gates["scale"][h] * (phi_q @ kv), None
    return phi_q @ kv, phi_q @ z


def joined(module, h, q, k, v, near, far, num, den):
    scores = SCALING * k[near] @ q
    window = scores.softmax(0) @ v[near]
    mix = module.settings.mix
    if mix == "window" or not far:
        return window
    linear = num if den is None else num / (den + module.settings.eps)
    bias = module.mix_bias.detach().double()[h]
    if mix == "shared":
        # As LoLCATs: sinks belong to the window, whose scores are relative to their largest.
        weights = bias.sigmoid() * (scores - scores.max()).exp()
        return (weights @ v[near] + num) / (weights.sum() + den + module.settings.eps)
    learned = bias + module.mix_weight.detach().double()[h] @ q
    if mix == "gate":
        return torch.lerp(window, linear, learned.sigmoid())
    own = math.log(len(far)) + SCALING * k[far].mean(0) @ q + learned
    weights = torch.cat([scores, own[None]]).softmax(0)
    return weights @ torch.cat([v[near], linear[None]])


MIXES = ["key", "gate", "shared", "window"]


def attend(module, q, k, v, mask, pieces, rotation=None):
    """Read tokens in pieces, with a cache where they are several; rows of padding are zero. Without any, no mask."""
    state = State() if len(pieces) > 1 else None
    found = []
    for n, tokens in enumerate(pieces):
        part = slice(sum(pieces[:n]), sum(pieces[:n]) + tokens)
        turn = rotation and rotation.cut(part.start, part.stop)
        with torch.no_grad():
            call = Call(None if mask.all() else mask[:, part], state=state, rotation=turn)
            found.append(module(q[:, :, part], k[:, :, part], v[:, :, part], call))
    return torch.cat(found, 2) * mask[:, None, :, None]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("pieces", [[T], [9, 14], [1] * T, [4, 1, 12, 6]], ids=str)
def test_the_rule_is_its_definition(mix, padded, pieces):
    module = attention(mix).double()
    q, k, v, mask = inputs()
    mask |= not padded
    o = attend(module, q, k, v, mask, pieces)
    # States are fp32 whatever the inputs.
    torch.testing.assert_close(o, expected(module, q, k, v, mask), atol=2e-5, rtol=2e-5)


RULED = [("decay", mix) for mix in MIXES[:3]] + [(rule, mix) for rule in ("delta", "gated_delta") for mix in MIXES[:2]]


@pytest.mark.parametrize(("rule", "mix"), RULED)
@pytest.mark.parametrize("pieces", [[T], [1] * T, [4, 1, 12, 6]], ids=str)
def test_an_update_rule_is_its_definition(rule, mix, pieces):
    """Gates are those of the keys that leave the window, when they leave it; padding and sinks have none."""
    follows_its_definition(attention(mix, update_rule=rule, rotary="undo", rotated=True), pieces)


@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_kernels_follow_the_update_rule(rule):
    options = {"update_rule": rule, "rotary": "undo", "rotated": True, "backend": "triton"}
    follows_its_definition(attention("gate", **options), [9, 1, 13])


def follows_its_definition(module, pieces):
    for name in ("decay_bias", "scale"):
        if hasattr(module, f"rule_{name}"):
            getattr(module, f"rule_{name}").data.add_(5 if name == "decay_bias" else 0)
    q, k, v, mask = inputs(torch.float32)
    angles = torch.rand(B, T, D // 2, generator=torch.Generator().manual_seed(2)) * 6
    rotation = Rotation.of(angles.cos(), angles.sin(), Layout("next", "pair"))
    o = attend(module, q, k, v, mask, pieces, rotation)
    want = expected(module.double(), q, k, v, mask, (rotation.undo(q), rotation.undo(k)))
    torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("pieces", [[T], [9, 1, 1, 12]], ids=str)
def test_kernels_follow_the_rule(mix, pieces):
    module = attention(mix, backend="triton")
    q, k, v, mask = inputs(torch.float32)
    o = attend(module, q, k, v, mask, pieces)
    torch.testing.assert_close(o.double(), expected(module.double(), q, k, v, mask), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("mix", "backend"), [("key", "torch"), ("gate", "torch"), ("shared", "torch"), ("key", "triton")]
)
@pytest.mark.parametrize("pieces", [[T], [9, 1, 1, 12]], ids=str)
def test_only_the_linear_branch_reads_what_is_not_rotated(mix, backend, pieces):
    module = attention(mix, backend=backend, rotary="undo", rotated=True)
    q, k, v, mask = inputs(torch.float32)
    angles = torch.rand(B, T, D // 2, generator=torch.Generator().manual_seed(2)) * 6
    rotation = Rotation.of(1.5 * angles.cos(), 1.5 * angles.sin(), Layout("next", "pair"))
    o = attend(module, q, k, v, mask, pieces, rotation)
    want = expected(module.double(), q, k, v, mask, (rotation.undo(q), rotation.undo(k)))
    torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=2e-5)


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
