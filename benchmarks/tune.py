"""Tune the tile table on this GPU, offline, and write it to a versioned file.

    python benchmarks/tune.py --output tiles.json

Every row of the table is timed with each candidate tile that compiles and fits; the fastest takes its place.
Compiling takes far longer than timing, so other processes compile ahead into Triton's cache. The table is written
after every row, and a further run starts from it: ``--roles`` and ``--sizes`` choose what to tune. Rows of other
processors are kept. To use the result, put it in place of ``hf_linear_attn/ops/triton/tiles.json``, run
``hf-linear-attn check --full``, since some tiles are fast and wrong, and ``benchmarks/compile_check.py --update``.
Nothing is ever tuned while a model runs.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import replace_text
from problems import WINDOW, feature_problem, hybrid_problem, prefill_problem, window_problem

from hf_linear_attn.ops.features.triton.kernels import features_backward_launch, features_launch
from hf_linear_attn.ops.hybrid.triton.prefill import prefill_launches
from hf_linear_attn.ops.hybrid.triton.step import hybrid_launch
from hf_linear_attn.ops.linear_attention.triton import model
from hf_linear_attn.ops.linear_attention.triton.backward import Wanted, backward_launches, save
from hf_linear_attn.ops.linear_attention.triton.forward import forward_launches
from hf_linear_attn.ops.step.triton.kernels import decode_launch
from hf_linear_attn.ops.triton import plan
from hf_linear_attn.ops.triton.plan import Key, Launch, Problem, Target, Tile
from hf_linear_attn.ops.window.triton.backward import window_backward_launches
from hf_linear_attn.ops.window.triton.forward import window_launches
from hf_linear_attn.ops.window.triton.problem import BLOCK

DTYPES = {name: dtype for dtype, name in plan.KINDS.items()}
OF_WINDOW = ("window", "window_dq", "window_dkv")
OF_FEATURES = ("features", "features_backward")
STORED = ("stored_forward", "stored_dq", "stored_dk", "stored_dv", "stored_dkv")
OF_LAYERS = ("hybrid", "prefill")
ROLES = ("state", "forward", "reverse_state", "dq", "dk", "dv", "decode", *OF_LAYERS, *STORED, *OF_WINDOW, *OF_FEATURES)
STORED_LENGTH = 256
"""Tokens per segment with which walks that read their states are timed."""


def candidates(role: str, size: int) -> Iterator[Tile]:
    """Yield the tiles to try; ``size`` is the larger of a head's sizes."""
    if role in ("decode", "hybrid"):
        # Of the latter, tokens of its window at a time.
        for width, warps in itertools.product((16, 32, 64), (2, 4, 8)):
            yield Tile(1 if role == "decode" else 32, width, warps, 1)
    elif role in OF_FEATURES:
        # Its width is the number of tokens that a program walks.
        for tokens, width, warps in itertools.product((32, 64), (128, 256, 512), (4, 8)):
            yield Tile(tokens, width, warps, 1)
    elif role == "prefill":
        # Its width is the number of keys of the window at a time.
        for tokens, width, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (1, 2)):
            yield Tile(tokens, width, warps, stages)
    elif role in STORED:
        # Its width is that of the tiles that a program's own tile meets.
        for tokens, width, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (1, 2, 3)):
            yield Tile(tokens, width, warps, stages)
    else:
        widths = [w for w in (32, 64, 128) if w <= (BLOCK if role in OF_WINDOW else size)]
        for tokens, width, warps, stages in itertools.product((32, 64), widths, (4, 8), (1, 2, 3)):
            yield Tile(tokens, width, warps, stages)


@contextmanager
def cut_for(role: str, tokens: int) -> Iterator[None]:
    """Leave the planner no choice: states are stored for the walks that read them, and carried for all others."""
    stored = role in STORED
    length = STORED_LENGTH if stored else tokens if role == "delta" else tokens // 4
    before = model.cuts
    model.cuts = lambda p, tokens, role: iter([model.Cut(stored, length)])
    try:
        yield
    finally:
        model.cuts = before


def launch_of(
    role: str,
    target: Target,
    dtype: torch.dtype,
    D: int,
    V: int,
    *,
    tokens: int = 16_384,
    heads: int = 32,
    key_heads: int = 8,
    device: str = "cuda",
) -> Launch:
    """Plan one launch of a kernel, on real tensors that fill the device.

    What has more features than values is what distillation's recommended recipe runs, and gets features as they are.
    """

    def draw(dim: int, heads: int = key_heads, tokens: int = tokens) -> torch.Tensor:
        return torch.randn(1, tokens, heads, dim, device=device, dtype=dtype).transpose(1, 2)

    if role == "decode":
        q, k, v = draw(D, heads, 1), draw(D, tokens=1), draw(V, tokens=1)
        kv = torch.zeros(1, key_heads, D, V, device=device)
        width = plan.tile(target, dtype, role, D, V, heads // key_heads).width
        z = torch.zeros(1, key_heads, -(-V // width), D, device=device)
        return decode_launch(target, q, k, v, kv, z, None, "elu", 1e-6)[1]
    given = draw(D, heads), draw(D), draw(V)
    phi, delay = ("identity", WINDOW) if D > V else ("elu", 0)
    if phi == "identity":
        # A normaliser of features of either sign may vanish.
        given = given[0].abs(), given[1].abs(), given[2]
    p = Problem(target, *given, None, None, None, None, phi, True, delay)
    if role in (*OF_WINDOW, *OF_FEATURES):
        return launch_of_recipe(role, p)
    if role in OF_LAYERS:
        # Its row is that of its features, twice as many as a head has dimensions.
        return launch_of_layer(role, p._replace(q=p.q[..., : D // 2], k=p.k[..., : D // 2]))
    # Both gradients come from one kernel where there is one; each has its own for those who want no other.
    wanted = Wanted(k=role != "stored_dv", v=role != "stored_dk")
    with cut_for(role, tokens):
        out, forward = forward_launches(p, 1e-6)
        for launch in forward:
            launch.run()
        do, dkv, dz = torch.randn_like(out.o), torch.zeros_like(out.kv), torch.zeros_like(out.z)
        _, backward = backward_launches(p, save(p, out), do, dkv, dz, wanted)
        for launch in backward:
            launch.run()
    found = {launch.role: launch for launch in (*forward, *backward)}
    if role not in found:
        raise SystemExit(f"{role} is not launched for {tokens} tokens of {heads} heads on {target}")
    return found[role]


def launch_of_layer(role: str, p: Problem) -> Launch:
    """Plan the launch that is most of a whole step, or of a whole text, of the recommended recipe."""
    layer = hybrid_problem(p) if role == "hybrid" else prefill_problem(p)
    if layer is None:
        raise SystemExit(f"{role} does not hold {2 * p.k.shape[3]} features")
    if role == "hybrid":
        return hybrid_launch(p.target, layer)[1]
    *before, last = prefill_launches(p.target, layer)[1]
    for launch in before:
        launch.run()
    return last


def launch_of_recipe(role: str, p: Problem) -> Launch:
    """Plan one launch of what the recommended recipe runs besides linear attention."""
    problem = window_problem(p) if role in OF_WINDOW else feature_problem(p)
    if problem is None:
        raise SystemExit(f"{role} does not hold heads of {p.k.shape[3]} dimensions in {p.q.dtype}")
    if role in OF_WINDOW:
        saved, forward = window_launches(problem)
        _, backward = window_backward_launches(problem, saved, torch.randn_like(saved.o))
    else:
        features, launch = features_launch(problem)
        forward, backward = [launch], [features_backward_launch(problem, torch.randn_like(features))[1]]
    for launch in (*forward, *backward):
        launch.run()
    return next(launch for launch in (*forward, *backward) if launch.role == role)


def time_ms(launch: Launch, repeats: int) -> float:
    """Return the median time of a launch."""
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch.run()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


class Timing(NamedTuple):
    """What became of a candidate.

    Attributes:
        ms: Its median time; None where it does not run.
        error: Why not.
        lost: Whether its process has no device any more.
    """

    ms: float | None
    error: str = ""
    lost: bool = False


def time_candidate(target: Target, key: Key, candidate: Tile, repeats: int) -> Timing:
    """Time a kernel with a candidate in place of the table's tile."""
    _, kind, role, D, V, _ = key
    shipped = plan.tile_table()
    table = {**shipped, key: candidate}
    plan.tile_table = lambda: table
    try:
        return Timing(time_ms(launch_of(role, target, DTYPES[kind], D, V), repeats))
    # A tile that does not fit or compile is no candidate; Triton has no common base for such errors.
    except Exception as error:
        return Timing(None, type(error).__name__, lost=not _has_device())
    finally:
        plan.tile_table = lambda: shipped


def _has_device() -> bool:
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


def compile_all(target: Target, rows: Sequence[Key], jobs: int) -> None:
    """Compile every candidate of some rows."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        # What is timed here is forgotten, and errors are met again: Triton keeps the code on disk.
        tasks = [(target, key, candidate, 1) for key in rows for candidate in candidates(key[2], max(key[3:5]))]
        for number, _ in enumerate(pool.map(time_candidate, *zip(*tasks, strict=True)), 1):
            if number % 50 == 0:
                print(f"compiled {number} of {len(tasks)}", flush=True)


class Elsewhere:
    """Times candidates in another process, and in a new one where that has lost its device.

    A kernel that reads where it may not takes the device from its whole process: what comes after fails there, too.
    """

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, *arguments: Any) -> Timing:
        """Time one."""
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        found = self.pool.submit(time_candidate, *arguments).result()
        if found.lost:
            self.close()
        return found

    def close(self) -> None:
        """End the process."""
        if self.pool is not None:
            self.pool.shutdown()
        self.pool = None


def tune(
    target: Target, rows: Sequence[Key], repeats: int, output: Path, timed: Callable[..., Timing] = time_candidate
) -> dict[Key, Tile]:
    """Replace some rows by the fastest, write the table after each, and return it."""
    table = dict(plan.tile_table())
    for key in rows:
        before = table[key]
        times: dict[Tile, float] = {}
        for candidate in dict.fromkeys((before, *candidates(key[2], max(key[3:5])))):
            found = timed(target, key, candidate, repeats)
            if found.ms is None:
                print(f"  {key} {tuple(candidate)}: {found.error}", flush=True)
            else:
                times[candidate] = found.ms
        table[key] = min(times, key=times.__getitem__) if times else before
        gain = f"{times[before]:.4f} -> {times[table[key]]:.4f} ms" if before in times else "the old one does not run"
        print(f"{key}: {tuple(before)} -> {tuple(table[key])}, {gain}", flush=True)
        replace_text(output, plan.format_table(table))
    return table


def rows_of(arch: str, dtypes: Sequence[str], sizes: Sequence[int], roles: Sequence[str]) -> list[Key]:
    """Return the rows of a processor's table whose larger size is one of some."""
    return [
        key
        for key in plan.tile_table()
        if key[0] == arch and key[1] in dtypes and key[2] in roles and max(key[3:5]) in sizes
    ]


def main() -> int:
    """Tune and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the table to write")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=sorted(plan.KINDS.values()))
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256], choices=(64, 128, 256))
    parser.add_argument("--roles", nargs="+", default=ROLES, choices=ROLES, help="kernels (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile (%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="timings of which the median counts (%(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("Tuning needs a CUDA or ROCm GPU, and torch sees none.")
    target = plan.target_of(torch.device("cuda", torch.cuda.current_device()))
    if target is None:
        sys.exit(f"No kernels for {torch.cuda.get_device_name()}.")
    if arguments.output.exists():
        known = plan.parse_table(arguments.output.read_text())
        plan.tile_table = lambda: known
    rows = rows_of(target.arch, arguments.dtypes, arguments.sizes, arguments.roles)
    compile_all(target, rows, arguments.jobs)
    elsewhere = Elsewhere()
    tune(target, rows, arguments.repeats, arguments.output, elsewhere)
    elsewhere.close()
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
