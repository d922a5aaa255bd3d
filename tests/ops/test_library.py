"""The ops of torch.library: graphs, transforms, memory, and what they are asked."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.autograd import forward_ad

from hf_linear_attn import DeltaRuleState, LinearAttentionState, delta_rule, linear_attention
from hf_linear_attn.errors import BackendError, HFLinearAttnError
from hf_linear_attn.ops.hybrid.triton.op import triton_hybrid_
from hf_linear_attn.ops.linear_attention import torch as chunked
from hf_linear_attn.ops.linear_attention.triton import op
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.step.triton.op import triton_decode_
from hf_linear_attn.ops.triton import plan
from hf_linear_attn.ops.window import OwnKey, window_attention
from tests.ops.oracle import DEVICE, Case, poison, run

BACKENDS = ("torch", "triton")
FORWARD = {"torch": chunked.chunked_forward, "triton": op.triton_forward}
BACKWARD = {"torch": chunked.chunked_backward, "triton": op.triton_backward}


def positional(case: Case) -> tuple[object, ...]:
    x = case.inputs()
    names = ("q", "k", "v", "key_mask", "cu_seqlens", "kv0", "z0", "log_decay")
    given = [x[name].requires_grad_(x[name].is_floating_point()) if name in x else None for name in names]
    return *given, case.phi, case.causal, case.delay, case.eps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=3, D=8, V=4, HKV=1, masked=True, state=True, layout="bthd"),
        Case(B=1, T=3, D=8, V=4, HKV=1, masked=True, state=True, decay=0.3),
        Case(H=1, HKV=1, T=4, D=8, V=4, lengths=(1, 3), dtype=torch.bfloat16),
        Case(B=1, H=1, HKV=1, T=3, S=4, D=8, V=4, causal=False),
    ],
    ids=["dense", "faded", "packed", "bidirectional"],
)
def test_opcheck(backend: str, case: Case) -> None:
    torch.library.opcheck(FORWARD[backend], positional(case))


def test_no_op_has_a_default_for_what_it_changes() -> None:
    """Calls leave out what is as by default, and torch 2.11 then misses what it should mark as changed."""
    assert triton_hybrid_._opoverload._schema.name in OPDEFS
    ours = [whole._opoverload._schema for name, whole in OPDEFS.items() if name.startswith("hf_linear_attn::")]
    assert len(ours) > 10
    for schema in ours:
        changed = [x for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        assert not [x.name for x in changed if x.has_default_value()], schema.name


@pytest.mark.usefixtures("short_segments")
def test_opcheck_split() -> None:
    torch.library.opcheck(op.triton_forward, positional(Case(B=1, H=1, HKV=1, T=20, D=8, V=4)))


def test_opcheck_decode() -> None:
    q, k, v = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 20)
    kv, z = torch.rand(1, 1, 8, 20), torch.rand(1, 1, 2, 8)
    arguments = q, k, v, torch.rand(1, 2) > 0.5, kv, z, "elu", 1e-6
    torch.library.opcheck(triton_decode_, arguments)
    torch.library.opcheck(triton_decode_, (*arguments, -torch.rand(1, 1, 2)))


def linear(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, kv: Tensor, backend: str, *, fades: bool) -> Tensor:
    """Attend from a state; return a sum over all results."""
    log_decay = -F.softplus(gate) if fades else None
    before = LinearAttentionState(kv, kv[..., 0].square())
    o, state = linear_attention(q, k, v, state=before, log_decay=log_decay, backend=backend)
    return o.sum() + state.kv.square().sum() + state.z.sum()


def overwritten(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, kv: Tensor, backend: str) -> Tensor:
    """Read by the delta rule likewise."""
    gates = gate.sigmoid(), -F.softplus(gate)
    o, state = delta_rule(q, k, v, *gates, state=DeltaRuleState(kv), backend=backend)
    return o.sum() + state.kv.square().sum()


OPERATIONS = {"linear": partial(linear, fades=False), "faded": partial(linear, fades=True), "delta": overwritten}


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(1, 2, 19, 8)] * 3 + [(1, 2, 19), (1, 2, 8, 8)]
    return [torch.randn(size, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles_without_graph_breaks(name: str, backend: str) -> None:
    def gradients(function: Callable[..., Tensor]) -> list[Tensor | None]:
        given = leaves()
        function(*given, backend).backward()
        return [x.grad for x in given]

    compiled = torch.compile(OPERATIONS[name], backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled), gradients(OPERATIONS[name]), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_refuses_second_derivatives_and_vmap(name: str, backend: str) -> None:
    given = leaves()
    (dq,) = torch.autograd.grad(OPERATIONS[name](*given, backend), given[0], create_graph=True)
    with pytest.raises(BackendError, match="must be 'reference' for second derivatives"):
        dq.sum().backward()
    with pytest.raises(BackendError, match="must be 'reference' under vmap"):
        torch.vmap(lambda *x: OPERATIONS[name](*x, backend))(*(x.detach()[None] for x in given))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_reference_has_second_derivatives(name: str) -> None:
    given = leaves()
    (dq,) = torch.autograd.grad(OPERATIONS[name](*given, "reference"), given[0], create_graph=True)
    dq.sum().backward()
    assert given[0].grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=20, HKV=1, V=20, D=12, state=True),
        Case(B=1, H=1, HKV=1, T=20, delay=5, masked=True),
        Case(B=1, H=1, HKV=1, T=40, decay=0.2),
        Case(H=1, HKV=1, T=25, lengths=(0, 18, 7), state=True),
        Case(B=1, H=1, HKV=1, T=7, S=20, causal=False),
    ],
    ids=["dense", "delayed", "faded", "packed", "bidirectional"],
)
@pytest.mark.parametrize("cut", ["short_segments", "stored_states"])
def test_writes_all_it_allocates(
    backend: str, case: Case, cut: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(cut)
    clean = run(case, backend)
    poison(monkeypatch)
    for name, x in run(case, backend).items():
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize(
    ("backend", "cut"),
    [
        ("torch", "whole_sequences"),
        ("triton", "whole_sequences"),
        ("triton", "short_segments"),
        ("triton", "stored_states"),
    ],
)
def test_same_bits_twice_and_in_every_layout(backend: str, cut: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(cut)
    case = Case(B=1, H=1, HKV=1, T=20, D=20, dtype=torch.bfloat16)
    x = case.inputs()
    first = run(case, backend, x)
    # Same numbers, other strides: tokens before heads, and a slice of a wider tensor.
    moved = x | {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v", "do")}
    sliced = x | {name: torch.cat([x[name], x[name]], -1)[..., : x[name].shape[-1]] for name in ("q", "k", "v", "do")}
    for inputs in (x, moved, sliced):
        for name, y in run(case, backend, inputs).items():
            assert torch.equal(y, first[name]), name


def test_reads_both_layouts_without_a_copy() -> None:
    x = torch.randn(2, 3, 5, 16)
    assert plan.readable(x) is x
    y = x.transpose(1, 2)
    assert plan.readable(y) is y
    assert plan.readable(x.transpose(2, 3)).is_contiguous()


def test_offsets_beyond_32_bits() -> None:
    # The storage is virtual: only the pages that hold the two rows are ever touched.
    stride = 2**31 + 64
    storage = torch.empty(stride + 5 * 16, dtype=torch.bfloat16)
    far = storage.as_strided((2, 1, 5, 16), (stride, 80, 16, 1))
    near = torch.randn(2, 1, 5, 16).bfloat16()
    far.copy_(near)
    o, state = linear_attention(far, far, far, backend="triton")
    expected, expected_state = linear_attention(near, near, near, backend="triton")
    assert torch.equal(o, expected)
    assert torch.equal(state.kv, expected_state.kv)


def far_heads(x: Tensor, stride: int) -> Tensor:
    """Return a copy with that many numbers from head to head; the storage between them is virtual."""
    heads, tokens, dim = x.shape[1:]
    storage = torch.empty(stride * (heads - 1) + tokens * dim, dtype=x.dtype)
    return storage.as_strided(x.shape, (stride * heads, stride, dim, 1)).copy_(x)


@pytest.mark.parametrize("cut", ["short_segments", "stored_states"])
def test_offsets_of_a_group_beyond_32_bits(cut: str, request: pytest.FixtureRequest) -> None:
    """The last query head of a group lies 2^31 numbers behind the first."""
    request.getfixturevalue(cut)
    case = Case(B=1, H=5, HKV=1, T=20, dtype=torch.bfloat16)
    x = case.inputs()
    expected = run(case, "triton", x)
    far = x | {name: far_heads(x[name].detach(), 2**29 + 64) for name in ("q", "do")}
    for name, y in run(case, "triton", far).items():
        assert torch.equal(y, expected[name]), name


def test_offsets_of_a_step_beyond_32_bits() -> None:
    T, stride = 130, 2**24 - 64
    near = torch.randn(1, 1, T, 16).bfloat16()
    far = torch.empty(stride * T, dtype=torch.bfloat16).as_strided(near.shape, (stride * T, stride * T, stride, 1))
    far.copy_(near)
    state, other = (decode_state(1, 1, 16, 16, device=DEVICE) for _ in range(2))
    expected = decode_step_(near, near, near, state, backend="triton")
    assert torch.equal(decode_step_(far, far, far, other, backend="triton"), expected)
    heads = torch.randn(1, 5, 1, 16).bfloat16()
    one = near[:, :, :1]
    expected = decode_step_(heads, one, one, state, backend="triton")
    assert torch.equal(decode_step_(far_heads(heads, 2**29 + 64), one, one, other, backend="triton"), expected)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_no_visible_key_gives_exactly_zero(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    mask = torch.tensor([[False, False, True, True, True, True]])
    o, _ = linear_attention(q, k, v, key_mask=mask, backend=backend)
    assert (o[:, :, :2] == 0).all()
    assert (o[:, :, 2:] != 0).all()
    o, state = linear_attention(q, k, v, delay=6, backend=backend)
    assert (o == 0).all()
    assert (state.kv == 0).all()
    assert (state.z == 0).all()
    o, _ = linear_attention(q.abs() + 1, -k.abs() - 1, v, feature_map="relu", backend=backend)
    assert (o == 0).all()


def forward_mode(f, x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


# Torch's own rules for forward mode are scripted.
FUNCTIONAL = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda y: f(y).sum())(x),
    "dual": forward_mode,
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x[None])[0],
}


@pytest.mark.parametrize("derivative", FUNCTIONAL.values(), ids=FUNCTIONAL)
@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_derivatives_are_refused(backend: str, derivative) -> None:
    # A tangent that an op of torch.library does not know of would be taken for 0.
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))

    def attend(x: Tensor) -> Tensor:
        return linear_attention(x, k, v, return_state=False, backend=backend)

    def attend_after(x: Tensor) -> Tensor:
        state = LinearAttentionState(x.mT @ v, x.sum(2))
        return linear_attention(q, k, v, state=state, return_state=False, backend=backend)

    def fade(x: Tensor) -> Tensor:
        return linear_attention(q, k, v, log_decay=-x.square().mean(-1), return_state=False, backend=backend)

    def overwrite(x: Tensor) -> Tensor:
        return delta_rule(x, k, v, torch.ones(1, 2, 6), return_state=False, backend=backend)

    def overwrite_more_or_less(x: Tensor) -> Tensor:
        return delta_rule(q, k, v, x.sigmoid().mean(-1), return_state=False, backend=backend)

    for f in (attend, attend_after, fade, overwrite, overwrite_more_or_less):
        with pytest.raises(BackendError, match=rf"`backend` must be 'reference' .*, got '{backend}'"):
            derivative(f, q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("derivative", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_the_reference_has_functional_derivatives(derivative) -> None:
    q, k, v = (torch.randn(1, 2, 6, 16, dtype=torch.float64) for _ in range(3))
    own_key = OwnKey(v, v[0, :, 0, 0], q[0, :, 0], torch.ones(1, 6).bool(), torch.arange(6)[None] // 3)

    for f in (
        lambda x: linear_attention(x, k, v, return_state=False, backend="reference"),
        lambda x: window_attention(x, k, v, window=3, scaling=0.25, backend="reference"),
        lambda x: window_attention(x, k, v, window=3, scaling=0.25, own_key=own_key, backend="reference"),
    ):
        found = derivative(f, q)
        step = 1e-6 * torch.ones_like(q)
        if found.shape == q.shape and derivative in (FUNCTIONAL["jvp"], FUNCTIONAL["dual"]):
            expected = (f(q + step) - f(q - step)) / 2e-6
        else:
            leaf = q.clone().requires_grad_()
            expected = torch.autograd.grad(f(leaf).sum(), leaf)[0]
        # Central differences of float64.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_forward_mode_through_a_window_is_right_or_refused() -> None:
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))

    def tangent(backend: str) -> Tensor:
        return FUNCTIONAL["jvp"](lambda x: window_attention(x, k, v, window=3, scaling=0.25, backend=backend), q)

    torch.testing.assert_close(tangent("torch"), tangent("reference"))
    with pytest.raises(BackendError, match=r"`backend` must be 'reference' for forward-mode derivatives, got 'triton'"):
        tangent("triton")


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_tensors_without_storage_give_shapes(backend: str) -> None:
    q, k, v = (torch.empty(1, heads, 6, 4, device="meta") for heads in (4, 2, 2))
    o, state = linear_attention(q, k, v, "hedgehog", backend=backend)
    assert (o.shape, o.device.type) == (q.shape, "meta")
    assert state.kv.shape == (1, 2, 8, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": float("nan")}, "`eps` must be a number, got nan"),
        ({"eps": 1e-60}, "`eps` must lie in 1e-37..1e\\+37, got 1e-60"),
        ({"eps": "small"}, "`eps` must be a number, got 'small'"),
        ({"eps": None}, "`eps` must be a number, got None"),
        ({"delay": 1.5}, "`delay` must be a whole number, got 1.5"),
        ({"delay": True}, "`delay` must be a whole number, got True"),
        ({"delay": 10**30}, "`delay` must lie in 0..2\\*\\*62"),
        ({"causal": 1}, "`causal` must be True or False, got 1"),
    ],
    ids=str,
)
def test_numbers_are_checked(arguments, message: str) -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    with pytest.raises(HFLinearAttnError, match=message):
        linear_attention(q, k, v, **arguments)
