"""Sums that fade: the recurrence, what is masked, what is refused; test_oracle.py has the drawn problems."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn import LinearAttentionState, linear_attention
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.linear_attention import torch as chunked
from hf_linear_attn.ops.linear_attention.triton import forward, gradients, op, steps, stored_gradients
from tests.ops.oracle import DEVICE, Case, check, poison, run
from tests.ops.test_library import positional
from tests.spread import spread

CASE = Case(B=2, H=4, HKV=2, T=37, D=5, V=3, dtype=torch.float64, masked=True, state=True, decay=0.3)


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


@pytest.mark.parametrize("delay", [0, 6, 100])
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.usefixtures("short_chunks", "short_segments")
def test_the_recurrence(backend: str, delay: int) -> None:
    x = CASE.inputs()
    dtype = torch.float32 if backend == "triton" else torch.float64
    x |= {name: x[name].to(dtype) for name in ("q", "k", "v", "kv0", "z0")}
    state = LinearAttentionState(x["kv0"], x["z0"])
    o, final = linear_attention(
        x["q"], x["k"], x["v"], key_mask=x["key_mask"], state=state, delay=delay, log_decay=x["log_decay"],
        backend=backend,
    )  # fmt: skip
    for name, right in recurrence(x, delay).items():
        tolerance = 1e-7 if dtype == torch.float64 else 1e-5
        found = {"o": o, "kv": final.kv, "z": final.z}[name].double()
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("stored_states")
def test_pieces_and_packed_texts_are_the_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = {name: y.detach() for name, y in Case(B=1, T=90, decay=0.2).inputs().items()}

    def attend(a: int, b: int, **more: object) -> tuple[Tensor, LinearAttentionState]:
        q, k, v, g = (x[name][:, :, a:b] for name in ("q", "k", "v", "log_decay"))
        return linear_attention(q, k, v, log_decay=g, backend=backend, **more)

    whole, final = attend(0, 90)
    state, parts = None, []
    for a, b in ((0, 64), (64, 65), (65, 90)):
        o, state = attend(a, b, state=state)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(state, final)
    bounds = (0, 64, 64, 90)
    packed, states = attend(0, 90, cu_seqlens=torch.tensor(bounds))
    alone = [attend(a, b) for a, b in ((0, 64), (64, 90))]
    torch.testing.assert_close(packed, torch.cat([o for o, _ in alone], 2))
    torch.testing.assert_close(states.kv[[0, 2]], torch.cat([s.kv for _, s in alone]))
    assert not states.kv[1].any()


@pytest.mark.parametrize(
    ("backend", "cut"),
    [
        ("torch", "whole_sequences"),
        ("triton", "whole_sequences"),
        ("triton", "short_segments"),
        ("triton", "stored_states"),
    ],
)
def test_nothing_is_lost_behind_strong_decays(backend: str, cut: str, request: pytest.FixtureRequest) -> None:
    """Sums of log decays grow to thousands, and differences of a hundredth still count."""
    request.getfixturevalue(cut)
    x = Case(B=1, H=1, HKV=1, T=64, decay=0.05).inputs()
    x["log_decay"] = torch.where(torch.arange(64) % 4 == 0, -1000.0, -0.05).expand(1, 1, -1)
    exact, found = run(Case(), "reference", x), run(Case(), backend, x)
    for name in ("o", "kv", "dv", "dlog_decay"):
        error = (found[name].double() - exact[name]).norm() / exact[name].norm()
        # The kernels take a decay of less than exp(-80) for that.
        assert error < 1e-5, name


RESETS = (0, 7, 8, 20, 33)
"""Tokens before which all is forgotten: the first one, two in a row, and others within chunks and segments."""


def with_resets(case: Case, resets: tuple[int, ...] = RESETS) -> dict[str, Tensor]:
    """Draw a case; what is forgotten first is a state of large numbers."""
    x = {name: y.detach() for name, y in case.inputs().items()}
    x["log_decay"][:, :, list(resets)] = -torch.inf
    for name in ("kv0", "z0"):
        x[name] = x[name] * 1e30
    return x


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


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", torch.float32), ("torch", torch.float64), ("torch", torch.bfloat16), ("triton", torch.float32)],
)
@pytest.mark.parametrize("cut", ["whole_sequences", "stored_states"])
def test_nothing_crosses_a_reset(backend: str, dtype: torch.dtype, cut: str, request: pytest.FixtureRequest) -> None:
    """Neither values nor gradients, to the last bit; and in packed texts as in texts of their own."""
    request.getfixturevalue(cut)
    case = Case(B=1, H=2, HKV=1, T=40, state=True, decay=0.3, dtype=dtype)
    x = with_resets(case, (21,))
    x |= {name: x[name].to(torch.float64) for name in ("kv0", "z0") if dtype == torch.float64}
    past = torch.arange(40) < 21
    huge = x | {name: torch.where(past[:, None], 1e4 * x[name], x[name]) for name in ("k", "v")}
    clean, found = run(case, backend, x, gradients=False), run(case, backend, huge, gradients=False)
    assert torch.equal(found["o"][:, :, 21:], clean["o"][:, :, 21:])
    for name in ("kv", "z"):
        assert torch.equal(found[name], clean[name])
    later = run(case, backend, huge | {"do": x["do"] * ~past[:, None]})
    for name in ("dq", "dk", "dv"):
        assert not later[name][:, :, :21].any(), name
        assert later[name].isfinite().all(), name
    # The reference differentiates a sum over all tokens.
    assert later["dlog_decay"][:, :, :21].abs().max() <= (1e-12 if backend == "reference" else 0)
    assert later["dlog_decay"][0, 0, 21] == 0
    assert not later["dkv0"].any()
    bounds = (0, 10, 40)
    x = {name: y for name, y in x.items() if name not in ("kv0", "z0")}
    packed = Case(**(vars(case) | {"lengths": (10, 30), "state": False}))
    alone = Case(**(vars(case) | {"state": False}))
    whole = run(
        packed,
        backend,
        x
        | {"cu_seqlens": torch.tensor(bounds), "dkv": x["dkv"].expand(2, -1, -1, -1), "dz": x["dz"].expand(2, -1, -1)},
    )
    for n, (a, b) in enumerate(((0, 10), (10, 40))):
        piece = {name: y[:, :, a:b] if name in ("q", "k", "v", "do", "log_decay") else y for name, y in x.items()}
        for name, y in run(alone, backend, piece).items():
            other = whole[name][n : n + 1] if name in ("kv", "z") else whole[name][:, :, a:b]
            torch.testing.assert_close(other, y, msg=name)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("short_chunks", "short_segments")
def test_masked_content_matters_nowhere(backend: str) -> None:
    x = Case(B=2, H=2, HKV=1, T=40, masked=True, decay=0.2).inputs()
    clean = run(Case(), backend, x)
    hidden = ~x["key_mask"][:, None]
    for content in (torch.nan,) if backend == "triton" else (torch.nan, torch.inf, 3.0):
        dirty = x | {"log_decay": x["log_decay"].masked_fill(hidden, content)}
        for name, y in run(Case(), backend, dirty).items():
            assert torch.equal(y, clean[name]), name
    assert not clean["dlog_decay"][hidden.expand_as(clean["dlog_decay"])].any()


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
    ("leaves", "cut"),
    spread(product([("log_decay",), ("q", "log_decay"), ("v",)], ["whole_sequences", "stored_states"]), 5),
)
def test_gradients_are_the_same_for_whoever_asks(
    leaves: tuple[str, ...], cut: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(cut)
    case = Case(B=1, H=2, HKV=1, T=40, delay=3, state=True, decay=0.5)
    every, x = run(case, "triton"), case.inputs()
    tensors = {name: x[name].requires_grad_(name in leaves) for name in ("q", "k", "v", "kv0", "z0", "log_decay")}
    state = LinearAttentionState(tensors.pop("kv0"), tensors.pop("z0"))
    o, final = linear_attention(**tensors, delay=3, state=state, backend="triton")
    torch.autograd.backward([o, *final], [x["do"], x["dkv"], x["dz"]])
    for name in leaves:
        assert torch.equal(x[name].grad, every[f"d{name}"]), name


@pytest.mark.parametrize("forward", [chunked.chunked_forward, op.triton_forward])
def test_opcheck(forward: Callable[..., object]) -> None:
    case = Case(B=1, T=3, D=8, V=4, HKV=1, masked=True, state=True, decay=0.3)
    log_decay = case.inputs()["log_decay"].requires_grad_()
    *tensors, _, phi, causal, delay, eps = positional(case)
    torch.library.opcheck(forward, (*tensors, log_decay, phi, causal, delay, eps))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_without_graph_breaks(backend: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        o, state = linear_attention(q, k, v, log_decay=-F.softplus(a), backend=backend)
        return o.sum() + state.kv.square().sum() + state.z.sum()

    leaves = [torch.randn(1, 2, 19, 8, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(1, 2, 19, requires_grad=True))
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    for x, y in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"log_decay": torch.ones(1, 2, 3)}, ArgumentError, r"`log_decay` must be <= 0, got 1\.0\..*-softplus"),
        ({"log_decay": torch.zeros(1, 3)}, ArgumentError, r"`log_decay` must have shape \[B, HKV, S\] = \(1, 2, 3\)"),
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
