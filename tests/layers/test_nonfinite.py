"""A NaN of a real token is seen by whoever sees the token, in a layer's every part, at once or in pieces."""

import pytest
import torch

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State

T, WINDOW, SINKS = 40, 8, 2
PIECES = {"at once": [T], "in pieces": [15, 2, 7, 16], "by steps": [15, *[1] * 25]}
MIXES = [("additive", mix) for mix in ("key", "gate", "shared", "window", None)] + [("gated_delta", "key")]


def read(layer, qkv, pieces):
    state = State()
    with torch.no_grad():
        return torch.cat(
            [layer(*part, Call(state=state)) for part in zip(*(x.split(pieces, 2) for x in qkv), strict=True)], 2
        )


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize(("rule", "mix"), MIXES)
def test_a_nan_is_seen_by_those_who_see_its_token(rule, mix, pieces):
    torch.manual_seed(0)
    window = {} if mix is None else {"window": WINDOW, "sinks": SINKS, "mix": mix}
    config = LinearAttentionConfig(feature_map="hedgehog", update_rule=rule, backend="torch", **window)
    layer = LinearAttention(config, Sizes(8, 4, 2, 8**-0.5), "layer")
    qkv = [torch.randn(1, heads, T, 8) for heads in (4, 2, 2)]
    clean = read(layer, qkv, pieces)
    for at in (1, 20):
        # The second sink is seen for ever, and so is whatever a state took in.
        end = at + WINDOW if mix == "window" and at >= SINKS else T
        for side in (1, 2):
            broken = [x.clone() for x in qkv]
            broken[side][0, 0, at] = torch.nan
            found = read(layer, broken, pieces)
            shown = found[0].isnan().any(-1).nonzero().tolist()
            assert shown == [[head, t] for head in range(2) for t in range(at, end)], (at, "qkv"[side])
            sound = ~found.isnan()
            torch.testing.assert_close(found[sound], clean[sound])
