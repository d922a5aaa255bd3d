"""Drawn problems of the delta rule, and errors against its float64 recurrence."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from hf_linear_attn import DeltaRuleState, delta_rule
from tests.ops.oracle import DEVICE, laid_out

LEAVES = ("q", "k", "v", "beta", "log_decay", "kv0")


@dataclass(frozen=True)
class Case:
    """A problem; everything in it follows from its fields. ``decay`` is the largest log decay, 0 for none."""

    B: int = 2
    HKV: int = 2
    group: int = 1
    T: int = 33
    F: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    delay: int = 0
    decay: float = 0
    masked: bool = False
    lengths: tuple[int, ...] | None = None
    state: bool = False
    l2norm: bool = True
    layout: str = "bhtd"
    seed: int = 0

    def inputs(self) -> dict[str, Tensor]:
        """Draw everything that the case has."""
        g = torch.Generator(DEVICE).manual_seed(self.seed)
        B = 1 if self.lengths is not None else self.B
        rows = B if self.lengths is None else len(self.lengths)

        def draw(heads: int, dim: int) -> Tensor:
            return laid_out(self.layout, (B, heads, self.T, dim), self.dtype, g)

        heads = self.HKV * self.group
        x = {"q": draw(heads, self.F), "k": draw(self.HKV, self.F), "v": draw(self.HKV, self.V)}
        if not self.l2norm:
            # Longer keys would let the state grow without bound.
            x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(self.dtype)
        gates = torch.rand(2, B, self.T, self.HKV, generator=g).transpose(2, 3)
        x["beta"] = 1.9 * gates[0]
        if self.decay:
            x["log_decay"] = -self.decay * gates[1]
        if self.masked:
            x["key_mask"] = torch.rand(B, self.T, generator=g) > 0.3
            x["key_mask"][0, : self.T // 3] = False
        if self.lengths is not None:
            x["cu_seqlens"] = torch.tensor([0, *self.lengths]).cumsum(0)
        if self.state:
            x["kv0"] = torch.randn(rows, self.HKV, self.F, self.V, generator=g)
        x["do"] = draw(heads, self.V)
        x["dkv"] = 0.3 * torch.randn(rows, self.HKV, self.F, self.V, generator=g)
        return x


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype, lengths: list[int], dims: list[int]) -> Case:
    """Draw groups, masks, packing, states, delays, decays, layouts and odd sizes."""
    T = draw(st.sampled_from(lengths))
    B, HKV, group = draw(st.sampled_from([(1, 1, 1), (1, 1, 3), (1, 2, 2), (2, 1, 2), (2, 2, 1)]))
    kind = draw(st.sampled_from(["plain", "delayed", "packed"]))
    cut = sorted(draw(st.tuples(st.integers(0, T), st.integers(0, T))))
    return Case(
        B=B,
        HKV=HKV,
        group=group,
        T=T,
        F=draw(st.sampled_from(dims)),
        V=draw(st.sampled_from(dims)),
        dtype=dtype,
        delay=0 if kind == "plain" else draw(st.sampled_from([1, 3, 16, 50] if kind == "delayed" else [0, 0, 3])),
        decay=draw(st.sampled_from([0, 0.1, 1, 8])),
        masked=draw(st.booleans()),
        lengths=(cut[0], cut[1] - cut[0], T - cut[1]) if kind == "packed" else None,
        state=draw(st.booleans()),
        l2norm=draw(st.sampled_from([True, True, False])),
        layout=draw(st.sampled_from(["bhtd", "bthd", "sliced"])),
        seed=draw(st.integers(0, 1000)),
    )


def run(
    case: Case, backend: str, inputs: dict[str, Tensor] | None = None, *, gradients: bool = True
) -> dict[str, Tensor]:
    """Return output, final state and every gradient of ``sum(o do) + sum(kv dkv)``."""
    x = case.inputs() if inputs is None else inputs
    exact = backend == "reference"
    leaves = {
        name: (x[name].double() if exact else x[name]).detach().requires_grad_(gradients)
        for name in LEAVES
        if name in x
    }
    o, final = delta_rule(
        *(leaves.get(name) for name in LEAVES[:5]),
        key_mask=x.get("key_mask"),
        cu_seqlens=x.get("cu_seqlens"),
        state=DeltaRuleState(leaves["kv0"]) if case.state else None,
        delay=case.delay,
        l2norm=case.l2norm,
        backend=backend,
    )
    results = {"o": o.detach(), "kv": final.kv.detach()}
    if not gradients:
        return results
    torch.autograd.backward([o, final.kv], [x["do"].to(o.dtype), x["dkv"].to(final.kv.dtype)])
    return results | {
        f"d{name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each result by norm, relative to what is right, or to a thousandth where that is less."""
    return {
        name: float((x.double() - exact[name].double()).norm() / exact[name].double().norm().clamp(min=1e-3))
        for name, x in found.items()
    }


def condition(case: Case, x: dict[str, Tensor], exact: dict[str, Tensor], relative: float) -> dict[str, float]:
    """Return how far each result moves when queries, keys, values and the state are off by so much, at random."""
    g = torch.Generator(DEVICE).manual_seed(1)

    def moved(y: Tensor) -> Tensor:
        y = y.double()
        return y * (1 + relative * (2 * torch.rand(y.shape, generator=g, dtype=y.dtype) - 1))

    rounded = {name: moved(x[name]) for name in ("q", "k", "v", "kv0", "do") if name in x}
    return errors(run(case, "reference", x | rounded), exact)


def check(case: Case, backend: str, tolerance: float) -> None:
    """Compare a backend with the oracle: within ``tolerance``, or what rounding of that order does to the problem."""
    x = case.inputs()
    exact = run(case, "reference", x)
    worst = errors(run(case, backend, x), exact)
    bad = {name: e for name, e in worst.items() if not e <= tolerance}
    if bad:
        allowed = condition(case, x, exact, tolerance)
        bad = {name: (e, allowed[name]) for name, e in bad.items() if not e <= 2 * allowed[name]}
    assert not bad, f"{case}: {bad}"
