"""How loops are called: what tensors are to them, and how many of their units run side by side."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

KINDS: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
"""The dtypes that loops read and write, as what stands for them there."""

LEAST_WORK = 2**20
"""Multiplications below which units are not shared out: threads would take longer to start."""


def loop_obstacle(tokens: Sequence[Tensor | None], learned: Sequence[Tensor | None]) -> str | None:
    """Say why loops cannot take tensors, or None where they can: all tokens are alike, and all that is learned."""
    for of in (tokens, learned):
        kinds = {x.dtype for x in of if x is not None}
        if len(kinds) > 1 or not kinds <= KINDS.keys():
            return f"loops take tensors of one dtype, fp32 or bf16, not {', '.join(sorted(map(str, kinds)))}"
    for x in (*tokens, *learned):
        if x is not None and (x.device.type != "cpu" or type(x) not in (Tensor, Parameter)):
            return f"loops take plain tensors on the CPU, not a {type(x).__name__} on {x.device.type}"
    return None


def address(x: Tensor | None) -> int:
    """Return where a tensor begins; 0 where there is none."""
    return 0 if x is None else x.data_ptr()


class _Desk(threading.local):
    floats = np.empty(0, np.float32)
    address = 0


_desk = _Desk()


def desk(floats: int) -> int:
    """Return where a thread has memory to work on during one call, for so many fp32; not for what other threads run."""
    if floats > len(_desk.floats):
        _desk.floats = np.empty(floats, np.float32)
        _desk.address = _desk.floats.ctypes.data
    return _desk.address


def parts_of(units: int, work: int) -> int:
    """Return by how many threads units are run, of about so many multiplications each: at most as PyTorch uses."""
    most = min(units, units * work // LEAST_WORK)
    return most if most < 2 else min(most, torch.get_num_threads())


def in_parts(run: Callable[[int, int], object], units: int, work: int, held: object = None) -> None:
    """Run a loop over units, by several threads where that pays.

    Args:
        run: Takes the first unit and the one after the last; lets other threads run.
        units: How many there are.
        work: About how many multiplications each of them is.
        held: What is read and written: it must outlive a thread, also where whoever waits for that is interrupted.
    """
    parts = parts_of(units, work)
    if parts < 2:
        run(0, units)
        return
    bounds = [units * n // parts for n in range(parts + 1)]
    others = [_pool(parts - 1, os.getpid()).submit(_run, run, *pair, held) for pair in pairwise(bounds[1:])]
    run(bounds[0], bounds[1])
    wait(others)
    for other in others:
        other.result()


def _run(run: Callable[[int, int], object], first: int, last: int, held: object) -> None:
    run(first, last)


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a process's threads: one that is forked has none of its parent's."""
    return ThreadPoolExecutor(threads, "hf_linear_attn")
