"""The latency suite: prefill, decode, peak memory and cache bytes by length, each cell on a fresh cache."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.evaluation.generation import forward, is_out_of_memory, prefill
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.statistics import crossing
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject

_MIB = 2**20
# Models whose decode is compared: names of the measured columns and what they cost.
BREAK_EVEN_COLUMNS = {"prefill": "ttft_ms", "decode": "decode_ms_per_token", "memory": "peak_mib"}


class PeakTensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors alive inside the block, operator by operator, and keeps the highest count.

    On a CPU there is no allocator to ask and the process's resident size is mostly that of the libraries, so this
    counts what PyTorch's operators return; scratch space within a single operator is not seen.
    """

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


def check_latency(subjects: Sequence[Subject]) -> None:
    """Refuse to time an eager softmax, which no one would deploy.

    Raises:
        UnsupportedError: If a softmax model runs eager attention.
    """
    for subject in subjects:
        if subject.linear_attention is None and subject.model.config._attn_implementation == "eager":
            raise UnsupportedError(
                "attn_implementation",
                "be a fused one for the latency suite",
                "eager",
                "Load the model with attn_implementation='sdpa', or leave the latency suite out.",
                where=subject.name,
            )


def _key(store: SampleStore, subject: Subject, length: int) -> str:
    return store.key(subject.fingerprint, f"latency/{subject.name}/{length}")


def run_latency(subject: Subject, settings: EvaluationSettings, store: SampleStore) -> Iterator[int]:
    """Measure every length that the store does not hold yet; yields the tokens dealt with after each."""
    for length in settings.lengths:
        key = _key(store, subject, length)
        if store.get(key) is None and subject.refusal(length) is None:
            try:
                figures = {"status": "ok", "reason": None, **measure(subject, length, settings)}
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                figures = {**_NOTHING, "status": "out-of-memory", "reason": "The model ran out of memory."}
            store.add([{"key": key, "id": f"latency/{subject.name}/{length}", "figures": figures}])
        yield length


def measure(subject: Subject, length: int, settings: EvaluationSettings) -> dict[str, Any]:
    """Measure one cell: reading `length - decode_tokens` tokens, then decoding `decode_tokens` forced ones.

    Args:
        subject: The model.
        length: Tokens in the cache when the measurement ends; at least 2.
        settings: `warmups`, `repeats`, `decode_tokens`, `prefill_chunk`, `batch_size` and `seed` are used.

    Returns:
        Medians and quartiles of the repeats, and the memory of one more run.
    """
    decoded = min(settings.decode_tokens, length // 2)
    generator = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(0, subject.vocabulary, (settings.batch_size, length), generator=generator).to(subject.device)
    prompt, forced = ids[:, : length - decoded], ids[:, length - decoded :]
    model, device, chunk = subject.model, subject.device, settings.prefill_chunk

    def decode(cache: Any) -> Any:
        for at in range(decoded):
            _, cache = forward(model, forced[:, at : at + 1], cache, all_logits=False)
        return cache

    def fill() -> Any:
        return prefill(model, prompt, None, chunk)[1]

    with torch.inference_mode():
        reads, decodes = [], []
        filled: list[Any] = []
        for _ in range(settings.warmups + settings.repeats):
            filled.clear()
            reads.append(timed(device, lambda: filled.append(fill())))
        for _ in range(settings.warmups + settings.repeats):
            cache = copy.deepcopy(filled[0])
            decodes.append(timed(device, lambda c=cache: decode(c)) / decoded)  # type: ignore[misc]
        filled.clear()
        del cache
        peak_mib, method = peak_memory_mib(device, lambda: filled.append(decode(fill())))
    read, step = _quartiles(reads[settings.warmups :]), _quartiles(decodes[settings.warmups :])
    return {
        "prompt_tokens": length - decoded,
        "decoded_tokens": decoded,
        "batch_size": settings.batch_size,
        "repeats": settings.repeats,
        "ttft_ms": read[1],
        "ttft_ms_iqr": [read[0], read[2]],
        "prefill_tokens_per_s": 1000 * prompt.numel() / read[1],
        "decode_ms_per_token": step[1],
        "decode_ms_per_token_iqr": [step[0], step[2]],
        "peak_mib": peak_mib,
        "peak_method": method,
        "cache_bytes": cache_bytes(filled[0]),
    }


_NOTHING: dict[str, Any] = {
    "prompt_tokens": None,
    "decoded_tokens": None,
    "batch_size": None,
    "repeats": None,
    "ttft_ms": None,
    "ttft_ms_iqr": None,
    "prefill_tokens_per_s": None,
    "decode_ms_per_token": None,
    "decode_ms_per_token_iqr": None,
    "peak_mib": None,
    "peak_method": None,
    "cache_bytes": None,
}


def _quartiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, [0.25, 0.5, 0.75])]


def collect_latency(
    subjects: Sequence[Subject], settings: EvaluationSettings, store: SampleStore
) -> list[dict[str, Any]]:
    """Turn the store's records into the report's latency cells."""
    cells = []
    for subject in subjects:
        for length in settings.lengths:
            cell = {"model": subject.name, "length": length}
            record = store.get(_key(store, subject, length))
            if record is None:
                cells.append({**cell, "status": "unsupported", "reason": subject.refusal(length), **_NOTHING})
            else:
                cells.append({**cell, **record["figures"]})
    return cells


def break_even(cells: Sequence[dict[str, Any]], first: str, other: str) -> dict[str, Any]:
    """Return the lengths from which `first` costs less than `other` in time to first token, decode and memory."""
    mine = {cell["length"]: cell for cell in cells if cell["model"] == first and cell["status"] == "ok"}
    theirs = {cell["length"]: cell for cell in cells if cell["model"] == other and cell["status"] == "ok"}
    lengths = sorted(mine.keys() & theirs.keys())
    found: dict[str, Any] = {"model": first, "other": other}
    for name, column in BREAK_EVEN_COLUMNS.items():
        found[name] = (
            crossing(lengths, [mine[n][column] for n in lengths], [theirs[n][column] for n in lengths])
            if lengths
            else None
        )
    return found
