"""Keys that are kept beyond a window: which they are, what they replace, and where none can be."""

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig, from_pretrained, patch_model
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops.dispatch import HAS_NUMBA
from tests.patching.checks import close, prompt
from tests.patching.zoo import tiny_model

BACKENDS = ("reference", "torch", *(["numba"] if HAS_NUMBA else []))
WINDOW, SINKS = 3, 2
UNREAD = "kept_nearest", "kept_at"
"""Tensors of a state of which no more than the places that are taken say something."""


def attention(kept, backend="torch", mix="window"):
    config = LinearAttentionConfig(window=WINDOW, sinks=SINKS, kept=kept, mix=mix, backend=backend)
    return LinearAttention(config, Sizes(4, 2, 1, 0.5, 4), "layer")


def kept_of(values, backend, kept=2):
    """Read a text of such values, and return the numbers of the tokens that are kept at last, in order."""
    v = torch.tensor(values, dtype=torch.float32)[None, None, :, None].expand(-1, -1, -1, 4)
    tokens = v.shape[2]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, tokens, 4, generator=generator) for heads in (2, 1))
    state = State()
    attention(kept, backend)(q, k, v, Call(state=state))
    return state.tensors["kept_at"][0, 0].sort().values.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
class TestWhichAreKept:
    """Tokens 0 and 1 are sinks, and the last three lie in the window."""

    def test_the_one_whose_value_came_again_goes(self, backend):
        # Token 5 says nearly what token 2 did.
        assert kept_of([9, 9, 1, 4, 8, 1.5, 0, 0, 0], backend, kept=3) == [3, 4, 5]

    def test_of_equal_ones_the_oldest_goes(self, backend):
        assert kept_of([9, 9, 5, 5, 5, 5, 5, 0, 0, 0], backend) == [5, 6]

    def test_what_comes_stays_until_the_next_does(self, backend):
        # Token 4 is that which is kept already.
        assert kept_of([9, 9, 1, 7, 1, 0, 0, 0], backend) == [3, 4]
        assert kept_of([9, 9, 1, 7, 1, 30, 0, 0, 0], backend) == [4, 5]

    def test_what_has_gone_says_still_what_was_said_again(self, backend):
        # Token 3 has gone when token 6 comes, and has met token 2 before.
        assert kept_of([9, 9, 1, 2, 2, 40, 80, 0, 0, 0], backend, kept=3) == [4, 5, 6]


@pytest.mark.parametrize("mix", ["window", "key"])
def test_a_model_that_keeps_all_keys_is_its_teacher(mix):
    teacher, ids = tiny_model("causal", "llama"), prompt(30, rows=2)
    expected = teacher(ids).logits
    found = patch_model(teacher, "elu", window=WINDOW, sinks=SINKS, kept=25, mix=mix)(ids).logits
    close(found, expected, "with all keys")


def test_a_layer_has_what_it_has_of_its_own(tmp_path):
    settings, ids = {"sinks": SINKS, "mix": "window"}, prompt(30, rows=2)

    def logits(**sizes):
        model = patch_model(tiny_model("causal", "llama"), **settings, **sizes)
        model.save_pretrained(tmp_path)
        found = model(ids).logits
        assert torch.equal(from_pretrained(tmp_path).eval()(ids).logits, found)
        return found

    small, large = {"window": 3, "kept": 2}, {"window": 6, "kept": 5}
    mixed = logits(**small, per_layer={1: large})
    close(logits(**large, per_layer={0: small}), mixed, "said the other way round")
    close(logits(**small, per_layer={0: large, 1: large}), logits(**large), "all of their own")
    for other in (small, large):
        assert (logits(**other) - mixed).abs().max() > 1e-2
    with pytest.raises(ArgumentError, match=r"`per_layer` must be about layers that are converted, got \[7\]"):
        logits(**small, per_layer={7: large})
