"""Scores by which keys are kept: made in pieces from keys as they are, they are those that were learned."""

import pytest
import torch

from hf_linear_attn.layers import Sizes
from hf_linear_attn.layers.retention.learned import AT_ONCE, Learned
from hf_linear_attn.layers.window import Tokens
from hf_linear_attn.ops.rotation import Layout, Rotation

WINDOW = 24


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 300])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("dtype", "units"), [(torch.float64, 5), (torch.bfloat16, 64)])
def test_scores_are_those_of_the_inputs(count, turned, dtype, units):
    generator = torch.Generator().manual_seed(count)

    def draw(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    rule, tokens = Learned(Sizes(8, 4, 2, 0.3, value_dim=4), WINDOW, units), count + WINDOW
    weights = {name: (x + 0.1 * draw(*x.shape)).to(x.dtype) for name, x in rule.weights().items()}
    k, v = draw(2, 2, tokens, 8).to(dtype), draw(2, 2, tokens, 4).to(dtype)
    angles = draw(1, tokens, 4)
    turns = torch.cat([angles.cos(), angles.sin()], 2).to(dtype)
    rotation = Rotation(turns, Layout("half", "pair")) if turned else None
    given = Tokens(k, v, draw(2, tokens) < 1, None, rotation)
    found = rule.score(given, count, weights, "torch")
    wanted = rule.scores_of(rule.inputs(given, count, "torch"), weights)
    assert found.shape == (2, 2, count, 6)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
