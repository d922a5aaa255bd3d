"""Gradients that nobody asks for are not computed, and those that are do not change by it."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from hf_linear_attn import LinearAttentionState, linear_attention
from hf_linear_attn.ops.linear_attention.triton import op as linear
from hf_linear_attn.ops.triton.plan import Launch
from hf_linear_attn.ops.window.triton import op as window
from tests.ops import test_window
from tests.ops.oracle import Case
from tests.spread import spread

TOKENS = ("q", "k", "v")


def recorded(module: object, planner: str, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return a list to which a module's planner adds what it plans."""
    launches: list[Launch] = []
    plan = getattr(module, planner)

    def recording(*arguments: object) -> tuple[object, list[Launch]]:
        out, planned = plan(*arguments)
        launches.extend(planned)
        return out, planned

    monkeypatch.setattr(module, planner, recording)
    return launches


def gradients(case: Case, leaves: tuple[str, ...]) -> dict[str, Tensor]:
    x = case.inputs()
    for name in leaves:
        x[name].requires_grad_()
    state = LinearAttentionState(x["kv0"], x["z0"]) if case.state else None
    o, _ = linear_attention(
        *(x[name] for name in TOKENS),
        causal=case.causal,
        delay=case.delay,
        cu_seqlens=x.get("cu_seqlens"),
        state=state,
        backend="triton",
        log_decay=x.get("log_decay"),
    )
    o.backward(x["do"])
    return {name: x[name].grad for name in leaves}


CASES = {
    "whole": Case(B=1, HKV=1, T=20, state=True),
    "delayed": Case(B=1, HKV=1, T=20, delay=4, state=True),
    "packed": Case(H=2, HKV=1, T=25, lengths=(18, 7), state=True),
    "bidirectional": Case(B=1, HKV=1, T=7, S=20, causal=False, state=True),
    "faded": Case(B=1, HKV=1, T=40, delay=3, state=True, decay=0.5),
}


@pytest.mark.parametrize(
    ("cut", "name"), spread(product(["whole_sequences", "short_segments", "stored_states"], CASES), 3)
)
def test_gradients_are_the_same_for_whoever_asks(cut: str, name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    request.getfixturevalue(cut)
    every = gradients(case, (*TOKENS, "kv0", "z0", *(() if case.decay is None else ("log_decay",))))
    asked = [("q",), ("k",), ("v",), ("q", "k"), ("kv0",), ("q", "z0")]
    if case.decay is not None:
        asked += [("log_decay",), ("q", "log_decay")]
    for leaves in asked:
        for name, x in gradients(case, leaves).items():
            # Whoever asks for dq alone may have it summed in other segments.
            same = torch.equal if case.causal or x.device.type == "cpu" else torch.allclose
            assert same(x, every[name]), (leaves, name)


@pytest.mark.parametrize(
    ("leaves", "backward"),
    [
        (("q",), ("delta", "dq")),
        (("q", "k"), ("delta", "dq", "dk")),
        (("k",), ("delta", "dk")),
        (("v",), ("dv",)),
        (TOKENS, ("delta", "dq", "dk", "dv")),
    ],
    ids=str,
)
@pytest.mark.usefixtures("whole_sequences")
def test_kernels_of_unwanted_gradients_are_not_launched(
    leaves: tuple[str, ...], backward: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(linear, "backward_launches", monkeypatch)
    gradients(Case(B=1, H=1, HKV=1, T=7), leaves)
    assert [launch.role for launch in launches] == list(backward)


def test_a_final_state_that_no_loss_has_gets_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    plan = linear.backward_launches
    monkeypatch.setattr(linear, "backward_launches", lambda p, saved, *rest: seen.extend(rest) or plan(p, saved, *rest))
    gradients(Case(B=1, H=1, HKV=1, T=7), TOKENS)
    assert seen[1] is None
    assert seen[2] is None


@pytest.mark.parametrize("part", ["o", "kv", "z"])
def test_losses_of_one_result_alone(part: str) -> None:
    """Whatever of the results has a gradient, the others count as zeros."""
    case = Case(B=1, HKV=1, T=20)

    def found(backend: str) -> list[Tensor | None]:
        x = case.inputs()
        q, k, v = (x[name].double() if backend == "reference" else x[name] for name in TOKENS)
        leaves = [y.requires_grad_() for y in (q, k, v)]
        o, state = linear_attention(*leaves, backend=backend)
        result = {"o": o, "kv": state.kv, "z": state.z}[part]
        result.square().sum().backward()
        return [y.grad for y in leaves]

    for x, right in zip(found("triton"), found("reference"), strict=True):
        expected = torch.zeros(()) if right is None else right.float()
        torch.testing.assert_close(torch.zeros(()) if x is None else x, expected.expand_as(x), rtol=1e-4, atol=1e-4)


def window_gradients(case: test_window.Case, leaves: Iterable[str]) -> dict[str, Tensor]:
    x = case.inputs()
    wanted = {name: x[name].requires_grad_() for name in leaves}
    test_window.attended(case, x, "triton").backward(x["do"])
    return {name: leaf.grad for name, leaf in wanted.items()}


WINDOW = test_window.Case(B=1, T=20, past=7, own=True, before=True, sinks=2, masked=True)


@pytest.mark.parametrize("case", [WINDOW, replace(WINDOW, kept=3)])
def test_gradients_of_a_window_are_the_same_for_whoever_asks(case: test_window.Case) -> None:
    names = [name for name in test_window.LEAVES if name in case.inputs()]
    every = window_gradients(case, names)
    kept = [("gone", "kept_v"), ("kept_k",)] if case.kept else []
    for leaves in (("f", "bias", "weight"), ("q",), ("v", "sink_k"), ("before",), *kept):
        for name, x in window_gradients(case, leaves).items():
            assert torch.equal(x, every[name]), (leaves, name)


def test_a_window_whose_keys_need_no_gradient_computes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(window, "window_backward_launches", monkeypatch)
    window_gradients(WINDOW, ("f", "bias", "weight"))
    assert [launch.role for launch in launches] == ["window_dq"]
    assert not launches[0].arguments["OF_Q"]
    assert not launches[0].arguments["OF_SINKS"]
