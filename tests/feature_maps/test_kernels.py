"""Maps that stand for a known kernel: how near they come to it."""

import math
from itertools import pairwise

import pytest
import torch

from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.feature_maps.learned import identity_like

D, PAIRS = 16, 64


def vectors(length: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.nn.functional.normalize(torch.randn(1, 1, PAIRS, D, generator=generator, dtype=torch.float64), dim=-1)
        for _ in range(2)
    )
    return q * length, k * length


def estimate(phi, q, k):
    return (phi.phi_q(q) * phi.phi_k(k)).sum(-1)


KERNELS = {
    "performer": lambda q, k: (q * k).sum(-1).exp(),
    "rff": lambda q, k: (-(q - k).square().sum(-1) / 2).exp(),
}


@pytest.mark.parametrize("name", KERNELS)
def test_error_falls_as_features_grow(name):
    q, k = vectors()
    exact = KERNELS[name](q, k)

    def error(features: int) -> float:
        return sum(
            (estimate(get_feature_map(name, D, scaling=1.0, num_features=features, seed=s), q, k) - exact)
            .abs()
            .mean()
            .item()
            for s in range(30)
        )

    assert error(1024) <= 0.6 * error(256)


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_estimates_are_unbiased(name, orthogonal):
    q, k = vectors()
    draws = torch.stack(
        [
            estimate(get_feature_map(name, D, scaling=1.0, num_features=64, orthogonal=orthogonal, seed=s), q, k)
            for s in range(400)
        ]
    )
    standard_error = draws.std(0) / math.sqrt(len(draws))
    z = (draws.mean(0) - KERNELS[name](q, k)) / standard_error
    # Were the estimate biased by its own standard error, z would average 1, and its square 2.
    assert abs(z.mean()) < 0.5
    assert z.square().mean() < 1.6
    assert z.abs().max() < 4


@pytest.mark.parametrize("name", KERNELS)
def test_orthogonal_features_have_less_variance(name):
    q, k = vectors()

    def variance(orthogonal: bool) -> torch.Tensor:
        options = {"scaling": 1.0, "num_features": 32, "orthogonal": orthogonal}
        draws = [estimate(get_feature_map(name, D, seed=s, **options), q, k) for s in range(300)]
        return torch.stack(draws).var(0).mean()

    assert variance(True) < 0.95 * variance(False)


def test_directions_are_orthogonal_within_a_block():
    w = get_feature_map("performer", D, num_features=D).projection[0]
    gram = w @ w.mT
    assert (gram - gram.diagonal().diag()).abs().max() < 1e-4 * gram.diagonal().mean()


def test_heads_draw_their_own_projection_if_asked_and_redraw():
    phi = get_feature_map("performer", D, 4, 2, num_features=32, per_head=True)
    assert not torch.equal(phi.projection[0], phi.projection[1])
    x = torch.randn(1, 1, 3, D).expand(1, 4, 3, D)
    phi_q = phi.phi_q(x)
    assert torch.equal(phi_q[:, 0], phi_q[:, 1])  # one group
    assert not torch.equal(phi_q[:, 1], phi_q[:, 2])
    phi.redraw_(seed=5)
    assert not torch.equal(phi.phi_q(x), phi_q)
    phi.redraw_(seed=0)
    assert torch.equal(phi.phi_q(x), phi_q)


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize("constant", [0.0, 1.0, 0.3])
def test_polynomial_is_its_kernel(power, constant):
    phi = get_feature_map("polynomial", D, power=power, constant=constant)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 9, D, generator=generator, dtype=torch.float64) for _ in range(2))
    want = (q @ k.mT / math.sqrt(D) + constant) ** power
    assert (phi.phi_q(q) @ phi.phi_k(k).mT - want).abs().max() <= 1e-10
    assert phi.phi_q(q).shape[-1] == phi.feature_dim
    assert phi.feature_dim == math.comb(D + (constant > 0) + power - 1, power)


def test_the_error_of_taylor_is_of_third_order():
    phi = get_feature_map("taylor", D, reduced_dim=D, scaling=1.0)
    q, k = vectors()
    s = (q * k).sum(-1)
    errors = [(estimate(phi, q * math.sqrt(f), k * math.sqrt(f)) - (f * s).exp()).abs() for f in (0.2, 0.1, 0.05)]
    for coarse, fine in pairwise(errors):
        ratio = (coarse.sum() / fine.sum()).log2().item()
        assert 2.9 < ratio < 3.1
    assert torch.allclose(errors[2], (0.05 * s).abs() ** 3 / 6, rtol=0.05)


def test_projections_start_as_near_to_the_identity_as_they_can():
    assert torch.equal(identity_like(D, D), torch.eye(D))
    wide = identity_like(D, 2 * D)
    assert torch.equal(wide @ wide.mT, 2 * torch.eye(D))
    narrow = identity_like(D, 4)
    torch.testing.assert_close(narrow.mT @ narrow, (D / 4) * torch.eye(4))
    assert (narrow.norm(dim=1) > 0).all()  # every dimension takes part


def test_norm_preserving_preserves_norms_and_sharpens_with_the_query():
    phi = get_feature_map("norm_preserving", D)
    q, k = vectors(3.0)
    for features, x in ((phi.phi_q(q), q), (phi.phi_k(k), k)):
        torch.testing.assert_close(features.norm(dim=-1), x.norm(dim=-1))

    def entropy(length: float) -> float:
        weights = phi.phi_q(length * q) @ phi.phi_k(k).mT
        p = weights / weights.sum(-1, keepdim=True)
        return -(p * (p + 1e-30).log()).sum(-1).mean().item()

    assert entropy(0.1) > entropy(1.0) > entropy(10.0)


def test_dpfp_is_never_negative_and_grows_with_nu():
    x = torch.randn(1, 1, 50, D)
    for nu in (1, 2, 3):
        features = get_feature_map("dpfp", D, nu=nu).phi_q(x)
        assert features.shape[-1] == 2 * D * nu
        assert features.min() >= 0


def test_cosformer_weighs_by_distance():
    phi = get_feature_map("cosformer", 1, max_length=40)
    one, positions = torch.ones(1, 1, 40, 1, dtype=torch.float64), torch.arange(40)[None]
    weights = (phi.phi_q(one, positions) @ phi.phi_k(one, positions).mT)[0, 0]
    distance = positions.T - positions
    torch.testing.assert_close(weights, torch.cos(distance.double() * math.pi / 80))
    assert weights.min() > 0


@pytest.mark.parametrize("features", [None, 24, 4])
def test_norm_preserving_features_are_their_definition(features: int | None):
    phi = get_feature_map("norm_preserving", head_dim=6, num_heads=4, num_kv_heads=2, num_features=features).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in phi.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    for side, heads in (("q", 4), ("k", 2)):
        x = torch.randn(2, heads, 5, 6, generator=generator, dtype=torch.float64)
        y = x @ phi.get_parameter(f"weight_{side}")
        length = y.norm(dim=-1, keepdim=True)
        power = phi.get_parameter(f"power_{side}")
        if side == "q":
            power = power * (0.5 + torch.tanh(math.sqrt(phi.scaling) * length))
        r = torch.cat([y, -y], -1).clamp(min=0) ** power
        found = phi.phi_q(x) if side == "q" else phi.phi_k(x)
        torch.testing.assert_close(found, length * r / r.norm(dim=-1, keepdim=True), atol=1e-8, rtol=1e-7)
    q, k = (torch.randn(2, 2, n, 6, generator=generator, dtype=torch.float64) for n in (2, 1))
    stepped = phi(q, "q", key=k)
    torch.testing.assert_close(stepped[:, :, 1:].flatten(1, 2), phi.phi_q(q.flatten(1, 2)[:, :, None])[:, :, 0])
    torch.testing.assert_close(stepped[:, :, :1], phi.phi_k(k))


@pytest.mark.parametrize("features", [4 * D, 5 * D, 2 * D])
def test_norm_preserving_starts_with_lengths_and_no_feature_twice(features: int):
    phi = get_feature_map("norm_preserving", D, num_features=features)
    x = vectors(1.0)[1]
    found = phi.phi_k(x)
    assert found.shape[-1] == phi.feature_dim == features
    if features % (2 * D) == 0:
        torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))
    different = torch.corrcoef(found.flatten(0, 2).mT).triu(1)
    assert different.max() < 0.99
