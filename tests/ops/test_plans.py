"""Plans that are made once: followed rightly with other tensors, made anew where something differs, and fast."""

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from hf_linear_attn import linear_attention
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.layers.numbers import shared_by_texts
from hf_linear_attn.ops.delta_rule import delta_rule
from hf_linear_attn.ops.hybrid import hybrid_step_
from hf_linear_attn.ops.linear_attention.triton import op as linear
from hf_linear_attn.ops.state import LinearAttentionState
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.triton import run
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile
from hf_linear_attn.ops.triton.run import Number, clear_caches, directly, execute

from .oracle import DEVICE
from .test_hybrid_step import Case, drawn


class Kernel:
    """Stands for a jitted function: adds ``n`` to what it is given, on the host."""

    def __init__(self) -> None:
        self.programs: list[int] = []

    @staticmethod
    def fn(x: Tensor, out: Tensor, n: int, **options: Any) -> None: ...

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def run(x: Tensor, out: Tensor, n: int, **options: Any) -> None:
            self.programs.append(grid[0])
            out.copy_(x + n)

        return run


KERNEL, TILE = Kernel(), Tile(1, 1, 1, 1)


class Pair(NamedTuple):
    """A named tuple among arguments, as problems are."""

    x: Tensor
    n: int


def counted() -> tuple[Callable[..., Any], list[Any]]:
    """Return a plan and a list that grows by one whenever it is made."""
    times: list[Any] = []

    def added(given: Pair) -> tuple[tuple[Tensor, int], Launch]:
        times.append(given)
        x = given.x
        # As the plans do: an output in another order of dimensions.
        out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device).transpose(0, 1)
        return (out, 7), Launch("add", KERNEL, len(x), {"x": x, "out": out, "n": given.n}, TILE)

    return added, times


def test_a_plan_is_followed_with_other_tensors() -> None:
    plan, times = counted()
    first = torch.randn(3, 5)
    results = []
    for x in (first, torch.randn(3, 5), torch.randn(3, 5)):
        out, constant = execute(plan, Pair(x, 2))
        assert torch.equal(out, x + 2)
        assert constant == 7
        assert out.stride() == (1, 3)
        results.append(out)
    assert len(times) == 1
    assert times[0].x.is_meta
    # What earlier calls returned is theirs.
    assert torch.equal(results[0], first + 2)
    assert KERNEL.programs[-3:] == [3, 3, 3]


def test_what_differs_has_a_plan_of_its_own() -> None:
    plan, times = counted()
    x, whole = torch.randn(4, 6), torch.randn(25)
    different = [
        *((x, 1), (x, 2), (x[:2], 1), (x.double(), 1), (x.t().contiguous().t(), 1)),
        # Triton compiles another kernel for addresses that 16 does not divide.
        (whole[1:].view(4, 6), 1),
    ]
    for y, n in different * 2:
        assert torch.equal(execute(plan, Pair(y, n))[0], y + n)
    assert len(times) == len(different)
    try:
        torch.set_float32_matmul_precision("high")
        execute(plan, Pair(x, 1))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(times) == len(different) + 1
    clear_caches()
    execute(plan, Pair(x, 1))
    assert len(times) == len(different) + 2


def test_one_tensor_in_two_roles() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
        outs = torch.empty_like(x), torch.empty_like(y)
        given = zip((x, y), outs, (1, 2), strict=True)
        return outs, [Launch("add", KERNEL, 1, {"x": a, "out": out, "n": n}, TILE) for a, out, n in given]

    x, y = torch.randn(2, 2), torch.randn(2, 2)
    for a, b in ((x, x), (x, y), (y, y)):
        for found, expected in zip(execute(both, a, b), (a + 1, b + 2), strict=True):
            assert torch.equal(found, expected)
    assert run.plan_of.cache_info().currsize == 1


def test_a_number_goes_on_to_the_launch() -> None:
    plan, times = counted()
    x = torch.randn(2, 2)
    for n in (5, 3, 7, 1, 16, 32):
        assert torch.equal(execute(plan, Pair(x, Number(n)))[0], x + n)
    # Triton tells 1 and multiples of 16 apart.
    assert len(times) == 3


class Halves(NamedTuple):
    """A result, of which a launch writes one."""

    written: Tensor
    rest: Tensor


class ByAddress:
    """Stands for a jitted function that Triton compiles: adds ``n`` to fp32 numbers, later by their addresses."""

    def __init__(self) -> None:
        self.compiled: list[torch.device] = []

    @staticmethod
    def fn(x: Tensor, out: Tensor, n: int, size: int, **options: Any) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile_and_run(x: Tensor, out: Tensor, n: int, size: int, **options: Any) -> ByAddress:
            self.compiled.append(x.device)
            out[:size] = x[:size] + n
            return self

        def run(x: int, out: int, n: int, size: int, *options: Any) -> None:
            read, written = (np.ctypeslib.as_array((ctypes.c_float * size).from_address(at)) for at in (x, out))
            assert x % 16 == out % 16 == 0
            written[:] = read + n

        # Triton's own takes one size of the grid, what it compiled three.
        return compile_and_run if len(grid) == 1 else run


def test_what_was_compiled_is_handed_addresses() -> None:
    """Of what is given, of results, and of what launches alone know, which lies side by side in one allocation."""
    kernel = ByAddress()

    def plan(x: Tensor) -> tuple[Halves, list[Launch]]:
        # The last is the largest: in the place of another it would lie over what is still to be read.
        one, two, three = (torch.empty(size, device=x.device) for size in (1000, 1001, 3000))
        out, other = torch.empty_like(x), torch.empty_like(x)
        chain = [
            *((x, one, 1, 1000), (x, two, 10, 1000), (x, three, 100, 3000)),
            *((one, out, 1, 1000), (two, other, 10, 1000), (three, other, 100, 500)),
        ]
        return Halves(out, other), [
            Launch("add", kernel, 1, {"x": a, "out": b, "n": n, "size": size}, TILE) for a, b, n, size in chain
        ]

    for _ in range(3):
        x = torch.randn(3000)
        found = execute(plan, x)
        torch.testing.assert_close(found.written[:1000], x[:1000] + 2)
        torch.testing.assert_close(found.rest[:500], x[:500] + 200)
        torch.testing.assert_close(found.rest[500:1000], x[500:1000] + 20)
    assert len(kernel.compiled) == 6


def test_what_was_compiled_belongs_to_one_device() -> None:
    kernel = ByAddress()

    def plan(x: Tensor) -> tuple[Tensor, Launch]:
        out = torch.empty_like(x)
        return out, Launch("add", kernel, 1, {"x": x, "out": out, "n": 1, "size": 1000}, TILE)

    # Tensors on meta are on another device than the others, and alike in all that a plan knows.
    for device in ("cpu", "meta", "cpu"):
        x = torch.zeros(1000, device=device)
        assert execute(plan, x).device == x.device
    assert [x.type for x in kernel.compiled] == ["cpu", "meta"]


def test_what_launches_do_not_write_begins_as_zeros() -> None:
    def plan(x: Tensor) -> tuple[Halves, Launch]:
        out = Halves(torch.empty_like(x), torch.empty_like(x))
        return out, Launch("add", KERNEL, 1, {"x": x, "out": out.written, "n": 1}, TILE)

    x = torch.randn(40, 40)
    for _ in range(4):
        # The memory that was freed comes again.
        found = execute(plan, x, zeros=("rest",))
        assert torch.equal(found.written, x + 1)
        assert not found.rest.any()
        found.rest.fill_(7)
        del found


def test_views_in_plans() -> None:
    def of_rows(x: Tensor, first: int) -> tuple[Tensor, Launch]:
        out = torch.empty_like(x)
        return out, Launch("add", KERNEL, 1, {"x": x[first:], "out": out, "n": 0}, TILE)

    def returned(x: Tensor) -> tuple[Tensor, Launch]:
        out = torch.empty_like(x)
        return out[:1], Launch("add", KERNEL, 1, {"x": x, "out": out, "n": 0}, TILE)

    x = torch.randn(2, 2)
    # A kernel gets an address.
    assert torch.equal(execute(of_rows, x, 0), x)
    for plan, given in ((of_rows, (x, 1)), (returned, (x,))):
        with pytest.raises(RuntimeError, match="a view that begins elsewhere, or returns one"):
            execute(plan, *given)


def test_one_thread_does_not_disturb_another() -> None:
    plan, _ = counted()
    wrong = []

    def work(seed: int) -> None:
        g = torch.Generator(DEVICE).manual_seed(seed)
        for i in range(60):
            x = torch.randn(2 + i % 7, 3, generator=g, device=DEVICE)
            if not torch.equal(execute(plan, Pair(x, i % 3))[0], x + i % 3):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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


@pytest.mark.parametrize(
    ("rule", "backend", "dtype"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case == ("delta", "triton", torch.int32) else ())
        for case in itertools.product(("additive", "delta"), ("torch", "triton"), (torch.int32, torch.int64))
    ],
)
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


def test_calls_that_are_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(times) == 4


def test_what_differs_from_a_planned_call_is_still_refused() -> None:
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


def test_gradients_after_calls_without_them() -> None:
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


def test_steps_tell_autograd_what_they_change() -> None:
    q, k, v = drawn_tokens((1, 4, 1, 16), (1, 2, 1, 16), (1, 2, 1, 16))
    state = decode_state(1, 2, 16, 16, device=DEVICE)
    versions = []
    for _ in range(3):
        decode_step_(q, k, v, state, backend="triton")
        versions.append([x._version for x in state])
    assert versions[0] < versions[1] < versions[2]
    assert all(later > earlier for earlier, later in zip(versions[0], versions[2], strict=True))


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
    monkeypatch.setattr(Launch, "run", lambda self, arguments=None: Compiled())
    monkeypatch.setattr("hf_linear_attn.ops.triton.run.target_of", lambda device: Target("sm_90", 132))


def cpu_times(*calls: Callable[[], object]) -> list[float]:
    """Return the least CPU time of each call, in seconds, of batches taken in turn: what else runs slows all."""
    best = [float("inf")] * len(calls)
    for _ in range(40):
        for number, call in enumerate(calls):
            started = time.thread_time()
            for _ in range(25):
                call()
            best[number] = min(best[number], (time.thread_time() - started) / 25)
    return best


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are stubbed on the CPU")
def test_host_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small allocations, which take 0.8 to 1.4 us; planned anew each time the first two took 180 and 62.

    They take 38 and 25 now, and the third, the recommended recipe's step, 60: as an op of torch.library, of 34
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
    with torch.no_grad():
        unit, forward, step, hybrid = cpu_times(
            lambda: torch.empty(1, 2, 128, 128),
            lambda: linear_attention(q, k, v, feature_map, backend="triton"),
            lambda: decode_step_(*one, state, backend="triton"),
            lambda: hybrid_step_(whole, "triton"),
        )
    # Measured: some 50 allocations, 26 and 54; with three other processes on two cores up to 64, 33 and 65.
    assert forward < 70 * unit, f"{forward * 1e6:.1f} us, an allocation takes {unit * 1e6:.2f}"
    assert step < 50 * unit, f"{step * 1e6:.1f} us, an allocation takes {unit * 1e6:.2f}"
    assert hybrid < 120 * unit, f"{hybrid * 1e6:.1f} us, an allocation takes {unit * 1e6:.2f}"
