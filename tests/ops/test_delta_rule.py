"""The delta rule: every backend against the float64 recurrence, and what holds between calls."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from hf_linear_attn import DeltaRuleState, LinearAttentionState, delta_rule
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
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
