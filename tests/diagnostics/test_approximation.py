import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attn.diagnostics import ApproximationSettings, AttentionInputs, measure_layer
from hf_linear_attn.diagnostics.approximation import correlation, length_edges, ranks, spread
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps import get_feature_map

H, HKV, D, V, T = 4, 2, 8, 6, 70


def draw(tokens: int = T, causal: bool = True, **values: torch.Tensor) -> AttentionInputs:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1, H, tokens, D), "k": (1, HKV, tokens, D), "v": (1, HKV, tokens, V)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return AttentionInputs(index=0, name="layer", scaling=D**-0.5, causal=causal, **(tensors | values))


def maps(*names: str) -> dict:
    return {name: get_feature_map(name, D, H, HKV) for name in names}


def dense(x: AttentionInputs, phi) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (y[0].repeat_interleave(H // HKV, 0) for y in (x.k, x.v))
    mask = torch.ones(T, T).tril() if x.causal else torch.ones(T, T)
    if phi is None:
        a = (x.scaling * x.q[0] @ k.mT).masked_fill(mask == 0, -torch.inf).softmax(-1)
    else:
        a = phi.phi_q(x.q)[0] @ phi.phi_k(x.k)[0].repeat_interleave(H // HKV, 0).mT * mask
        a = a / (a.sum(-1, keepdim=True) + 1e-6)
    return a, a @ v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_mib", [64.0, 0.002])
def test_measures_are_those_of_the_whole_matrix(causal, block_mib):
    x = draw(causal=causal)
    settings = ApproximationSettings(window=9, sinks=3, block_mib=block_mib)
    report = measure_layer(x, maps("elu", "taylor"), settings)
    a, o = dense(x, None)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()

    def close(got, want):
        torch.testing.assert_close(torch.tensor(got), want, rtol=1e-4, atol=1e-5, check_dtype=False)

    for name, phi in {"exact": None, **maps("elu", "taylor")}.items():
        got = report["exact"] if phi is None else report["maps"][name]
        b, p = dense(x, phi)
        close(got["entropy_nats"], -torch.special.xlogy(b, b).sum(-1).mean(-1))
        close(got["mass_beyond_window"], (b * (distance >= 9)).sum(-1).mean(-1))
        close(got["mass_on_first_tokens"], (b * (distance >= 9))[..., :3].sum(-1).mean(-1))
        if phi is not None:
            close(got["weights_error"], (b - a).norm(dim=(1, 2)) / a.norm(dim=(1, 2)))
            close(got["output_error"], (p - o).norm(dim=(1, 2)) / o.norm(dim=(1, 2)))
            assert report["length_edges"] == [16, 32, 64, 70]
            by_length = torch.tensor(got["output_error_by_length"])
            close(by_length[:, 1].tolist(), (p - o)[:, 16:32].norm(dim=(1, 2)) / o[:, 16:32].norm(dim=(1, 2)))
            assert got["feature_dim"] == phi.feature_dim


def test_a_map_that_is_softmax_to_rounding_has_no_error():
    # Taylor's remainder is of third order: at scores of 1e-3 the map is softmax to single precision.
    x = draw()
    x = draw(q=x.q * 0.02, k=x.k * 0.02)
    phi = {"taylor": get_feature_map("taylor", D, H, HKV, reduced_dim=D)}
    got = measure_layer(x, phi, ApproximationSettings())["maps"]["taylor"]
    assert max(got["output_error"]) < 1e-5
    assert max(got["weights_error"]) < 1e-5
    assert min(got["rank_correlation"]) > 0.99


def test_uniform_attention_has_the_entropy_and_rank_of_means():
    x = draw(q=torch.zeros(1, H, T, D), causal=False)
    exact = measure_layer(x, {}, ApproximationSettings())["exact"]
    assert exact["entropy_nats"] == pytest.approx([math.log(T)] * H, rel=1e-5)
    assert exact["effective_rank"] == pytest.approx([1.0] * H, rel=1e-2)


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 1.0), (-1.0, -1.0)])
def test_monotonicity_is_told_from_its_opposite(sign, expected):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(1, heads, T, 1, generator=generator) + 0.1 for heads in (H, HKV))
    phi = {"exp": get_feature_map("exp", 1, H, HKV)}
    # exp(k) grows with k; the score q k does where q > 0, and falls where q < 0.
    x = draw(q=sign * q, k=k)
    got = measure_layer(x, phi, ApproximationSettings())["maps"]["exp"]
    assert got["rank_correlation"] == pytest.approx([expected] * H)


def test_negative_weights_are_counted():
    got = measure_layer(draw(), maps("identity", "relu"), ApproximationSettings())["maps"]
    assert min(got["identity"]["negative_share"]) > 0.1
    assert max(got["relu"]["negative_share"]) == 0


class Largest(TorchDispatchMode):
    """Remember the size of the largest tensor that an operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def test_memory_stays_within_blocks():
    tokens = 2048
    x = draw(tokens)
    settings = ApproximationSettings(block_mib=1.0, matrix_tokens=32, ranked_queries=2, queries=64)
    with Largest() as largest:
        measure_layer(x, maps("elu", "polynomial"), settings)
    # Sums are taken in double precision; the matrix of all heads would take 64 MiB.
    assert largest.bytes <= 2 * 2**20


def test_queries_are_spread_to_the_end():
    assert spread(10, 20, torch.device("cpu")).tolist() == list(range(10))
    assert spread(100, 4, torch.device("cpu")).tolist() == [24, 49, 74, 99]
    assert length_edges(10) == [10]
    assert length_edges(33) == [16, 32, 33]
    sparse = measure_layer(draw(), maps("elu"), ApproximationSettings(queries=1))["maps"]["elu"]
    assert sparse["output_error_by_length"][0][:3] == [None] * 3


def test_rank_correlation_knows_ties():
    x, y = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert correlation(ranks(x), ranks(y)).item() == pytest.approx(2 / math.sqrt(5))
    assert correlation(ranks(x), ranks(torch.zeros(1, 4))).item() == 0


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("window", 0, "be at least 1"), ("matrix_tokens", 1, "be at least 2"), ("block_mib", 0.0, "be greater than 0")],
)
def test_settings_that_do_not_fit_are_named(name, value, rule):
    with pytest.raises(ArgumentError, match=f"`{name}` must {rule}, got {value}"):
        ApproximationSettings(**{name: value})
