"""What holds for every registered map; a new map is tested here without a line being added."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from hf_linear_attn import linear_attention
from hf_linear_attn.feature_maps import FeatureMap, available_feature_maps, feature_map_class, get_feature_map
from hf_linear_attn.feature_maps.base import map_options
from hf_linear_attn.feature_maps.elementwise import elementwise_map

MAPS = available_feature_maps()
H, HKV, D, V, T = 4, 2, 16, 5, 23
EPS = 1e-6


def build(name: str, dtype: torch.dtype = torch.float64, **options: object) -> FeatureMap:
    """Build the map with weights moved off their start, so that q, k and heads differ."""
    phi = get_feature_map(name, D, H, HKV, **options).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in phi.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=dtype)
    return phi


@pytest.mark.parametrize("name", MAPS)
def test_weights_lie_row_by_row(name):
    # A loop that reads them otherwise copies them at every step.
    few = {"num_features": 8} if "num_features" in map_options(feature_map_class(name)) else {}
    for options in ({}, few, few | {"separate": False, "per_head": False}):
        phi = get_feature_map(name, D, H, HKV, **options)
        assert all(x.is_contiguous() for x in phi.parameters())


def inputs(phi: FeatureMap, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Draw q, k, v for which no normaliser is near 0: there the exact function itself is ill-conditioned."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, T, dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((H, D), (HKV, D), (HKV, V))
    )
    q, k = (q + 0.5, k + 0.5) if phi.non_negative else (q.abs() / 2, k.abs() / 2)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


POSITIONS = torch.arange(T).expand(2, T) + torch.tensor([[0], [7]])


def quadratic(phi: FeatureMap, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    phi_q, phi_k = phi.phi_q(q, POSITIONS), phi.phi_k(k, POSITIONS)
    weights = (phi_q @ phi_k.repeat_interleave(H // HKV, 1).mT).tril()
    den = weights.sum(-1, keepdim=True)
    return weights @ v.repeat_interleave(H // HKV, 1) / (den + EPS * torch.where(den < 0, -1, 1))


def condition(phi: FeatureMap, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Return by how much the sum of magnitudes exceeds a normaliser at most: 1 for features without signs."""
    phi_q, z = phi.phi_q(q, POSITIONS), phi.phi_k(k, POSITIONS).cumsum(2).repeat_interleave(H // HKV, 1)
    return ((phi_q * z).abs().sum(-1) / (phi_q * z).sum(-1).abs()).max().item()


def pieces(phi: FeatureMap, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
    out, state = [], None
    for a in range(0, T, size):
        s = slice(a, a + size)
        o, state = linear_attention(
            q[:, :, s], k[:, :, s], v[:, :, s], phi, state=state, positions=POSITIONS[:, s], eps=EPS
        )
        out.append(o)
    return torch.cat(out, dim=2)


def forms(phi: FeatureMap) -> dict[str, object]:
    return {
        "parallel": lambda *x: pieces(phi, *x, size=T),
        "chunked": lambda *x: pieces(phi, *x, size=9),
        "token by token": lambda *x: pieces(phi, *x, size=1),
    }


def outputs_and_gradients(form, phi: FeatureMap, x: list[torch.Tensor]) -> list[torch.Tensor]:
    o = form(*x)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(o.dtype)
    return [o, *torch.autograd.grad(o, [*x, *phi.parameters()], do)]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_all_forms_agree_with_the_quadratic_one(name, dtype, tolerance):
    exact_phi = build(name)
    exact = outputs_and_gradients(lambda *x: quadratic(exact_phi, *x), exact_phi, inputs(exact_phi))
    if dtype == torch.float32:
        # Features that cancel amplify rounding, by how much depends on the processor's order of summation.
        tolerance = max(tolerance, 1e-6 * condition(exact_phi, *inputs(exact_phi)))
    phi = build(name)
    phi = phi.to(dtype)
    for label, form in forms(phi).items():
        for got, want in zip(outputs_and_gradients(form, phi, inputs(phi, dtype)), exact, strict=True):
            error = (got.double() - want).abs().max() / want.abs().max()
            assert error <= tolerance, f"{label}: {error:.1e}"


@pytest.mark.parametrize("name", MAPS)
def test_features_have_the_declared_size_dtype_and_sign(name):
    phi = build(name, torch.float32)
    q, k, _ = inputs(phi, torch.bfloat16)
    q, k = q - 0.5, k - 0.5
    phi_q, phi_k = phi.phi_q(q), phi.phi_k(k)
    assert phi_q.shape == (2, H, T, phi.feature_dim)
    assert phi_k.shape == (2, HKV, T, phi.feature_dim)
    assert phi_q.dtype == phi_k.dtype == torch.float32
    if phi.non_negative:
        product = phi_q @ phi_k.repeat_interleave(H // HKV, 1).mT
        assert product.min() >= -1e-5 * product.abs().max()
    _, state = linear_attention(q, k, k, phi)
    assert state.z.shape == (2, HKV, phi.feature_dim)
    assert state.kv.dtype == state.z.dtype == torch.float32


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_outputs_and_gradients_are_finite_at_every_size(name, dtype, factor):
    phi = build(name, torch.float32)
    q, k, v = (x.detach() * factor for x in inputs(phi))
    v = v / factor
    q[:, :, 0], k[:, :, 1] = 0, 0  # all-zero rows
    q[:, :, 2], k[:, :, 3] = factor, -factor  # all-equal rows
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    assert phi.phi_q(q).isfinite().all()
    assert phi.phi_k(k).isfinite().all()
    if not phi.non_negative:
        # A signed normaliser may vanish; then only the features can be bounded.
        return
    o, _ = linear_attention(q, k, v, phi)
    assert o.isfinite().all()
    grads = torch.autograd.grad(phi.phi_q(q).sum() + phi.phi_k(k).sum(), [q, k, *phi.parameters()])
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", MAPS)
def test_a_saved_map_is_the_same_map(name):
    phi = build(name, torch.float32)
    copy = get_feature_map(name, D, H, HKV)
    copy.load_state_dict(load(save({n: x.contiguous() for n, x in phi.state_dict().items()})))
    q, k, _ = inputs(phi, torch.float32)
    assert torch.equal(phi.phi_q(q), copy.phi_q(q))
    assert torch.equal(phi.phi_k(k), copy.phi_k(k))


@pytest.mark.parametrize("name", MAPS)
def test_scale_multiplies_the_input(name):
    one, half = build(name), build(name, scale=0.5)
    q, k, v = inputs(one)
    torch.testing.assert_close(half.phi_q(2 * q), one.phi_q(q))
    torch.testing.assert_close(half.phi_k(2 * k), one.phi_k(k))
    assert half.kernel is None
    torch.testing.assert_close(linear_attention(2 * q, 2 * k, v, half)[0], linear_attention(q, k, v, one)[0])


@pytest.mark.parametrize("name", [name for name in MAPS if feature_map_class(name).learned])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_weights_are_shared_as_asked(name, separate, per_head):
    phi = build(name, separate=separate, per_head=per_head)
    assert {n.rsplit("_", 1)[-1] in ("q", "k") for n, _ in phi.named_parameters()} == {separate}
    x = torch.randn(1, 1, 3, D, dtype=torch.float64).expand(1, H, 3, D)
    phi_q, phi_k = phi.phi_q(x), phi.phi_k(x[:, :HKV])
    assert torch.equal(phi_q[:, 0], phi_q[:, -1]) == (not per_head)
    assert torch.equal(phi_k[:, 0], phi_k[:, -1]) == (not per_head)
    if name != "norm_preserving":  # there a query's power depends on its length, a key's does not
        assert torch.equal(phi_q[:, 0], phi_k[:, 0]) == (not separate)
        assert torch.equal(phi_q[:, -1], phi_k[:, -1]) == (not separate)
    o, _ = linear_attention(*inputs(phi), phi)
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(o.square().sum(), list(phi.parameters())))


@pytest.mark.parametrize("name", MAPS)
def test_a_shift_of_all_positions_changes_nothing(name):
    phi = build(name)
    x = inputs(phi)
    here, _ = linear_attention(*x, phi, positions=POSITIONS)
    there, _ = linear_attention(*x, phi, positions=POSITIONS + 100)
    torch.testing.assert_close(here, there)


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=5, deadline=None)
@given(padding=st.integers(1, 6))
def test_left_padding_changes_nothing(name, padding):
    phi = build(name)
    q, k, v = inputs(phi)
    plain, _ = linear_attention(q, k, v, phi)
    pad = lambda x: torch.cat([x[:, :, :padding] * 3, x], dim=2)  # noqa: E731
    mask = torch.ones(2, T + padding, dtype=torch.bool)
    mask[:, :padding] = False
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded, _ = linear_attention(pad(q), pad(k), pad(v), phi, key_mask=mask, positions=positions)
    torch.testing.assert_close(padded[:, :, padding:], plain)


@pytest.mark.parametrize("name", MAPS)
def test_every_map_says_what_it_is(name):
    cls = feature_map_class(name)
    for text in (cls.name, cls.formula, cls.paper):
        assert text.strip()
        assert "\n" not in text
    assert ">>>" in (cls.__doc__ or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"separate": False}, {"per_head": False}, {"scale": 2.0}], ids=str)
@pytest.mark.parametrize("name", [name for name in available_feature_maps() if feature_map_class(name).joint])
def test_a_step_has_the_features_of_both_sides(name: str, options: dict[str, object], dtype: torch.dtype) -> None:
    phi = get_feature_map(name, 16, 6, 2, **options)
    g = torch.Generator().manual_seed(0)
    for weight in phi.parameters():
        torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.3, generator=g)
    q, k = (torch.randn(3, 2, group, 16, generator=g).to(dtype) for group in (3, 1))
    # Padding and large tokens, too.
    k[0, 0], q[1, 0, 0], q[2] = 0, 0, 30 * q[2]
    with torch.no_grad():
        both = phi(q, "q", key=k)
        of_q, of_k = phi(q.flatten(1, 2)[:, :, None], "q").view(3, 2, 3, -1), phi(k, "k")
    assert both.dtype == of_q.dtype
    torch.testing.assert_close(both, torch.cat([of_k, of_q], 2), rtol=1e-5, atol=1e-5)


# PyTorch decomposes forward-mode derivatives by scripts of its own.
def test_derivatives_of_the_norm_preserving_map() -> None:
    phi = get_feature_map("norm_preserving", 5, 4, 2).double()
    g = torch.Generator().manual_seed(0)
    weights = list(phi.parameters())
    for weight in weights:
        torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.3, generator=g)
    x = torch.randn(1, 4, 2, 5, generator=g, dtype=torch.float64, requires_grad=True)

    def features(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return phi(x, "q")

    assert torch.autograd.gradcheck(features, (x, *weights))
    assert torch.autograd.gradgradcheck(features, (x, *weights))
    assert torch.autograd.gradcheck(lambda x: phi(x, "q"), (x,), check_forward_ad=True)
    # A token of zeros, as padding is, has none.
    zero = torch.zeros_like(x, requires_grad=True)
    assert all(not gradient.any() for gradient in torch.autograd.grad(phi(zero, "q").sum(), [zero, *weights[:1]]))


def test_what_reaches_features_that_are_0_matters_not() -> None:
    phi = get_feature_map("norm_preserving", 8, 1, 1)
    g = torch.Generator().manual_seed(0)
    x, above = torch.randn(1, 1, 64, 8, generator=g), torch.randn(1, 1, 64, 16, generator=g)
    gradients = []
    for size in (0.0, 1e3, 1e9):
        token = x.clone().requires_grad_()
        features = phi(token, "k")
        features.backward(torch.where(features > 0, above, size))
        gradients.append([token.grad, phi.power_k.grad.clone()])
        phi.power_k.grad = None
    assert gradients[0][0].any()
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=0, atol=0)


def test_a_graph_asks_for_an_elementwise_map_without_a_warning() -> None:
    x = torch.linspace(-2, 2, 8)
    found = torch.compile(lambda x: elementwise_map("relu").phi(x), backend="eager", fullgraph=True)(x)
    assert torch.equal(found, x.relu())
