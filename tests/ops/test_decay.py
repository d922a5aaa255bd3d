"""Sums that fade: the recurrence, what is masked, what is refused; test_oracle.py has the drawn problems."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn import linear_attention
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.linear_attention.triton import forward, gradients, steps, stored_gradients
from tests.ops import delta, oracle
from tests.ops.oracle import DEVICE, Case, check, run


def recurrence(x: dict[str, Tensor], delay: int = 0) -> dict[str, Tensor]:
    """Read one token after the other, in float64."""
    q, k, v, g = (x[name].double() for name in ("q", "k", "v", "log_decay"))
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    kv, z, outputs = x["kv0"].double(), x["z0"].double(), []
    for t in range(q.shape[2]):
        if t >= delay:
            j = t - delay
            real = x["key_mask"][:, j].double()[:, None]
            fade = torch.where(real.bool(), g[:, :, j], 0).exp()
            kv = fade[..., None, None] * kv + (real[..., None] * phi_k[:, :, j])[..., None] * v[:, :, j, None]
            z = fade[..., None] * z + real[..., None] * phi_k[:, :, j]
        group = q.shape[1] // k.shape[1]
        num = torch.einsum("bhf,bhfv->bhv", phi_q[:, :, t], kv.repeat_interleave(group, 1))
        den = (phi_q[:, :, t] * z.repeat_interleave(group, 1)).sum(-1) + 1e-6
        outputs.append(num / den[..., None])
    return {"o": torch.stack(outputs, 2), "kv": kv, "z": z}


@pytest.mark.parametrize(
    ("rule", "backend", "cut"),
    [
        (oracle, "torch", "whole_sequences"),
        (oracle, "triton", "whole_sequences"),
        (oracle, "triton", "short_segments"),
        (oracle, "triton", "stored_states"),
        # Of the delta rule chunks are all alike.
        (delta, "torch", "whole_sequences"),
        (delta, "triton", "whole_sequences"),
    ],
)
def test_nothing_is_lost_behind_strong_decays(
    rule: Any, backend: str, cut: str, request: pytest.FixtureRequest
) -> None:
    """Sums of log decays grow to thousands, and differences of a hundredth still count."""
    request.getfixturevalue(cut)
    case = rule.Case(B=1, HKV=1, T=64, decay=0.05, **({"H": 1} if rule is oracle else {}))
    x = case.inputs()
    x["log_decay"] = torch.where(torch.arange(64) % 4 == 0, -1000.0, -0.05).expand(1, 1, -1)
    exact, found = rule.run(case, "reference", x), rule.run(case, backend, x)
    for name in ("o", "kv", "dv", "dlog_decay"):
        error = (found[name].double() - exact[name]).norm() / exact[name].norm()
        # The kernels take a decay of less than exp(-80) for that.
        assert error < 1e-5, name


RESETS = (0, 7, 8, 20, 33)
"""Tokens before which all is forgotten: the first one, two in a row, and others within chunks and segments."""


def with_resets(case: Any, resets: tuple[int, ...] = RESETS) -> dict[str, Tensor]:
    """Draw a case; what is forgotten first is a state of large numbers."""
    x = {name: y.detach() for name, y in case.inputs().items()}
    x["log_decay"][:, :, list(resets)] = -torch.inf
    return x | {name: 1e30 * x[name] for name in ("kv0", "z0") if name in x}


@pytest.mark.parametrize(
    ("backend", "cut", "delay"),
    [
        ("reference", "whole_sequences", 3),
        ("torch", "whole_sequences", 0),
        ("torch", "whole_sequences", 3),
        ("triton", "whole_sequences", 3),
        ("triton", "short_segments", 0),
        ("triton", "stored_states", 3),
    ],
)
@pytest.mark.usefixtures("short_chunks")
def test_minus_infinity_is_a_reset(backend: str, cut: str, delay: int, request: pytest.FixtureRequest) -> None:
    """Outputs, states and gradients are those of the recurrence, whose state is 0 there."""
    request.getfixturevalue(cut)
    case = Case(B=2, H=4, HKV=2, T=40, D=5, V=3, masked=True, state=True, decay=0.3, delay=delay)
    x = with_resets(case)
    # Queries that see no key yet read a state of ordinary size.
    x |= {name: x[name] / 1e30 for name in ("kv0", "z0")} if delay else {}
    leaves = {n: x[n].double().requires_grad_() for n in ("q", "k", "v", "kv0", "z0", "log_decay")}
    exact = recurrence(x | leaves, delay)
    torch.autograd.backward(list(exact.values()), [x[name].double() for name in ("do", "dkv", "dz")])
    exact |= {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    found = run(case, backend, x)
    for name, y in found.items():
        torch.testing.assert_close(y.double(), exact[name].detach(), rtol=1e-4, atol=2e-4, msg=name)
    assert (found["dlog_decay"][:, :, list(RESETS)] == 0).all()
    assert x["log_decay"][:, :, list(RESETS)].isinf().all()


OF_TOKENS = ("q", "k", "v", "beta", "log_decay", "do")


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", torch.float32), ("torch", torch.float64), ("torch", torch.bfloat16), ("triton", torch.float32)],
)
@pytest.mark.parametrize(
    ("case", "cut"),
    [
        (Case(B=1, H=2, HKV=1, T=40, state=True, decay=0.3), "whole_sequences"),
        (Case(B=1, H=2, HKV=1, T=40, state=True, decay=0.3), "stored_states"),
        (delta.Case(B=1, HKV=1, group=2, T=40, state=True, decay=1), "whole_sequences"),
    ],
    ids=["linear", "linear-stored", "delta"],
)
def test_nothing_crosses_a_reset(
    case: Any, cut: str, backend: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Neither values nor gradients, to the last bit; and in packed texts as in texts of their own."""
    request.getfixturevalue(cut)
    case, rule = replace(case, dtype=dtype), oracle if isinstance(case, Case) else delta
    x = with_resets(case, (21,))
    of_state = [name for name in ("kv0", "z0") if name in x]
    x |= {name: x[name].double() for name in (*of_state, "log_decay") if dtype == torch.float64}
    past = torch.arange(40) < 21
    changed = x | {name: torch.where(past[:, None], 1e4 * x[name], x[name]) for name in ("k", "v")}
    changed |= {name: -x[name] for name in of_state}
    clean, found = (rule.run(case, backend, y, gradients=False) for y in (x, changed))
    assert torch.equal(found.pop("o")[:, :, 21:], clean["o"][:, :, 21:])
    for name, y in found.items():
        assert torch.equal(y, clean[name]), name
    later = rule.run(case, backend, changed | {"do": x["do"] * ~past[:, None]})
    for name in ("dq", "dk", "dv", *(("dbeta",) if rule is delta else ())):
        assert not later[name][:, :, :21].any(), name
        assert later[name].isfinite().all(), name
    # Linear attention's reference differentiates a sum over all tokens.
    assert later["dlog_decay"][:, :, :21].abs().max() <= (1e-12 if (rule, backend) == (oracle, "reference") else 0)
    assert later["dlog_decay"][0, 0, 21] == 0
    assert not later["dkv0"].any()
    lengths, alone = (10, 0, 30), replace(case, state=False)
    x = {name: y for name, y in x.items() if name not in of_state}
    states = {name: y.expand(3, *y.shape[1:]) for name, y in x.items() if name in ("dkv", "dz")}
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    whole = rule.run(replace(alone, lengths=lengths), backend, x | states | {"cu_seqlens": bounds})
    for n, (a, b) in ((0, (0, 10)), (2, (10, 40))):
        piece = {name: y[:, :, a:b] if name in OF_TOKENS else y for name, y in x.items()}
        for name, y in rule.run(alone, backend, piece).items():
            other = whole[name][n : n + 1] if name in ("kv", "z") else whole[name][:, :, a:b]
            torch.testing.assert_close(other, y, msg=name)


@triton.jit
def within_a_chunk(
    a, b, c, less, visible, acc, PRECISION, PIN, of_rows=None, of_columns=None, FADED=False, APART=False, LAST=False
):
    """Attend as if nothing faded."""
    return steps.attend(a, b, c, less, visible, acc, PRECISION, PIN)


@triton.jit
def of_sums(b, T, base, start, c, end, ot):
    """Sum up log decays as if there were none."""
    return steps.sums_since(b, T, base, start, c, end, ot) * 0.0


@triton.jit
def of_pairs(b, T, c, end, ot):
    """Tell of rows that nothing faded before them."""
    return tl.zeros(ot.shape, tl.float32), tl.zeros(ot.shape, tl.float32)


@triton.jit
def of_chunks(b, T, c, start, end, ot, BT):
    """Tell of a chunk that all of it is left."""
    return tl.full(ot.shape, 1.0, tl.float32), 1.0


@triton.jit
def between_segments(a, b, PRECISION):
    """Sum up segments as if nothing faded."""
    return tl.cumsum(b, 0)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled kernels do not look up what they call")
@pytest.mark.parametrize("module", [forward, gradients, stored_gradients])
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("attend", within_a_chunk),
        ("sums_at", of_pairs),
        ("sums_since", of_sums),
        ("sums_until", of_sums),
        ("kept_by_chunk", of_chunks),
        ("exact", between_segments),
    ],
)
def test_a_decay_left_out_anywhere_is_noticed(
    name: str, broken: object, module: object, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if not hasattr(module, name):
        pytest.skip("both scan alike")
    # Walks that carry a state ask for chunks, of which a short segment has but one.
    cut = "stored_states" if module is stored_gradients else "short_segments"
    request.getfixturevalue("whole_sequences" if name == "kept_by_chunk" else cut)
    case = Case(B=1, H=1, HKV=1, T=40, decay=0.5)
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError, match="Case"):
        check(case, "triton", 1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"log_decay": torch.ones(1, 2, 3)}, ArgumentError, r"`log_decay` must be at most 0, got 1\.0\..*-softplus"),
        ({"log_decay": torch.zeros(1, 3)}, ArgumentError, r"`log_decay` must have k's \[B, HKV, S\] = \(1, 2, 3\)"),
        ({"log_decay": torch.zeros(1, 2, 3, dtype=torch.int64)}, ArgumentTypeError, "`log_decay` must be bf16"),
        ({"log_decay": 0.5}, ArgumentTypeError, "`log_decay` must be a tensor or None, got 'float'"),
        ({"log_decay": torch.zeros(1, 2, 3, device="meta")}, ArgumentError, "`log_decay` must be on k's device"),
        ({"causal": False}, ArgumentError, "`log_decay` must be None where not causal"),
    ],
)
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    # On a GPU nobody waits to see numbers.
    q, k, v = (torch.randn(1, 2, 3, 4, device="cpu") for _ in range(3))
    with pytest.raises(error, match=message):
        linear_attention(q, k, v, **({"log_decay": torch.zeros(1, 2, 3, device="cpu")} | change))
