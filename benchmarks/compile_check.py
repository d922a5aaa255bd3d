"""Compile every kernel of the tile table ahead of time, with no GPU present, and hold the result to a budget.

python benchmarks/compile_check.py              # the sizes that matter, against compile_budget.json
python benchmarks/compile_check.py --all        # those, too, that are as they were when the budget was written
python benchmarks/compile_check.py --full       # every size of the table, an hour and more
python benchmarks/compile_check.py --update     # measure what has changed and rewrite the budget, of this Triton

What is compiled is what the planner launches for a few batches and lengths: elu on plain heads, and the recommended
recipe's features (identity, masked, delayed, from a state), whose size is twice that of a head; and both with sums that
fade.

A kernel fails if it uses more stack or shared memory than its budget, more than its processor has, over 5 % more
instructions in its main loop, or not the matrix instructions that its processor is bought for: on sm_90 those of warp
groups, on sm_100 those of the fifth generation. On sm_90 it fails, too, where its machine code reads uniform registers
that nothing wrote or stores a transposed product, as known releases make wrong code. With another Triton than the
budget's, and for sizes that the budget does not list, only limits are held: shared memory, matrix instructions, wrong
code, and a stack of less than a kilobyte.

The budget names by a digest what was compiled when it was written: the source of a kernel and of all that it calls,
types, constants and options. What has the same digest, by the same Triton, is compiled to the same: it is left out, so
that a check takes as long as what has changed. Of Tritons older than the budget's, ``--update`` writes digests alone.

``issue`` is clocks for issue alone per token and query head: instructions times warps over the four schedulers, loops
as often as they run. Of the window's kernels it is per tile of keys. ``resident`` is how many programs a processor
holds, from registers, shared memory and warps.
"""

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" or multiprocessing.parent_process() is not None:
    # Interpreted kernels cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from harness import replace_text
from problems import (
    WINDOW,
    beside_kept,
    choice_problem,
    delta_problem,
    feature_problem,
    hybrid_problem,
    in_pool,
    keeping,
    prefill_problem,
    window_problem,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from uniform import halved, unwritten

from hf_linear_attn.ops.delta_rule.triton import backward as delta_backward
from hf_linear_attn.ops.delta_rule.triton import forward as delta_forward
from hf_linear_attn.ops.delta_rule.triton.step import step_launch
from hf_linear_attn.ops.dispatch import FAULTS, LARGEST_FEATURES, LARGEST_HEAD, numbers
from hf_linear_attn.ops.features.triton.kernels import features_backward_launch, features_launch
from hf_linear_attn.ops.hybrid.triton.prefill import Left, linear_problem, prefill_launches, read_launches
from hf_linear_attn.ops.hybrid.triton.queries import queries_backward_launches
from hf_linear_attn.ops.hybrid.triton.trade import hybrid_launches
from hf_linear_attn.ops.kept.triton import choose_launch
from hf_linear_attn.ops.linear_attention.triton.backward import backward_launches, save
from hf_linear_attn.ops.linear_attention.triton.forward import forward_launches
from hf_linear_attn.ops.rotation.triton import turn_launch
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.step.triton.kernels import decode_launch
from hf_linear_attn.ops.triton.plan import TILED, Launch, Problem, Target
from hf_linear_attn.ops.window.triton.backward import Far, window_backward_launches
from hf_linear_attn.ops.window.triton.forward import window_launches

BUDGET = Path(__file__).with_name("compile_budget.json")
LOOP_SLACK = 1.05
STACK_LIMIT = 1024
"""Bytes of stack that no kernel may reach, whatever the budget says: the assembler at times gives up on registers."""


@dataclass(frozen=True)
class Processor:
    """What a processor has.

    Attributes:
        processors: Multiprocessors or compute units of a common model.
        shared: Shared memory that one program may have, bytes.
        total: Shared memory of a processor, bytes.
        warps: Warps that a processor holds.
        matrix: Its matrix instructions, in machine code.
        tiles: The processor whose tiles it takes.
    """

    processors: int
    shared: int
    total: int
    warps: int
    matrix: str
    tiles: str


PROCESSORS = {
    "sm_80": Processor(108, 163 << 10, 164 << 10, 64, r"\bHMMA", "sm_80"),
    "sm_86": Processor(84, 99 << 10, 100 << 10, 48, r"\bHMMA", "sm_86"),
    "sm_89": Processor(128, 99 << 10, 100 << 10, 48, r"\bHMMA", "sm_89"),
    "sm_90": Processor(132, 227 << 10, 228 << 10, 64, r"\bHGMMA", "sm_90"),
    # Consumer Blackwell.
    "sm_120": Processor(170, 99 << 10, 100 << 10, 48, r"\bHMMA", "sm_89"),
    "sm_100": Processor(148, 227 << 10, 228 << 10, 64, r"\bUTC\w*MMA", "sm_90"),
    "gfx942": Processor(304, 64 << 10, 64 << 10, 32, r"\bv_mfma", "gfx942"),
}
REGISTERS = 65536
"""Of an NVIDIA processor, given out to warps by 256."""
RESERVED = 1 << 10
"""Bytes of shared memory that the driver takes of each program."""
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Config:
    """One size of one architecture.

    ``kind`` is ``"elu"`` on plain heads, ``"recipe"`` for features that are masked, delayed and go on from a state, or
    ``"packed"`` for those of packed sequences; ``"faded-elu"`` and ``"faded-recipe"`` are the former with log decays.
    """

    arch: str
    dtype: str
    D: int
    V: int
    group: int
    kind: str = "elu"

    @property
    def faded(self) -> bool:
        """Whether sums fade."""
        return self.kind.startswith("faded")

    def __str__(self) -> str:
        return f"{self.arch}/{self.dtype}/D{self.D}/V{self.V}/g{self.group}/{self.kind}"


@dataclass(frozen=True)
class Result:
    """What the compiler made of one kernel; a figure that an architecture does not have is 0."""

    config: str
    role: str
    tile: tuple[int, ...]
    registers: int
    stack: int
    spilled: int
    shared: int
    matrix: int
    loop: int
    loop_spills: int
    issue: float
    resident: int = 1
    transposed: bool = False
    unwritten: int = 0
    digest: str = ""

    @property
    def key(self) -> str:
        """Name under which the budget files it."""
        return f"{self.config}/{self.role}"


CALLS = ((1, 8_192), (512, 1_024), (1, 1_024))
"""Batches and lengths that are planned: a long lone sequence, a batch that fills a device, and a short sequence."""


def problem(config: Config, batch: int, tokens: int, kv_heads: int = 8) -> Problem:
    """Build a problem of that size without memory."""

    def tensor(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(batch, tokens, heads, dim, dtype=DTYPES[config.dtype], device="meta").transpose(1, 2)

    q, k, v = (
        tensor(heads, dim)
        for heads, dim in ((kv_heads * config.group, config.D), (kv_heads, config.D), (kv_heads, config.V))
    )
    target = Target(PROCESSORS[config.arch].tiles, PROCESSORS[config.arch].processors)
    log_decay = torch.empty(batch, tokens, kv_heads, device="meta").transpose(1, 2) if config.faded else None
    if config.kind.endswith("elu"):
        return Problem(target, q, k, v, None, None, None, None, "elu", True, 0, log_decay)
    packed = config.kind == "packed"
    rows = 4 if packed else batch
    kv0 = torch.empty(rows, kv_heads, config.D, config.V, device="meta")
    mask = None if packed else torch.empty(batch, tokens, dtype=torch.uint8, device="meta")
    bounds = torch.empty(rows + 1, dtype=torch.int64, device="meta") if packed else None
    return Problem(target, q, k, v, mask, bounds, kv0, kv0[..., 0], "identity", True, WINDOW, log_decay)


def launches(config: Config) -> Iterator[Launch]:
    """Yield a launch per kernel that some call of this size runs."""
    seen: set[str] = set()
    calls = [(batch, tokens) for batch, tokens in CALLS if batch == 1 or config.kind != "packed"]
    for launch in (launch for call in calls for launch in _of_call(config, problem(config, *call))):
        if launch.role not in seen:
            seen.add(launch.role)
            yield launch


def _of_call(config: Config, p: Problem) -> Iterator[Launch]:
    out, forward = forward_launches(p, 1e-6)
    do, dkv, dz = torch.empty_like(out.o), torch.empty_like(out.kv), torch.empty_like(out.z)
    # Beside a window, gradients of values are added to its own, and below those of queries and keys; it knows delta.
    into, delta = (torch.empty_like(p.v), torch.empty_like(out.den)) if p.delay else (None, None)
    _, backward = backward_launches(p, save(p, out), do, dkv, dz, into=into, known_delta=delta)
    yield from forward
    yield from backward
    q, k, v = (x[:, :, :1] for x in (p.q, p.k, p.v))
    mask = None if p.mask is None else p.mask[:, :1]
    copies = -(-config.V // p.tile("decode").width)
    z = torch.empty(*out.z.shape[:2], copies, config.D, device="meta")
    if config.kind != "packed":
        log_decay = None if p.log_decay is None else p.log_decay[:, :, :1]
        yield decode_launch(p.target, q, k, v, out.kv, z, mask, p.phi, 1e-6, log_decay)[1]
        places = torch.empty(len(q), dtype=torch.int64, device="meta")
        yield decode_launch(p.target, q, k, v, out.kv, out.z[:, :, None], mask, p.phi, 1e-6, log_decay, places)[1]
    if config.faded or config.D > LARGEST_HEAD:
        return
    yield from _of_delta_rule(config, p)
    if config.kind != "elu":
        return
    of_window = window_problem(p)
    if of_window is not None:
        for one in (of_window, beside_kept(of_window)):
            saved, forward = window_launches(one)
            yield from forward
            # Linear attention that trains beside a window has no kept keys.
            linear = Far(*[torch.empty_like(saved.lse)] * 3) if one.kept is None else None
            yield from window_backward_launches(one, saved, torch.empty_like(saved.o), linear=linear)[1]
    for scores in (False, True):
        yield choose_launch(p.target, choice_problem(p, scores=scores))[1]
    of_step = hybrid_problem(p)
    if of_step is not None:
        yield from hybrid_launches(p.target, of_step)[1]
        yield from hybrid_launches(p.target, in_pool(of_step))[1]
        for scores in (False, True):
            yield from hybrid_launches(p.target, keeping(of_step, scores=scores))[1]
    of_features = feature_problem(p)
    if of_features is not None:
        features, launch = features_launch(of_features)
        yield launch
        into = torch.empty_like(of_features.x) if of_features.in_halves else None
        yield features_backward_launch(of_features, features, into=into)[1]
        x, turns, pairs, at_end = of_features.x, of_features.turns, of_features.pairs, of_features.at_end
        if turns is not None:
            yield turn_launch(p.target, x, turns, pairs, at_end=at_end, derive=True)[1]
    of_text = prefill_problem(p)
    if of_text is not None:
        found, planned = prefill_launches(p.target, of_text)
        yield planned[-1]
        phi_q = empty_like_tokens(p.q, of_text.features.shape[3])
        left = Left(phi_q, found.o, *[torch.empty_like(out.den)] * 3)
        states, prefix = (found.kv, found.z), planned[-1].arguments["prefix"]
        yield read_launches(p.target, of_text, found.o, states, prefix, left)[-1]
        if of_features is not None and of_features.in_halves:
            linear, dx = linear_problem(p.target, of_text), torch.empty_like(p.q)
            numbers_of = left.lse, left.score
            yield queries_backward_launches(linear, of_features, found.o, *numbers_of, dx, of_weight=True)[1][-1]


def _of_delta_rule(config: Config, p: Problem) -> Iterator[Launch]:
    d = delta_problem(p)
    out, forward = delta_forward.forward_launches(d)
    yield from forward
    yield from delta_backward.backward_launches(d, torch.empty_like(out.o), None if p.kv0 is None else out.kv)[1]
    if config.kind != "packed":
        tokens = {name: getattr(d, name)[:, :, :1] for name in ("q", "k", "v", "beta", "log_decay")}
        step = d._replace(**tokens, mask=None if d.mask is None else d.mask[:, :1])
        yield step_launch(step, out.kv)[1]
        yield step_launch(step, out.kv, torch.empty(len(d.q), dtype=torch.int64, device="meta"))[1]


def signature(launch: Launch) -> ASTSource:
    """Describe the arguments to the compiler as a launch would."""
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            types[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            types[parameter.name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[parameter.name] = "fp32"
        else:
            types[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, types, constants, attributes)


@cache
def source_of(kernel: JITFunction) -> str:
    """Return what a kernel and all that it calls is made of, without comments and the lines where it stands."""
    parts: list[str] = []
    called = {kernel}
    queue = [kernel]
    for function in queue:
        tree = function.parse()
        parts.append(ast.unparse(tree))
        for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
            value = function.__globals__.get(name)
            if isinstance(value, JITFunction) and value not in called:
                called.add(value)
                queue.append(value)
            elif isinstance(value, triton.language.constexpr):
                parts.append(f"{name} = {value.value}")
    return "\n".join(parts)


def digest(launch: Launch) -> str:
    """Name what the compiler is given: two launches of one digest are compiled to the same."""
    source = signature(launch)
    given = source_of(launch.kernel), source.signature, source.constants, source.attrs, launch.options
    return hashlib.sha256("\n".join(map(str, given)).encode()).hexdigest()[:12]


def gpu_target(arch: str) -> GPUTarget:
    """Return Triton's name of an architecture."""
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


UNCOUNTED = (
    *("scan", "key_scan", "delta", "fade", "fade_back", "key_sums", "kept_sums"),
    *("decode", "decode_rows", "hybrid", "hybrid_rows", "hybrid_kept"),
    *("hybrid_given", "hybrid_given_rows", "hybrid_given_kept", "ahead", "ahead_rows", "ahead_kept"),
    *("keep", "keep_scored", "trade", "trade_scored", "hidden"),
)
"""Kernels whose clocks are few."""

MULTIPLIES = re.compile(
    r"(stored_)?(forward|state|reverse_state|dq|dk|dv|dkv)$|window|features|prefill|delta_(?!step|inverse)"
)
"""Kernels whose loops are matrix products."""
NARROW = re.compile("window_dk")
"""Those of which heads of over 128 leave too few registers for the 64 rows of a warp group's products."""


def measure(config: Config, launch: Launch) -> Result:
    """Compile one launch and read the machine code."""
    compiled = triton.compile(signature(launch), target=gpu_target(config.arch), options=launch.options)
    read = _amd if config.arch.startswith("gfx") else _nvidia
    figures, listing = read(compiled, PROCESSORS[config.arch].matrix)
    shared = compiled.metadata.shared
    return Result(
        str(config),
        launch.role,
        tuple(launch.tile),
        shared=shared,
        issue=round(issue(listing, launch, config), 1),
        resident=resident(config.arch, figures["registers"], shared, launch.tile.warps),
        transposed=config.arch == "sm_90" and stores_transposed(compiled.asm["ttgir"]),
        digest=digest(launch),
        **figures,
    )


def resident(arch: str, registers: int, shared: int, warps: int) -> int:
    """Return how many programs a processor holds, at least one."""
    has = PROCESSORS[arch]
    if arch.startswith("gfx"):
        # Four units of 512 registers per lane, given out by eights; a program's warps are shared out among them.
        by_registers = 4 * min(8, 512 // (8 * -(-registers // 8))) // warps
        return max(1, min(by_registers, has.total // max(shared, 1)))
    by_registers = REGISTERS // (256 * -(-registers * 32 // 256)) // warps
    return max(1, min(by_registers, has.total // (shared + RESERVED), has.warps // warps))


def stores_transposed(code: str) -> bool:
    """Tell whether a kernel stores the transposed result of a warp-group product to shared memory.

    Triton 3.4 to 3.7.0 does that wrongly (fla-org/flash-linear-attention, issue 640 and pull requests 826 and 983):
    such a result has a linear layout, and its store takes the instructions of a product's own layout.
    """
    layouts = re.findall(r"^(#\w+) = #ttg\.linear", code, re.MULTILINE)
    stored = re.findall(r"ttg\.local_(?:alloc|store) [^\n]*?tensor<[^>]*?(#\w+)>", code)
    return bool(set(layouts) & set(stored)) and "warp_group_dot" in code


@dataclass(frozen=True)
class Listing:
    """Machine code: which lines are instructions, and the first and last line of each loop."""

    lines: list[str]
    instruction: re.Pattern[str]
    loops: list[tuple[int, int]]

    def count(self, first: int = 0, last: int | None = None) -> int:
        """Return the number of instructions between two lines."""
        return sum(
            bool(self.instruction.search(line)) for line in self.lines[first : None if last is None else last + 1]
        )

    def largest(self, first: int = -1, last: int | None = None) -> tuple[int, int] | None:
        """Return the longest loop strictly inside two lines."""
        last = len(self.lines) if last is None else last
        inside = [(a, b) for a, b in self.loops if first <= a and b <= last and (a, b) != (first, last)]
        return max(inside, key=lambda loop: loop[1] - loop[0], default=None)

    def executed(self, trips: Sequence[float], first: int = -1, last: int | None = None) -> float:
        """Return the instructions that run, the longest loop inside as often as ``trips`` begins with, and so on."""
        loop = self.largest(first, last)
        whole = float(self.count(max(first, 0), last))
        if loop is None or not trips:
            return whole
        return whole - self.count(*loop) + trips[0] * self.executed(trips[1:], *loop)

    def outermost(self) -> list[tuple[int, int]]:
        """List the loops outside of all others."""
        return [x for x in self.loops if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in self.loops)]

    def in_order(self, trips: Sequence[float]) -> float:
        """Return the instructions that run, the longest loops outside of others as often as told, in their order."""
        chosen = sorted(sorted(self.outermost(), key=lambda loop: loop[0] - loop[1])[: len(trips)])
        lengths = [self.count(*loop) for loop in chosen]
        return self.count() + sum(n * (trip - 1) for n, trip in zip(lengths, trips, strict=False))


def issue(listing: Listing, launch: Launch, config: Config) -> float:
    """Return the clocks for issue per token and query head; 0 where there is no loop over tokens."""
    tokens = launch.arguments.get("BT", 1)
    loop = listing.largest()
    if tokens == 1 or loop is None or launch.role in UNCOUNTED:
        return 0.0
    clocks = launch.tile.warps / 4 / tokens
    if launch.role.startswith("prefill"):
        # Through the segment's keys up to its own, then through those in sight; features and the rest come once.
        wide, seen = launch.arguments["BN"], (launch.arguments["L"] + tokens) / 2
        return listing.in_order((seen / wide, (tokens + launch.arguments["W"]) / wide + 0.5)) * clocks
    if launch.role.startswith("delta_"):
        # Only walks have a loop over tokens; the others loop over columns of one chunk.
        if launch.role not in ("delta_walk", "delta_back"):
            return 0.0
        passes = max(1, config.V / launch.arguments["BV"])
        return listing.executed((config.group,), *loop) * clocks * passes / config.group
    if launch.role.startswith("stored"):
        # A program goes from its own tile to an end of the segment.
        length, wide = launch.arguments["L"], launch.arguments["BN"]
        others = (length + tokens) / 2 / wide
        of_keys = launch.role != "stored_forward" and launch.role != "stored_dq"
        # A loop over one head is none.
        trips = (config.group, others) if of_keys and config.group > 1 else (others,)
        share = clocks / (config.group if of_keys else 1)
        tiles = -(-config.D // launch.arguments["BD"])
        if launch.arguments.get("APART"):
            # Of programs of two kinds, each runs one half of the code.
            return _of_both(listing, trips, tiles) * share
        if tiles == 1 or launch.role in ("stored_dq", "stored_dk"):
            # Programs share out what is too wide for one.
            return listing.executed(trips) * tiles * share
        # It goes through tiles of features, once from a state and then for each tile of tokens.
        outer = [loop for loop in listing.outermost() if loop != listing.largest()]
        before = sum(listing.count(*loop) for loop in outer) * (tiles - 1)
        return (listing.executed((*trips, tiles)) + before) * share
    if launch.role in ("features_backward", "queries_backward"):
        # A block's tiles go through one loop, and then through the next.
        tiles = launch.arguments["BLOCK"] / tokens
        wide = launch.arguments.get("BN")
        others = ((launch.arguments["L"] + tokens) / 2 / wide,) if wide else ()
        inner = [x for x in listing.loops if loop[0] < x[0] and x[1] < loop[1]]
        parts = [x for x in inner if not any(y[0] < x[0] and x[1] < y[1] for y in inner)]
        every = sum(listing.executed(others, *x) - listing.count(*x) / tiles for x in parts)
        return (listing.count(*loop) / tiles + every) * clocks
    tiled = TILED.get(launch.role)
    passes = max(1, {"D": config.D, "V": config.V}[tiled] / launch.tile.width) if tiled else 1
    if launch.role == "state":
        # Of one key head, and of both dimensions.
        wide = max(1, config.V / launch.arguments["BV"])
        return listing.executed((), *loop) * clocks * passes * wide / config.group
    if launch.role == "reverse_state":
        inner = listing.largest(*loop) or loop
        return listing.executed((), *inner) * clocks * passes
    if launch.role in ("dk", "dv"):
        return listing.executed((config.group,), *loop) * clocks * passes / config.group
    return listing.executed((), *loop) * clocks * passes


def _of_both(listing: Listing, trips: Sequence[float], tiles: int) -> float:
    """Return the instructions of programs that share out a tile's dk, and of the one for its dv.

    Each skips what is the others'; what stands outside of loops is taken as once for all of them.
    """
    of_k, of_v = sorted(sorted(listing.outermost(), key=lambda loop: loop[0] - loop[1])[:2])
    around = listing.count() - listing.count(*of_k) - listing.count(*of_v)
    inner = trips[1:]
    return around + trips[0] * (tiles * listing.executed(inner, *of_k) + listing.executed((*inner, tiles), *of_v))


def _listing(code: str, label: str, branch: str, instruction: str) -> Listing:
    lines = code.splitlines()
    places = {m[1]: i for i, line in enumerate(lines) if (m := re.match(label, line))}
    loops = []
    for i, line in enumerate(lines):
        m = re.search(branch, line)
        # A program ends with a jump to itself.
        if m and places.get(m[1], i) < i - 2:
            loops.append((places[m[1]], i))
    return Listing(lines, re.compile(instruction), loops)


def _figures(listing: Listing, matrix: str, spill: str) -> dict[str, int]:
    loop = listing.largest()
    body = [] if loop is None else listing.lines[loop[0] : loop[1] + 1]
    return {
        "matrix": sum(bool(re.search(matrix, line)) for line in listing.lines),
        "loop": 0 if loop is None else listing.count(*loop),
        "loop_spills": sum(bool(re.search(spill, line)) for line in body),
    }


def _nvidia(compiled: object, matrix: str) -> tuple[dict[str, int], Listing]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([TOOLS / tool, *flags, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flags in (("cuobjdump", ["-res-usage"]), ("nvdisasm", ["-c"]))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    bad = len(unwritten(code)) + len(halved(code)) if "HGMMA" in matrix else 0
    listing = _listing(code, r"\s*(\.L_x_\d+):", r"BRA.*`\((\.L_x_\d+)\)", r"/\*[0-9a-f]{4,5}\*/\s+\S")
    spilled = len(re.findall(r"\bSTL", code))
    used = {"registers": int(found[1]), "stack": int(found[2]), "spilled": spilled, "unwritten": bad}
    return used | _figures(listing, matrix, r"\b(STL|LDL)"), listing


def _amd(compiled: object, matrix: str) -> tuple[dict[str, int], Listing]:
    code = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])

    listing = _listing(code, r"(\.LBB\d+_\d+):", r"s_c?branch\w*\s+(\.LBB\d+_\d+)", r"^\t[a-z]")
    used = {
        "registers": figure("vgpr_count"),
        "stack": figure("private_segment_fixed_size"),
        "spilled": figure("vgpr_spill_count"),
    }
    return used | _figures(listing, matrix, "scratch_"), listing


def configs(*, full: bool) -> list[Config]:
    """List what is compiled: in full, or the sizes that matter."""
    if full:
        sizes = [(64, 64, "elu"), (128, 128, "elu"), (256, 256, "elu"), (80, 80, "elu"), (256, 128, "elu")]
        sizes += [
            (D, V, kind) for kind in ("recipe", "packed") for D, V in ((128, 64), (256, 128), (160, 80), (512, 256))
        ]
        return [
            Config(arch, dtype, D, V, group, kind)
            for arch in PROCESSORS
            for dtype in DTYPES
            for D, V, kind in sizes
            for group in (1, 4)
        ]
    # Consumer Blackwell has Ada's tiles: one size shows whether its assembler goes astray with them.
    usual = [arch for arch in PROCESSORS if arch != "sm_120"]
    # Heads of 64 and of 128: their features, which are twice as wide, and what reads the heads themselves.
    sizes = ((128, 64, 4, "recipe"), (256, 128, 4, "recipe"), (128, 128, 1, "elu"))
    return [
        *(Config(arch, "bf16", *size) for arch in usual for size in sizes),
        *(Config(arch, "bf16", 64, 64, 1) for arch in ("sm_80", "sm_90")),
        Config("sm_90", "bf16", 128, 128, 4),
        Config("sm_90", "bf16", 256, 128, 4, "packed"),
        Config("sm_90", "bf16", 160, 80, 4, "recipe"),
        Config("sm_90", "fp32", 64, 64, 1),
        # Heads that are no power of two, and those of 256, whose features no program holds whole.
        Config("sm_90", "bf16", 80, 80, 4),
        *(Config(arch, "bf16", 512, 256, 4, "recipe") for arch in PROCESSORS if arch != "sm_86"),
        Config("sm_90", "bf16", 256, 256, 4),
        *(Config(arch, "bf16", 256, 128, 4, "faded-recipe") for arch in usual),
        *(Config(arch, "bf16", 128, 64, 4, "faded-recipe") for arch in usual),
        *(Config(arch, "bf16", 128, 128, 1, "faded-elu") for arch in usual),
        *(Config(arch, "bf16", 64, 64, 1, "faded-elu") for arch in ("sm_80", "sm_90")),
    ]


def is_refused(arch: str) -> bool:
    """Tell whether the kernels refuse this Triton on an architecture, so that what it makes there does not matter."""
    major = int(arch[3:-1]) if arch.startswith("sm_") else 0
    return any(
        fault.refused and major in fault.majors and numbers(triton.__version__) < fault.fixed for fault in FAULTS
    )


def compile_config(config: Config, known: dict[str, str]) -> tuple[list[Result], list[str]]:
    """Compile the kernels of one size, but for those of which the digest is known; return the keys of these, too."""
    planned = {f"{config}/{launch.role}": launch for launch in launches(config)}
    same = [key for key, launch in planned.items() if key in known and known[key] == digest(launch)]
    return [measure(config, launch) for key, launch in planned.items() if key not in same], same


def complaints(result: Result, budget: dict[str, Any] | None, *, limits_only: bool = False) -> list[str]:
    """Say what is wrong with a result.

    Args:
        result: What the compiler made of a kernel.
        budget: What it may use.
        limits_only: Whether it is held to what its processor has alone.
    """
    arch, dtype, size = result.config.split("/")[:3]
    has, found = PROCESSORS[arch], []
    if result.shared > has.shared:
        found.append(f"{result.shared} B of shared memory, and {arch} has {has.shared}")
    wide = dtype == "bf16" and 64 <= int(size[1:]) <= (128 if NARROW.match(result.role) else LARGEST_FEATURES)
    # Tokens are the rows of these products, and on an H100 32 of them were faster than the 64 of a warp group.
    wide = wide and not (result.role == "features_backward" and result.tile[0] < 64)
    if wide and MULTIPLIES.match(result.role) and result.matrix == 0:
        found.append(f"none of {arch}'s matrix instructions")
    if result.transposed:
        found.append("a transposed product in shared memory, which Triton before 3.7.1 stores wrongly")
    if result.unwritten:
        found.append(f"{result.unwritten} instructions read uniform registers of something else, as of ptxas 12.8")
    if result.stack >= STACK_LIMIT:
        found.append(f"stack {result.stack}, and none may have {STACK_LIMIT}")
    if limits_only:
        return found
    if budget is None:
        return [*found, "no budget (run with --update)"]
    found += [
        f"{name} {getattr(result, name)}, budget {budget[name]}"
        for name in ("stack", "shared")
        if getattr(result, name) > budget[name]
    ]
    if result.loop > LOOP_SLACK * budget["loop"]:
        found.append(f"loop {result.loop} instructions, budget {budget['loop']} + 5 %")
    return found


class Budget(NamedTuple):
    """What is known of kernels, each by the key of its :class:`Result`.

    Attributes:
        triton: By which Triton.
        kernels: What each may use, and its digest.
        older: Digests alone of what older Tritons compile within the limits, by their version.
    """

    triton: str
    kernels: dict[str, dict[str, Any]]
    older: dict[str, dict[str, str]]

    @classmethod
    def read(cls) -> "Budget":
        """Return what the file holds, or an empty one of this Triton."""
        return cls(**json.loads(BUDGET.read_text())) if BUDGET.exists() else cls(triton.__version__, {}, {})

    def write(self) -> None:
        """Write it, a kernel per line; what is there is kept until the new file is whole."""
        older = ",\n".join(f"  {json.dumps(name)}: {_lines(rows, 3)}" for name, rows in sorted(self.older.items()))
        parts = f' "triton": "{self.triton}"', f' "kernels": {_lines(self.kernels, 2)}', f' "older": {{\n{older}\n }}'
        replace_text(BUDGET, "{\n" + ",\n".join(parts) + "\n}\n")

    def digests(self) -> dict[str, str]:
        """Return the digests of what this Triton has compiled."""
        if self.triton == triton.__version__:
            return {key: row["digest"] for key, row in self.kernels.items()}
        return self.older.get(triton.__version__, {})

    def updated(self, config: Config, same: Sequence[str], results: Sequence[Result], wrong: set[str]) -> "Budget":
        """Return it with what this Triton has made of one size; what is wrong is compiled again the next time."""
        others = {key: row for key, row in self.kernels.items() if key.rpartition("/")[0] != str(config)}
        digests = {r.key: "" if r.key in wrong else r.digest for r in results}
        if self.triton != triton.__version__:
            found = self.digests()
            found = {key: found[key] for key in found if key in others or key in same} | digests
            return self._replace(older=self.older | {triton.__version__: found})
        rows = {r.key: {name: getattr(r, name) for name in ("stack", "shared", "loop", "digest")} for r in results}
        rows = {key: row | {"digest": digests[key]} for key, row in rows.items()}
        return self._replace(kernels=others | {key: self.kernels[key] for key in same} | rows)

    def moved_on(self) -> "Budget":
        """Return it of the sizes that matter, and of this Triton if that is newer, which has compiled nothing yet."""
        sizes = set(map(str, configs(full=False)))
        rows = {key: row for key, row in self.kernels.items() if key.rpartition("/")[0] in sizes}
        if numbers(triton.__version__) <= numbers(self.triton):
            return self._replace(kernels=rows)
        return Budget(triton.__version__, {key: row | {"digest": ""} for key, row in rows.items()}, self.older)


def _lines(rows: dict[str, Any], indent: int) -> str:
    end = "\n" + " " * (indent - 1)
    return (
        "{" + ",".join(f"{end} {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items())) + end + "}"
    )


def main() -> int:
    """Compile, print and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every size of the table, held to limits alone")
    parser.add_argument("--all", action="store_true", help="compile what is as it was when the budget was written, too")
    parser.add_argument("--update", action="store_true", help="rewrite the budget, or with --only those rows")
    parser.add_argument("--only", default="", help="only configs that contain this text, such as sm_90/bf16/D64")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    arguments = parser.parse_args()
    chosen = [config for config in configs(full=arguments.full) if arguments.only in str(config)]
    for arch in dict.fromkeys(config.arch for config in chosen if is_refused(config.arch)):
        print(f"{arch} is left out: the kernels refuse Triton {triton.__version__} there")
        chosen = [config for config in chosen if config.arch != arch]
    budget = Budget.read().moved_on() if arguments.update else Budget.read()
    is_same = budget.triton == triton.__version__
    if not is_same:
        print(f"the budget is of Triton {budget.triton}, this is {triton.__version__}: only limits are held")
    limits_only = arguments.update or arguments.full or not is_same
    known = {} if arguments.all or arguments.full else budget.digests()
    started = time.time()
    failures = unchanged = 0
    print(f"{'kernel':54} {'tile':>16} regs stack spills  shared matrix  loop spills issue resident")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = pool.map(partial(compile_config, known=known), chosen)
        for config, (results, same) in zip(chosen, found, strict=True):
            unchanged += len(same)
            for r in results:
                print(
                    f"{r.key:54} {'x'.join(map(str, r.tile)):>16} {r.registers:4} {r.stack:5} {r.spilled:6}"
                    f" {r.shared:7} {r.matrix:6} {r.loop:5} {r.loop_spills:6} {r.issue:5} {r.resident:8}",
                    flush=True,
                )
            wrong = {r.key: complaints(r, budget.kernels.get(r.key), limits_only=limits_only) for r in results}
            for key, complaint in ((key, x) for key, found_wrong in wrong.items() for x in found_wrong):
                failures += 1
                print(f"  FAIL {key}: {complaint}")
            if arguments.update:
                budget = budget.updated(config, same, results, {key for key, x in wrong.items() if x})
                budget.write()
    if unchanged:
        print(f"left out, as they were when the budget was written: {unchanged} kernels")
    print(f"{len(chosen)} sizes in {time.time() - started:.0f} s, {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
