"""Plans that are made once: repeated rightly with other tensors, made anew where something differs, and fast."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from hf_linear_attn import linear_attention
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.ops.delta_rule import delta_rule
from hf_linear_attn.ops.dispatch import choose_backend
from hf_linear_attn.ops.linear_attention.triton import op as linear
from hf_linear_attn.ops.state import LinearAttentionState
from hf_linear_attn.ops.step import decode_state, decode_step_, hybrid_step_
from hf_linear_attn.ops.triton import remember
from hf_linear_attn.ops.triton.plan import Target
from hf_linear_attn.ops.triton.record import recording
from hf_linear_attn.ops.triton.remember import launch, remembered, shared_by_texts
from hf_linear_attn.ops.triton.run import directly
from hf_linear_attn.ops.triton.start import Start

from .oracle import DEVICE
from .test_hybrid_step import Case, drawn


class Kernel:
    """Stands for a jitted function: adds ``n`` to what it is given, on the host."""

    def __init__(self) -> None:
        self.programs: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(x: Tensor, out: Tensor, n: int) -> None:
            self.programs.append(grid[0])
            out.copy_(x + n)

        return run


def counted(plan: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return the remembered function and, at the other end, how often it planned."""
    times: list[int] = []

    def counting(*arguments: Any) -> Any:
        times.append(1)
        result, starts = plan(*arguments)
        launch(starts, DEVICE)
        return result

    return remembered(counting), times


def added(x: Tensor, n: int) -> tuple[tuple[Tensor, Tensor], list[Start]]:
    # As the plans do: outputs in another order of dimensions, something filled, something computed from the input.
    out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device).transpose(0, 1)
    doubled = torch.cat([x, x])[: len(x)] + torch.zeros_like(x)
    return (out, doubled), [Start(KERNEL, len(x), {"x": x, "out": out, "n": n})]


KERNEL = Kernel()


def test_repeats_with_other_tensors() -> None:
    run, times = counted(added)
    first = torch.randn(3, 5)
    results = []
    for x in (first, torch.randn(3, 5), torch.randn(3, 5)):
        out, same = run(x, 2)
        assert torch.equal(out, x + 2)
        assert torch.equal(same, x)
        assert out.stride() == (1, 3)
        results.append(out)
    assert len(times) == 1
    # What earlier calls returned is theirs.
    assert torch.equal(results[0], first + 2)
    assert KERNEL.programs[-3:] == [3, 3, 3]


def test_plans_anew_what_differs() -> None:
    run, times = counted(added)
    x = torch.randn(4, 6)
    different = [(x, 1), (x, 2), (x[:2], 1), (x.double(), 1), (x.t().contiguous().t(), 1)]
    for y, n in different * 2:
        assert torch.equal(run(y, n)[0], y + n)
    assert len(times) == len(different)
    try:
        torch.set_float32_matmul_precision("high")
        run(x, 1)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(times) == len(different) + 1
    remember.forget()
    run(x, 1)
    assert len(times) == len(different) + 2


def test_a_plan_that_reads_memory_is_made_each_time() -> None:
    def by_value(x: Tensor, n: int) -> Any:
        return added(x, n + int(x[0, 0]))

    elsewhere = torch.ones(2, 2)

    def by_another(x: Tensor, n: int) -> Any:
        (_, doubled), starts = added(x, n)
        return (starts[0].arguments["out"], doubled + elsewhere), starts

    for plan in (by_value, by_another):
        run, times = counted(plan)
        for value in (1.0, 5.0):
            x = torch.full((2, 2), value)
            expected = plan(x, 1)[1][0].arguments["n"] + value
            assert torch.equal(run(x, 1)[0], torch.full((2, 2), expected))
        assert len(times) == 2


def test_a_tensor_in_two_roles_is_not_taken_for_one() -> None:
    def total(x: Tensor, y: Tensor) -> Any:
        out = torch.empty_like(x)
        return out, [Start(KERNEL, 1, {"x": x + y, "out": out, "n": 0})]

    run, times = counted(total)
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    assert torch.equal(run(x, x), x + x)
    for _ in range(3):
        assert torch.equal(run(x, y), x + y)
    # Nor is one that was given so first planned anew for ever.
    assert len(times) == 2
    assert torch.equal(run(y, y), y + y)


def test_one_thread_does_not_disturb_another() -> None:
    run, _ = counted(added)
    wrong = []

    def work(seed: int) -> None:
        g = torch.Generator(DEVICE).manual_seed(seed)
        for i in range(60):
            x = torch.randn(2 + i % 7, 3, generator=g, device=DEVICE)
            if not torch.equal(run(x, i % 3)[0], x + i % 3):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_remembers_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remember, "MOST_CALLS", 3)
    run, times = counted(added)
    for rows in (1, 2, 3, 4, 4, 3, 2):
        run(torch.randn(rows, 2), 0)
    assert len(times) == 4
    run(torch.randn(1, 2), 0)
    assert len(times) == 5


def test_what_watches_gets_the_op() -> None:
    told = []
    call = directly(lambda x: told.append("op") or x, lambda x: told.append("run") or x)
    x = torch.ones(1)
    call(x)
    with torch.inference_mode():
        call(x)
    assert told == ["run", "run"]
    with FlopCounterMode(display=False):
        call(x)
    torch.func.vmap(lambda x: call(x))(x)
    with torch.autograd.forward_ad.dual_level():
        call(x)
    # Gradients, where what runs has none of its own.
    call(x.clone().requires_grad_())
    assert told[2:] == ["op"] * 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rule", ["additive", "delta"])
def test_boundaries_are_read_at_every_call(rule: str, backend: str, dtype: torch.dtype) -> None:
    """Also where their memory is written by what PyTorch does not see, as a graph's replay or NumPy."""
    q, k, v = drawn_tokens(*[(1, 2, 80, 16)] * 3)
    beta, bounds = torch.rand(1, 2, 80), torch.tensor([0, 10, 80], dtype=dtype)

    def read(**settings: Any) -> Tensor:
        given = q, k / 4, v
        if rule == "delta":
            return delta_rule(*given, beta, return_state=False, backend=backend, **settings)
        return linear_attention(*given, return_state=False, backend=backend, **settings)

    for boundary in (10, 60, 33):
        version = bounds._version
        bounds.data[1] = boundary
        assert bounds._version == version
        expected = read(cu_seqlens=torch.tensor([0, boundary, 80], dtype=dtype))
        assert torch.equal(read(cu_seqlens=bounds), expected)
        v.requires_grad_()
        found, expected = (torch.autograd.grad(read(cu_seqlens=x).square().sum(), v) for x in (bounds, bounds.clone()))
        v.requires_grad_(False)
        assert torch.equal(found[0], expected[0])


def drawn_tokens(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(size, generator=g, device=DEVICE) for size in sizes]


def planning(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one whenever linear attention is planned."""
    times: list[int] = []
    plan = linear.forward_launches
    monkeypatch.setattr(linear, "forward_launches", lambda *given: times.append(1) or plan(*given))
    return times


def test_whole_calls_are_repeated_with_their_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    times = planning(monkeypatch)
    sizes = (1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16), (1, 2, 16, 16), (1, 2, 16)
    mask = torch.arange(40)[None] > 3
    for seed in range(3):
        q, k, v, kv, z = drawn_tokens(*sizes, seed=seed)
        state = LinearAttentionState(kv, z.abs())
        for backend in ("triton", "torch"):
            o, after = linear_attention(q, k, v, "elu", state=state, key_mask=mask, delay=3, backend=backend)
            if backend == "triton":
                found = o, *after
                assert type(after) is LinearAttentionState
        for x, y in zip(found, (o, *after), strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)
    assert len(times) == 1
    # Nothing else than what it was is taken for it.
    assert isinstance(linear_attention(q, k, v, return_state=False, backend="triton"), Tensor)
    for name in ("identity", "elu", "relu"):
        feature_map = get_feature_map(name, 16, 4, 2)
        found, right = (linear_attention(q, k, v, feature_map, backend=backend)[0] for backend in ("triton", "torch"))
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-3)
    assert len(times) == 5


def test_what_a_remembered_call_refuses_is_still_refused() -> None:
    q, k, v = drawn_tokens((1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16))
    for _ in range(2):
        linear_attention(q, k, v, backend="triton")
        linear_attention(q, k, v, causal=True, backend="triton")
    with pytest.raises(ArgumentTypeError, match="causal"):
        linear_attention(q, k, v, causal=1, backend="triton")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="device"):
        linear_attention(q, k.to("meta"), v, backend="triton")
    with pytest.raises(ArgumentTypeError, match="dtype"):
        linear_attention(q, k.bfloat16(), v, backend="triton")
    with pytest.raises(ArgumentError, match="tokens"):
        linear_attention(q, k[:, :, :39], v[:, :, :39], backend="triton")


def test_a_call_whose_gradients_are_asked_for_is_no_repetition() -> None:
    tokens = drawn_tokens((1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16))
    with torch.no_grad():
        for _ in range(2):
            expected = linear_attention(*tokens, backend="triton")[0]
    for x in tokens:
        x.requires_grad_()
    with torch.no_grad():
        assert not linear_attention(*tokens, backend="triton")[0].requires_grad
    o = linear_attention(*tokens, backend="triton")[0]
    assert torch.equal(o, expected)
    o.sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in tokens)


def test_repeated_steps_tell_autograd_what_they_change() -> None:
    q, k, v = drawn_tokens((1, 4, 1, 16), (1, 2, 1, 16), (1, 2, 1, 16))
    state = decode_state(1, 2, 16, 16, device=DEVICE)
    versions = []
    for _ in range(3):
        decode_step_(q, k, v, state, backend="triton")
        versions.append([x._version for x in state])
    assert versions[0] < versions[1] < versions[2]
    assert all(later > earlier for earlier, later in zip(versions[0], versions[2], strict=True))


def test_a_call_that_pytorch_computes_is_not_written_down() -> None:
    """Its operations are many, and all that they allocate would be kept until it ends."""
    kept, times = [], []

    @remembered
    def call(x: Tensor) -> Tensor:
        times.append(1)
        choose_backend("torch", x.device, lambda: "nothing")
        y = x + 1
        recorder = recording()
        kept.append(recorder is not None and (len(recorder.alive), len(recorder.steps)))
        return y * 2

    x = torch.ones(3)
    for _ in range(3):
        assert torch.equal(call(x), 2 * (x + 1))
    assert len(times) == 3
    assert kept == [(0, 0), False, False]


def test_what_autocast_casts_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    times = planning(monkeypatch)
    q, k, v = drawn_tokens((1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16))
    outside = linear_attention(q, k, v, backend="triton")[0]
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        within = [linear_attention(q, k, v, backend="triton")[0] for _ in range(2)]
    assert all(torch.equal(x, outside) for x in within)
    # Written down as a whole call once, and as a kernel's call by itself.
    assert len(times) == 2


def test_texts_of_one_shape_share_what_depends_on_that_alone() -> None:
    times = []

    @shared_by_texts
    def count(device: torch.device, tokens: Tensor | int) -> Tensor:
        times.append(1)
        return torch.arange(2, device=device) + tokens

    assert count(DEVICE, 3) is count(DEVICE, 3)
    assert len(times) == 1
    with torch.inference_mode():
        assert not count(DEVICE, 4).is_inference()
    # Where a tensor tells, its number may be another the next time.
    length = torch.tensor(3)
    first = count(DEVICE, length)
    length += 1
    assert torch.equal(count(DEVICE, length), first + 1)
    # What watches sees what is computed, and keeps what it makes of it.
    with FakeTensorMode(), FlopCounterMode(display=False):
        assert isinstance(count(DEVICE, 3), FakeTensor)
    assert not isinstance(count(DEVICE, 3), FakeTensor)


class Compiled:
    """Stands for what Triton compiled: launches nothing."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: None


def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Start, "run", lambda self: Compiled())
    monkeypatch.setattr("hf_linear_attn.ops.triton.run.target_of", lambda device: Target("sm_90", 132))


def cpu_time(call: Callable[[], object]) -> float:
    """Return the least CPU time of a call, in seconds, of several batches of calls."""
    best = float("inf")
    for _ in range(20):
        started = time.thread_time()
        for _ in range(25):
            call()
        best = min(best, (time.thread_time() - started) / 25)
    return best


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are stubbed on the CPU")
def test_host_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small allocations, which take 0.8 to 1.4 us; planned anew each time the first two took 180 and 62.

    They take 9 and 8 now. The third is the recommended recipe's step, which takes 24: as an op of torch.library, of 34
    arguments, it took 400.
    """
    stubbed(monkeypatch)
    # A default device, as these tests have, makes every call of torch slower.
    torch.set_default_device(None)
    feature_map = get_feature_map("elu", 128, 8, 2)
    q, k, v = (torch.empty(1, 4096, heads, 128, dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 2, 2))
    one = [x[:, :, :1] for x in (q, k, v)]
    state = decode_state(1, 2, 128, 128, device="cpu")
    recommended = Case("norm_preserving", B=1, D=64, V=64, window=8, first=10, T=11, turned=64, dtype=torch.bfloat16)
    whole = drawn(recommended, monkeypatch)
    unit = cpu_time(lambda: torch.empty(1, 2, 128, 128))
    with torch.no_grad():
        forward = cpu_time(lambda: linear_attention(q, k, v, feature_map, backend="triton"))
        step = cpu_time(lambda: decode_step_(*one, state, backend="triton"))
        hybrid = cpu_time(lambda: hybrid_step_(whole, backend="triton"))
    assert forward < 25 * unit, f"{forward * 1e6:.1f} us, an allocation takes {unit * 1e6:.2f}"
    assert step < 20 * unit, f"{step * 1e6:.1f} us, an allocation takes {unit * 1e6:.2f}"
    assert hybrid < 60 * unit, f"{hybrid * 1e6:.1f} us, an allocation takes {unit * 1e6:.2f}"
