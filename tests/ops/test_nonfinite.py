"""NaN and infinity: what is masked never matters, no row touches another, and no packed text does."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linear_attn import DeltaRuleState, LinearAttentionConfig, linear_attention
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.layers import Call, LinearAttention, Sizes, State
from hf_linear_attn.ops.delta_rule import delta_step_
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.window import window_sums
from tests.ops import delta, oracle
from tests.ops import test_window as window
from tests.ops.oracle import DEVICE, MAPS

T = 50
LENGTHS = (18, 0, 20, 12)
"""Of packed texts, the third of which is broken: no chunk begins where it does."""
BROKEN = slice(18, 38)

Inputs = dict[str, Tensor]
Run = Callable[[str, Inputs, str], Inputs]
"""Computes, of what is asked about and by a backend, all results by name: outputs, states and gradients."""

Case = oracle.Case | delta.Case | window.Case
CASES: dict[str, Case] = {
    "elu": oracle.Case(T=T, H=2, HKV=1, V=17, delay=3, state=True),
    "signed": oracle.Case(T=T, HKV=1, phi="identity"),
    "faded": oracle.Case(T=T, HKV=1, decay=0.5, state=True),
    "bidirectional": oracle.Case(T=T, S=T, HKV=1, causal=False),
    "delta": delta.Case(T=T, HKV=1, group=2, V=17, decay=1, delay=2, state=True),
    "packed": oracle.Case(T=T, HKV=1, delay=3, lengths=LENGTHS),
    "packed delta": delta.Case(T=T, HKV=1, decay=1, delay=2, lengths=LENGTHS),
    "window": window.Case(T=T - 10, past=10, own=True, before=True, sinks=3),
}
MODULES: dict[type[Case], Any] = {oracle.Case: oracle, delta.Case: delta, window.Case: window}


def asked(name: str, kind: str) -> Case:
    """Return a case with masks, or with packed texts."""
    case = replace(CASES[name], masked=kind == "masked")
    return replace(case, lengths=LENGTHS) if kind == "text" else case


def inputs_of(name: str, kind: str) -> Inputs:
    """Draw a case's inputs."""
    x = asked(name, kind).inputs()
    return x | ({"key_mask": x["mask"]} if "mask" in x else {})


def of_case(name: str, kind: str, x: Inputs, backend: str) -> Inputs:
    """Run the operation that a case is of."""
    case = asked(name, kind)
    found: Inputs = MODULES[type(case)].run(case, backend, x)
    return found


def tokens(kind: str) -> Inputs:
    """Draw tokens of 4 query heads and 2 key heads."""
    g = torch.Generator(DEVICE).manual_seed(0)
    rows = 1 if kind == "text" else 2
    x = {name: torch.randn(rows, heads, T, 16, generator=g) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    x["log_decay"] = -torch.rand(rows, 2, T, generator=g)
    if kind == "masked":
        x["key_mask"] = torch.rand(2, T, generator=g) > 0.3
        x["key_mask"][0, : T // 3] = False
    return x


def learned(kind: str, x: Inputs, backend: str) -> Inputs:
    """Attend by a map that learns, whose weights get a gradient of every key."""
    torch.manual_seed(0)
    phi, leaves = get_feature_map("hedgehog", 16, 4, 2), {name: x[name].clone().requires_grad_() for name in "qkv"}
    with torch.no_grad():
        for weight in phi.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    o, (kv, z) = linear_attention(*leaves.values(), phi, key_mask=x["key_mask"], backend=backend)
    o.square().sum().backward()
    weights = {f"d{name}": weight.grad for name, weight in phi.named_parameters()}
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()} | weights
    return {"o": o, "kv": kv, "z": z} | {name: y for name, y in gradients.items() if y is not None}


def sums(_: str, x: Inputs, backend: str) -> Inputs:
    num, den = window_sums(x["q"], x["k"], x["v"], window=7, scaling=0.3, key_mask=x.get("key_mask"))
    return {"o": num / den[..., None]}


def steps(fades: bool, kind: str, x: Inputs, backend: str) -> Inputs:
    state, read = decode_state(2, 2, 16, 16, device=DEVICE), []
    for a, b in ((0, 1), (1, 2), (2, 19), (19, 24), (24, 25)):
        others = {name: x[name][..., a:b] for name in ("key_mask", *("log_decay",) * fades) if name in x}
        read.append(decode_step_(*(x[name][:, :, a:b] for name in "qkv"), state, backend=backend, **others))
    return {"o": torch.cat(read, 2), "kv": state.kv, "z": state.z}


def delta_steps(kind: str, x: Inputs, backend: str) -> Inputs:
    state, read = DeltaRuleState(torch.zeros(2, 2, 16, 16)), []
    for a, b in ((0, 1), (1, 2), (2, 19), (19, 24), (24, 25)):
        gates = -x["log_decay"][..., a:b], x["log_decay"][..., a:b]
        mask = x["key_mask"][:, a:b] if kind == "masked" else None
        part = (x[name][:, :, a:b] for name in "qkv")
        read.append(delta_step_(*part, *gates, state, key_mask=mask, backend=backend))
    return {"o": torch.cat(read, 2), "kv": state.kv}


def layer_of(rule: str, mix: str | None, backend: str) -> LinearAttention:
    torch.manual_seed(0)
    own = {} if mix is None else {"window": 7, "sinks": 2, "mix": mix, "rotary": "undo"}
    config = LinearAttentionConfig(feature_map="hedgehog", update_rule=rule, backend=backend, **own)
    return LinearAttention(config, Sizes(16, 4, 2, 0.25), "layer", rotated=mix is not None).to(DEVICE)


TURNS = torch.randn(1, T, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def layers(rule: str, mix: str | None, kind: str, x: Inputs, backend: str) -> Inputs:
    """Read a prompt in pieces and some tokens, and without a state a text of which there are gradients."""
    layer, mask = layer_of(rule, mix, backend), x.get("key_mask")
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0) if kind == "text" else None

    def call(a: int, b: int, state: State | None) -> Call:
        turns = None if mix is None else Rotation(TURNS[:, a:b], Layout("half", "pair"))
        return Call(None if mask is None else mask[:, a:b], cu_seqlens=bounds, state=state, rotation=turns)

    found: Inputs = {}
    if backend != "numba":
        leaves = {name: x[name].clone().requires_grad_() for name in "qkv"}
        o = layer(*leaves.values(), call(0, T, None))
        weight = torch.ones(1, 1, T, 1) if mask is None else mask[:, None, :, None]
        torch.where(weight != 0, o, 0).square().sum().backward()
        found = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        if kind == "masked":
            found |= {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    state, pieces = (None, [(0, T)]) if kind == "text" else (State(), [(0, 20), (20, 48), (48, 49), (49, 50)])
    with torch.no_grad():
        read = [layer(*(x[name][:, :, a:b] for name in "qkv"), call(a, b, state)) for a, b in pieces]
    found["o"] = torch.cat(read, 2)
    return found | ({} if state is None else {name: y for name, y in state.read().items() if y.ndim > 1})


def prompt(kind: str, x: Inputs, backend: str) -> Inputs:
    """Read a prompt as :func:`hf_linear_attn.ops.hybrid.hybrid_prefill` gets it: what is masked is still there."""
    turns = Rotation(TURNS, Layout("half", "pair"))
    with torch.no_grad():
        layer = layer_of("additive", "key", backend)
        return {"o": layer.attend(x["q"], x["k"], x["v"], Call(x.get("key_mask"), rotation=turns))}


RULES = [
    *(("additive", mix) for mix in ("key", "gate", "shared", "window", None)),
    *((rule, "key") for rule in ("decay", "gated_delta")),
]
LOOPS = [("additive", "key"), ("additive", "gate"), ("additive", "window"), ("decay", "key")]
BACKENDS, ALL = ("torch", "numba"), ("masked", "row", "text")
Problem = tuple[str, Callable[[str], Inputs], Run, tuple[str, ...], tuple[str, ...]]
"""Its name, inputs, function, backends and what is asked about it."""

OF_CASES = {name: ("masked",) if "packed" in name else ("masked", "row") if name == "window" else ALL for name in CASES}
PROBLEMS: list[Problem] = [
    *(
        (name, partial(inputs_of, name), partial(of_case, name), ("reference", "torch", "triton"), kinds)
        for name, kinds in OF_CASES.items()
    ),
    ("learned", tokens, learned, ("reference", "torch", "triton"), ALL[:1]),
    ("sums", tokens, sums, ("torch",), ALL[:2]),
    ("steps", tokens, partial(steps, False), ("torch", "triton"), ALL[:2]),
    ("fading steps", tokens, partial(steps, True), ("torch", "triton"), ALL[:2]),
    ("delta steps", tokens, delta_steps, ("torch", "triton"), ALL[:2]),
    ("prompt", tokens, prompt, ("numba", "triton"), ALL[:2]),
    *(
        (f"layer, {rule}, {mix}", tokens, partial(layers, rule, mix), BACKENDS[: 1 + ((rule, mix) in LOOPS)], ALL)
        for rule, mix in RULES
    ),
    ("layer in kernels", tokens, partial(layers, "additive", "key"), ("triton",), ALL),
]
CUTS = ("whole_sequences", "short_segments", "stored_states")
ASKED = [
    pytest.param(
        *(problem, backend, kind, cut),
        id=f"{problem[0]}-{backend}-{kind}{cut and '-' + cut}",
        # An interpreter of whole layers takes its time.
        marks=[pytest.mark.slow] * (problem[0] == "layer in kernels" and kind != "text"),
    )
    for problem in PROBLEMS
    for backend, kind in product(problem[3], problem[4])
    for cut in (CUTS if backend == "triton" and problem[0] == "faded" else ("",))
]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice", "ignore:overflow")
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(("problem", "backend", "kind", "cut"), ASKED)
def test_what_is_broken_stays_where_it_is(
    problem: Problem, backend: str, kind: str, cut: str, request: pytest.FixtureRequest
) -> None:
    """To the bit: what is masked reaches nothing, and what is visible no other row, and no other packed text."""
    if cut:
        request.getfixturevalue(cut)
    _, inputs, run, _, _ = problem
    x = inputs(kind)
    given = [name for name in ("q", "k", "v", "beta", "log_decay", "sink_k", "sink_v") if name in x]
    if kind == "masked":
        broken = {name: ~x["key_mask"][:, None] for name in given[1:] if "sink" not in name}
        if "seen" in x:
            # Nobody sees the last sink.
            x["seen"][..., 2] = False
            broken |= {name: torch.tensor([False, False, True]) for name in ("sink_k", "sink_v")}
    else:
        broken = {name: torch.zeros(x[name].shape[:3], dtype=torch.bool) for name in given}
        for mask in broken.values():
            mask[-1:, :, BROKEN if kind == "text" else slice(None)] = True

    def filled(k: float, v: float) -> Inputs:
        masks = {name: y if x[name].ndim == 3 else y[..., None] for name, y in broken.items()}
        values = {name: v if name.endswith("v") else k for name in masks}
        return run(kind, x | {name: x[name].masked_fill(y, values[name]) for name, y in masks.items()}, backend)

    clean, found = filled(0, 0), filled(torch.nan, torch.inf)
    for name, y in clean.items():
        for a, b in zip(others(kind, name, found[name], x), others(kind, name, y, x), strict=True):
            assert b.isfinite().all(), name
            assert torch.equal(a, b), name
    assert found["o"].isnan().any() or kind == "masked"


def others(kind: str, name: str, y: Tensor, x: Inputs) -> list[Tensor]:
    """Return what of a result must not show what is broken."""
    if kind == "row":
        # A weight's gradient is a sum over rows.
        return [] if name in ("dbias", "dweight") else [y[:-1]]
    if kind == "text":
        return [y[:2], y[3:]] if name in ("kv", "z", "dkv0", "dz0") else [y[:, :, :18], y[:, :, 38:]]
    # Nobody reads what masked queries give.
    return [y * x["key_mask"][:, None, -y.shape[2] :, None] if name == "o" else y]


def rows_with_nan(x: Tensor) -> list[list[int]]:
    """Return, per head of a lone sequence, the tokens that have a NaN."""
    return [torch.nonzero(head.isnan().any(-1)).flatten().tolist() for head in x[0]]


@pytest.mark.usefixtures("short_chunks", "short_segments")
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["elu", "signed", "faded", "delta", "window"])
def test_no_chunk_before_a_broken_key_shows_it_and_every_query_that_sees_it_does(
    name: str, backend: str, side: str
) -> None:
    case = replace(CASES[name], T=80, **({"own": False, "sinks": 0, "past": 0} if name == "window" else {}))
    module, x = MODULES[type(case)], case.inputs()
    clean = module.run(case, backend, x)["o"]
    x[side][0, 0, 72, 3] = torch.nan
    found = module.run(case, backend, x)["o"]
    # A chunk, a block and a tile begin there in every backend, here and on a GPU.
    assert torch.equal(found[:, :, :64], clean[:, :, :64])
    first = 72 + getattr(case, "delay", 0)
    sees = slice(first, min(first + case.window, 80) if isinstance(case, window.Case) else 80)
    assert found[0, :, sees].isnan().any(-1).all()


@pytest.mark.parametrize("cut", ["", *CUTS])
def test_masked_keys_get_no_gradient_of_a_nan(cut: str, request: pytest.FixtureRequest) -> None:
    if cut:
        request.getfixturevalue(cut)
    case = oracle.Case(B=1, H=1, HKV=1, T=40, masked=True)
    x = case.inputs()
    x["q"][0, 0, 39] = torch.nan
    found = oracle.run(case, "triton" if cut else "torch", x)
    real = x["key_mask"][0]
    for name in ("dk", "dv"):
        assert found[name][0, 0, real].isnan().any()
        assert (found[name][0, 0, ~real] == 0).all()


@pytest.mark.parametrize("phi", MAPS)
def test_no_map_swallows_a_nan(phi: str) -> None:
    """Neither of a query, which is in its row alone, nor of a key, in one call or in steps."""
    case = oracle.Case(B=1, HKV=1, T=20, phi=phi)
    x = case.inputs()
    clean = oracle.run(case, "triton", x, gradients=False)
    x["q"][0, 1, 5, 3] = torch.nan
    found = oracle.run(case, "triton", x, gradients=False)
    assert rows_with_nan(found["o"]) == [[], [5]]
    rest = torch.arange(20) != 5
    assert torch.equal(found["o"][:, :, rest], clean["o"][:, :, rest])
    x["k"][0, 0, 0, 3] = torch.nan
    found = oracle.run(case, "triton", x, gradients=False)
    assert found["o"].isnan().all()
    assert found["z"][..., 3].isnan().all()
    state = decode_state(1, 1, 16, 16, device=DEVICE)
    o = decode_step_(*(x[name][:, :1, :1] for name in "qkv"), state, phi=phi, backend="triton")
    assert o.isnan().all()
    assert state.z[..., 3].isnan().all()


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
    rest = torch.arange(9) != 4
    assert torch.equal(found[:, :, rest], clean[:, :, rest])
