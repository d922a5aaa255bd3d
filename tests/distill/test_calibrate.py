"""Gates that start from the teacher's attention."""

import math

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig, patch_model
from hf_linear_attn.distill import distill
from hf_linear_attn.distill.calibrate import Measured, calibrate
from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.distill.stages.transfer import teacher_forced
from hf_linear_attn.layers import Call, LinearAttention, Sizes
from tests.patching.zoo import tiny_model

D, H, HKV, T = 8, 4, 2, 40


def layer(rule="gated_delta", **settings):
    settings = {"window": 5, "sinks": 2} | settings
    return LinearAttention(LinearAttentionConfig(update_rule=rule, **settings), Sizes(D, H, HKV, 1.0), "layer")


def draw(seed=0, rows=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, T, D, generator=g) for heads in (H, HKV, HKV)]


def look(part, q, k, v, call=None, own=None):
    found = Measured(part)
    found.look(q, k, v, call or Call(), torch.ones(q.shape[0], q.shape[2], dtype=torch.bool), own)
    return found


def test_attention_that_is_spread_evenly():
    """All keys alike: distances are those of the keys beyond window and sinks, and nothing is concentrated."""
    q, k, v = draw(rows=1)
    found = look(layer(), 0 * q, k, v)
    mass = distance = 0.0
    for i in range(T):
        apart = [i - j - 5 for j in range(2, i + 1) if i - j >= 5]
        mass += len(apart) / (i + 1)
        distance += sum(apart) / (i + 1)
    torch.testing.assert_close(found.half_life, torch.full((HKV,), distance / mass).double())
    # A query that reads one key cannot spread its attention.
    assert ((found.beta - 0.3).abs() < 0.03).all()


def test_attention_that_rests_on_one_key():
    """Every query of the first group looks 11 tokens back, so its keys have gone 6 tokens before."""
    q, k, v = (x[:1] for x in draw())
    angles = torch.arange(T) * 2 * math.pi / T
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    k = torch.zeros_like(k)
    q = torch.zeros_like(q)
    k[0, :, :, :2], q[0, :, :, :2] = circle, 3000 * circle.roll(11, 0)
    # Those before token 11 look at what has not come, and so at what is nearest to it.
    found = look(layer(window=5, sinks=0), q[:, :, 11:], k[:, :, 11:], v[:, :, 11:])
    late = look(layer(window=5, sinks=0), q, k, v)
    assert (late.beta > 0.69).all()
    assert (found.beta > 0.69).all()
    assert found.half_life[0] == pytest.approx(6, rel=0.2)


def test_padding_counts_nowhere():
    q, k, v = draw()
    part, mask = layer(), torch.ones(2, T, dtype=torch.bool)
    mask[1, :9] = False
    padded = look(part, q, k, v, Call(mask))
    alone, short = look(part, q[:1], k[:1], v[:1]), look(part, q[1:, :, 9:], k[1:, :, 9:], v[1:, :, 9:])
    # The token just before the first real one sees itself, and is no query.
    for name in ("mass", "distance", "concentration"):
        torch.testing.assert_close(getattr(padded, name), getattr(alone, name) + getattr(short, name))


def test_packed_texts_are_texts_alone():
    q, k, v = (x[:1] for x in draw())
    part = layer()
    packed = look(part, q, k, v, Call(cu_seqlens=torch.tensor([0, 15, 40])))
    pieces = [look(part, *(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 15), (15, 40))]
    torch.testing.assert_close(packed.distance, pieces[0].distance + pieces[1].distance)


@pytest.mark.parametrize("rule", ["decay", "delta", "gated_delta"])
@pytest.mark.parametrize("window", [{"window": 3, "sinks": 1}, {}], ids=["window", "no window"])
def test_a_model_starts_where_its_teacher_attends(rule, window):
    model = patch_model(tiny_model("causal", "llama"), "elu", update_rule=rule, **window)
    ids = torch.randint(5, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones(2, 24), torch.ones(2, 24, dtype=torch.bool))

    def error():
        losses = []
        with torch.no_grad(), teacher_forced(model, lambda part, own, want: losses.append(float((own - want).norm()))):
            model(ids)
        return sum(losses)

    before, found = error(), calibrate(model, [batch, batch])
    assert len(found) == 2
    # The scale alone makes the outputs of a rule without a normaliser nearer; a decay need not.
    assert rule == "decay" or error() < before
    for measured in found:
        part = measured.part
        if rule != "delta":
            half_life = math.log(2) / torch.nn.functional.softplus(part.rule_decay_bias.detach().double())
            torch.testing.assert_close(half_life, measured.half_life, rtol=1e-5, atol=0)
            assert ((measured.half_life >= 1) & (measured.half_life < 24)).all()
        if rule != "decay":
            torch.testing.assert_close(part.rule_beta_bias.detach().double().sigmoid(), measured.beta)
            assert part.rule_scale.ne(1).all()


def test_a_run_calibrates_where_it_is_told(settings, teacher, tokenizer, data):
    changes = {"update_rule": "gated_delta", "stages": ["transfer"], "transfer_steps": 1, "map_lr": 1e-9}

    def start(batches):
        told = settings.with_changes(**changes, calibration_batches=batches)
        found = distill(told, teacher=teacher, tokenizer=tokenizer, data=data)
        return [part.rule_decay_bias.detach() for part in linear_attention_parts(found.student)]

    assert all(torch.allclose(x, torch.tensor(-7.0), atol=1e-3) for x in start(0))
    assert all((x > -5).all() for x in start(2))


def test_a_sum_has_no_gates():
    model = patch_model(tiny_model("causal", "llama"), "elu")
    assert calibrate(model, []) == []
