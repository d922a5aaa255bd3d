"""Compile every kernel of the tile table ahead of time, with no GPU present, and hold the result to a budget.

python benchmarks/compile_check.py              # the sizes that matter, against compile_budget.json
python benchmarks/compile_check.py --full       # every size of the table
python benchmarks/compile_check.py --update     # measure anew and rewrite the budget; with --full, all of it

A kernel fails if it uses more stack or shared memory than its budget, more than its processor has, over 5 % more
instructions in its main loop, or, on sm_90 from D = 64, no warp-group matrix instruction. ``issue`` is the loop's
instructions per token and head times warps over the four schedulers: clocks for issue alone (of the window's
kernels, per tile of keys).
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__" or multiprocessing.parent_process() is not None:
    # Interpreted kernels cannot be compiled.
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from problems import feature_problem, window_problem
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_linear_attn.ops.features.triton.kernels import features_backward_launch, features_launch
from hf_linear_attn.ops.linear_attention.triton.backward import backward_launches, save
from hf_linear_attn.ops.linear_attention.triton.forward import forward_launches
from hf_linear_attn.ops.step.triton.kernels import decode_launch
from hf_linear_attn.ops.triton.plan import TILED, Launch, Problem, Target
from hf_linear_attn.ops.window.triton.kernels import window_backward_launches, window_launches

BUDGET = Path(__file__).with_name("compile_budget.json")
LOOP_SLACK = 1.05
# Shared memory that one program may have, bytes.
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Config:
    """One size of one architecture."""

    arch: str
    dtype: str
    D: int
    V: int
    group: int

    def __str__(self) -> str:
        return f"{self.arch}/{self.dtype}/D{self.D}/V{self.V}/g{self.group}"


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

    @property
    def key(self) -> str:
        """Name under which the budget files it."""
        return f"{self.config}/{self.role}"


def problem(config: Config, *, split: bool) -> Problem:
    """Build a problem of that size without memory; a long lone sequence is split, a large batch is not.

    The processors are so many that even the smallest tiles do not fill them with heads and columns alone.
    """
    heads = 2 * config.group
    batch, tokens = (1, 65536) if split else (512, 1024)

    def tensor(heads: int, dim: int) -> torch.Tensor:
        return torch.empty(batch, tokens, heads, dim, dtype=DTYPES[config.dtype], device="meta").transpose(1, 2)

    q, k, v = tensor(heads, config.D), tensor(2, config.D), tensor(2, config.V)
    return Problem(Target(config.arch, 528), q, k, v, None, None, None, None, "elu", True, 0)


def launches(config: Config) -> Iterator[Launch]:
    """Yield one launch per role: the split walk, whose states come from memory, and the decode step."""
    p = problem(config, split=True)
    out, forward = forward_launches(p, 1e-6)
    _, backward = backward_launches(p, save(p, out), torch.empty_like(out.o), out.kv, out.z)
    yield from forward
    yield from (launch for launch in backward if launch.role != "scan")
    # Sequences that are not split get their deltas from a kernel of its own.
    whole = problem(config, split=False)
    of_whole, _ = forward_launches(whole, 1e-6)
    do = torch.empty_like(of_whole.o)
    yield backward_launches(whole, save(whole, of_whole), do, of_whole.kv, of_whole.z)[1][0]
    q, k, v = (x[:, :, :1] for x in (p.q, p.k, p.v))
    tiles = -(-config.V // 32)
    z = torch.empty(1, 2, tiles, config.D, device="meta")
    yield decode_launch(p.target, q, k, v, out.kv, z, None, "elu", 1e-6)[1]
    of_window = window_problem(p)
    if of_window is not None:
        saved, forward = window_launches(of_window)
        _, backward = window_backward_launches(of_window, saved, torch.empty_like(saved.o))
        yield from forward
        yield from (launch for launch in backward if launch.role in ("window_dq", "window_dkv"))
    of_features = feature_problem(p)
    if of_features is not None:
        features, launch = features_launch(of_features)
        yield launch
        yield features_backward_launch(of_features, features)[1]


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


def gpu_target(arch: str) -> GPUTarget:
    """Return Triton's name of an architecture."""
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def measure(config: Config, launch: Launch) -> Result:
    """Compile one launch and read the machine code."""
    compiled = triton.compile(signature(launch), target=gpu_target(config.arch), options=launch.options)
    figures = _amd(compiled) if config.arch.startswith("gfx") else _nvidia(compiled)
    tokens = launch.arguments.get("BT", 1)
    tiled = TILED.get(launch.role)
    passes = {"D": config.D, "V": config.V}[tiled] / launch.tile.width if tiled else 1
    return Result(
        str(config),
        launch.role,
        tuple(launch.tile[:4]),
        shared=compiled.metadata.shared,
        issue=round(figures["loop"] * launch.tile.warps / 4 / tokens * max(1, passes), 1) if tokens > 1 else 0.0,
        **figures,
    )


def _loop(lines: list[str], label: str, branch: str) -> list[str]:
    """Return the lines of the longest loop."""
    places = {m[1]: i for i, line in enumerate(lines) if (m := re.match(label, line))}
    best: list[str] = []
    for i, line in enumerate(lines):
        m = re.search(branch, line)
        if m and places.get(m[1], i) < i and i - places[m[1]] > len(best):
            best = lines[places[m[1]] : i + 1]
    return best


def _nvidia(compiled: object) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([TOOLS / tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    body = [line for line in _loop(code.splitlines(), r"\s*(\.L_x_\d+):", r"BRA.*`\((\.L_x_\d+)\)") if "/*" in line]
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spilled": len(re.findall(r"\bSTL", code)),
        "matrix": len(re.findall(r"\bHGMMA", code)) or len(re.findall(r"\bHMMA", code)),
        "loop": len(body),
        "loop_spills": sum("STL" in line or "LDL" in line for line in body),
    }


def _amd(compiled: object) -> dict[str, int]:
    code = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])

    lines = _loop(code.splitlines(), r"(\.LBB\d+_\d+):", r"s_c?branch\w*\s+(\.LBB\d+_\d+)")
    body = [line for line in lines if re.match(r"\t[a-z]", line)]
    return {
        "registers": figure("vgpr_count"),
        "stack": figure("private_segment_fixed_size"),
        "spilled": figure("vgpr_spill_count"),
        "matrix": len(re.findall(r"\bv_mfma", code)),
        "loop": len(body),
        "loop_spills": sum("scratch_" in line for line in body),
    }


def configs(*, full: bool) -> list[Config]:
    """List what is compiled: in full, or the sizes that matter."""
    if full:
        return [
            Config(arch, dtype, D, V, group)
            for arch in SHARED_LIMIT
            for dtype in DTYPES
            for D, V in ((64, 64), (128, 128), (256, 256), (80, 80), (256, 128))
            for group in (1, 4)
        ]
    sizes = [Config(arch, "bf16", D, D, 1) for arch in SHARED_LIMIT for D in (64, 128)]
    return [*sizes, Config("sm_90", "bf16", 128, 128, 4), Config("sm_90", "fp32", 64, 64, 1)]


def compile_config(config: Config) -> list[Result]:
    """Compile all kernels of one size."""
    return [measure(config, launch) for launch in launches(config)]


def complaints(result: Result, budget: dict[str, int] | None) -> list[str]:
    """Say what is wrong with a result."""
    arch, dtype, size = result.config.split("/")[:3]
    found = []
    if result.shared > SHARED_LIMIT[arch]:
        found.append(f"{result.shared} B of shared memory, and {arch} has {SHARED_LIMIT[arch]}")
    multiplies = result.role not in ("scan", "delta", "decode", "key_sums", "key_scan")
    if arch == "sm_90" and dtype == "bf16" and int(size[1:]) >= 64 and multiplies and result.matrix == 0:
        found.append("no matrix instruction")
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


def main() -> int:
    """Compile, print and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every size of the table")
    parser.add_argument("--update", action="store_true", help="rewrite the budget")
    parser.add_argument("--only", default="", help="only configs that contain this text, such as sm_90/bf16/D64")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    arguments = parser.parse_args()
    chosen = [config for config in configs(full=arguments.full) if arguments.only in str(config)]
    known = json.loads(BUDGET.read_text()) if BUDGET.exists() else {"kernels": {}}
    if not arguments.update and known.get("triton") != triton.__version__:
        print(f"budget is of Triton {known.get('triton')}, this is {triton.__version__}: counts may differ")
    started = time.time()
    failures = 0
    print(f"{'kernel':46} {'tile':>18} regs stack spills  shared matrix  loop spills issue")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for results in pool.map(compile_config, chosen):
            for r in results:
                print(
                    f"{r.key:46} {'x'.join(map(str, r.tile)):>18} {r.registers:4} {r.stack:5} {r.spilled:6}"
                    f" {r.shared:7} {r.matrix:6} {r.loop:5} {r.loop_spills:6} {r.issue:5}",
                    flush=True,
                )
                if arguments.update:
                    known["kernels"][r.key] = {name: asdict(r)[name] for name in ("stack", "shared", "loop")}
                    continue
                for complaint in complaints(r, known["kernels"].get(r.key)):
                    failures += 1
                    print(f"  FAIL {r.key}: {complaint}")
    print(f"{len(chosen)} sizes in {time.time() - started:.0f} s, {failures} failures")
    if arguments.update:
        rows = [f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(known["kernels"].items())]
        kernels = ",\n".join(rows)
        BUDGET.write_text(f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n{kernels}\n }}\n}}\n')
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
