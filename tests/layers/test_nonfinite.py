"""A NaN of a real token is seen by whoever sees the token, in a layer's every part, at once or in pieces."""

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.layers.spans import spans_of
from hf_linear_attn.ops import finite

T, WINDOW, SINKS = 40, 8, 2
PIECES = {"at once": [T], "in pieces": [15, 2, 7, 16], "by steps": [15, *[1] * 25]}
MIXES = [
    *(("additive", mix) for mix in ("key", "gate", "shared", "window", None)),
    ("decay", "key"),
    ("gated_delta", "key"),
]
PADDING = 5
TEXTS = torch.tensor([0, 18, 18, T])
"""Boundaries of packed ones."""


def layer_of(rule, mix, backend="torch"):
    torch.manual_seed(0)
    window = {} if mix is None else {"window": WINDOW, "sinks": SINKS, "mix": mix}
    config = LinearAttentionConfig(feature_map="hedgehog", update_rule=rule, backend=backend, **window)
    return LinearAttention(config, Sizes(8, 4, 2, 8**-0.5), "layer")


def read(layer, qkv, pieces):
    state = State()
    with torch.no_grad():
        return torch.cat(
            [layer(*part, Call(state=state)) for part in zip(*(x.split(pieces, 2) for x in qkv), strict=True)], 2
        )


def last_to_see(at, mix, begin=0, end=T):
    """Return where the queries end that see token ``at`` of a text: of a sink, and of what a state took in, all do."""
    return min(at + WINDOW, end) if mix == "window" and at - begin >= SINKS else end


def assert_shown(read, tokens, ends, *, shape=(1, 4, 2, T, 8)):
    """Break keys and values of one head at ``tokens``: exactly the queries up to ``ends`` show it."""
    batch, heads, kv_heads, length, dim = shape
    qkv = [torch.randn(batch, n, length, dim) for n in (heads, kv_heads, kv_heads)]
    clean = read(qkv)
    for at, end in zip(tokens, ends, strict=True):
        for side in (1, 2):
            broken = [x.clone() for x in qkv]
            broken[side][0, 0, at] = torch.nan
            found = read(broken)
            shown = found[0].isnan().any(-1).nonzero().tolist()
            assert shown == [[head, t] for head in range(heads // kv_heads) for t in range(at, end)], (at, "qkv"[side])
            sound = ~found.isnan()
            torch.testing.assert_close(found[sound], clean[sound])


@pytest.fixture(params=["seen", "unseen"])
def looking(request, monkeypatch):
    """Where numbers can be looked at, and where not, as on a GPU."""
    if request.param == "unseen":
        monkeypatch.setattr(finite, "_can_look", lambda x: False)


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize(("rule", "mix"), MIXES)
def test_a_nan_is_seen_by_those_who_see_its_token(rule, mix, pieces):
    layer = layer_of(rule, mix)
    # The second sink is seen for ever, and so is whatever a state took in.
    assert_shown(lambda qkv: read(layer, qkv, pieces), (1, 20), [last_to_see(at, mix) for at in (1, 20)])


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize(
    ("rule", "mix"), [("additive", "key"), ("additive", "gate"), ("additive", "window"), ("decay", "key")]
)
def test_a_nan_is_seen_alike_by_loops(rule, mix, pieces):
    layer = layer_of(rule, mix, "numba")
    assert_shown(lambda qkv: read(layer, qkv, pieces), (1, 20), [last_to_see(at, mix) for at in (1, 20)])


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize(("rule", "mix"), MIXES)
def test_a_nan_stays_in_its_text(rule, mix):
    """Of packed texts, and of one behind padding that holds anything."""
    layer = layer_of(rule, mix)
    ends = [last_to_see(12, mix, 0, 18), last_to_see(25, mix, 18)]

    def packed(qkv):
        with torch.no_grad():
            return layer(*qkv, Call(cu_seqlens=TEXTS))

    assert_shown(packed, (12, 25), ends)
    mask = torch.ones(1, T, dtype=torch.bool)
    mask[:, :PADDING] = False

    def padded(qkv):
        with torch.no_grad():
            hidden = [qkv[0], *(x.masked_fill(~mask[:, None, :, None], torch.inf) for x in qkv[1:])]
            o = layer(*hidden, Call(key_mask=mask))
        return o.masked_fill(~mask[:, None, :, None], 0)

    places = (PADDING + 1, 20)
    assert_shown(padded, places, [last_to_see(at, mix, PADDING) for at in places])


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("rule", "mix"), [("additive", "key"), ("additive", None), ("gated_delta", "key")])
def test_a_nan_is_seen_alike_in_a_graph(rule, mix, trained):
    layer = layer_of(rule, mix)
    compiled = torch.compile(lambda q, k, v: layer(q, k, v), backend="eager", fullgraph=True)

    def traced(qkv):
        with torch.set_grad_enabled(trained):
            return compiled(*qkv).detach()

    assert_shown(traced, (1, 20), (T, T))


@pytest.mark.usefixtures("looking")
def test_a_nan_is_seen_alike_where_a_call_is_read_in_spans():
    length = 1030
    layer = layer_of("additive", "key")
    found = []

    def walked(qkv):
        with torch.no_grad():
            found.append(len(spans_of(qkv[0])))
            return layer(*qkv)

    assert_shown(walked, (500, 515), (length, length), shape=(1, 4, 2, length, 8))
    assert min(found) > 1
