"""A layer in every way in which it reads tokens, by every backend, against its definition.

Rules, mixes, maps and backends come from the registries: a new one is tested here without a change.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from hf_linear_attn.layers import Call, LinearAttention, State
from hf_linear_attn.layers.pool import Pool, Rows, Texts, can_step, pool_slots, read_, read_rows_, step_rows_
from hf_linear_attn.ops import delta_rule, linear_attention
from hf_linear_attn.ops.dispatch import BACKENDS, HAS_NUMBA
from hf_linear_attn.ops.features.triton import kernels
from hf_linear_attn.ops.hybrid import Geometry, Tokens, hybrid_reference
from hf_linear_attn.ops.triton import plan, run
from hf_linear_attn.ops.window import window_attention
from tests.ops.hybrid import (
    GROUPED,
    HALVED,
    HALVED_WIDE,
    LENGTHS,
    LIGHT,
    LONG,
    OF_80,
    OF_96,
    SHAPES,
    WIDE,
    Shape,
    Spec,
    call_of,
    defined,
    expected,
    hidden,
    params_of,
    pieces,
    shown,
    specs,
)
from tests.ops.oracle import DEVICE, assert_near, poison

# By norm. In fp64 only the order of sums differs. In fp32 sums of some twenty terms are rounded, and what is divided by
# a normaliser. In half precision features and the linear branch's output are rounded once or twice.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}
PLAIN = ("reference", "torch")
"""Backends that compute in float64 what they are given in it."""

EVERY = {"triton": (24, 8, 90), "reference": (3, 1, 8)}
"""For `make test` a backend reads the first layers in each n-th way, else in each m-th, and others in each k-th.

Without an entry these are 1, 1 and 4: only kernels are interpreted.
"""

Found = tuple[Tensor, dict[str, Tensor]]


def read(layer: LinearAttention, tokens: Tokens, lengths: tuple[int, ...], *, static: bool = False) -> Found:
    """Read a text in pieces of such lengths into a state; return what it gives, and the state's sums."""
    state, found = State(static=static), []
    for piece in pieces(tokens, lengths):
        # A state's tensors may be changed in place by later steps.
        found.append(layer(piece.q, piece.k, piece.v, call_of(piece, state=state)))
    return torch.cat(found, 2), state.read()


def read_packed(layer: LinearAttention, tokens: Tokens) -> Found:
    """Read texts that lie end to end."""
    return layer(tokens.q, tokens.k, tokens.v, call_of(tokens)), {}


PLACES = torch.tensor([4, 1, 6, 3], device=DEVICE)
"""Where in a pool the texts lie side by side."""
SCHEDULE = (
    ("alone", (6, 0, 0, 0)),
    ("beside", (1, 1, 3, 2)),
    ("step", (1, 1, 1, 0)),
    ("alone", (0, 2, 0, 0)),
    ("step", (1, 0, 1, 0)),
    ("beside", (4, 1, 1, 0)),
)
"""What is read next of each, and how; the rest is read by steps. Some begin within the sinks or the window."""


def read_pooled(layer: LinearAttention, tokens: Tokens) -> Found:
    """Read texts side by side in a pool with gaps between its places, as a server does.

    What was never written is NaN, or of integers the least.
    """
    slots, done = pool_slots(layer, tokens.v.shape[3]), torch.zeros(len(LENGTHS), dtype=torch.long)
    whole = {name: slot.zeros(16, tokens.k) for name, slot in slots.items()}
    unwritten = {name: torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min for name, x in whole.items()}
    for name, x in whole.items():
        x.fill_(unwritten[name])
    pool = Pool(slots, {name: x[::2] for name, x in whole.items()})
    o = tokens.v.new_zeros(*tokens.q.shape[:3], tokens.v.shape[3])
    steps = [("step", (1, 1, 1, 1))] * max(LENGTHS)
    for how, counts in (*SCHEDULE, *steps):
        new = torch.tensor(counts).minimum(torch.tensor(LENGTHS) - done)
        rows = new.nonzero()[:, 0]
        for among in rows[:, None] if how == "alone" else [rows][: len(rows)]:
            read_next_(layer, tokens, pool, how, among, done, new[among], o)
            done[among] += new[among]
    for name, x in pool.tensors.items():
        torch.testing.assert_close(x[[0, 2, 5, 7]], torch.full_like(x[:4], unwritten[name]), equal_nan=True)
    return o, {name: x[PLACES] for name, x in pool.tensors.items()}


def read_next_(
    layer: LinearAttention, tokens: Tokens, pool: Pool, how: str, rows: Tensor, done: Tensor, new: Tensor, o: Tensor
) -> None:
    """Read the next tokens of some rows in a pool, filled up with what must not matter, and write what they give."""
    most, begin, places = int(new.max()), done[rows], PLACES[rows.to(DEVICE)]
    ahead = torch.arange(most)
    at, real = (begin[:, None] + ahead).clamp(max=max(LENGTHS) - 1), ahead < new[:, None]
    q, k, v = (x[rows[:, None], :, at].transpose(1, 2) for x in (tokens.q, tokens.k, tokens.v))
    k, v = (x.masked_fill(~real[:, None, :, None].to(DEVICE), 7) for x in (k, v))
    turned, lengths = tokens.rotation, begin.to(DEVICE)
    rotation = None if turned is None else turned.of_others(turned.turns[rows[:, None], at])
    if how == "alone":
        found = read_(layer, q, k, v, pool, int(places), int(begin), rotation)
    elif how == "step" and can_step(layer):
        found = step_rows_(layer, q, k, v, pool, Rows(places, lengths, int(begin.min())), rotation)
        assert lengths.tolist() == begin.tolist()
    else:
        found = read_rows_(layer, q, k, v, pool, Texts(places, lengths, new.to(DEVICE), most), rotation)
    for row, of_row, start, count in zip(rows, found, begin, new, strict=True):
        o[row, :, start : start + count] = of_row[:, :count]


WAYS: dict[str, tuple[str, Callable[[LinearAttention, Tokens], Found]]] = {
    "at once": ("plain", lambda layer, x: read(layer, x, (17,))),
    "in pieces": ("plain", lambda layer, x: read(layer, x, (7, 1, 2, 1, 5))),
    "by steps": ("plain", lambda layer, x: read(layer, x, (1,))),
    "padded": ("padded", lambda layer, x: read(layer, x, (17,))),
    "padded, in pieces": ("padded", lambda layer, x: read(layer, x, (2, 4, 1, 1, 5, 1))),
    "padded, static": ("padded", lambda layer, x: read(layer, x, (3, 1), static=True)),
    "packed": ("packed", read_packed),
    "pooled": ("rows", read_pooled),
}
"""What text is read, and how."""


def cases() -> list[object]:
    """List layers, backends, ways and dtypes, of which some are slow."""
    (first, others), found = specs(), []
    for number, spec in enumerate([*first, *others]):
        for backend, (turn, way) in product(BACKENDS, enumerate(WAYS, number)):
            usual, later, rest = EVERY.get(backend, (1, 1, 4))
            is_first, dtypes = number < len(first), [torch.float64 if backend in PLAIN else torch.float32]
            if is_first and backend != "reference" and turn % (4 * later) == 0:
                dtypes.append(torch.bfloat16)
            if backend != "auto" and turn % (later if is_first else rest) == 0:
                marks = () if is_first and turn % usual == 0 else pytest.mark.slow
                found += [pytest.param(spec, backend, way, dtype, marks=marks) for dtype in dtypes]
    # The step's kernel, with keys that leave the window: in a pool, and with sums that fade.
    found += [
        (Spec(rule), "triton", way, torch.float32) for rule, way in (("additive", "pooled"), ("decay", "by steps"))
    ]
    found += [
        (Spec(shape=OF_80), "triton", "padded", torch.float32),
        (Spec(shape=OF_96), "triton", "padded, in pieces", torch.float32),
        (Spec(feature_map="hedgehog", shape=OF_80), "triton", "in pieces", torch.bfloat16),
        (Spec(shape=OF_96), "triton", "padded", torch.bfloat16),
    ]
    ways = ("padded", "padded, in pieces", "pooled")
    found += [pytest.param(Spec(shape=WIDE), "triton", way, torch.bfloat16, marks=pytest.mark.slow) for way in ways]
    return found


# Kernels compute features of what is masked, and an interpreter of NaNs warns.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
@pytest.mark.parametrize(("spec", "backend", "way", "dtype"), cases(), ids=str)
def test_a_layer_is_its_definition(spec: Spec, backend: str, way: str, dtype: torch.dtype) -> None:
    if backend == "numba" and not HAS_NUMBA:
        pytest.skip("Numba is not installed")
    kind, reads = WAYS[way]
    tokens = spec.text(kind, dtype)
    with torch.no_grad():
        o, sums = reads(spec.layer(backend, dtype), tokens if kind == "rows" else hidden(tokens))
    wanted, state = expected(spec, kind, dtype)
    assert o.dtype == dtype
    assert_near(shown(o, tokens), wanted, TOLERANCE[dtype], "o")
    for name in sums.keys() & state.keys():
        assert_near(sums[name], state[name], TOLERANCE[dtype], name)


GRADIENTS = ("padded", "packed", "long")
"""Texts of which gradients are taken."""


def gradient_cases() -> list[object]:
    """List layers, backends and texts."""
    found = []
    for number, spec in enumerate(specs()[0]):
        for backend, (turn, kind) in product(BACKENDS, enumerate(GRADIENTS, number)):
            one = replace(spec, shape=LONG, feature_map=LIGHT[number // 3 % len(LIGHT)]) if kind == "long" else spec
            usual, later, _ = EVERY.get(backend, (4, 1, 1) if kind == "long" else (2, 1, 1))
            # PyTorch and loops walk, and loops read nothing else of which there are gradients.
            walks, reads = backend in ("torch", "numba"), backend not in ("auto", "numba")
            if turn % later == 0 and (walks if kind == "long" else reads):
                marks = () if turn % usual == 0 else pytest.mark.slow
                found.append(pytest.param(one, backend, kind, marks=marks))
    # What kernels train as one node of a graph: sinks that are a text's first keys, or are found in it, or are none,
    # and a window that no key leaves.
    found += [
        *((Spec(shape=SHAPES[shape]), "triton", kind) for shape, kind in ((0, "plain"), (1, "plain"), (4, "plain"))),
        *((Spec(feature_map="hedgehog", shape=SHAPES[0]), "triton", kind) for kind in ("plain", "padded", "packed")),
        *((Spec(shape=HALVED), "triton", kind) for kind in ("plain", "padded")),
        *((Spec(shape=shape), "triton", kind) for shape, kind in ((OF_80, "padded"), (OF_96, "plain"))),
    ]
    return found


@pytest.mark.parametrize(("spec", "backend", "kind"), gradient_cases(), ids=str)
def test_gradients_are_those_of_the_definition(spec: Spec, backend: str, kind: str) -> None:
    assert_gradients(spec, backend, kind, torch.float64 if backend in PLAIN else torch.float32)


def assert_gradients(spec: Spec, backend: str, kind: str, dtype: torch.dtype) -> None:
    """Compare a layer and its gradients with the definition, which computes in float64 from the same numbers."""
    layer, tokens = spec.layer(backend, dtype), spec.text(kind, dtype)
    leaves = [x.detach().requires_grad_() for x in (hidden(tokens).q, hidden(tokens).k, hidden(tokens).v)]
    given = replace(tokens, **dict(zip("qkv", leaves, strict=True)))
    weights = dict(layer.named_parameters())
    probe = torch.randn(*tokens.q.shape[:3], tokens.v.shape[3], generator=torch.Generator(DEVICE).manual_seed(3))
    o, definition = layer(*leaves, call_of(given)), defined(layer, given)[0]
    assert_near(shown(o, tokens), definition.detach(), TOLERANCE[dtype], "o")
    inputs = [*leaves, *weights.values()]
    found, wanted = (
        torch.autograd.grad((shown(x, tokens) * probe).sum(), inputs, materialize_grads=True) for x in (o, definition)
    )
    for name, x, y in zip((*"qkv", *weights), found, wanted, strict=True):
        # Where features of a query hardly meet those of the only key that it reads, it is divided by little more than
        # eps, twice: half of the digits of fp32 are left, in that token alone. What a single key gives does not depend
        # on its features: gradients of 1 cancel.
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
        assert_near(x, y, tolerance, f"the gradient of {name}", least=1.0)


@pytest.mark.skipif("triton" not in BACKENDS, reason="there are no kernels")
@pytest.mark.parametrize(("shape", "kind"), [(SHAPES[0], "padded"), (HALVED, "plain")], ids=str)
def test_so_are_those_of_kernels_that_follow_one_another(shape: Shape, kind: str, apart: None) -> None:
    test_gradients_are_those_of_the_definition(Spec(shape=shape), "triton", kind)


@pytest.mark.skipif("triton" not in BACKENDS, reason="there are no kernels")
@pytest.mark.parametrize(
    ("spec", "kind", "dtype"),
    [
        (Spec(shape=HALVED), "long", torch.float32),
        (Spec(feature_map="hedgehog", shape=HALVED), "long", torch.float32),
        (Spec(shape=GROUPED), "padded, longer", torch.bfloat16),
        (Spec(feature_map="hedgehog", shape=HALVED_WIDE), "padded, longer", torch.float32),
        (Spec(feature_map="hedgehog", shape=GROUPED), "packed", torch.bfloat16),
        pytest.param(Spec(shape=HALVED_WIDE), "padded, longer", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_so_are_those_of_several_segments(
    spec: Spec, kind: str, dtype: torch.dtype, stored_states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W's gradient is summed over the fewest tokens, so that a head has several sums, too."""
    launched: dict[str, plan.Launch] = {}
    launch = plan.Launch.run
    monkeypatch.setattr(plan.Launch, "run", lambda x, *given: launch(launched.setdefault(x.role, x) and x, *given))
    monkeypatch.setattr(kernels, "LONGER", 1)
    poison(monkeypatch)
    assert_gradients(spec, "triton", kind, dtype)
    if DEVICE.type == "cpu":
        assert launched.keys() >= {"queries_backward", "features_backward", "stored_dkv"}
        assert all(launched[role].arguments["OF_WEIGHT"] for role in ("queries_backward", "features_backward"))
        assert launched["stored_dkv"].arguments["APART"] == (spec.shape is HALVED_WIDE)
        assert launched["stored_dkv"].arguments["ADD"]


@pytest.mark.skipif("triton" not in BACKENDS, reason="there are no kernels")
@pytest.mark.parametrize(
    ("feature_map", "kind", "dtype"),
    [
        ("norm_preserving", "padded", torch.bfloat16),
        ("norm_preserving", "long", torch.float16),
        ("hedgehog", "padded", torch.float16),
        ("hedgehog", "long", torch.bfloat16),
    ],
    ids=str,
)
def test_one_kernel_derives_queries_as_two_do(
    feature_map: str, kind: str, dtype: torch.dtype, stored_states: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    spec, has = Spec(feature_map=feature_map, shape=HALVED), plan.Problem.has

    def gradients(dtype: torch.dtype) -> dict[str, Tensor]:
        layer, tokens = spec.layer("triton", dtype), hidden(spec.text(kind, dtype))
        leaves = {name: getattr(tokens, name).detach().requires_grad_() for name in "qkv"}
        o = layer(*leaves.values(), call_of(replace(tokens, **leaves)))
        probe = torch.randn(o.shape, generator=torch.Generator(DEVICE).manual_seed(3)).to(dtype)
        inputs = leaves | dict(layer.named_parameters())
        return dict(zip(inputs, torch.autograd.grad((o * probe).sum(), list(inputs.values())), strict=True))

    found = gradients(dtype)
    monkeypatch.setattr(plan.Problem, "has", lambda p, role: role != "queries_backward" and has(p, role))
    run.plan_of.cache_clear()
    for name, wanted in gradients(torch.float32).items():
        error = (found[name].double() - wanted).norm() / wanted.norm()
        # By norm: what crosses memory is rounded to the dtype a few times.
        assert error <= (3e-2 if dtype == torch.bfloat16 else 4e-3), f"the gradient of {name} is off by {error:.1e}"


ASKED = (["q"], ["k"], ["v"], ["mix_bias"], ["feature_map.weight_q"], ["feature_map.power_k"], ["k", "mix_weight"], [])
"""What has gradients of tokens, and of what a layer has learned."""


@pytest.mark.skipif("triton" not in BACKENDS, reason="there are no kernels")
@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        pytest.param(Shape(), "apart", marks=pytest.mark.slow, id="rows"),
        pytest.param(HALVED, "apart", marks=pytest.mark.slow, id="halved"),
        pytest.param(HALVED, "stored_states", id="halved, stored"),
    ],
)
def test_kernels_train_as_one_node_and_give_what_is_asked_for(
    shape: Shape, cut: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(cut)
    spec = Spec(shape=shape)
    layer, tokens = spec.layer("triton", torch.float32), spec.text("plain", torch.float32)
    probe = torch.randn(*tokens.q.shape[:3], tokens.v.shape[3], generator=torch.Generator(DEVICE).manual_seed(3))
    learned = dict(layer.named_parameters())

    def gradients(asked: list[str], call: Call) -> dict[str, Tensor]:
        leaves = {name: getattr(tokens, name).detach().requires_grad_(name in asked) for name in "qkv"}
        for name, x in learned.items():
            x.requires_grad_(name in asked)
        o = layer(*leaves.values(), call)
        if not asked:
            assert not o.requires_grad
            return {}
        before = {type(node).__name__ for node, _ in o.grad_fn.next_functions if node is not None}
        assert (call.state is None) == (before <= {"AccumulateGrad", "ViewBackward0"})
        inputs = {name: x for name, x in (leaves | learned).items() if name in asked}
        return dict(zip(inputs, torch.autograd.grad((o * probe).sum(), list(inputs.values())), strict=True))

    # Into a state, one operation follows on the other.
    every = gradients([*"qkv", *learned], call_of(tokens)._replace(state=State()))
    for asked in (*ASKED, [*"qkv", *learned]):
        for name, x in gradients(asked, call_of(tokens)).items():
            torch.testing.assert_close(x, every[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.skipif("triton" not in BACKENDS, reason="there are no kernels")
@pytest.mark.parametrize(
    ("shape", "kind", "asked"),
    [
        pytest.param(SHAPES[0], "plain", "faketensor", id="sinks"),
        pytest.param(SHAPES[1], "padded", "", marks=pytest.mark.slow, id="padded"),
        pytest.param(HALVED, "plain", "faketensor", id="halved"),
    ],
)
def test_training_is_an_op(shape: Shape, kind: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_linear_attn.ops.hybrid.triton import train

    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(train, "attend", lambda *inputs: calls.append(inputs) or train.triton_train(*inputs))
    spec = Spec(shape=shape)
    layer, tokens = spec.layer("triton", torch.float32), spec.text(kind, torch.float32)
    layer(*(getattr(hidden(tokens), name).requires_grad_() for name in "qkv"), call_of(tokens)).sum().backward()
    # Layers differ in what is allocated.
    utils = {"test_utils": f"test_{asked}"} if asked else {}
    torch.library.opcheck(train.triton_train, calls[0], **utils)


@pytest.mark.skipif("triton" not in BACKENDS, reason="there are no kernels")
def test_compiled_training_is_one_op_each_way() -> None:
    spec = Spec(shape=SHAPES[0])
    layer, tokens = spec.layer("triton", torch.float32), spec.text("plain", torch.float32)
    leaves = [getattr(hidden(tokens), name).requires_grad_() for name in "qkv"]
    traced: list[list[str]] = []

    def trace(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        traced.append([str(x.target) for x in graph.graph.nodes if "hf_linear_attn" in str(x.target)])
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    both = aot_autograd(fw_compiler=trace, bw_compiler=trace)
    found = torch.compile(layer, backend=both, fullgraph=True)(*leaves, call_of(tokens))
    gradients = torch.autograd.grad(found.sum(), leaves)
    torch.compiler.reset()
    names = "triton_train", "triton_train_backward"
    assert traced == [[f"hf_linear_attn.{name}.default"] for name in names]
    for x, y in zip(gradients, torch.autograd.grad(layer(*leaves, call_of(tokens)).sum(), leaves), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "auto"])
@pytest.mark.parametrize("feature_map", ["elu", "hedgehog", "cosformer"])
def test_without_causality_every_query_reads_all_keys(feature_map: str, backend: str) -> None:
    spec, dtype = Spec("additive", None, feature_map), torch.float32
    layer, tokens = spec.layer(backend, dtype), spec.text("padded", dtype)
    params = params_of(layer)
    wanted, _ = hybrid_reference(tokens, replace(params, geometry=Geometry(causal=False)))
    given = hidden(tokens)
    o = layer(given.q, given.k, given.v, call_of(given, causal=False))
    assert_near(shown(o, tokens), wanted, TOLERANCE[dtype], "o")


@pytest.mark.parametrize("lengths", [(1,), (6, 1, 2, 5)])
@pytest.mark.parametrize("rule", ["decay", "delta"])
def test_the_definition_goes_on_from_a_state(rule: str, lengths: tuple[int, ...]) -> None:
    spec = Spec(rule, "key", "cosformer", SHAPES[0])
    layer, tokens = spec.layer("reference", torch.float64), spec.text("padded", torch.float64)
    state, found = None, []
    for piece in pieces(tokens, lengths):
        o, state = hybrid_reference(piece, params_of(layer), state)
        found.append(o)
    wanted, last = hybrid_reference(tokens, params_of(layer))
    torch.testing.assert_close(torch.cat(found, 2), wanted)
    torch.testing.assert_close(state.heads[1][1].sums, last.heads[1][1].sums)
    assert state.seen == last.seen == tokens.key_mask.sum(1).tolist()


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("rule", ["additive", "decay", "delta", "gated_delta"])
def test_without_a_window_it_is_the_operation_of_its_rule(rule: str, delay: int) -> None:
    """Those have definitions of their own: of linear attention the whole matrix, of the delta rules a recurrence."""
    spec = Spec(rule, None, "elu", SHAPES[1])
    layer, x = spec.layer("reference", torch.float64), spec.text("packed", torch.float64)
    params = replace(params_of(layer), geometry=Geometry(delay=delay))
    wanted, _ = hybrid_reference(replace(x, rotation=None), params)
    phi_q, phi_k, gates = layer.feature_map(x.q, "q"), layer.feature_map(x.k, "k"), layer.gates(x.k, x.v)
    shared = {"key_mask": x.key_mask, "cu_seqlens": x.cu_seqlens, "delay": delay, "backend": "reference"}
    if "delta" in rule:
        o, _ = delta_rule(phi_q, phi_k, x.v, gates.beta, gates.log_decay, **shared)
        o = o * gates.scale[:, None, None]
    else:
        log_decay = None if gates is None else gates.log_decay
        o, _ = linear_attention(phi_q, phi_k, x.v, "identity", eps=params.eps, log_decay=log_decay, **shared)
    torch.testing.assert_close(shown(o, x), wanted)


def test_without_a_state_it_is_attention_to_a_window() -> None:
    spec = Spec(mix="window", shape=replace(SHAPES[0], sinks=0))
    layer, x = spec.layer("reference", torch.float64), spec.text("padded", torch.float64)
    wanted, _ = defined(layer, x)
    o = window_attention(x.q, x.k, x.v, window=5, scaling=layer.sizes.scaling, key_mask=x.key_mask, backend="reference")
    torch.testing.assert_close(shown(o, x), wanted)


def test_a_row_without_a_single_key_is_read_as_zeros() -> None:
    """Of padding alone nothing is remembered."""
    spec = Spec(shape=SHAPES[0])
    tokens = spec.text("plain", torch.float64)
    mask = torch.ones_like(tokens.k[:, 0, :, 0], dtype=torch.bool)
    mask[0] = False
    o, state = defined(spec.layer("reference", torch.float64), replace(tokens, key_mask=mask))
    assert not o[0].any()
    assert o[1].all()
    assert state.seen == [0, tokens.k.shape[2]]
    assert not any(head.sinks or head.number for head in state.heads[0])
