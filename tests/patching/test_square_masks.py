"""4-D masks of the caller's, bool and additive: done where they are causality, padding and packing, else refused."""

from itertools import pairwise

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from hf_linear_attn.patching import returned_cache
from hf_linear_attn.patching.call_cache import NAME

from .checks import prompt, some
from .zoo import tiny_model

T = 10
SETTINGS = some("plain", "window", "kept", "mixed")


@pytest.fixture(params=SETTINGS)
def model(request):
    return patch_model(tiny_model("causal", "llama"), **SETTINGS[request.param])


@pytest.fixture(params=["bool", "additive"])
def form(request):
    """Return a function that makes a 4-D mask ``[B, 1, T, S]`` of what each query sees ``[B, T, S]``."""
    if request.param == "bool":
        return lambda visible: visible[:, None]
    return lambda visible: torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None]


def causal(real):
    return torch.ones(real.shape[1], real.shape[1], dtype=torch.bool).tril() & real[:, None].bool()


@torch.no_grad()
def logits(model, ids, **more):
    return model(ids, **more).logits


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_causality_and_padding_are_what_a_2d_mask_says(model, form, side):
    real = torch.ones(2, T, dtype=torch.long)
    if side != "none":
        real[1, slice(None, 4) if side == "left" else slice(-4, None)] = 0
    more = {"position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    expected = logits(model, prompt(T, rows=2), attention_mask=real, **more)
    found = logits(model, prompt(T, rows=2), attention_mask=form(causal(real)), **more)
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gap", [0, 2])
def test_packed_texts_do_not_see_each_other_nor_what_is_between(model, form, gap):
    ids, first = prompt(T), 4
    text = torch.tensor([0] * first + [-1] * gap + [1] * (T - first - gap))
    visible = (causal(torch.ones(1, T)) & (text == text[:, None])) & (text >= 0)
    positions = torch.cat([torch.arange(first), torch.zeros(gap), torch.arange(T - first - gap)]).long()[None]
    found = logits(model, ids, attention_mask=form(visible), position_ids=positions, use_cache=False)
    for part in (slice(0, first), slice(first + gap, T)):
        torch.testing.assert_close(found[:, part], logits(model, ids[:, part]), rtol=1e-5, atol=1e-5)


def test_the_next_tokens_after_a_cache(model, form):
    ids, real = prompt(T, rows=2), torch.ones(2, T, dtype=torch.long)
    real[1, :3] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    expected, cuts = logits(model, ids, attention_mask=real, position_ids=positions), [0, 6, 9, T]
    with torch.no_grad():
        cache = None
        for start, end in pairwise(cuts):
            out = model(
                ids[:, start:end],
                attention_mask=form(causal(real)[:, start:end, :end]),
                position_ids=positions[:, start:end],
                use_cache=True,
                **{NAME: cache},
            )
            cache, seen = returned_cache(out), real[:, start:end].bool()
            torch.testing.assert_close(out.logits[seen], expected[:, start:end][seen], rtol=1e-5, atol=1e-5)


def test_what_was_read_cannot_be_hidden(model, form):
    ids = prompt(T, rows=2)
    with torch.no_grad():
        cache = returned_cache(model(ids[:, :7], use_cache=True))
        later = torch.ones(2, T, dtype=torch.long)
        later[:, 2:4] = 0
        with pytest.raises(ArgumentError, match=r"`attention_mask` must show the \[7, 7\] real tokens"):
            model(ids[:, 7:], attention_mask=form(causal(later)[:, 7:]), **{NAME: cache})


def other(kind):
    visible = causal(torch.ones(2, T))
    if kind == "prefix":
        visible[:, :, :4] = True
    elif kind == "window":
        visible &= torch.ones(T, T, dtype=torch.bool).triu(-3)
    elif kind == "one query":
        visible[0, 7, 2] = False
    elif kind == "both ways":
        visible[:] = True
    elif kind == "shared prefix":
        visible[:, 6:, 4:6] = False
    elif kind == "tree":
        visible[:, 7, 6] = visible[:, 8, 7] = False
    elif kind == "strictly causal":
        visible &= ~torch.eye(T, dtype=torch.bool)
    return visible


@pytest.mark.parametrize(
    "kind", ["prefix", "window", "one query", "both ways", "shared prefix", "tree", "strictly causal"]
)
def test_any_other_pattern_is_refused_by_name(model, form, kind):
    with pytest.raises(UnsupportedError, match=r"`attention_mask` must be causal or bidirectional, .*another pattern"):
        logits(model, prompt(T, rows=2), attention_mask=form(other(kind)), use_cache=False)


def test_a_bias_on_scores_is_refused_by_name(model):
    bias = torch.where(causal(torch.ones(1, T)), -0.1 * torch.arange(T).float(), float("-inf"))[:, None]
    with pytest.raises(UnsupportedError, match=r"`attention_mask` must .*got 'a bias on scores'"):
        logits(model, prompt(T, rows=2), attention_mask=bias)


def test_a_pattern_for_each_head_is_refused_by_name(model):
    heads = causal(torch.ones(2, T))[:, None].repeat(1, model.config.num_attention_heads, 1, 1)
    expected = logits(model, prompt(T, rows=2))
    torch.testing.assert_close(logits(model, prompt(T, rows=2), attention_mask=heads), expected, rtol=1e-5, atol=1e-5)
    heads[:, 0, 8, 3] = False
    with pytest.raises(UnsupportedError, match=r"`attention_mask` must .*got 'a pattern of its own for each head'"):
        logits(model, prompt(T, rows=2), attention_mask=heads)


def test_whole_numbers_are_refused_by_name(model):
    # Softmax would take them for a bias, where it takes them at all.
    mask = causal(torch.ones(2, T))[:, None].long()
    with pytest.raises(ArgumentTypeError, match=r"`attention_mask` must be bool or additive .*got torch\.int64"):
        logits(model, prompt(T, rows=2), attention_mask=mask)


def test_an_encoder_takes_padding_and_nothing_else(form):
    model = patch_model(tiny_model("masked", "bert"), "elu")
    real = torch.ones(2, T, dtype=torch.bool)
    real[1, -4:] = False
    visible = real[:, None].expand(-1, T, -1).clone()
    expected = logits(model, prompt(T, rows=2), attention_mask=real.long())
    found = logits(model, prompt(T, rows=2), attention_mask=form(visible))
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
    visible[0, 3, 7] = False
    with pytest.raises(UnsupportedError, match=r"`attention_mask` must .*another pattern"):
        logits(model, prompt(T, rows=2), attention_mask=form(visible))
