"""The Triton kernels on a GPU: correctness first, then time, share of the floor and memory, against their peers.

    python benchmarks/run.py --suite kernels

Correctness: fresh inputs against the float64 oracle, unwritten memory filled with NaN, and the same bits twice; a
suite whose kernels are wrong times nothing. Time: medians of events around calls, over buffers that together exceed
the cache. In that time is the host's, who starts a call launch by launch: up to some thousand tokens there is little
else. What the device takes alone is timed besides, as replays of a graph; decode steps only so. The floor is the bytes
of q, k, v, o and their gradients, each moved once, over the bandwidth of a large copy on the same device. What
distillation's recommended recipe runs, linear attention of its features, the features and a window with sinks and a
key of each query's own, is timed against the same in PyTorch. Peers that are installed take part:
flash-linear-attention (`pip install flash-linear-attention`) and the kernels behind scaled_dot_product_attention.
Every row is kept in the output as soon as it is measured, and the same command goes on from there.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import break_even, earlier, facts_line, markdown, picture, provenance, spread, suite_parser, version, write
from problems import SINKS, WINDOW
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import elu, scaled_dot_product_attention

from hf_linear_attn import linear_attention
from hf_linear_attn.diagnostics.check import ON_GPU, TOLERANCE, check, parts
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.window import OwnKey, window_attention

OURS = "hf_linear_attn"
PYTORCH = "PyTorch"
ATTENTION = f"Window of {WINDOW}, {SINKS} sinks and a key of each query's own"
FEATURES = "Norm-preserving features of q"
LINEAR = f"Linear attention of twice as many features, masked and delayed by {WINDOW}"
RECIPE_LENGTHS = (2048, 8192, 32768, 131072)
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
        return [self._draw(tokens, heads, self.D, dtype) for heads in (self.H, self.HKV, self.HKV)]

    def draw_features(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """Draw q and k of twice as many dimensions, not negative as the recommended map's features are, and v."""
        q, k = (self._draw(tokens, heads, 2 * self.D, dtype).abs() for heads in (self.H, self.HKV))
        return [q, k, self._draw(tokens, self.HKV, self.D, dtype)]

    def _draw(self, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        size = (self.B, tokens, heads, dim)
        return torch.randn(size, generator=_drawing(), device="cuda", dtype=dtype).transpose(1, 2)

    def bytes(self, tokens: int) -> tuple[int, int]:
        """Return the bytes of a q and of a k in bf16."""
        return self.B * self.H * tokens * self.D * 2, self.B * self.HKV * tokens * self.D * 2


@functools.cache
def _drawing() -> torch.Generator:
    """Return the numbers that inputs are drawn from: torch's own may not be used any more after a failed capture."""
    return torch.Generator("cuda").manual_seed(0)


SHAPES = (Shape(1, 32, 8, 128), Shape(1, 32, 32, 128), Shape(8, 32, 32, 64))


def check_kernels() -> list[dict[str, Any]]:
    """Compare the kernels with float64 as `hf-linear-attn check --full` does; raise where they are wrong."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for dtype in TOLERANCE:
        for part in parts(device, dtype, ON_GPU, full=True):
            outcome = check(part, "triton")
            if not outcome.right:
                raise SystemExit(str(outcome))
            rows.append({"part": part.name, "dtype": str(dtype).removeprefix("torch.")} | outcome.errors)
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


def times(calls: Sequence[Callable[[], object]], repeats: int, seconds: float = 3.0) -> dict[str, Any]:
    """Return the spread of the times of calls that are made in turn, as many as fit into some seconds."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    found: list[float] = []
    while len(found) < 3 or (len(found) < repeats and sum(found) < 1e3 * seconds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        calls[len(found) % len(calls)]()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return spread(found)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a large copy."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (times([lambda: y.copy_(x)], 20)["median_ms"] / 1e3)


def passes(function: Function, inputs: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Return what to time: the forward, the backward alone, by a graph that is kept, and both."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves)
    do = torch.empty_like(o).normal_(generator=_drawing())

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    def backward() -> None:
        torch.autograd.grad(o, leaves, do, retain_graph=True, allow_unused=True)

    def both() -> None:
        # Leaves of its own: autograd would wait for the stream that others were made on.
        own = [x.detach().requires_grad_() for x in inputs]
        torch.autograd.grad(function(*own), own, do, allow_unused=True)

    return {"forward": forward, "backward": backward, "both": both}


def on_device(call: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return what the passes of a call take without the host, in ms; nothing for those that no graph can hold."""
    found: dict[str, float] = {}
    try:
        found["forward_on_device"] = times([captured(call["forward"])], repeats)["median_ms"]
        both = times([captured(call["both"])], repeats)["median_ms"]
        found["backward_on_device"] = both - found["forward_on_device"]
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}", flush=True)
    return found


def recipe(shape: Shape, tokens: int, part: str) -> tuple[dict[str, Function], dict[str, int]]:
    """Return who computes a part of the recommended recipe, and the bytes that its passes have to move."""
    u, u_kv = shape.bytes(tokens)
    if part == FEATURES:
        feature_map = get_feature_map("norm_preserving", shape.D, shape.H, shape.HKV).to("cuda")

        def features(backend: str) -> Function:
            return lambda q, k, v: features_of(feature_map, q, "q", backend=backend)

        return {OURS: features("triton"), PYTORCH: features("torch")}, {"forward": 3 * u, "backward": 4 * u}
    ones = torch.ones(shape.B, tokens, dtype=torch.bool, device="cuda")
    if part == LINEAR:

        def linear(backend: str) -> Function:
            settings: dict[str, Any] = {"feature_map": None, "key_mask": ones, "delay": WINDOW, "backend": backend}
            return lambda q, k, v: linear_attention(q, k, v, return_state=False, **settings)

        floor = {"forward": 3 * u + 3 * u_kv, "backward": 5 * u + 6 * u_kv}
        return {OURS: linear("triton"), PYTORCH: linear("torch")}, floor
    f, _, _ = shape.draw(tokens)
    number = (torch.arange(tokens, device="cuda") - WINDOW + 1).clamp(min=0).expand(shape.B, -1)
    own_key = OwnKey(f, torch.zeros(shape.H, device="cuda"), torch.zeros(shape.H, shape.D, device="cuda"), ones, number)
    seen = ones[..., None].expand(-1, -1, SINKS)

    def window(backend: str) -> Function:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            sinks = k[:, :, :SINKS], v[:, :, :SINKS], seen
            settings: dict[str, Any] = {"window": WINDOW, "scaling": shape.D**-0.5, "sinks": sinks, "key_mask": ones}
            return window_attention(q, k, v, **settings, own_key=own_key, backend=backend)

        return attend

    floor = {"forward": 3 * u + 2 * u_kv, "backward": 5 * u + 4 * u_kv}
    return {OURS: window("triton"), PYTORCH: window("torch")}, floor


def time_shape(
    shape: Shape,
    tokens: int,
    named: dict[str, Function],
    floor: dict[str, int],
    bandwidth: float,
    repeats: int,
    draw: Callable[[Shape, int], list[Tensor]] = Shape.draw,
) -> dict[str, Any]:
    """Time all that can run this problem, whose passes move so many bytes; what cannot is left out with its reason."""
    u, u_kv = shape.bytes(tokens)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = max(1, min(8, math.ceil(3 * cache / (2 * u + 2 * u_kv))))
    row: dict[str, Any] = asdict(shape) | {"tokens": tokens, "left_out": {}}
    for name, function in named.items():
        try:
            calls = [passes(function, draw(shape, tokens)) for _ in range(sets)]
            timed: dict[str, Any] = {}
            for which, size in floor.items():
                found = times([call[which] for call in calls], repeats)
                timed[which], timed[f"{which}_iqr"] = found["median_ms"], found["iqr_ms"]
                timed[f"{which}_share_of_floor"] = size / bandwidth * 1e3 / timed[which]
            timed |= on_device(calls[0], repeats)
            del calls
            inputs = [x.requires_grad_() for x in draw(shape, tokens)]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            o = function(*inputs)
            timed["saved_mib"] = (torch.cuda.memory_allocated() - before) / 2**20
            torch.autograd.grad(o, inputs, torch.empty_like(o), allow_unused=True)
            timed["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del o, inputs
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            row["left_out"][name] = str(error).split("\n")[0]
            torch.cuda.empty_cache()
            continue
        row[name] = timed
    return row


def time_decode(shape: Shape, bandwidth: float, repeats: int) -> list[dict[str, Any]]:
    """Time decode steps as replays of a graph, against softmax over a cache of several lengths."""
    rows = []
    for batch in (1, 8, 64):
        q, k, v = Shape(batch, shape.H, shape.HKV, shape.D).draw(1)
        state = decode_state(batch, shape.HKV, shape.D, shape.D, device="cuda")
        moved = 2 * (state.kv.numel() + state.z.numel()) * 4
        found = times([captured(lambda a=(q, k, v, state): decode_step_(*a, backend="triton"))], repeats)
        step = found["median_ms"]
        row: dict[str, Any] = {
            "B": batch,
            **{name: x for name, x in asdict(shape).items() if name != "B"},
            OURS + ", µs": step * 1e3,
            "quartiles": _quartiles(found["iqr_ms"], 1e3),
            "share of copy bandwidth": moved / bandwidth * 1e3 / step,
        }
        for tokens in (2048, 32768):
            try:
                _, keys, values = Shape(batch, shape.HKV, shape.HKV, shape.D).draw(tokens)
                group = shape.H != shape.HKV
                attend = captured(lambda a=(q, keys, values), g=group: scaled_dot_product_attention(*a, enable_gqa=g))
                row[f"softmax over {tokens}, µs"] = times([attend], repeats)["median_ms"] * 1e3
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


def _quartiles(found: Sequence[float], factor: float = 1.0) -> str:
    return " - ".join(f"{factor * x:.3g}" for x in found)


def tables(rows: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """Return a table per shape."""
    parts = []
    for shape in dict.fromkeys(map(shape_of, rows)):
        cells = []
        for row in rows:
            if shape_of(row) != shape:
                continue
            mine = row[OURS]
            cell: dict[str, Any] = {"tokens": row["tokens"]}
            for which in ("forward", "backward"):
                cell[f"{which}, ms"] = mine[which]
                cell[f"{which} quartiles"] = _quartiles(mine[f"{which}_iqr"])
                cell[f"{which} share of floor"] = mine[f"{which}_share_of_floor"]
                if f"{which}_on_device" in mine:
                    cell[f"{which} on the device, ms"] = mine[f"{which}_on_device"]
                for name in names[1:]:
                    cell[f"{name} / ours, {which}"] = row[name][which] / mine[which] if name in row else None
            cells.append(cell | {"saved, MiB": mine["saved_mib"], "peak, MiB": mine["peak_mib"]})
        parts += [f"### {shape}\n", markdown(cells)]
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("kernels", __doc__)
    parser.add_argument("--repeats", type=int, default=30, help="timings of which the median counts (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens (%(default)s)")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest sequence (%(default)s)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("`--suite kernels` needs a CUDA or ROCm GPU, and torch sees none. Use `--suite cpu` here.")
    facts = provenance("kernels", argv or []) | {"flash-linear-attention": version("flash-linear-attention")}
    result: dict[str, Any] = {
        "provenance": facts,
        "checked": check_kernels(),
        "copy_bytes_per_second": copy_bandwidth(),
    }
    before = earlier(arguments.output, facts)
    for name in ("rows", "recipe", "decode", "left_out"):
        result[name] = before.get(name, [])
    named, bandwidth = peers(), result["copy_bytes_per_second"]
    known = {(shape_of(row), row["tokens"]) for row in result["rows"]}
    for shape in SHAPES:
        for tokens in (n for n in arguments.lengths if n * shape.B <= arguments.longest):
            if (shape, tokens) in known:
                continue
            u, u_kv = shape.bytes(tokens)
            floor = {"forward": 2 * u + 2 * u_kv, "backward": 4 * u + 4 * u_kv}
            row = time_shape(shape, tokens, named, floor, bandwidth, arguments.repeats)
            print(f"{shape} {tokens}: {row.get(OURS)}", flush=True)
            # Where ours itself cannot run there is nothing to compare.
            if OURS in row:
                result["rows"].append(row | {"commit": facts["commit"]})
            else:
                result["left_out"].append(f"{shape} {tokens}: {row['left_out'][OURS]}")
            save(arguments.output, result)
    known = {(row["part"], shape_of(row), row["tokens"]) for row in result["recipe"]}
    for key in itertools.product((LINEAR, ATTENTION, FEATURES), (SHAPES[0], SHAPES[2]), RECIPE_LENGTHS):
        part, shape, tokens = key
        if key in known or tokens not in arguments.lengths or tokens * shape.B > arguments.longest:
            continue
        draw = Shape.draw_features if part == LINEAR else Shape.draw
        row = time_shape(shape, tokens, *recipe(shape, tokens, part), bandwidth, arguments.repeats, draw)
        print(f"{part}, {shape} {tokens}: {row.get(OURS)}", flush=True)
        if OURS in row:
            result["recipe"].append({"part": part} | row | {"commit": facts["commit"]})
        else:
            result["left_out"].append(f"{part}, {shape} {tokens}: {row['left_out'][OURS]}")
        save(arguments.output, result)
    if not result["decode"]:
        result["decode"] = [row for shape in SHAPES[:2] for row in time_decode(shape, bandwidth, arguments.repeats)]
    save(arguments.output, result)
    print(f"wrote {arguments.output}, .md and .png")


def shape_of(row: Mapping[str, Any]) -> Shape:
    """Return the shape of a row."""
    return Shape(*(row[name] for name in ("B", "H", "HKV", "D")))


def save(output: Path, result: dict[str, Any]) -> None:
    """Write result, page and picture; the break-even is that of the first shape."""
    rows: list[dict[str, Any]] = sorted(result["rows"], key=lambda row: (SHAPES.index(shape_of(row)), row["tokens"]))
    names = [OURS, *dict.fromkeys(name for row in rows for name in row if name.startswith(("fla ", "softmax, ")))]
    drawn = [row for row in rows if shape_of(row) == SHAPES[0]]
    flash = "softmax, flash"
    both = [row for row in drawn if flash in row]
    result["break_even"] = {
        which: break_even(
            [row["tokens"] for row in both], [row[OURS][which] for row in both], [row[flash][which] for row in both]
        )
        for which in ("forward", "backward")
        if both
    }
    facts = result["provenance"]
    commits = ", ".join(sorted({str(row["commit"])[:10] for row in rows}))
    not_run = [
        *result["left_out"],
        *(f"{shape_of(row)} {row['tokens']}, {name}: {why}" for row in rows for name, why in row["left_out"].items()),
    ]
    parts = [
        "# Kernel results\n",
        facts_line(facts),
        f"Rows measured at commit {commits}; flash-linear-attention {facts['flash-linear-attention']}. Copy bandwidth "
        f"{result['copy_bytes_per_second'] / 1e12:.2f} TB/s. Causal, bf16, elu. Break-even with flash attention, "
        f"{SHAPES[0]}: {result['break_even']}.\n",
        "## Linear attention\n",
        *tables(rows, names),
        *(
            part
            for name in (LINEAR, ATTENTION, FEATURES)
            for part in (f"## {name}\n", *tables([r for r in result["recipe"] if r["part"] == name], [OURS, PYTORCH]))
        ),
        "## Decode\n",
        markdown(result["decode"]),
        f"![Time by length]({output.with_suffix('.png').name})\n",
        "## Not run\n",
        "".join(f"* {line}\n" for line in not_run) or "Nothing was left out.\n",
        "## Checked before timing\n",
        markdown(result["checked"]),
    ]
    write(output, result, "\n".join(parts))
    if drawn:
        lengths = [row["tokens"] for row in drawn]
        curves = {
            which: {name: [row.get(name, {}).get(which) for row in drawn] for name in names}
            for which in ("forward", "backward")
        }
        picture(output.with_suffix(".png"), lengths, curves, OURS, flash)
