"""How loops are called: what tensors are to them, and how many of their units run side by side."""

import ctypes
import os
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from hf_linear_attn.ops.numba.compile import Entry

MaybeT = TypeVar("MaybeT", Tensor, Tensor | None)

DTYPES = {torch.float32, torch.bfloat16}
"""What loops read and write."""

PLAIN_TENSORS = Tensor, Parameter
"""Tensors whose memory is what they say."""

LEAST_WORK = 2**20
"""Multiplications below which units are not shared out: threads would take longer to start."""


def loop_obstacle(tokens: Sequence[Tensor | None], learned: Sequence[Tensor | None]) -> str | None:
    """Say why loops cannot take tensors, or None where they can: all tokens are alike, and all that is learned."""
    # At each token of each layer the host waits for this.
    for of in (tokens, learned):
        kinds = set()
        for x in of:
            if x is None:
                continue
            if not x.is_cpu or type(x) not in PLAIN_TENSORS:
                return f"loops take plain tensors on the CPU, not a {type(x).__name__} on {x.device.type}"
            kinds.add(x.dtype)
        if len(kinds) > 1 or not kinds <= DTYPES:
            return f"loops take tensors of one dtype, fp32 or bf16, not {', '.join(sorted(map(str, kinds)))}"
    return None


def in_rows(x: MaybeT) -> MaybeT:
    """Return a tensor as loops read it: the entries of its last dimension side by side."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def in_fp32(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors in fp32, contiguous."""
    return [None if x is None else x.float().contiguous() for x in tensors]


def addresses(*tensors: Tensor | None) -> list[int]:
    """Return where tensors begin; 0 where there is none."""
    return [0 if x is None else x.data_ptr() for x in tensors]


class _Scratch(threading.local):
    floats = np.empty(0, np.float32)
    address = 0


_scratch = _Scratch()


def scratch(floats: int) -> int:
    """Return where a thread has memory to work on during one call, for so many fp32; not for what other threads run."""
    if floats > len(_scratch.floats):
        _scratch.floats = np.empty(floats, np.float32)
        _scratch.address = _scratch.floats.ctypes.data
    return _scratch.address


def parts_of(units: int, work: int) -> int:
    """Return by how many threads units are run, of about so many multiplications each: at most as PyTorch uses."""
    most = min(units, units * work // LEAST_WORK)
    return 1 if most < 2 else min(most, torch.get_num_threads())


def bits(*numbers: float) -> tuple[int, ...]:
    """Return the bits of each float64 as an int64, as a table of numbers holds it."""
    return struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))


HEAD = 3
"""Numbers before a task's own: the part that is next, how many there are, and units."""


def in_parts(task: "Entry", parts: int, units: int, numbers: Sequence[int], held: object = None) -> None:
    """Run a task over units, each of several threads some of them.

    PyTorch's own threads do it where they can be reached. They look for work for a while after each operation: other
    threads would have to share cores with them.

    Args:
        task: Takes the address of a table: what says :data:`HEAD`, then the numbers. Takes turns with other threads.
        parts: By how many threads, see :func:`parts_of`.
        units: How many units there are.
        numbers: The task's own, int64.
        held: What is read and written: it must outlive a thread, also where the caller that waits is interrupted.
    """
    table = array("q", (0, parts, units, *numbers))
    address = table.buffer_info()[0]
    if parts == 1:
        task.call(address)
    elif (team := _team(os.getpid())) is not None:
        # As many as PyTorch asks for: who asks for fewer ends the others.
        team(task.address, address, torch.get_num_threads(), 0)
    else:
        others = [_pool(parts - 1, os.getpid()).submit(_run, task, address, (table, held)) for _ in range(1, parts)]
        task.call(address)
        wait(others)
        for other in others:
            other.result()


def _run(task: "Entry", address: int, held: object) -> None:
    task.call(address)


_FIRST_PROCESS = os.getpid()


@cache
def _team(process: int) -> Callable[[int, int, int, int], None] | None:
    """Return what runs a function by OpenMP's threads; None where there is no such thing, or in a fork, which has none.

    Both GNU's and Intel's runtime have it, and on Linux PyTorch brings one of them.
    """
    if process != _FIRST_PROCESS:
        return None
    try:
        run = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    found: Callable[[int, int, int, int], None] = run
    return found


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a process's threads: one that is forked has none of its parent's."""
    return ThreadPoolExecutor(threads, "hf_linear_attn")
