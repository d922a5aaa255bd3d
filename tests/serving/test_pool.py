"""Places of a pool are used again and copied, and kernels step them; tests/ops/test_hybrid.py has the rest."""

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.layers import pool as module
from hf_linear_attn.layers.pool import Pool, Rows, Texts, can_step, pool_slots, read_, read_rows_, step_rows_
from hf_linear_attn.ops.hybrid import hybrid_step_
from hf_linear_attn.ops.rotation import Layout, Rotation

H, HKV, D, V, PLACES = 4, 2, 6, 5, 7
LAYERS = {"key": {"window": 5, "sinks": 2}, "no window": {}}
TEXTS = {4: 23, 1: 9, 6: 31, 3: 2}
"""Tokens of each text, by its place."""


def build(feature_map="norm_preserving", **settings):
    config = LinearAttentionConfig(feature_map=feature_map, **settings)
    layer = LinearAttention(config, Sizes(D, H, HKV, 0.3, V), "layer", rotated=True).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return layer


def pool_of(layer):
    """Return a pool whose places hold what nobody wrote, with a gap between them as in pages."""
    slots = pool_slots(layer, V)
    tensors = {}
    for name, slot in slots.items():
        whole = slot.zeros(2 * PLACES, torch.zeros(1))
        whole.fill_(float("nan") if whole.is_floating_point() else 1)
        tensors[name] = whole[::2]
    return Pool(slots, tensors)


def draw(place, tokens):
    generator = torch.Generator().manual_seed(place)
    return [torch.randn(1, h, tokens, d, generator=generator) for h, d in ((H, D), (HKV, D), (HKV, V))]


def turning(start, end):
    angles = torch.arange(start, end)[:, None] * torch.tensor([1.0, 0.3, 0.01])
    return Rotation(torch.cat([angles.cos(), angles.sin()], -1)[None], Layout("half"))


def alone(layer, place, tokens):
    """Read a text at once in a state of its own."""
    rotation = turning(0, tokens) if layer.undoes else None
    return layer(*draw(place, tokens), Call(state=State(), rotation=rotation))


def several(layer, pool, whole, got, spans):
    """Read more tokens of several texts at once, filled up with what must not matter."""
    most, places = max(end - start for start, end in spans.values()), list(spans)
    starts = torch.tensor([spans[p][0] for p in places])
    new = torch.tensor([end - start for start, end in spans.values()])
    rows, turns = [], []
    for place, (start, end) in spans.items():
        own = [x[:, :, start:end] for x in whole[place]]
        rows.append([torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[2]), value=7.0) for x in own])
        turns.append(turning(start, start + most).turns)
    q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
    rotation = Rotation(torch.cat(turns), Layout("half")) if layer.undoes else None
    with torch.no_grad():
        o = read_rows_(layer, q, k, v, pool, Texts(torch.tensor(places), starts, new, most), rotation)
    for row, (place, (start, end)) in enumerate(spans.items()):
        got[place][:, :, start:end] = o[row, :, : end - start]


@pytest.mark.parametrize("name", ["key", "no window"])
def test_a_place_that_is_used_again_remembers_nothing(name):
    layer = build(**LAYERS[name])
    pool = pool_of(layer)
    read_(layer, *draw(1, 17), pool, 3, 0)
    got = read_(layer, *draw(2, 1), pool, 3, 0)
    torch.testing.assert_close(got, alone(layer, 2, 1))


def test_a_copied_place_goes_its_own_way():
    layer = build(**LAYERS["key"])
    pool = pool_of(layer)
    q, k, v = draw(1, 20)
    read_(layer, q[:, :, :12], k[:, :, :12], v[:, :, :12], pool, 0, 0)
    pool.copy_(0, 5)
    read_(layer, *draw(2, 3), pool, 0, 12)
    rest = read_(layer, q[:, :, 12:], k[:, :, 12:], v[:, :, 12:], pool, 5, 12)
    torch.testing.assert_close(rest, alone(layer, 1, 20)[:, :, 12:], atol=1e-5, rtol=1e-5)


def test_a_layer_without_a_step_says_so():
    assert not can_step(build(mix="shared", window=4))
    assert not can_step(build(backend="reference"))
    assert can_step(build(window=4))


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 3, "sinks": 2},
        {"window": 3, "sinks": 4, "rotary": "undo", "feature_map": "elu"},
        {"window": 2, "mix": "gate", "feature_map": "hedgehog", "update_rule": "decay"},
        {"window": 3, "sinks": 1, "mix": "window"},
    ],
    ids=str,
)
def test_a_kernel_steps_states_where_they_lie(settings, monkeypatch):
    """Texts are shorter than their sinks, shorter than the window, and longer; what is beside them stays as it was."""
    served, step = [], module.hybrid_step_
    monkeypatch.setattr(module, "hybrid_step_", lambda whole, chosen: served.append(whole) or step(whole, chosen))
    steps_alike(*(build(backend=backend, **settings) for backend in ("torch", "triton")))
    assert len(served) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"feature_map": "elu"},
        {"feature_map": "hedgehog", "update_rule": "decay"},
        {"update_rule": "gated_delta", "rotary": "undo"},
        {"window": 3, "sinks": 2, "update_rule": "delta"},
    ],
    ids=str,
)
def test_a_rules_kernel_steps_its_states_where_they_lie(settings, monkeypatch):
    """There is no kernel for all of a step without a window, nor for the delta rules."""
    plain, fused = (build(backend=backend, **settings) for backend in ("torch", "triton"))
    step, seen = fused.rule.step_, []

    def watched(token, state):
        seen.append((token.rows, state))
        return step(token, state)

    monkeypatch.setattr(fused.rule, "step_", watched)
    pool = steps_alike(plain, fused)
    assert len(seen) == 3
    assert all(rows is not None and tensors["kv"] is pool.tensors["kv"] for rows, tensors in seen)


@pytest.mark.parametrize(
    "settings",
    [{"window": 2, "sinks": 1}, {"feature_map": "elu"}, {"update_rule": "delta"}],
    ids=str,
)
def test_kernels_read_several_texts_at_once(settings):
    """Some begin, of others the window is not yet full, or has been for long."""
    whole = {place: draw(place, tokens) for place, tokens in TEXTS.items()}
    found = []
    for backend in ("torch", "triton"):
        layer = build(backend=backend, **settings)
        pool, got = pool_of(layer), {place: torch.zeros(1, H, tokens, V) for place, tokens in TEXTS.items()}
        for spans in ({4: (0, 1), 1: (0, 4)}, {4: (1, 4), 1: (4, 5), 3: (0, 2)}):
            several(layer, pool, whole, got, spans)
        found.append((got, pool))
    (expected, plain), (other, fused) = found
    for place, o in expected.items():
        torch.testing.assert_close(other[place], o, atol=1e-5, rtol=1e-5)
    for name, x in plain.tensors.items():
        torch.testing.assert_close(fused.tensors[name], x, atol=1e-5, rtol=1e-5, equal_nan=True)


def steps_alike(plain, fused):
    """Step a layer in PyTorch and by kernels, and compare what they give and keep; return the second one's pool."""
    expected, found = pool_of(plain), pool_of(fused)
    done = {4: 1, 1: 3, 6: 12}
    for place, tokens in done.items():
        rotation = turning(0, tokens) if plain.undoes else None
        read_(plain, *draw(place, tokens), expected, place, 0, rotation)
    for name, x in expected.tensors.items():
        found.tensors[name].copy_(x)
    for number in range(3):
        q, k, v = (torch.cat([draw(place + 10 * number, 1)[i] for place in done]) for i in range(3))
        lengths = torch.tensor([tokens + number for tokens in done.values()])
        rotation = None
        if plain.undoes:
            each = [turning(length, length + 1) for length in lengths.tolist()]
            rotation = Rotation(torch.cat([r.turns for r in each]), each[0].layout)
        rows = Rows(torch.tensor(list(done)), lengths)
        with torch.no_grad():
            o, other = (
                step_rows_(layer, q, k, v, pool, rows, rotation) for layer, pool in ((plain, expected), (fused, found))
            )
        torch.testing.assert_close(other, o, atol=1e-5, rtol=1e-5)
    for name, x in expected.tensors.items():
        if not name.startswith("near_"):
            torch.testing.assert_close(found.tensors[name], x, atol=1e-5, rtol=1e-5, equal_nan=True)
        untouched = [p for p in range(PLACES) if p not in done]
        assert torch.equal(found.tensors[name][untouched].isnan(), x[untouched].isnan())
    return found


@pytest.mark.parametrize("backend", ["triton", "numba"])
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rows": torch.tensor([4])}, "`rows` must have shape (2,)"),
        ({"place": torch.tensor(3)}, "`place` must have shape (2,)"),
        ({"key_mask": torch.ones(2, 1, dtype=torch.bool)}, "`key_mask` must be None in a pool"),
        ({"z": torch.zeros(PLACES, HKV, 1, D)}, f"`z` must have shape ({PLACES}, {HKV}, {D})"),
    ],
)
def test_refuses_what_does_not_fit(changes, word, backend, monkeypatch):
    layer, found = build(window=3, feature_map="elu", backend="triton"), []
    pool, rows = pool_of(layer), Rows(torch.tensor([4, 1]), torch.tensor([5, 9]))
    monkeypatch.setattr(module, "hybrid_step_", lambda whole, _: found.append(whole) or whole.q)
    q, k, v = (torch.cat([draw(place, 1)[i] for place in (4, 1)]) for i in range(3))
    step_rows_(layer, q, k, v, pool, rows)
    with pytest.raises(ArgumentError) as error:
        hybrid_step_(found[0]._replace(**changes), backend)
    assert word in str(error.value)
