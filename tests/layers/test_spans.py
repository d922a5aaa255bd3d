"""The walk over spans behind a state and with padding; tests/ops/test_hybrid.py has every rule and mix."""

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State, spans

B, H, HKV, D, V = 2, 4, 2, 6, 5
LAYERS = {
    "key": {"window": 5, "sinks": 2},
    "wide": {"window": 70},
    "decay shared": {"window": 5, "mix": "shared", "update_rule": "decay"},
    "gated delta, no window": {"update_rule": "gated_delta"},
}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(spans, "SPAN", 16 * B)
    monkeypatch.setattr(spans, "CHUNK", 16)


def build(feature_map="norm_preserving", **settings):
    config = LinearAttentionConfig(feature_map=feature_map, **settings)
    layer = LinearAttention(config, Sizes(D, H, HKV, 0.3, V), "layer").double()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return layer


def draw(tokens, rows=B, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((H, D), (HKV, D), (HKV, V))
    return [torch.randn(rows, h, tokens, d, generator=generator).double().requires_grad_() for h, d in shapes]


def padded(tokens):
    mask = torch.ones(B, tokens, dtype=torch.bool)
    mask[0, :7] = mask[1, tokens - 3 :] = False
    return mask


def results(layer, qkv, call, before=()):
    """Return output, gradients and final state of a call after others."""
    state = State()
    with torch.no_grad():
        for tokens in before:
            layer(*draw(tokens, seed=9), Call(state=state))
    o = layer(*qkv, call._replace(state=state))
    if call.key_mask is not None:
        # Nobody reads what padding gives.
        o = o * call.key_mask[:, None, :, None]
    weights = [p for p in layer.parameters() if p.requires_grad]
    probe = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).double()
    found = torch.autograd.grad((o * probe).sum(), [*qkv, *weights], allow_unused=True)
    return [o, *found, *state.read().values()]


@pytest.mark.parametrize("before", [(), (9,), (30, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_spans_give_what_the_whole_gives(name, masked, before, monkeypatch):
    layer, qkv = build(**LAYERS[name]), draw(53)
    call = Call(padded(53) if masked else None)
    found = results(layer, qkv, call, before)
    monkeypatch.setattr(spans, "walks", lambda *args: False)
    for x, y in zip(found, results(layer, qkv, call, before), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_masked_content_never_matters(content):
    layer, qkv, mask = build(**LAYERS["key"]), draw(53), padded(53)
    dirty = [x.detach().masked_fill(~mask[:, None, :, None], content) for x in qkv[1:]]
    real = mask[:, None, :, None]
    with torch.no_grad():
        clean = layer(*qkv, Call(mask)) * real
        torch.testing.assert_close(torch.where(real, layer(qkv[0], *dirty, Call(mask)), 0), clean)


def test_memory_does_not_grow_with_the_text_beyond_inputs_and_outputs():
    """What autograd keeps is the inputs, and a state per span."""
    layer = build(**LAYERS["key"])

    def kept(tokens):
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        qkv = draw(tokens)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            layer(*qkv)
        return sum(sizes.values()) / sum(x.nbytes for x in qkv)

    # A state of 12 features of 5 values and their sums, every 16 tokens, beside 32 numbers a token.
    assert kept(512) < 1.5 * kept(128)
    assert kept(512) < 4
