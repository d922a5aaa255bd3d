"""The PyTorch backend against scaled_dot_product_attention on a CPU: time, memory and decode latency.

    python benchmarks/run.py --suite cpu

Forward and forward + backward of causal attention, fp32, B = 1, 8 heads of 64, elu; the two run in turn, and medians
are compared. Peak memory is that of a fresh process, beyond what it held before the call.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import break_even, by_turns, facts_line, markdown, picture, provenance, suite_parser, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_linear_attn import linear_attention
from hf_linear_attn.ops.step import decode_state, decode_step_

HEADS, DIM = 8, 64
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OURS, SOFTMAX = "linear attention", "softmax (SDPA)"


BENCHMARKS = Path(__file__).parents[1]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with PyTorch's own kernel."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with the PyTorch backend."""
    return linear_attention(q, k, v, return_state=False, backend="torch")


def draw(tokens: int) -> list[Tensor]:
    """Draw q, k, v."""
    g = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, HEADS, tokens, DIM, generator=g, requires_grad=True) for _ in range(3)]


def passes(function: Callable[..., Tensor], qkv: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    """Return the two passes to time."""
    do = torch.randn_like(qkv[2])

    def forward() -> None:
        with torch.no_grad():
            function(*qkv)

    def both() -> None:
        torch.autograd.grad(function(*qkv), qkv, do)

    return {"forward": forward, "forward + backward": both}


def time_lengths(repeats: int, longest: int) -> list[dict[str, Any]]:
    """Time both kinds of attention at every length."""
    rows = []
    for tokens in (n for n in LENGTHS if n <= longest):
        qkv = draw(tokens)
        ours, theirs = passes(linear, qkv), passes(softmax, qkv)
        row: dict[str, Any] = {"tokens": tokens}
        for name in ours:
            times = by_turns({OURS: ours[name], SOFTMAX: theirs[name]}, repeats if tokens < 8192 else min(repeats, 5))
            row[name] = times | {"ratio": times[SOFTMAX]["median_ms"] / times[OURS]["median_ms"]}
        rows.append(row)
        print(f"{tokens:6} " + ", ".join(f"{name} {row[name]['ratio']:.2f}x" for name in ours), flush=True)
    return rows


def time_decode(repeats: int) -> list[dict[str, Any]]:
    """Time one new token after contexts of several lengths."""
    rows = []
    for tokens in (n for n in LENGTHS if n >= 1024):
        q, k, v = (x.detach() for x in draw(tokens))
        state = decode_state(1, HEADS, DIM, DIM, device="cpu")
        new = [x[:, :, -1:].contiguous() for x in (q, k, v)]

        def ours(new: list[Tensor] = new, state: Any = state) -> None:
            for _ in range(20):
                decode_step_(*new, state, backend="torch")

        def theirs(new: list[Tensor] = new, k: Tensor = k, v: Tensor = v) -> None:
            for _ in range(20):
                scaled_dot_product_attention(new[0], k, v)

        with torch.no_grad():
            times = by_turns({OURS: ours, SOFTMAX: theirs}, repeats)
        rows.append({"tokens": tokens} | {name: x["median_ms"] / 20 * 1e3 for name, x in times.items()})
    return rows


def peak(tokens: int, name: str) -> float:
    """Return the bytes that forward + backward hold at most in this process, beyond what it held before."""
    qkv = draw(tokens)
    function = passes(linear, qkv)[name]
    passes(linear, draw(256))[name]()
    # The process's own peak so far, from its imports, does not count.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    function()
    return float(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Read a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure_memory(longest: int) -> list[dict[str, Any]]:
    """Measure peak memory, a process per length and pass."""
    rows = []
    for tokens in (n for n in LENGTHS if 4096 <= n <= longest):
        row: dict[str, Any] = {"tokens": tokens, "qkvo_mib": 4 * HEADS * tokens * DIM * 4 / 2**20}
        for name in ("forward", "forward + backward"):
            command = [sys.executable, "-m", "suites.cpu", "--peak-of", str(tokens), name]
            out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=BENCHMARKS).stdout
            row[f"{name}, MiB"] = json.loads(out) / 2**20
            row[f"{name}, times q, k, v, o"] = row[f"{name}, MiB"] / row["qkvo_mib"]
        rows.append(row)
    return rows


def page(result: dict[str, Any], drawn: str) -> str:
    """Compose the page, with the picture of that name in it."""
    timed = []
    for row in result["lengths"]:
        cells: dict[str, Any] = {"tokens": row["tokens"]}
        for name in ("forward", "forward + backward"):
            cells |= {
                f"{name}: linear, ms": row[name][OURS]["median_ms"],
                "softmax, ms" if name == "forward" else "softmax, ms ": row[name][SOFTMAX]["median_ms"],
                "ratio" if name == "forward" else "ratio ": row[name]["ratio"],
            }
        timed.append(cells)
    crossing = ", ".join(
        f"{name} {f'from {at:.0f} tokens on' if at else 'not reached'}" for name, at in result["break_even"].items()
    )
    parts = [
        "# CPU results\n",
        "Causal attention in fp32, B = 1, 8 heads of 64, elu; medians of runs in turn. "
        "Made by the command below, not by hand.\n",
        facts_line(result["provenance"]),
        f"Faster than softmax: {crossing}.\n",
        markdown(timed),
        f"![Time by length]({drawn})\n",
        "Peak memory beyond the inputs, in a fresh process:\n",
        markdown(result["memory"]),
        "One decoded token after a context, µs:\n",
        markdown(result["decode_us"]),
    ]
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("cpu", __doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="timings of which the median counts (%(default)s)")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest sequence (%(default)s)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    facts = provenance("cpu", argv or [])
    rows = time_lengths(arguments.repeats, arguments.longest)
    lengths = [row["tokens"] for row in rows]
    curves = {
        name: {kind: [row[name][kind]["median_ms"] for row in rows] for kind in (OURS, SOFTMAX)}
        for name in ("forward", "forward + backward")
    }
    result = {
        "provenance": facts,
        "lengths": rows,
        "break_even": {name: break_even(lengths, x[OURS], x[SOFTMAX]) for name, x in curves.items()},
        "memory": measure_memory(arguments.longest),
        "decode_us": time_decode(arguments.repeats),
    }
    drawn = arguments.output.with_suffix(".png")
    write(arguments.output, result, page(result, drawn.name))
    picture(drawn, lengths, curves, OURS, SOFTMAX)
    print(f"wrote {arguments.output}, .md and .png")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--peak-of"]:
        sys.exit("python benchmarks/run.py --suite cpu")
    torch.set_num_threads(2)
    print(json.dumps(peak(int(sys.argv[2]), sys.argv[3])))
