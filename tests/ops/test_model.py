"""The model of clocks and bytes: what it chooses, and how far it is from what the compiler makes."""

import json
from pathlib import Path

import pytest
import torch

from hf_linear_attn.ops.linear_attention.triton import model
from hf_linear_attn.ops.linear_attention.triton.backward import backward_launches, save
from hf_linear_attn.ops.linear_attention.triton.forward import forward_launches
from hf_linear_attn.ops.linear_attention.triton.model import Costs, Cut, microseconds
from hf_linear_attn.ops.triton.plan import Launch, Problem, Target

ROOT = Path(__file__).parents[2]
HOPPER = Target("sm_90", 132)


def problem(
    T: int,
    *,
    B: int = 1,
    H: int = 32,
    HKV: int = 8,
    D: int = 128,
    V: int = 128,
    phi: str = "elu",
    target: Target = HOPPER,
    lengths: tuple[int, ...] = (),
) -> Problem:
    def empty(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(B, T, heads, dim, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    return Problem(target, empty(H, D), empty(HKV, D), empty(HKV, V), None, cu_seqlens, None, None, phi, True, 0)


def launches(p: Problem) -> tuple[list[Launch], list[Launch]]:
    out, forward = forward_launches(p, 1e-6)
    return forward, backward_launches(p, save(p, out), torch.empty_like(out.o), out.kv, out.z)[1]


# Instructions that the compiled kernels issue per head and token, times warps over four schedulers: Triton 3.9.0,
# sm_90, bf16, four query heads per key head, segments of 256 tokens; features wider than values are the identity's,
# masked and delayed, others elu's.
COMPILED = [
    (64, 64, "state", 6.4),
    (64, 64, "forward", 18.1),
    (64, 64, "reverse_state", 10.8),
    (64, 64, "dq", 16.0),
    (64, 64, "dk", 14.1),
    (64, 64, "dv", 11.0),
    (64, 64, "stored_forward", 27.8),
    (64, 64, "stored_dq", 28.0),
    (64, 64, "stored_dkv", 35.8),
    (128, 64, "state", 4.4),
    (128, 64, "stored_forward", 23.6),
    (128, 64, "stored_dq", 23.2),
    (128, 64, "stored_dkv", 36.5),
    (128, 128, "state", 10.4),
    (128, 128, "forward", 38.1),
    (128, 128, "reverse_state", 20.9),
    (128, 128, "dq", 50.5),
    (128, 128, "dk", 45.1),
    (128, 128, "dv", 23.3),
    (128, 128, "stored_forward", 41.7),
    (128, 128, "stored_dq", 40.8),
    (128, 128, "stored_dkv", 47.1),
    (256, 128, "state", 8.0),
    (256, 128, "reverse_state", 22.3),
    (256, 128, "stored_forward", 33.6),
    (256, 128, "stored_dq", 34.9),
    (256, 128, "stored_dk", 35.5),
    (256, 128, "stored_dv", 31.0),
]


@pytest.mark.parametrize(("D", "V", "role", "compiled"), COMPILED)
def test_clocks_are_near_those_of_compiled_kernels(D: int, V: int, role: str, compiled: float) -> None:
    T, length = 65_536, 256
    p = problem(T, D=D, V=V, phi="elu" if D == V else "identity")
    costs = Costs(p)
    if role in ("state", "reverse_state"):
        work, heads = costs.state(role, T, length), 32 if role == "reverse_state" else 8
    elif role.startswith("stored"):
        work, heads = costs.stored(role, T, length), 32
    else:
        work, heads = costs.carried(role, T, length), 32
    issued = work.clocks * work.programs / (heads * T)
    assert 1 / 1.7 < issued / compiled < 1.7


# How the H100 of docs/results/kernels-h100.json cut its sequences: the forward, dq, and dk with dv.
CUTS_ON_AN_H100 = {
    (8, 8_192): (Cut(False, 512), Cut(True, 256), Cut(True, 256)),
    (8, 32_768): (Cut(False, 896), Cut(True, 256), Cut(True, 256)),
    (32, 8_192): (Cut(False, 2_048), Cut(False, 2_048), Cut(True, 512)),
    (32, 32_768): (Cut(False, 5_504), Cut(False, 8_192), Cut(True, 512)),
}


@pytest.mark.parametrize("HKV", [8, 32])
def test_further_tokens_take_what_they_took_on_an_h100(HKV: int) -> None:
    """From 8192 to 32768 tokens, so that the host's time drops out; the gap is fitted to eight key heads alone."""
    rows = json.loads((ROOT / "docs/results/kernels-h100.json").read_text())["rows"]
    took = {row["tokens"]: row["hf_linear_attn"] for row in rows if row["HKV"] == HKV}
    predicted = {}
    for T in (8_192, 32_768):
        forward, dq, dkv = CUTS_ON_AN_H100[HKV, T]
        costs = Costs(problem(T, HKV=HKV))
        backward = (costs.dq(dq), costs.dkv(dkv))
        predicted["forward", T] = microseconds(HOPPER, costs.forward(forward))
        predicted["backward", T] = sum(microseconds(HOPPER, part) for part in backward)
    for part in ("forward", "backward"):
        measured = 1e3 * (took[32_768][part] - took[8_192][part])
        assert 1 / 1.4 < (predicted[part, 32_768] - predicted[part, 8_192]) / measured < 1.4


RECIPE = [("recipe", 8, 256, T) for T in (2_048, 8_192, 32_768)]


@pytest.mark.parametrize(
    ("kind", "HKV", "D", "T"),
    [("rows", 8, 128, 2_048), ("rows", 8, 128, 8_192), ("rows", 8, 128, 32_768), ("rows", 32, 128, 32_768), *RECIPE],
)
def test_calls_take_on_an_h100_what_is_predicted(kind: str, HKV: int, D: int, T: int) -> None:
    """Without the host. What the model counts was fixed before these were measured, but for the tiles."""
    rows = json.loads((ROOT / "docs/results/kernels-h100-tuned.json").read_text())[kind]
    # Features are twice as wide as the heads that a row names; rows of other parts come later.
    took = next(row["hf_linear_attn"] for row in rows if (row["HKV"], row["tokens"]) == (HKV, T))
    for part, predicted in zip(("forward", "backward"), chosen_us(problem(T, HKV=HKV, D=D)), strict=True):
        assert 1 / 1.4 < predicted / (1e3 * took[f"{part}_on_device"]) < 1.4


def seconds_of(p: Problem, cut: Cut) -> tuple[float, float]:
    costs = Costs(p)
    return microseconds(p.target, costs.forward(cut)), sum(
        microseconds(p.target, part) for part in (costs.dq(cut), costs.dkv(cut))
    )


def chosen_us(p: Problem) -> tuple[float, float]:
    costs = Costs(p)
    forward = microseconds(p.target, costs.forward(model.forward_cut(p)))
    backward = (costs.dq(model.dq_cut(p)), costs.dkv(model.dkv_cut(p)))
    return forward, sum(microseconds(p.target, part) for part in backward)


def test_short_sequences_gain_and_long_ones_do_not_lose() -> None:
    """Against segments of no fewer than 1024 tokens, as they were once cut."""
    forward, backward = chosen_us(problem(2_048))
    former = seconds_of(problem(2_048), Cut(False, 1_024))
    assert former[0] > 2 * forward
    assert former[1] > 3 * backward
    for T in (8_192, 32_768, 131_072):
        now = chosen_us(problem(T))
        for length in (1_024, T // 4, T):
            then = seconds_of(problem(T), Cut(False, length))
            assert now[0] <= 1.01 * then[0]
            assert now[1] <= 1.01 * then[1]


@pytest.mark.parametrize(("HKV", "D"), [(8, 128), (32, 128), (8, 256)])
@pytest.mark.parametrize("T", [2_048, 4_096, 32_768])
def test_programs_for_every_processor(HKV: int, D: int, T: int) -> None:
    """All but four of 132: eight key heads of 2048 tokens are 128 tiles of 128 keys."""
    for launch in (x for part in launches(problem(T, HKV=HKV, D=D)) for x in part):
        assert launch.programs >= 128, launch.role


@pytest.mark.parametrize("lengths", [(), (3_000, 0, 1_096)])
@pytest.mark.parametrize("cut", [Cut(False, 4_096), Cut(False, 1_024), Cut(True, 256)])
def test_works_are_the_launches_of_the_plan(
    cut: Cut, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(4_096, lengths=lengths)
    monkeypatch.setattr(model, "cuts", lambda *_: iter([cut]))
    costs = Costs(p)
    forward, backward = launches(p)
    assert [(x.role, x.programs) for x in costs.forward(cut)] == [(x.role, x.programs) for x in forward]
    works = {x.role: x.programs for x in (*costs.dq(cut), *costs.dkv(cut))}
    for launch in backward:
        if launch.role != "delta":
            assert works[launch.role] == launch.programs, launch.role


def test_a_batch_that_fills_the_device_is_not_cut() -> None:
    """Its bytes are what it takes, and a cut reads keys and values twice."""
    assert model.forward_cut(problem(8_192, B=8, HKV=32, D=64, V=64)) == Cut(False, 8_192)


def test_narrow_heads_carry_their_states_and_wide_features_read_them() -> None:
    assert not model.forward_cut(problem(65_536, B=4, D=64, V=64)).stored
    assert not model.dq_cut(problem(65_536, B=4, D=64, V=64)).stored
    for cut in (model.forward_cut, model.dq_cut, model.dkv_cut):
        assert cut(problem(65_536, D=256)).stored


def test_slower_processors_take_longer() -> None:
    p = problem(8_192)
    works = Costs(p).forward(Cut(False, 1_024))
    assert microseconds(Target("sm_80", 108), works) > microseconds(HOPPER, works)
    assert microseconds(Target("sm_90", 66), works) > microseconds(HOPPER, works)
