"""Drawn problems, and errors against the float64 oracle."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hf_linear_attn import LinearAttentionState, linear_attention

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
"""Where the kernels are tested: on a GPU if there is one, otherwise in Triton's interpreter."""

MAPS = ("elu", "relu", "squared_relu", "exp", "sigmoid", "identity")


def laid_out(layout: str, size: tuple[int, int, int, int], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Draw ``[B, heads, T, D]``: ``"bhtd"``, with tokens before heads as ``"bthd"``, or ``"sliced"`` of wider rows."""
    B, heads, tokens, dim = size
    if layout == "bthd":
        return torch.randn(B, tokens, heads, dim, generator=g).to(dtype).transpose(1, 2)
    if layout == "sliced":
        return torch.randn(B, heads, tokens, 2 * dim, generator=g).to(dtype)[..., dim:]
    return torch.randn(size, generator=g).to(dtype)


@dataclass(frozen=True)
class Case:
    """A problem; everything in it follows from its fields."""

    B: int = 2
    H: int = 2
    HKV: int = 2
    T: int = 33
    S: int | None = None
    D: int = 16
    V: int = 16
    phi: str = "elu"
    dtype: torch.dtype = torch.float32
    causal: bool = True
    delay: int = 0
    masked: bool = False
    lengths: tuple[int, ...] | None = None
    state: bool = False
    layout: str = "bhtd"
    seed: int = 0
    eps: float = 1e-6
    decay: float | None = None

    def inputs(self) -> dict[str, Tensor]:
        """Draw q, k, v and whatever else the case has, leaves that require gradients in the case's dtype."""
        g = torch.Generator(DEVICE).manual_seed(self.seed)
        S = self.T if self.S is None else self.S
        B = 1 if self.lengths is not None else self.B

        def draw(heads: int, tokens: int, dim: int) -> Tensor:
            return laid_out(self.layout, (B, heads, tokens, dim), self.dtype, g)

        x = {
            "q": draw(self.H, self.T, self.D),
            "k": draw(self.HKV, S, self.D),
            "v": draw(self.HKV, S, self.V),
        }
        if self.phi == "identity":
            # Signed features whose normaliser vanishes measure luck; these change sign but sum well away from 0.
            x["q"], x["k"] = x["q"] * 0.3 + 0.8, x["k"] * 0.3 + 0.8
        x["do"] = draw(self.H, self.T, self.V)
        if self.masked:
            mask = torch.rand(B, S, generator=g) > 0.3
            mask[0, : S // 3] = False
            x["key_mask"] = mask
        if self.lengths is not None:
            x["cu_seqlens"] = torch.tensor([0, *self.lengths]).cumsum(0)
        rows = B if self.lengths is None else len(self.lengths)
        if self.state:
            x["kv0"] = torch.randn(rows, self.HKV, self.D, self.V, generator=g)
            x["z0"] = 3 * torch.rand(rows, self.HKV, self.D, generator=g) + 0.1
        x["dkv"] = 0.1 * torch.randn(rows, self.HKV, self.D, self.V, generator=g)
        x["dz"] = 0.1 * torch.randn(rows, self.HKV, self.D, generator=g)
        if self.decay is not None:
            # Most tokens fade little, some nearly all.
            u = torch.rand(B, self.HKV, S, generator=g)
            x["log_decay"] = torch.where(u < 0.1, -30 * u * 10, -self.decay * u)
        return x


def run(
    case: Case, backend: str, inputs: dict[str, Tensor] | None = None, *, gradients: bool = True
) -> dict[str, Tensor]:
    """Return output, final state and every gradient of ``sum(o do) + sum(kv dkv) + sum(z dz)``."""
    x = case.inputs() if inputs is None else inputs
    exact = backend == "reference"
    leaves = {
        name: (x[name].double() if exact else x[name]).detach().requires_grad_(gradients)
        for name in ("q", "k", "v", "kv0", "z0", "log_decay")
        if name in x
    }
    state = LinearAttentionState(leaves["kv0"], leaves["z0"]) if case.state else None
    o, final = linear_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        feature_map=case.phi,
        causal=case.causal,
        key_mask=x.get("key_mask"),
        cu_seqlens=x.get("cu_seqlens"),
        state=state,
        delay=case.delay,
        eps=case.eps,
        backend=backend,
        log_decay=leaves.get("log_decay"),
    )
    results = {"o": o.detach(), "kv": final.kv.detach(), "z": final.z.detach()}
    if not gradients:
        return results
    torch.autograd.backward(
        [o, final.kv, final.z], [x[name].to(y.dtype) for name, y in zip(("do", "dkv", "dz"), (o, *final), strict=True)]
    )
    return results | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def scales(case: Case, inputs: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the rows of each result are made of, where that is larger than the rows themselves.

    dq and dk are differences: the gradient through the numerator less that through the normaliser. Where a query sees
    a single key both are equal (at T = 1 the exact dq is rounding alone), so an error relative to dq would measure
    cancellation and not the kernel. The numerator's part is had from the oracle with a huge eps, which makes the
    normaliser a constant.
    """
    huge = 1e30
    ones = inputs | {"v": torch.ones_like(inputs["v"][..., :1])}
    state = {"kv0": inputs["z0"][..., None]} if case.state else {}
    with torch.no_grad():
        den = huge * run(replace(case, eps=huge), "reference", ones | state, gradients=False)["o"].double()
    weight = torch.where(den < 0, den - case.eps, den + case.eps).reciprocal()
    silent = {name: torch.zeros_like(inputs[name]) for name in ("dkv", "dz")}
    numerator = inputs | {"do": inputs["do"].double() * weight * huge} | silent
    parts = run(replace(case, eps=huge), "reference", numerator)
    # That of a log decay is what queries from there on draw from all keys, less what they draw from keys from there on.
    parts["dlog_decay"] = (exact["dv"].double() * inputs["v"].double()).sum(-1)
    differences = ("dq", "dk", "dz0", "dlog_decay")
    return {
        name: torch.maximum(_rows(x), _rows(parts[name]) if name in differences else _rows(x))
        for name, x in exact.items()
    }


def _rows(x: Tensor) -> Tensor:
    return x.double().norm(dim=-1)


def errors(
    found: dict[str, Tensor], exact: dict[str, Tensor], scale: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Return, per result, the error by norm and that of the worst row, relative to :func:`scales`.

    A row is measured against its own size, or a tenth of the typical row's where it is smaller than that.
    """
    out = {}
    for name, x in found.items():
        rows = _rows(x.double() - exact[name].double())
        typical = scale[name].square().mean().sqrt()
        if typical == 0:
            out[name] = (float(rows.max()), float(rows.max()))
            continue
        whole = float(rows.norm() / scale[name].norm())
        out[name] = (whole, float((rows / scale[name].clamp(min=0.1 * typical)).max()))
    return out


def check(case: Case, backend: str, tolerance: float) -> None:
    """Compare a backend with the oracle: by norm within ``tolerance``, and no row off by ten times that.

    A GPU gets sequences ten times as long, of whose rows the worst is worse.
    """
    most = (10 if DEVICE.type == "cpu" else 15) * tolerance
    x = case.inputs()
    exact = run(case, "reference", x)
    worst = errors(run(case, backend, x), exact, scales(case, x, exact))
    bad = {name: e for name, e in worst.items() if not (e[0] <= tolerance and e[1] <= most)}
    assert not bad, f"{case}: {bad}"


def assert_near(found: Tensor, wanted: Tensor, tolerance: float, what: str = "it", least: float = 1e-3) -> None:
    """Compare by norm, with ``least`` where that is smaller."""
    assert found.isfinite().all(), f"{what} is not finite"
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=least)
    assert error <= tolerance, f"{what} off by {error:.1e}"


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill whatever is allocated from now on with NaN, so that what nobody writes is noticed."""
    empty, empty_like = torch.empty, torch.empty_like
    # The first use of a device's context remembers for good which functions allocate: it must not see these.
    with torch.device("meta"):
        assert empty(1).is_meta

    def poisoned(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() and not x.is_meta else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    assert torch.empty(1).isnan().all()
