"""The kernels of learned maps, against PyTorch's features in float64."""

import sys

import pytest
import torch
from torch import Tensor, nn

from hf_linear_attn.feature_maps import FeatureMap, get_feature_map
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.features.triton import kernels, op
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.rotation.triton import triton_turn
from hf_linear_attn.ops.triton.plan import Target
from tests.spread import spread

from .oracle import DEVICE, assert_near, poison

MAPS = ("hedgehog", "norm_preserving")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""By norm: features are rounded once, gradients twice."""
H, HKV, D = 4, 2, 20
HALVED = 32
"""Dimensions of heads that a program takes in halves."""
T = 600 if DEVICE.type == "cuda" else 37
"""More than one program walks, on a GPU as in the interpreter."""


def drawn(name: str, dim: int = D, **options: object) -> FeatureMap:
    """Return a map whose weights are not where they start."""
    feature_map = get_feature_map(name, dim, H, HKV, **options)
    g = torch.Generator(torch.get_default_device()).manual_seed(0)
    for weight in feature_map.parameters():
        nn.init.normal_(weight, mean=weight.mean().item(), std=0.3, generator=g)
    return feature_map.to(torch.get_default_device())


def tokens(heads: int, dtype: torch.dtype, layout: str = "bhtd", dim: int = D) -> tuple[Tensor, Tensor]:
    g = torch.Generator(torch.get_default_device()).manual_seed(1)
    x, do = (2 * torch.randn(2, T, heads, n, generator=g).to(dtype).transpose(1, 2) for n in (dim, 2 * dim))
    return (x, do) if layout == "bthd" else (x.contiguous(), do.contiguous())


HALF = Layout("half", "pair")


def rotation_of(turned: int, rows: int, dtype: torch.dtype, layout: Layout = HALF) -> Rotation:
    """Return a rotation of so many entries, by a factor, too."""
    g = torch.Generator(torch.get_default_device()).manual_seed(2)
    angles = 6 * torch.rand(rows, T, turned // 2, generator=g)
    return Rotation(1.3 * torch.cat([angles.cos(), angles.sin()], -1).to(dtype), layout)


def run(
    feature_map: FeatureMap, x: Tensor, do: Tensor, side: str, backend: str, rotation: Rotation | None = None
) -> dict[str, Tensor]:
    if backend == "torch":
        feature_map, x, do = feature_map.double(), x.double(), do.double()
        rotation = rotation and rotation._replace(turns=rotation.turns.double())
    x = x.detach().requires_grad_()
    feature_map.zero_grad()
    o = features_of(feature_map, x, side, backend=backend, rotation=rotation)
    o.backward(do)
    found = {"o": o.detach(), "dx": x.grad}
    return found | {name: p.grad.clone() for name, p in feature_map.named_parameters() if p.grad is not None}


def assert_all_near(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        assert_near(found[name], expected, tolerance, name, least=0)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_features_and_gradients(name: str, side: str, dtype: torch.dtype) -> None:
    x, do = tokens(H if side == "q" else HKV, dtype)
    found = run(drawn(name), x, do, side, "triton")
    assert found["o"].dtype == dtype
    assert_all_near(found, run(drawn(name), x, do, side, "torch"), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "dim", "dtype"),
    [
        ("norm_preserving", 144, torch.bfloat16),
        pytest.param("hedgehog", 192, torch.float32, marks=pytest.mark.slow),
        pytest.param("norm_preserving", 256, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_that_no_program_holds_whole(name: str, dim: int, dtype: torch.dtype) -> None:
    x, do = (0.5 * y for y in tokens(HKV, dtype, dim=dim))
    rotation = rotation_of(dim, 1, dtype)
    found, exact = (run(drawn(name, dim), x, do, "k", backend, rotation) for backend in ("triton", "torch"))
    assert_all_near(found, exact, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    "options",
    [
        {"separate": False},
        {"per_head": False},
        {"separate": False, "per_head": False},
        {"scale": 0.7, "scaling": 0.3},
        {"num_features": 12},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MAPS)
def test_settings_of_maps(name: str, options: dict[str, object]) -> None:
    x, do = tokens(H, torch.float32, layout="bthd")
    do = do[..., : options.get("num_features", 2 * D)]
    maps = (drawn(name, **options) for _ in range(2))
    assert_all_near(run(next(maps), x, do, "q", "triton"), run(next(maps), x, do, "q", "torch"), 2e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_fp16_features_stay_finite(backend: str) -> None:
    feature_map = get_feature_map("norm_preserving", D)
    feature_map.to(torch.get_default_device()).weight_k.data.mul_(1e5)
    x = torch.ones(1, 1, 3, D, dtype=torch.float16, requires_grad=True)
    o = features_of(feature_map, x, "k", backend=backend)
    o.sum().backward()
    assert o.max() == 65504
    # What is cut off has no gradient.
    assert (x.grad == 0).all()


@pytest.mark.parametrize("dtype", spread(TOLERANCE, 3), ids=str)
@pytest.mark.parametrize(
    ("name", "turned", "rows", "layout"),
    [
        ("norm_preserving", D, 1, Layout("half", "pair")),
        ("hedgehog", 8, 2, Layout("next", "pair")),
        ("norm_preserving", 12, 2, Layout("half", "pair", at_end=True)),
        ("hedgehog", 6, 1, Layout("next", "pair", at_end=True)),
    ],
)
def test_what_is_turned_is_turned_back(name: str, turned: int, rows: int, layout: Layout, dtype: torch.dtype) -> None:
    x, do = tokens(H, dtype)
    rotation = rotation_of(turned, rows, dtype, layout)
    found = run(drawn(name), x, do, "q", "triton", rotation)
    assert_all_near(found, run(drawn(name), x, do, "q", "torch", rotation), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", spread(TOLERANCE, 3), ids=str)
@pytest.mark.parametrize(
    ("name", "rows", "pairs", "layout", "options"),
    [
        ("norm_preserving", 1, "half", "bhtd", {}),
        ("norm_preserving", 2, "half", "bthd", {"per_head": False}),
        ("hedgehog", 2, "half", "bthd", {"num_features": 20}),
        ("norm_preserving", 0, "none", "bthd", {}),
        ("hedgehog", 1, "next", "bhtd", {}),
    ],
    ids=str,
)
def test_heads_in_halves(
    name: str, rows: int, pairs: str, layout: str, options: dict[str, object], dtype: torch.dtype
) -> None:
    x, do = tokens(H, dtype, layout, HALVED)
    do = do[..., : options.get("num_features", 2 * HALVED)]
    rotation = rotation_of(HALVED, rows, dtype, Layout(pairs, "pair")) if rows else None
    found, exact = (run(drawn(name, HALVED, **options), x, do, "q", kind, rotation) for kind in ("triton", "torch"))
    assert_all_near(found, exact, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "per_head", "blocks"), [("norm_preserving", False, 1), ("hedgehog", True, 2), ("norm_preserving", True, 2)]
)
def test_gradients_of_weights_are_summed_by_piece(
    name: str, per_head: bool, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's tokens are those of several programs, of which each has one block of them or two."""
    monkeypatch.setattr(kernels, "LONGER", blocks)
    monkeypatch.setattr(sys.modules[__name__], "T", 3 * T)
    poison(monkeypatch)
    test_heads_in_halves(name, 2, "half", "bthd", {"per_head": per_head}, torch.float32)


def test_a_program_writes_dy_where_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LONGER", 2)
    monkeypatch.setattr(sys.modules[__name__], "T", 3 * T)
    poison(monkeypatch)
    x, do = tokens(H, torch.bfloat16, dim=HALVED)
    pair = drawn("hedgehog", HALVED).pair("q")
    settings = pair.name, pair.factor, pair.sharpness, "half", False
    dy, _, dweight, _ = op.triton_features_backward(do, x, None, pair.weight, None, *settings, True, True)
    # A head has several programs, each with memory for one of its two blocks.
    assert dweight.shape[2] > 1
    assert dy.shape[2] < T
    assert dy.isfinite().all()


def test_a_sum_of_weights_is_over_as_many_tokens_as_keep_processors_busy() -> None:
    def walk(heads: int, tokens: int, dim: int = 128) -> int:
        x = torch.empty(1, heads, tokens, dim, dtype=torch.bfloat16, device="meta")
        turns, weight = x[:, 0], torch.empty(heads, dim, dim, device="meta")
        settings = "hedgehog", 1.0, 0.0, "half", False
        return kernels.FeatureProblem(Target("sm_90", 132), x, turns, weight, None, *settings).walk("features_backward")

    assert walk(8, 4_096) == 256
    assert walk(32, 4_096) == 1_024
    assert walk(32, 32_768) == 2_048
    # Of four warps, a processor holds two programs.
    assert walk(32, 4_096, 64) == 512


@pytest.mark.parametrize("dim", [D, HALVED])
def test_gradients_that_are_not_asked_for(dim: int) -> None:
    x, do = tokens(H, torch.bfloat16, dim=dim)
    rotation, feature_map = rotation_of(dim, 1, torch.bfloat16), drawn("norm_preserving", dim)
    whole = run(feature_map, x, do, "q", "triton", rotation)
    features_of(feature_map, x, "q", backend="triton", rotation=rotation).backward(do)
    for name, p in feature_map.named_parameters():
        assert p.grad is None or torch.equal(p.grad, 2 * whole[name])
        p.requires_grad_(False)
    assert torch.equal(run(feature_map, x, do, "q", "triton", rotation)["dx"], whole["dx"])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("turned", "rows", "layout"),
    [(D, 1, Layout("half", "pair")), (8, 2, Layout("next", "pair")), (12, 2, Layout("half", "pair", at_end=True))],
)
def test_a_kernel_turns_back_for_maps_without_one(turned: int, rows: int, layout: Layout, dtype: torch.dtype) -> None:
    g = torch.Generator(torch.get_default_device()).manual_seed(3)
    x, do = (torch.randn(2, T, H, D, generator=g).to(dtype).transpose(1, 2) for _ in range(2))
    rotation, found = rotation_of(turned, rows, dtype, layout), {}
    for backend, wide in (("triton", dtype), ("torch", torch.float64)):
        leaf = x.to(wide).requires_grad_()
        o = rotation._replace(turns=rotation.turns.to(wide)).undo(leaf, backend)
        (dx,) = torch.autograd.grad(o, leaf, do.to(wide))
        found[backend] = {"o": o, "dx": dx}
    assert found["triton"]["o"].dtype == found["triton"]["dx"].dtype == dtype
    assert_all_near(found["triton"], found["torch"], TOLERANCE[dtype])


@pytest.mark.parametrize("name", MAPS)
def test_zero_has_finite_features_and_gradients(name: str) -> None:
    x = torch.zeros(1, HKV, 3, D)
    for y in run(drawn(name), x, torch.ones(1, HKV, 3, 2 * D), "k", "triton").values():
        assert y.isfinite().all()


@pytest.mark.parametrize(
    ("name", "dim", "turned"), [("hedgehog", D, 0), ("norm_preserving", D, 8), ("norm_preserving", HALVED, HALVED)]
)
def test_opcheck(name: str, dim: int, turned: int) -> None:
    pair = drawn(name, dim).pair("q")
    x = torch.randn(1, H, 3, dim, requires_grad=True)
    power = None if pair.power is None else pair.power.detach().requires_grad_()
    turns = torch.randn(1, 3, turned) if turned else None
    settings = pair.name, pair.factor, pair.sharpness, "half", False
    torch.library.opcheck(op.triton_features, (x, turns, pair.weight, power, *settings))
    if turns is not None:
        torch.library.opcheck(triton_turn, (x, turns, "half", False, False))


@pytest.mark.parametrize("dim", [D, HALVED])
@pytest.mark.parametrize("name", MAPS)
def test_writes_all_it_allocates(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, do = tokens(H, torch.bfloat16, dim=dim)
    rotation = rotation_of(dim, 1, torch.bfloat16)
    clean = run(drawn(name, dim), x, do, "q", "triton", rotation)
    poison(monkeypatch)
    for key, y in run(drawn(name, dim), x, do, "q", "triton", rotation).items():
        assert torch.equal(y, clean[key]), key


def test_maps_without_a_kernel_are_computed_by_torch() -> None:
    feature_map = get_feature_map("t2r", D, H, HKV).to(torch.get_default_device())
    assert feature_map.pair("q") is None
    x, _ = tokens(H, torch.bfloat16)
    assert torch.equal(features_of(feature_map, x, "q", backend="triton"), feature_map.phi_q(x).to(x.dtype))


@pytest.mark.parametrize("name", MAPS)
def test_the_kernel_computes_what_it_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = tokens(H, torch.float32)

    def refuse(*inputs: object) -> Tensor:
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(op, "compute", refuse)
    assert features_of(drawn(name), x, "q", backend="torch").shape[-1] == 2 * D
    with pytest.raises(AssertionError, match="the kernel was asked"):
        features_of(drawn(name), x, "q", backend="triton")
