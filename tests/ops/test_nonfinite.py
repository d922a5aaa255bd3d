"""NaN and infinity: what stands at a masked key matters nowhere, and what a real token holds is not swallowed."""

import unittest.mock
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from hf_linear_attn import delta_rule, linear_attention
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.ops import finite
from hf_linear_attn.ops.delta_rule import DeltaRuleState, delta_step_
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.linear_attention.triton import forward
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.triton import remember
from hf_linear_attn.ops.triton.plan import Problem, Target
from hf_linear_attn.ops.window import window_attention, window_sums
from tests.ops import test_window as window
from tests.ops.oracle import DEVICE, MAPS, Case, poison, run
from tests.spread import spread

CASES = {
    "dense": Case(B=1, HKV=1, T=25, D=20, V=17, masked=True, state=True),
    "delayed": Case(B=1, H=1, HKV=1, T=25, delay=5, masked=True),
    "packed": Case(H=2, HKV=1, T=25, lengths=(0, 18, 7), masked=True),
    "bidirectional": Case(B=1, H=1, HKV=1, T=7, S=20, causal=False, masked=True),
    "signed": Case(B=1, H=1, HKV=1, T=25, phi="identity", masked=True),
}


T, AT, WINDOW = 80, 72, 5
FIRST = 64
"""Where the chunk of token AT begins, or the block, in every backend that has such."""


def linear(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    return linear_attention(q, k, v, key_mask=mask, return_state=False, backend=backend)


def decay(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    fading = torch.linspace(-1, 0, T, device=q.device).expand(1, 2, T)
    return linear_attention(q, k, v, key_mask=mask, return_state=False, log_decay=fading, backend=backend)


def delta(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    beta = torch.linspace(0, 1, T, device=q.device).expand(1, 2, T)
    return delta_rule(q, k, v, beta, -beta, key_mask=mask, return_state=False, backend=backend)


def near(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    return window_attention(q, k, v, window=WINDOW, scaling=0.3, key_mask=mask, backend=backend)


def sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    num, den = window_sums(q, k, v, window=WINDOW, scaling=0.3, key_mask=mask)
    return num / den[..., None]


def steps(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    state, read = decode_state(1, 2, 16, 16, device=q.device), []
    for a in range(FIRST, T, 6):
        seen = None if mask is None else mask[:, a : a + 6]
        read.append(decode_step_(*(x[:, :, a : a + 6] for x in (q, k, v)), state, key_mask=seen, backend=backend))
    return torch.cat([q[:, :, :FIRST], *read], 2)


def delta_steps(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    state, read = DeltaRuleState(torch.zeros(1, 2, 16, 16, device=q.device)), []
    beta = torch.linspace(0, 1, T, device=q.device).expand(1, 2, T)
    for a in range(FIRST, T, 6):
        seen, piece = None if mask is None else mask[:, a : a + 6], (x[..., a : a + 6, :] for x in (q, k, v))
        read.append(delta_step_(*piece, beta[:, :, a : a + 6], None, state, key_mask=seen, backend=backend))
    return torch.cat([q[:, :, :FIRST], *read], 2)


def call(operation: Callable[..., Tensor], backend: str, x: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
    """Run an operation: ``"traced"`` is PyTorch's form in a graph, ``"unseen"`` where nobody can look, as on a GPU."""
    inputs = (x["q"], x["k"], x["v"], mask)
    with torch.no_grad():
        if backend == "traced":
            return torch.compile(operation, backend="eager", fullgraph=True)(*inputs, "torch")
        if backend == "unseen":
            with unittest.mock.patch.object(finite, "_can_look", return_value=False):
                return operation(*inputs, "torch")
        return operation(*inputs, backend)


def tokens() -> dict[str, Tensor]:
    g = torch.Generator(DEVICE).manual_seed(0)
    return {name: torch.randn(1, 2, T, 16, generator=g, device=DEVICE) for name in ("q", "k", "v")}


AFTER, WITHIN = list(range(AT, T)), list(range(AT, AT + WINDOW))
PLAIN = ("reference", "torch", "unseen", "traced")
# Which queries show a NaN of a key or a value.
SHOWN = {
    **{(operation, backend): AFTER for operation in (linear, decay, delta) for backend in (*PLAIN, "triton")},
    **{(operation, backend): AFTER for operation in (steps, delta_steps) for backend in ("torch", "unseen", "triton")},
    **{(near, backend): WITHIN for backend in (*PLAIN, "triton")},
    **{(sums, backend): WITHIN for backend in ("torch", "unseen", "traced")},
}
ALL = [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in SHOWN]


@pytest.mark.parametrize(("operation", "backend"), ALL)
def test_who_shows_a_nan(operation: Callable[..., Tensor], backend: str) -> None:
    """Whoever sees its token, and nobody else."""
    x, shown = tokens(), SHOWN[operation, backend]
    clean = call(operation, backend, x)
    for side in "kv":
        broken = x[side].clone()
        broken[0, 0, AT, 3] = torch.nan
        found = call(operation, backend, x | {side: broken})
        assert rows_with_nan(found) == [shown, []], side
        others = [i for i in range(T) if i not in shown]
        torch.testing.assert_close(found[0, 0, others], clean[0, 0, others])
        torch.testing.assert_close(found[0, 1], clean[0, 1])


# Kernels have cases of their own below, and the delta rule's beside its other tests.
@pytest.mark.parametrize(
    ("operation", "backend"), [case for case in ALL if "steps" in case.id or "triton" not in case.id]
)
def test_what_a_mask_hides_matters_to_nobody(operation: Callable[..., Tensor], backend: str) -> None:
    x, mask = tokens(), torch.ones(1, T, dtype=torch.bool, device=DEVICE)
    mask[0, :3], mask[0, AT] = False, False
    clean = call(operation, backend, x, mask)
    for value in (torch.nan, torch.inf):
        hidden = {side: x[side].masked_fill(~mask[:, None, :, None], value) for side in "kv"}
        found = call(operation, backend, x | hidden, mask)
        torch.testing.assert_close(found[:, :, mask[0]], clean[:, :, mask[0]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("delay", [0, 3, 30])
@pytest.mark.parametrize("lengths", [None, (0, 4, 0, 13, 3, 0)])
def test_who_sees_a_broken_key(lengths: tuple[int, ...] | None, delay: int, causal: bool) -> None:
    """By hand: every key of a query's own text that came at least ``delay`` tokens before it, or any."""
    broken = torch.rand(1 if lengths else 2, 3, 20, generator=torch.Generator(DEVICE).manual_seed(0)) < 0.15
    bounds = None if lengths is None else torch.tensor((0, *lengths)).cumsum(0)
    seen, kept = finite.who_sees(broken, 20, causal=causal, cu_seqlens=bounds, delay=delay)
    text = torch.zeros(20) if bounds is None else torch.repeat_interleave(torch.tensor(lengths))
    i = torch.arange(20)
    visible = (text[:, None] == text) & ((i <= i[:, None] - delay) | torch.tensor(not causal))
    assert torch.equal(seen, (broken[:, :, None] & visible).any(-1))
    ends = [20] if bounds is None else bounds[1:].tolist()
    starts = [0] if bounds is None else bounds[:-1].tolist()
    pieces = [broken[:, :, a : max(b - delay, a) if causal else b].any(2) for a, b in zip(starts, ends, strict=True)]
    assert torch.equal(kept, torch.cat(pieces))


PACKED = (0, 18, 30, 32)


def packed_sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    bounds = torch.tensor(PACKED, device=q.device).cumsum(0)
    return linear_attention(q, k, v, key_mask=mask, cu_seqlens=bounds, return_state=False, delay=3, backend=backend)


def packed_delta(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    bounds, beta = torch.tensor(PACKED, device=q.device).cumsum(0), torch.full_like(k[..., 0], 0.5)
    return delta_rule(q, k, v, beta, key_mask=mask, cu_seqlens=bounds, return_state=False, delay=3, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "unseen", "traced"])
@pytest.mark.parametrize("operation", [packed_sums, packed_delta])
def test_a_broken_value_stays_in_its_text(operation: Callable[..., Tensor], backend: str) -> None:
    x = tokens()
    clean = call(operation, backend, x)
    x["v"][0, 0, 21, 3] = torch.inf
    found = call(operation, backend, x)
    assert rows_with_nan(found) == [list(range(24, 48)), []]
    others = [*range(24), *range(48, T)]
    torch.testing.assert_close(found[0, 0, others], clean[0, 0, others])


@pytest.mark.parametrize("operation", [linear, decay, delta, near])
def test_where_nobody_looks_what_is_finite_stays_as_it_is(
    operation: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, outputs and gradients; and a masked key gets none."""
    mask = torch.ones(1, T, dtype=torch.bool, device=DEVICE)
    mask[0, :3] = False
    found = []
    for looks in (True, False):
        monkeypatch.setattr(finite, "_can_look", lambda _, looks=looks: looks)
        x = {name: y.requires_grad_() for name, y in tokens().items()}
        o = operation(*x.values(), mask, "torch")
        o[:, :, 3:].square().sum().backward()
        found.append([o[:, :, 3:], *(y.grad for y in x.values())])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    assert (found[1][2][:, :, :3] == 0).all()


def test_a_mapped_reference_shows_a_nan_to_those_who_see_it() -> None:
    """Numbers under a transform cannot be looked at."""
    x = tokens()
    x["v"][0, 0, AT, 3] = torch.nan
    mapped = torch.func.vmap(partial(linear, mask=None, backend="reference"))
    assert rows_with_nan(mapped(*(y[None] for y in x.values()))[0]) == [AFTER, []]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def masked_content_matters_nowhere(case: Case) -> None:
    x = case.inputs()
    padding = ~x["key_mask"][:, None, :, None]
    clean = run(case, "triton", x | {name: x[name].masked_fill(padding, 0) for name in ("k", "v")})
    for k, v in ((torch.nan, torch.inf), (-torch.inf, torch.nan)):
        filled = {"k": x["k"].masked_fill(padding, k), "v": x["v"].masked_fill(padding, v)}
        assert_same(run(case, "triton", x | filled), clean)
    for name in ("dk", "dv"):
        assert (clean[name].masked_select(padding) == 0).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_masked_content_matters_nowhere(case: Case) -> None:
    masked_content_matters_nowhere(case)


@pytest.mark.parametrize("case", [CASES["dense"], CASES["delayed"]], ids=["dense", "delayed"])
@pytest.mark.parametrize("cut", ["short_segments", "stored_states"])
def test_masked_content_matters_nowhere_when_split(case: Case, cut: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(cut)
    masked_content_matters_nowhere(case)


@pytest.mark.parametrize("cut", ["whole_sequences", "short_segments", "stored_states"])
def test_masked_keys_get_no_gradient_of_a_nan(cut: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(cut)
    case = Case(B=1, H=1, HKV=1, T=40, masked=True)
    x = case.inputs()
    x["q"][0, 0, 39] = torch.nan
    found = run(case, "triton", x)
    real = x["key_mask"][0]
    for name in ("dk", "dv"):
        assert found[name][0, 0, real].isnan().any()
        assert (found[name][0, 0, ~real] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_step_folds_no_masked_content(value: float) -> None:
    mask = torch.tensor([[True, False, True]])
    q, k, v = (torch.randn(1, 1, 3, 16) for _ in range(3))

    def step(filling: float) -> dict[str, Tensor]:
        state = decode_state(1, 1, 16, 16, device=q.device)
        padded = (x.masked_fill(~mask[:, None, :, None], filling) for x in (k, v))
        o = decode_step_(q, *padded, state, key_mask=mask, backend="triton")
        return {"o": o, "kv": state.kv, "z": state.z}

    assert_same(step(value), step(0.0))


def test_a_window_sees_no_masked_content() -> None:
    case = window.Case(B=1, T=30, past=10, window=10, own=True, before=True, sinks=3, masked=True)
    x = case.inputs()
    # Nobody sees the last sink.
    x["seen"][..., 2] = False
    padding = ~x["mask"][:, None, :, None]
    filled = x | {name: x[name].masked_fill(padding, torch.nan) for name in ("k", "v")}
    for name in ("sink_k", "sink_v"):
        filled[name] = x[name].clone()
        filled[name][:, :, 2] = torch.nan
    assert_same(window.run(case, "triton", filled), window.run(case, "triton", x))


def rows_with_nan(x: Tensor) -> list[list[int]]:
    """Return, per head of a lone sequence, the tokens that have a NaN."""
    return [torch.nonzero(head.isnan().any(-1)).flatten().tolist() for head in x[0]]


@pytest.mark.parametrize("phi", MAPS)
def test_a_nan_of_a_query_is_in_its_row(phi: str) -> None:
    case = Case(B=1, HKV=1, T=20, phi=phi)
    x = case.inputs()
    clean = run(case, "triton", x, gradients=False)
    x["q"][0, 1, 5, 3] = torch.nan
    found = run(case, "triton", x, gradients=False)
    assert rows_with_nan(found["o"]) == [[], [5]]
    others = torch.arange(20) != 5
    assert torch.equal(found["o"][:, :, others], clean["o"][:, :, others])


@pytest.mark.parametrize(
    ("phi", "cut"), spread(product(MAPS, ["whole_sequences", "short_segments", "stored_states"]), 5)
)
def test_a_nan_of_a_key_is_in_every_row_that_sees_it(phi: str, cut: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(cut)
    delay = 3
    case = Case(B=1, HKV=1, T=40, phi=phi, delay=delay)
    x = case.inputs()
    clean = run(case, "triton", x, gradients=False)
    x["k"][0, 0, 21, 3] = torch.nan
    found = run(case, "triton", x, gradients=False)
    first = 21 + delay
    assert rows_with_nan(found["o"]) == [list(range(first, 40))] * 2
    assert torch.equal(found["o"][:, :, :first], clean["o"][:, :, :first])
    assert found["z"].isnan().any()


@pytest.fixture
def cannot_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a walk that carries its state no registers to look, so that a launch does it after."""
    monkeypatch.setattr(forward, "can_look", lambda p: False)


SEEN = {
    "elu": Case(B=1, H=2, HKV=1, T=70, V=20, masked=True, state=True),
    "faded": Case(B=1, H=2, HKV=1, T=70, phi="identity", delay=6, state=True, decay=0.5),
    "packed": Case(H=2, HKV=1, T=70, lengths=(20, 0, 50), phi="exp", delay=3),
}
LOOKING_ALONE = [("whole_sequences", "cannot_look"), ("short_segments", "cannot_look")]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("name", "cut"),
    spread(product(SEEN, [("whole_sequences",), ("short_segments",), ("stored_states",), *LOOKING_ALONE]), 2),
)
def test_a_broken_value_is_in_every_row_that_sees_it_and_in_no_other(
    name: str, cut: tuple[str, ...], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products multiply the values of keys that a query does not see yet by 0; their chunk is written once more."""
    for fixture in cut:
        request.getfixturevalue(fixture)
    poison(monkeypatch)
    case, key = SEEN[name], 45
    x = case.inputs()
    x["key_mask"] = x.get("key_mask", torch.ones(1, 70, dtype=torch.bool, device=DEVICE)).clone()
    x["key_mask"][0, key : key + 5] = True
    clean = run(case, "triton", x, gradients=False)
    x["v"][0, 0, key, 3], x["v"][0, 0, key + 4, 1] = torch.nan, torch.inf
    found = run(case, "triton", x, gradients=False)
    first = key + case.delay
    assert rows_with_nan(found["o"]) == [list(range(first, 70))] * 2
    torch.testing.assert_close(found["o"][:, :, :first], clean["o"][:, :, :first])


@pytest.mark.parametrize("case", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("cut", ["whole_sequences", "short_segments"])
def test_who_looks_changes_nothing_that_is_finite(case: Case, cut: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(cut)
    x = case.inputs()
    looking = run(case, "triton", x, gradients=False)
    request.getfixturevalue("cannot_look")
    remember.forget()
    assert_same(run(case, "triton", x, gradients=False), looking)


@pytest.mark.parametrize(
    ("arch", "D", "V", "kind"),
    [
        ("sm_80", 128, 64, "after"),
        ("sm_80", 128, 128, "within"),
        ("sm_89", 128, 128, "after"),
        ("sm_90", 64, 64, "within"),
    ],
)
def test_every_walk_that_carries_its_state_is_looked_at_once(arch: str, D: int, V: int, kind: str) -> None:
    q, k = (torch.empty(512, 2, 64, D, dtype=torch.bfloat16, device="meta") for _ in range(2))
    v = torch.empty(512, 2, 64, V, dtype=torch.bfloat16, device="meta")
    _, launches = forward.forward_launches(
        Problem(Target(arch, 108), q, k, v, None, None, None, None, "elu", True, 0), 1e-6
    )
    walk = next(x for x in launches if x.role == "forward")
    assert walk.arguments["LOOKS"] == (kind == "within")
    assert ("mend_forward" in [x.role for x in launches]) == (kind == "after")


@pytest.mark.usefixtures("whole_sequences")
def test_a_broken_value_stays_in_its_sequence_and_head() -> None:
    case = Case(B=2, H=2, HKV=2, T=40)
    x = case.inputs()
    clean = run(case, "triton", x)
    x["v"][0, 0, 20, 3] = torch.nan
    found = run(case, "triton", x)
    for name in clean:
        assert torch.equal(found[name][0, 1], clean[name][0, 1]), name
        assert torch.equal(found[name][1], clean[name][1]), name


@pytest.mark.parametrize("phi", MAPS)
def test_a_step_folds_a_nan(phi: str) -> None:
    q, k, v = (torch.rand(1, 1, 1, 16) + 0.5 for _ in range(3))
    k[..., 3] = torch.nan
    state = decode_state(1, 1, 16, 16, device=q.device)
    o = decode_step_(q, k, v, state, phi=phi, backend="triton")
    assert o.isnan().all()
    assert state.z[..., 3].isnan().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("own", [False, True])
def test_a_window_shows_a_nan_of_a_key_to_those_who_see_it(own: bool) -> None:
    """With a key of each query's own, that is all after it: the mean of the keys out of sight."""
    # Of sums over blocks there are several.
    case = window.Case(B=1, H=1, T=130, window=7, own=True) if own else window.Case(B=1, HKV=2, T=40, window=7)
    x = case.inputs()
    if own:
        x["counts"] = torch.ones_like(x["counts"])
        x["number"] = case.gone(x["counts"]).sum(-1)
    clean = window.run(case, "triton", x)
    x["k"][0, -1, 20, 3] = torch.nan
    found = window.run(case, "triton", x)
    seen = range(20, 130 if own else 27)
    assert rows_with_nan(found["o"]) == [[]] * (case.H - 1) + [list(seen)]
    others = [t for t in range(case.T) if t not in seen]
    torch.testing.assert_close(found["o"][:, :, others], clean["o"][:, :, others])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("name", ["hedgehog", "norm_preserving"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_features_keep_a_nan(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 9, 16).to(dtype)
    phi = get_feature_map(name, 16, 2)
    with torch.no_grad():
        clean = features_of(phi, x, "q", None, "triton")
        x[0, 1, 4, 2] = torch.nan
        found = features_of(phi, x, "q", None, "triton")
    assert rows_with_nan(found) == [[], [4]]
    # Of the entry itself, which has no sign, in both halves.
    assert found[0, 1, 4, [2, 18]].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(found[:, :, others], clean[:, :, others])
