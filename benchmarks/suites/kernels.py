"""The Triton kernels on a GPU: correctness first, then time, share of the floor and memory, against their peers.

    python benchmarks/run.py --suite kernels

Correctness: fresh inputs against the float64 oracle, unwritten memory filled with NaN, and the same bits twice; a suite
whose kernels are wrong times nothing. Time: medians of events over buffers that together exceed the cache; decode steps
as replays of a graph. The floor is the bytes of q, k, v, o and their gradients, each moved once, over the bandwidth of
a large copy on the same device. Peers that are installed take part: flash-linear-attention (`pip install
flash-linear-attention`) and the kernels behind scaled_dot_product_attention.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import break_even, facts_line, markdown, picture, provenance, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import elu, scaled_dot_product_attention

from hf_linear_attn import linear_attention
from hf_linear_attn.ops.decode import decode_state, decode_step_

OURS = "hf_linear_attn"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """One family of problems; lengths vary."""

    B: int
    H: int
    HKV: int
    D: int

    def __str__(self) -> str:
        return f"B={self.B} H={self.H} HKV={self.HKV} D={self.D}"

    def draw(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Draw q, k, v laid out as projections leave them."""
        return [
            torch.randn(self.B, tokens, heads, self.D, device="cuda", dtype=dtype).transpose(1, 2)
            for heads in (self.H, self.HKV, self.HKV)
        ]

    def bytes(self, tokens: int) -> tuple[int, int]:
        """Return the bytes of a q and of a k in bf16."""
        return self.B * self.H * tokens * self.D * 2, self.B * self.HKV * tokens * self.D * 2


SHAPES = (Shape(1, 32, 8, 128), Shape(1, 32, 32, 128), Shape(8, 32, 32, 64))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory with NaN when it is allocated."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, backend: str, **settings: Any) -> dict[str, Tensor]:
    """Return output, state and gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, state = linear_attention(*leaves, backend=backend, **settings)
    dq, dk, dv = torch.autograd.grad(o, leaves, do.to(o.dtype))
    return {"o": o.detach(), "kv": state.kv.detach(), "z": state.z.detach(), "dq": dq, "dk": dk, "dv": dv}


def check_kernels() -> list[dict[str, Any]]:
    """Compare the kernels with the oracle; raise where they are wrong."""
    rows = []
    problems: list[tuple[Shape, int, dict[str, Any]]] = [
        (Shape(2, 4, 2, 64), 1000, {}),
        (Shape(1, 2, 2, 128), 4096, {}),
        (Shape(2, 4, 1, 80), 333, {"delay": 64}),
        (Shape(1, 4, 4, 128), 700, {"cu_seqlens": torch.tensor([0, 1, 300, 700], device="cuda")}),
        (Shape(2, 2, 2, 64), 500, {"causal": False}),
        (Shape(1, 2, 1, 256), 300, {}),
        (Shape(3, 6, 3, 96), 129, {"feature_map": "squared_relu"}),
    ]
    for shape, tokens, settings in problems:
        for dtype, tolerance in TOLERANCE.items():
            q, k, v = shape.draw(tokens, dtype)
            do = torch.randn_like(q)
            with poisoned():
                found = results(q, k, v, do, "triton", **settings)
                again = results(q, k, v, do, "triton", **settings)
            exact = results(q.double(), k.double(), v.double(), do.double(), "reference", **settings)
            errors = {name: float((x.double() - exact[name]).norm() / exact[name].norm()) for name, x in found.items()}
            names = {"shape": str(shape), "tokens": tokens, "dtype": str(dtype).split(".")[1]}
            rows.append(names | {"settings": ", ".join(settings) or "causal"} | errors)
            # NaN fails every comparison.
            wrong = [name for name, error in errors.items() if not error <= tolerance]
            unsteady = [name for name, x in found.items() if not torch.equal(x, again[name])]
            if wrong or unsteady:
                raise SystemExit(f"{rows[-1]}: beyond {tolerance}: {wrong}; other bits the second time: {unsteady}")
    return rows


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with the kernels."""
    return linear_attention(q, k, v, return_state=False, backend="triton")


def sdpa(kernel: SDPBackend) -> Function:
    """Return softmax attention by one of PyTorch's kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def flash_linear_attention() -> dict[str, Function]:
    """Return the routes of flash-linear-attention, or none where it is not installed."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn
    except ImportError:
        return {}

    def features(x: Tensor) -> Tensor:
        return elu(x) + 1

    def route(kernel: Callable[..., Any], map_: Callable[[Tensor], Tensor]) -> Function:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
            # It takes [B, T, H, D].
            o, _ = kernel(*(x.transpose(1, 2) for x in (map_(q), map_(k), v)), scale=1.0, normalize=True)
            return o.transpose(1, 2)

        return attend

    return {
        "fla chunk, eager map": route(chunk_linear_attn, features),
        "fla chunk, compiled map": route(chunk_linear_attn, torch.compile(features, dynamic=True)),
        "fla fused_chunk, eager map": route(fused_chunk_linear_attn, features),
    }


def peers() -> dict[str, Function]:
    """Return all that is timed, ours first."""
    return {
        OURS: ours,
        **flash_linear_attention(),
        "softmax, flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "softmax, cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "softmax, efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    }


def median_ms(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Return the median time of calls that are made in turn."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    times = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a large copy."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (median_ms([lambda: y.copy_(x)], 20) / 1e3)


def passes(function: Function, inputs: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Return the two passes to time; the backward alone, by a graph that is kept."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves)
    do = torch.randn_like(o)

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)}


def time_shape(shape: Shape, tokens: int, named: dict[str, Function], bandwidth: float, repeats: int) -> dict[str, Any]:
    """Time all that can run this problem; what cannot is left out with its reason."""
    u, u_kv = shape.bytes(tokens)
    floor = {"forward": 2 * u + 2 * u_kv, "backward": 4 * u + 4 * u_kv}
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(1, min(8, math.ceil(3 * cache / (2 * u + 2 * u_kv))))
    row: dict[str, Any] = asdict(shape) | {"tokens": tokens, "left_out": {}}
    for name, function in named.items():
        try:
            calls = [passes(function, shape.draw(tokens)) for _ in range(sets)]
            timed: dict[str, Any] = {p: median_ms([c[p] for c in calls], repeats) for p in ("forward", "backward")}
            del calls
            inputs = [x.requires_grad_() for x in shape.draw(tokens)]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            o = function(*inputs)
            timed["saved_mib"] = (torch.cuda.memory_allocated() - before) / 2**20
            torch.autograd.grad(o, inputs, torch.empty_like(o))
            timed["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del o, inputs
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            row["left_out"][name] = str(error).split("\n")[0]
            torch.cuda.empty_cache()
            continue
        for which, size in floor.items():
            timed[f"{which}_share_of_floor"] = size / bandwidth * 1e3 / timed[which]
        row[name] = timed
    return row


def time_decode(shape: Shape, bandwidth: float, repeats: int) -> list[dict[str, Any]]:
    """Time decode steps as replays of a graph, against softmax over a cache of several lengths."""
    rows = []
    for batch in (1, 8, 64):
        q, k, v = Shape(batch, shape.H, shape.HKV, shape.D).draw(1)
        state = decode_state(batch, shape.HKV, shape.D, shape.D, device="cuda")
        moved = 2 * (state.kv.numel() + state.z.numel()) * 4
        step = median_ms([captured(lambda a=(q, k, v, state): decode_step_(*a, backend="triton"))], repeats)
        row: dict[str, Any] = {
            "B": batch,
            **{name: x for name, x in asdict(shape).items() if name != "B"},
            OURS + ", µs": step * 1e3,
            "share of copy bandwidth": moved / bandwidth * 1e3 / step,
        }
        for tokens in (2048, 32768):
            try:
                _, keys, values = Shape(batch, shape.HKV, shape.HKV, shape.D).draw(tokens)
                group = shape.H != shape.HKV
                attend = captured(lambda a=(q, keys, values), g=group: scaled_dot_product_attention(*a, enable_gqa=g))
                row[f"softmax over {tokens}, µs"] = median_ms([attend], repeats) * 1e3
            except (RuntimeError, torch.cuda.OutOfMemoryError):
                row[f"softmax over {tokens}, µs"] = None
        rows.append(row)
    return rows


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a call captured in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def tables(rows: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Return a table per shape."""
    parts = []
    for shape in dict.fromkeys(Shape(*(row[x] for x in ("B", "H", "HKV", "D"))) for row in rows):
        cells = []
        for row in rows:
            if Shape(*(row[x] for x in ("B", "H", "HKV", "D"))) != shape:
                continue
            mine = row[OURS]
            cell: dict[str, Any] = {"tokens": row["tokens"]}
            for which in ("forward", "backward"):
                cell[f"{which}, ms"] = mine[which]
                cell[f"{which} share of floor"] = mine[f"{which}_share_of_floor"]
                for name in names[1:]:
                    cell[f"{name} / ours, {which}"] = row[name][which] / mine[which] if name in row else None
            cells.append(cell | {"saved, MiB": mine["saved_mib"], "peak, MiB": mine["peak_mib"]})
        parts += [f"## {shape}\n", markdown(cells)]
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = argparse.ArgumentParser(
        prog="run.py --suite kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/kernels.json"), help="result (%(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="timings of which the median counts (%(default)s)")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest sequence (%(default)s)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("`--suite kernels` needs a CUDA or ROCm GPU, and torch sees none. Use `--suite cpu` here.")
    facts = provenance("kernels", argv or [])
    checked = check_kernels()
    bandwidth = copy_bandwidth()
    named = peers()
    rows = []
    for shape in SHAPES:
        for tokens in (n for n in LENGTHS if n * shape.B <= arguments.longest):
            rows.append(time_shape(shape, tokens, named, bandwidth, arguments.repeats))
            print(f"{shape} {tokens}: {rows[-1].get(OURS)}", flush=True)
    # Where ours itself cannot run there is nothing to compare.
    missing = [f"{row['tokens']}: {row['left_out'][OURS]}" for row in rows if OURS not in row]
    rows = [row for row in rows if OURS in row]
    decode = [row for shape in SHAPES[:2] for row in time_decode(shape, bandwidth, arguments.repeats)]
    result = {
        "provenance": facts,
        "copy_bytes_per_second": bandwidth,
        "checked": checked,
        "rows": rows,
        "decode": decode,
        "left_out": missing,
    }
    drawn = [row for row in rows if Shape(*(row[x] for x in ("B", "H", "HKV", "D"))) == SHAPES[0]]
    lengths = [row["tokens"] for row in drawn]
    curves = {
        which: {name: [row.get(name, {}).get(which) for row in drawn] for name in named}
        for which in ("forward", "backward")
    }
    flash = "softmax, flash"
    both = [row for row in drawn if flash in row]
    result["break_even"] = {
        which: break_even(
            [row["tokens"] for row in both], [row[OURS][which] for row in both], [row[flash][which] for row in both]
        )
        for which in ("forward", "backward")
        if both
    }
    parts = [
        "# Kernel results\n",
        facts_line(facts),
        f"Copy bandwidth {bandwidth / 1e12:.2f} TB/s. Causal, bf16, elu. Break-even with flash attention, {SHAPES[0]}: "
        f"{result['break_even']}.\n",
        *tables(rows, list(named)),
        "## Decode\n",
        markdown(decode),
        "![Time by length](kernels.png)\n",
        "## Checked before timing\n",
        markdown(checked),
    ]
    write(arguments.output, result, "\n".join(parts))
    picture(arguments.output.with_suffix(".png"), lengths, curves, OURS, flash)
    print(f"wrote {arguments.output}, .md and .png")
