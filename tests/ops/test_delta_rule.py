"""The delta rule: every backend against the float64 recurrence, and what holds between calls."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from hf_linear_attn import DeltaRuleState, LinearAttentionState, delta_rule
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, BackendError
from hf_linear_attn.ops.delta_rule import delta_opaque_, delta_step_
from hf_linear_attn.ops.delta_rule import torch as chunked
from hf_linear_attn.ops.delta_rule.triton import op, problem
from hf_linear_attn.ops.delta_rule.triton.backward import backward_launches
from hf_linear_attn.ops.delta_rule.triton.forward import forward_launches
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile
from tests.ops.delta import LEAVES, Case, cases, check, run
from tests.ops.oracle import DEVICE, poison
from tests.spread import spread

# fp32 sums of at most a few hundred terms; operands of matrix products are rounded once in bf16, 2^-9 relative, and up
# to four such roundings meet in a gradient.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}

if DEVICE.type == "cpu":
    LENGTHS, DIMS = [1, 5, 31, 32, 33, 50], [3, 16, 20]
else:
    LENGTHS, DIMS = [1, 5, 63, 64, 65, 200, 333], [4, 20, 64, 96, 128]

drawn = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""The same problems in every run; fixtures only set what all of them share."""


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch walk chunks of 8 tokens and spans of 24, so that small problems have several."""
    monkeypatch.setattr(chunked, "CHUNK", 8)
    monkeypatch.setattr(chunked, "SPAN", 24)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_torch_backend(dtype: torch.dtype) -> None:
    @settings(drawn, max_examples=60)
    @given(cases(dtype, [1, 2, 7, 8, 9, 24, 33, 60], [3, 8, 16, 20]))
    def holds(case: Case) -> None:
        check(case, "torch", TOLERANCE[dtype])

    holds()


@pytest.mark.parametrize(("dtype", "number"), spread([(torch.float32, 6), (torch.bfloat16, 4), (torch.float16, 1)], 3))
def test_kernels(dtype: torch.dtype, number: int) -> None:
    @settings(drawn, max_examples=number)
    @given(cases(dtype, LENGTHS, DIMS))
    def holds(case: Case) -> None:
        check(case, "triton", TOLERANCE[dtype])

    holds()


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, HKV=1, T=100, F=16, V=40, decay=1, state=True, masked=True, delay=3),
        Case(B=1, HKV=1, T=90, F=80, V=16, lengths=(70, 0, 20)),
    ],
    ids=["delayed", "packed"],
)
def test_kernels_with_the_chunks_of_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 tokens, whose inverse is put together from halves; the interpreter's own are smaller."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(problem, "tile", lambda *_: Tile(64, 32, 1, 1))
    check(case, "triton", TOLERANCE[case.dtype])


def test_what_it_computes() -> None:
    """Keys that do not overlap are a table: a second writing replaces what the first left."""
    k = torch.eye(4)[[0, 1, 0]][None, None]
    v = torch.tensor([[1.0, 0], [2, 0], [0, 3]])[None, None]
    beta = torch.tensor([[[1.0, 1, 0.5]]])
    o, state = delta_rule(k, k, v, beta, l2norm=False)
    assert o[0, 0].tolist() == [[1, 0], [2, 0], [0.5, 1.5]]
    assert state.kv[0, 0].tolist() == [[0.5, 1.5], [2, 0], [0, 0], [0, 0]]
    assert state.z is None
    # The decay comes first: what fades is not what is written now.
    half = torch.full((1, 1, 3), 0.5).log()
    _, state = delta_rule(k, k, v, beta, half, l2norm=False)
    assert torch.allclose(state.kv[0, 0, :2], torch.tensor([[0.125, 1.5], [1, 0]]))


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("delay", [0, 3])
def test_a_sequence_may_be_cut_anywhere(backend: str, delay: int) -> None:
    case = Case(B=1, HKV=1, group=2, T=40, decay=1, masked=True)
    x = case.inputs()
    q, k, v, beta, g, mask = (x[name] for name in ("q", "k", "v", "beta", "log_decay", "key_mask"))
    whole, end = delta_rule(q, k, v, beta, g, key_mask=mask, delay=delay, backend=backend)
    # Keys that lag are those of the calls before: a query sees what was read up to `delay` tokens ago.
    q = q[:, :, delay:]
    state, o = None, []
    for a, b in ((0, 1), (1, 2), (2, 19), (19, 40 - delay)):
        piece = [y[:, :, a:b] for y in (q, k, v, beta, g)]
        y, state = delta_rule(*piece, key_mask=mask[:, a:b], state=state, backend=backend)
        o.append(y)
    torch.testing.assert_close(torch.cat(o, 2), whole[:, :, delay:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.kv, end.kv, rtol=1e-5, atol=1e-5)
    assert (whole[:, :, :delay] == 0).all()


def test_packed_sequences_are_as_if_apart() -> None:
    case = Case(lengths=(5, 0, 28), T=33, decay=1, state=True, delay=2, masked=True)
    x = case.inputs()
    packed = run(case, "torch", x)
    for n, (a, b) in enumerate(((0, 5), (5, 33))):
        row = 2 * n
        alone = {name: x[name][:, :, a:b] for name in ("q", "k", "v", "beta", "log_decay", "do")}
        alone |= {"key_mask": x["key_mask"][:, a:b], "kv0": x["kv0"][row : row + 1], "dkv": x["dkv"][row : row + 1]}
        for name, y in run(replace(case, lengths=None), "torch", alone).items():
            found = packed[name][row : row + 1] if name in ("kv", "dkv0") else packed[name][:, :, a:b]
            torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-6)
    assert torch.equal(packed["kv"][1], x["kv0"][1])


@pytest.mark.parametrize("decay", [0.0, 0.7])
@pytest.mark.parametrize("l2norm", [True, False])
def test_derivatives(decay: float, l2norm: bool) -> None:
    case = Case(B=1, HKV=1, group=2, T=11, F=3, V=2, decay=decay, l2norm=l2norm, state=True, delay=1, masked=True)
    x = case.inputs()
    leaves = [x[name].double().requires_grad_() for name in ("q", "k", "v", "beta", "log_decay", "kv0") if name in x]

    def of(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        gates, kv0 = tensors[3:-1], tensors[-1]
        settings = {"key_mask": x["key_mask"], "state": DeltaRuleState(kv0), "delay": 1, "l2norm": l2norm}
        o, final = delta_rule(*tensors[:3], *gates, **settings, backend="torch")
        return o, final.kv

    assert torch.autograd.gradcheck(of, leaves)


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("delay", [0, 3])
def test_minus_infinity_is_a_reset(backend: str, delay: int) -> None:
    """The first token, two in a row and others within chunks, of which some are masked and are none."""
    case = Case(B=2, HKV=2, group=2, T=50, F=5, V=3, decay=1, state=True, masked=True, delay=delay)
    x, resets = case.inputs(), [0, 13, 14, 30, 45]
    x["log_decay"][:, :, resets] = -torch.inf
    leaves = {name: x[name].double().requires_grad_() for name in LEAVES}
    exact = recurrence(leaves, x["key_mask"], delay)
    torch.autograd.backward(list(exact.values()), [x[name].double() for name in ("do", "dkv")])
    exact |= {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    found = run(case, backend, x)
    for name, y in found.items():
        torch.testing.assert_close(y.double(), exact[name].detach(), rtol=1e-4, atol=1e-4, msg=name)
    assert (found["dlog_decay"][:, :, resets] == 0).all()


def recurrence(x: dict[str, Tensor], key_mask: Tensor, delay: int) -> dict[str, Tensor]:
    """Read one token after the other; what a reset forgets is multiplied by 0."""
    q, k, v, beta, g, s = (x[name] for name in LEAVES)
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    o = []
    for t in range(q.shape[2]):
        if (j := t - delay) >= 0:
            real = key_mask[:, j, None]
            s = torch.where(real, g[:, :, j], 0).exp()[..., None, None] * s
            error = v[:, :, j] - torch.einsum("bhf,bhfv->bhv", k[:, :, j], s)
            written = torch.einsum("bhf,bhv->bhfv", k[:, :, j], (beta[:, :, j] * real)[..., None] * error)
            s = s + written
        o.append(torch.einsum("bhf,bhfv->bhv", q[:, :, t], s.repeat_interleave(q.shape[1] // k.shape[1], 1)))
    return {"o": torch.stack(o, 2), "kv": s}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", torch.float32), ("torch", torch.float64), ("torch", torch.bfloat16), ("triton", torch.float32)],
)
def test_nothing_crosses_a_reset(backend: str, dtype: torch.dtype) -> None:
    """Neither values nor gradients, to the last bit; and in packed texts as in texts of their own."""
    case = Case(B=1, HKV=1, group=2, T=40, decay=1, state=True, dtype=dtype)
    x = case.inputs()
    x["log_decay"][:, :, 21] = -torch.inf
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    x |= {"kv0": 1e30 * x["kv0"].to(state_dtype), "log_decay": x["log_decay"].to(state_dtype)}
    past = torch.arange(40) < 21
    changed = x | {"v": torch.where(past[:, None], 1e4 * x["v"], x["v"]), "kv0": -x["kv0"]}
    clean, found = run(case, backend, x, gradients=False), run(case, backend, changed, gradients=False)
    assert clean["o"].isfinite().all()
    assert torch.equal(found["o"][:, :, 21:], clean["o"][:, :, 21:])
    assert torch.equal(found["kv"], clean["kv"])
    later = run(case, backend, x | {"do": x["do"] * ~past[:, None]})
    for name in ("dq", "dk", "dv", "dbeta"):
        assert not later[name][:, :, :21].any(), name
        assert later[name].isfinite().all(), name
    assert not later["dlog_decay"][:, :, :22].any()
    assert not later["dkv0"].any()
    assert x["log_decay"][0, 0, 21] == -torch.inf
    lengths = (10, 0, 30)
    states = {name: x[name].expand(3, -1, -1, -1) for name in ("kv0", "dkv")}
    packed = replace(case, lengths=lengths, state=False)
    whole = run(packed, backend, x | states | {"cu_seqlens": torch.tensor((0, *lengths)).cumsum(0)})
    for n, (a, b) in ((0, (0, 10)), (2, (10, 40))):
        piece = {name: y if "kv" in name else y[:, :, a:b] for name, y in x.items()}
        for name, y in run(replace(case, state=False), backend, piece).items():
            if name != "dkv0":
                other = whole[name][n : n + 1] if name == "kv" else whole[name][:, :, a:b]
                torch.testing.assert_close(other, y, msg=name)


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_nothing_is_lost_behind_strong_decays(backend: str) -> None:
    """Sums of log decays grow to thousands within a chunk, and differences of a hundredth still count."""
    case = Case(B=1, HKV=1, T=64, decay=0.05)
    x = case.inputs()
    x["log_decay"] = torch.where(torch.arange(64) % 4 == 0, -1000.0, -0.05).expand(1, 1, -1)
    exact = run(case, "reference", x | {"log_decay": x["log_decay"].clamp(min=-700)})
    found = run(case, backend, x)
    for name in ("o", "kv", "dv", "dlog_decay"):
        error = (found[name].double() - exact[name]).norm() / exact[name].norm()
        assert error < 1e-5, name


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_step_forgets_all_at_a_log_decay_of_minus_infinity(backend: str, tokens: int) -> None:
    x = Case(B=1, HKV=2, T=tokens, F=20, V=17, decay=1).inputs()
    x["log_decay"][:, :, 0] = -torch.inf
    q, k, v, beta, g = (x[name] for name in LEAVES[:5])
    before, expected = (torch.full((1, 2, 20, 17), size) for size in (1e30, 0.0))
    o = delta_step_(q, k, v, beta, g, DeltaRuleState(before), backend=backend)
    torch.testing.assert_close(
        o, delta_step_(q, k, v, beta, g.clamp(min=-1), DeltaRuleState(expected), backend=backend)
    )
    torch.testing.assert_close(before, expected)


def test_one_key_written_over_and_over_stays_bounded() -> None:
    """With beta = 2 every token mirrors the state: the inverse of a chunk has no small entries to hide behind."""
    k = F.normalize(torch.randn(1, 1, 1, 16), dim=-1).expand(1, 1, 200, 16)
    v, beta = torch.randn(1, 1, 200, 16), torch.full((1, 1, 200), 2.0)
    expected, _ = delta_rule(k, k, v, beta, backend="reference")
    o, _ = delta_rule(k, k, v, beta, backend="torch")
    # A key's length is known to 1e-7, and what is off by that in one mirror is carried through 200.
    assert (o - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("lengths", [None, (0, 18, 27)])
def test_writes_all_it_allocates(
    backend: str, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(B=1, HKV=1, T=45, decay=1, state=True, delay=5, masked=True, lengths=lengths)
    clean = run(case, backend)
    poison(monkeypatch)
    for name, x in run(case, backend).items():
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize(
    ("forward", "lengths", "decay"),
    [
        (chunked.delta_forward, None, 1.0),
        (chunked.delta_forward, (1, 2), 0.0),
        (op.triton_delta_forward, (1, 2), 1.0),
    ],
    ids=["torch", "torch-packed", "triton"],
)
def test_opcheck(forward: Callable[..., object], lengths: tuple[int, ...] | None, decay: float) -> None:
    case = Case(B=1, HKV=1, T=3, F=4, V=3, decay=decay, masked=True, state=True, lengths=lengths)
    x = case.inputs()
    leaves = [x[n].requires_grad_() if n in x else None for n in ("q", "k", "v", "beta", "log_decay")]
    arguments = (*leaves, x["key_mask"], x.get("cu_seqlens"), x["kv0"].requires_grad_(), 1, True)
    torch.library.opcheck(forward, arguments)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_without_graph_breaks(backend: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, kv: Tensor) -> Tensor:
        gates = beta.sigmoid(), -F.softplus(g)
        o, state = delta_rule(q, k, v, *gates, state=DeltaRuleState(kv), backend=backend)
        return o.sum() + state.kv.square().sum()

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        sizes = [(1, 1, 19, 8)] * 3 + [(1, 1, 19)] * 2 + [(1, 1, 8, 8)]
        leaves = [torch.randn(size, requires_grad=True) for size in sizes]
        function(*leaves).backward()
        return [x.grad for x in leaves]

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled), gradients(loss), strict=True):
        assert torch.equal(found, expected)


def test_refuses_what_it_cannot_differentiate() -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, requires_grad=True) for _ in range(3))
    beta = torch.rand(1, 1, 5)
    o = delta_rule(q, k, v, beta, return_state=False, backend="torch")
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(BackendError, match="must be 'reference' for second derivatives"):
        dq.sum().backward()
    with pytest.raises(BackendError, match="must be 'reference' under vmap"):
        torch.vmap(lambda y: delta_rule(y, y, y, beta, return_state=False, backend="torch"))(q[None].detach())
    o = delta_rule(q, k, v, beta, return_state=False, backend="reference")
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    dq.sum().backward()


def arguments(**changes: object) -> dict[str, object]:
    # On a GPU nobody waits to see numbers.
    with torch.device("cpu"):
        x = {name: torch.randn(2, 2, 5, 4) for name in ("q", "k", "v")}
        return x | {"beta": torch.rand(2, 2, 5), "log_decay": -torch.rand(2, 2, 5)} | changes


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ArgumentError, {"beta": torch.rand(2, 5)}, r"`beta` must have k's \[B, HKV, S\] = \(2, 2, 5\), got \(2, 5\)"),
        (ArgumentError, {"log_decay": -torch.rand(2, 2, 4)}, r"`log_decay` must have k's .* got \(2, 2, 4\)"),
        (ArgumentError, {"beta": torch.full((2, 2, 5), 2.5)}, r"`beta` must lie in 0\.\.2, got 2.5. Use a sigmoid"),
        (ArgumentError, {"beta": torch.full((2, 2, 5), -0.5)}, r"`beta` must lie in 0\.\.2, got -0.5"),
        (ArgumentError, {"log_decay": torch.full((2, 2, 5), 0.5)}, r"`log_decay` must be at most 0, got 0.5. It is a"),
        (ArgumentTypeError, {"beta": 1.0}, "`beta` must be a tensor, got 'float'"),
        (ArgumentTypeError, {"beta": torch.ones(2, 2, 5).int()}, "`beta` must be bf16, fp16, fp32 or fp64"),
        (ArgumentTypeError, {"log_decay": 0}, "`log_decay` must be a tensor or None"),
        (ArgumentTypeError, {"state": torch.zeros(2, 2, 4, 4)}, "`state` must be a DeltaRuleState or None"),
        (ArgumentError, {"state": DeltaRuleState(torch.zeros(1, 2, 4, 4))}, r"`state.kv` must have shape \(2, 2, 4"),
        (
            ArgumentTypeError,
            {"state": DeltaRuleState(torch.zeros(2, 2, 4, 4).half())},
            "`state.kv` must be torch.float",
        ),
        (
            ArgumentError,
            {"state": LinearAttentionState(torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4))},
            "`state.z` must be None",
        ),
        (ArgumentError, {"q": torch.randn(2, 2, 6, 4)}, "`k` must have q's 6 tokens"),
        (ArgumentError, {"delay": -1}, "`delay` must lie in 0"),
        (ArgumentError, {"backend": "cuda"}, "`backend` must be a known backend"),
        (ArgumentTypeError, {"l2norm": 1}, "`l2norm` must be True or False"),
    ],
)
def test_errors(error: type[Exception], changes: dict[str, object], message: str) -> None:
    with pytest.raises(error, match=message):
        delta_rule(**arguments(**changes))


def test_gates_of_masked_tokens_are_not_looked_at() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool, device="cpu")
    mask[:, 0] = False
    x = arguments(key_mask=mask)
    x["beta"][:, :, 0], x["log_decay"][:, :, 0] = 5, 5
    delta_rule(**x)
    with pytest.raises(ArgumentError, match="`beta` must"):
        delta_rule(**x | {"key_mask": None})


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("pieces", [(1,) * 7, (3, 1, 3)])
def test_steps_are_what_a_sequence_is(backend: str, decay: float, pieces: tuple[int, ...]) -> None:
    case = Case(HKV=1, group=2, T=7, F=20, V=17, decay=decay, masked=True, state=True)
    x = case.inputs()
    x["k"] = x["k"].masked_fill(~x["key_mask"][:, None, :, None], torch.nan)
    expected = run(case, "reference", x, gradients=False)
    state = DeltaRuleState(x["kv0"].clone())
    o, a = [], 0
    for n in pieces:
        q, k, v, beta, g = (x[y][:, :, a : a + n] if y in x else None for y in ("q", "k", "v", "beta", "log_decay"))
        o.append(delta_step_(q, k, v, beta, g, state, key_mask=x["key_mask"][:, a : a + n], backend=backend))
        a += n
    torch.testing.assert_close(torch.cat(o, 2), expected["o"].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.kv, expected["kv"].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_states_are_stepped_where_they_lie_in_a_pool(backend: str) -> None:
    """They lie apart, as in pages; what is beside them stays as it was."""
    x = Case(B=2, HKV=2, group=2, T=1, F=20, V=17, decay=1.0, masked=True).inputs()
    pages = torch.randn(5, 800)
    pool, before, rows = pages[:, 40:720].view(5, 2, 20, 17), pages.clone(), torch.tensor([3, 0])
    own, options = pool[rows].clone(), {"key_mask": x["key_mask"], "backend": backend}
    tokens = [x[name] for name in ("q", "k", "v", "beta", "log_decay")]
    o = delta_step_(*tokens, DeltaRuleState(pool), rows=rows, **options)
    torch.testing.assert_close(o, delta_step_(*tokens, DeltaRuleState(own), **options), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool[rows], own, rtol=1e-5, atol=1e-5)
    pool[rows] = before[:, 40:720].view_as(pool)[rows]
    assert torch.equal(pages, before)
    with pytest.raises(ArgumentError, match="`rows` must be int64"):
        delta_step_(*tokens, DeltaRuleState(pool), rows=rows[:1], **options)


def test_a_step_is_one_node_of_a_graph() -> None:
    x = Case(B=1, T=1, decay=1, state=True, masked=True).inputs()
    tensors = (x["q"], x["k"], x["v"], x["beta"], x["log_decay"], x["kv0"], x["key_mask"])
    torch.library.opcheck(delta_opaque_, (*tensors, True, "torch"))
    tensors = (*tensors[:5], x["key_mask"], x["kv0"])
    torch.library.opcheck(op.triton_delta_step_, (*tensors, True))


def test_a_step_asks_for_a_state_it_can_change() -> None:
    x = Case(B=1, T=1, F=4, V=4).inputs()
    with pytest.raises(ArgumentError, match=r"`state.kv` must be contiguous"):
        delta_step_(x["q"], x["k"], x["v"], x["beta"], None, DeltaRuleState(torch.zeros(1, 2, 4, 4).mT))


def test_counted_traffic() -> None:
    """Bytes of what crosses memory, in those of q and of k; a number per token does not count."""
    tokens, H, HKV, D = 8_192, 32, 8, 128
    q, k = (torch.empty(1, heads, tokens, D, dtype=torch.bfloat16, device="meta") for heads in (H, HKV))
    gate = torch.empty(1, HKV, tokens, device="meta")
    p = problem.DeltaProblem(Target("sm_90", 132), q, k, k, gate, gate, None, None, None, 0, True)

    def crossing(launches: list[Launch]) -> tuple[float, float]:
        held = [x for a in launches for x in (*a.reads, *a.writes) if x.ndim == 4 and x.dtype == torch.bfloat16]
        of_q = sum(x.nbytes for x in held if x.shape == q.shape) / q.nbytes
        return of_q, sum(x.nbytes for x in held if x.shape != q.shape) / k.nbytes

    out, forward = forward_launches(p)
    assert [x.role for x in forward] == ["delta_inverse", "delta_prepare", "delta_walk", "delta_read"]
    assert crossing(forward) == (2, 16)
    assert crossing(backward_launches(p, torch.empty_like(out.o), out.kv)[1]) == (9, 33.5)


@pytest.mark.parametrize("role", ["delta_dq", "delta_dk"])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
def test_operands_of_gradients_are_never_narrow_on_hopper(role: str, size: int) -> None:
    """ptxas 12.8 addresses narrower ones wrongly; no interpreter shows it."""
    assert problem.tile(Target("sm_90", 132), torch.bfloat16, role, size, size).width >= 64
