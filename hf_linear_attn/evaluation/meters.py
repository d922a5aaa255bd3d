"""Instruments of the latency suite: clocks and counters of memory."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_MIB = 2**20


class PeakTensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors alive inside the block, operator by operator, and keeps the highest count.

    On a CPU there is no allocator to ask and the process's resident size is mostly that of the libraries, so this
    counts what PyTorch's operators return; scratch space within a single operator is not seen.
    """

    watches_only = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, int] = {}
        self._total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count the storages it returns."""
        known = {id(leaf.untyped_storage()) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in known and id(storage) not in self._live:
                    self._live[id(storage)] = storage.nbytes()
                    self._total += storage.nbytes()
                    weakref.finalize(storage, self._freed, id(storage))
        self.peak = max(self.peak, self._total)
        return result

    def _freed(self, number: int) -> None:
        self._total -= self._live.pop(number)


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors reachable from a cache, each storage counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [cache]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type | torch.nn.Module):
            stack.extend(vars(item).values())
    return sum(storages.values())


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(device: torch.device, run: Callable[[], Any]) -> float:
    """Return the milliseconds a call takes, by device events on CUDA and ROCm and by a synchronised clock elsewhere."""
    _synchronise(device)
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))
    begin = time.perf_counter()
    run()
    _synchronise(device)
    return 1000 * (time.perf_counter() - begin)


def peak_memory_mib(device: torch.device, run: Callable[[], Any]) -> tuple[float, str]:
    """Return how far memory rises above what is held before the call, and how that was measured."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / _MIB, "allocator"
    with PeakTensorBytes() as counter:
        run()
    return counter.peak / _MIB, "tensor bytes"
