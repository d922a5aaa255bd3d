"""What Triton would be told to launch, without a GPU: run by test_start.py, in a process that interprets nothing.

A driver that launches nothing stands for the GPU's. Each call runs twice: anew, when Triton looks at all arguments, and
repeated, when what Triton compiled is started directly.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hf_linear_attn import linear_attention
from hf_linear_attn.ops import dispatch
from hf_linear_attn.ops.hybrid import HybridStep, hybrid_step_
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.triton import run
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile
from hf_linear_attn.ops.triton.run import Number, clear_caches, execute
from tests.ops.test_hybrid_step import Case, drawn

LAUNCHES: list[list[Any]] = []
LOOKS: list[str] = []


class Launcher:
    """Writes down what it is told to launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        # Of the source and all that Triton compiled it for.
        self.compiled = metadata.hash

    def __call__(self, *arguments: Any) -> None:
        # Three numbers of programs, the stream, the function, two of metadata, two hooks, and the kernel's own.
        LAUNCHES.append([self.compiled, *arguments[:5], *map(shown, arguments[9:])])


def shown(x: Any) -> str:
    """Return what a launch is told by an argument; results lie at another place each time.

    A kernel that is started directly is told addresses, which are larger than any number that it is told.
    """
    address = x.data_ptr() if isinstance(x, torch.Tensor) else x
    if isinstance(address, int) and address > 2**40:
        return f"{address % 16} {PLACES.setdefault(address, f'allocated {len(PLACES)}')}"
    return f"{type(x).__name__} {x}"


class Utilities:
    """Loads nothing."""

    def load_binary(self, name: str, binary: bytes, *others: Any) -> tuple[Any, ...]:
        return 1, 2, 100, 0, 1024

    def unload_module(self, module: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Driver:
    """Stands for an H100."""

    launcher_cls, utils = Launcher, Utilities()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def add(x, out, n, m, SIZE: tl.constexpr = 16):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) + n + m)


PLACES: dict[int, str] = {}
"""What lies at an address."""


def same(name: str, call: Callable[..., Any], *given: Any) -> None:
    """Print whether a call launches the same when it is repeated, and how often Triton was asked."""
    found = []
    for again in range(2):
        PLACES.clear()
        PLACES.update({x.data_ptr(): f"{number}" for number, x in enumerate(given) if isinstance(x, torch.Tensor)})
        LAUNCHES.clear()
        LOOKS.clear()
        if not again:
            clear_caches()
        call(*given)
        found.append(([*LAUNCHES], len(LOOKS)))
    (first, looks), (second, again) = found
    told = {"launches": len(first), "same": first == second, "looks": [looks, again]}
    sys.stdout.write(json.dumps({name: told}) + "\n")


def main() -> None:
    driver.set_active(Driver())
    dispatch._obstacle = lambda device: None
    run.target_of = lambda device: Target("sm_90", 132)
    launch = Launch.run
    Launch.run = lambda self, arguments=None: LOOKS.append(self.role) or launch(self, arguments)

    def plan(x: torch.Tensor, n: int, m: int) -> tuple[torch.Tensor, Launch]:
        return x, Launch("add", add, 2, {"x": x, "out": x, "n": n, "m": m}, Tile(1, 1, 1, 1))

    # Calls that differ in what Triton compiles for alone: where x begins, and a number that is none of a plan's.
    whole, right, kernels = torch.zeros(20), True, set()
    for shift, n in [(shift, n) for shift in (0, 1, 4) for n in (1, 2, 3, 16, 32, 2**31, 2**40)] * 3:
        x = whole[shift : shift + 16]
        LAUNCHES.clear()
        execute(plan, x, Number(n), 5)
        plan(x, n, 5)[1].run()
        repeated, expected = LAUNCHES
        right = right and repeated == expected
        kernels.add(expected[0])
    sys.stdout.write(json.dumps({"told apart": {"same": right, "kernels": len(kernels)}}) + "\n")

    q, k, v = (torch.zeros(1, 200, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 2, 2))
    mask = torch.ones(1, 200, dtype=torch.bool)
    same("masked", lambda *x: linear_attention(*x, key_mask=mask, delay=8, backend="triton"), q, k, v)
    wide = torch.zeros(4 * 200 * 64 + 1, dtype=torch.bfloat16)
    bent = wide[1:].view(1, 200, 4, 64).transpose(1, 2)
    same("unaligned", lambda *x: linear_attention(*x, key_mask=mask, delay=8, backend="triton"), bent, k, v)
    state = decode_state(1, 2, 64, 64, device="cpu")
    one = [x[:, :, :1] for x in (q, k, v)]
    same("step", lambda *x: decode_step_(*x, state, backend="triton"), *one)
    recommended = Case("norm_preserving", B=1, D=64, V=64, window=8, first=10, T=11, turned=64, dtype=torch.bfloat16)
    same(
        "recommended step",
        lambda *x: hybrid_step_(HybridStep(*x), "triton"),
        *drawn(recommended, pytest.MonkeyPatch()),
    )


if __name__ == "__main__":
    main()
