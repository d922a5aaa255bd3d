"""Our kernels beside flash-linear-attention's as the assembler leaves them: clocks, registers, stack, bytes; no GPU.

    pip install "hf_linear_attn[peers]"
    python benchmarks/run.py --suite compiled

Both are compiled with the same Triton for the same shapes: causal linear attention with elu + 1 and its normaliser, in
bf16, a head of 64 and one of 128. Ours are the launches that are planned for one sequence of 8192 tokens and 32 heads.
Theirs are those of `chunk_linear_attn`, each in the best of a sample of its tunings; its feature map and its normaliser
are PyTorch's operations, which are counted as they run. Without flash-linear-attention only ours are listed.

The page says what such figures can tell and what they cannot.
"""

import argparse
import importlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import compile_check
import torch
import triton
from compile_check import Config, gpu_target, measure, problem
from harness import facts_line, markdown, provenance, write
from torch import Tensor, nn
from torch.nn.functional import elu
from triton.compiler import ASTSource

from hf_linear_attn.ops.linear_attention.triton.backward import backward_launches, save
from hf_linear_attn.ops.linear_attention.triton.forward import forward_launches
from hf_linear_attn.ops.triton.plan import Launch

TOKENS, HEADS = 8192, 32
CHUNK = 64
"""Tokens per chunk of theirs."""

TEXT = """
*Clocks* are those that a processor's four schedulers need to issue a kernel's instructions, per query head and token:
instructions times warps / 4, loops as often as they run. *Bytes* are those of the tensors that a launch takes and
gives, each once, in U, the bytes of q. An H200's memory takes about {per_u:.0f} clocks for a head and token of U at
D = 128, and half as many at D = 64 (4 TB/s, 132 processors, 1.755 GHz). *Programs held* is how many a processor holds,
from registers, shared memory and warps.

What this can tell: which of two kernels issues more instructions for the same work, whether registers spill to the
stack, whether a kernel fits a processor, and how often a tensor crosses memory. A kernel takes no less time than its
issue slots or its bytes, whichever is more.

What it cannot: time. Waits for memory and for matrix units, programs that do not fill a processor, caches and launches
are not in it, and neither is the choice that flash-linear-attention's tuner would make on a GPU: of a sample of tunings
the one that issues least is taken, which may not be the fastest. `--suite kernels` measures, on a GPU.
"""


@dataclass(frozen=True)
class Peer:
    """A kernel of flash-linear-attention.

    Attributes:
        part: ``"forward"`` or ``"backward"``.
        name: What the table calls it.
        module: Where it is, below ``fla.ops``.
        function: Its name there.
        tensors: Dtypes of the tensors it takes, by argument; others are None.
        tunings: Columns of K and of V per program, warps, stages.
        loops: Whether it walks a sequence in one loop; else a program takes one chunk.
    """

    part: str
    name: str
    module: str
    function: str
    tensors: dict[str, str]
    tunings: tuple[tuple[int, int, int, int], ...]
    loops: bool = False


BF, F32 = "bf16", "fp32"
WALKS = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (32, 64, 4, 2))
CHUNKS = ((128, 128, 8, 3), (64, 64, 4, 3))
WHOLE = ((128, 128, 4, 2), (128, 128, 4, 3), (128, 128, 2, 2))
SUMS = ((0, 32, 4, 2), (0, 32, 2, 2))
PEERS = (
    Peer("forward", "states", "common.chunk_h", "chunk_fwd_kernel_h", {"k": BF, "v": BF, "h": BF}, WALKS, True),
    Peer(
        "forward",
        "outputs",
        "common.chunk_o",
        "chunk_fwd_kernel_o",
        {"q": BF, "k": BF, "v": BF, "h": BF, "o": BF},
        CHUNKS,
    ),
    Peer(
        "forward", "sums of keys", "utils.cumsum", "chunk_global_cumsum_vector_kernel", {"s": BF, "o": BF}, SUMS, True
    ),
    Peer("backward", "states anew", "common.chunk_h", "chunk_fwd_kernel_h", {"k": BF, "v": BF, "h": F32}, WALKS, True),
    Peer(
        "backward",
        "states in reverse",
        "common.chunk_h",
        "chunk_bwd_kernel_dh",
        {"q": BF, "do": BF, "dh": F32},
        WALKS,
        True,
    ),
    Peer(
        "backward",
        "dq and dk",
        "common.chunk_o",
        "chunk_bwd_kernel_dqkwg",
        {"q": BF, "k": BF, "v": BF, "h": F32, "do": BF, "dh": F32, "dq": BF, "dk": BF},
        WHOLE,
    ),
    Peer(
        "backward",
        "dv",
        "common.chunk_o",
        "chunk_bwd_kernel_dv",
        {"q": BF, "k": BF, "do": BF, "dv": BF, "dh": F32},
        WHOLE,
    ),
    Peer(
        "backward", "sums of keys", "utils.cumsum", "chunk_global_cumsum_vector_kernel", {"s": BF, "o": BF}, SUMS, True
    ),
)


def ours(config: Config) -> Iterator[dict[str, Any]]:
    """Compile the launches of one sequence, and yield a row for each."""
    p = problem(config, 1, TOKENS, HEADS)
    u = p.q.nbytes
    out, forward = forward_launches(p, 1e-6)
    do, dkv, dz = torch.empty_like(out.o), torch.empty_like(out.kv), torch.empty_like(out.z)
    _, backward = backward_launches(p, save(p, out), do, dkv, dz)
    for part, launches in (("forward", forward), ("backward", backward)):
        for launch in launches:
            result = measure(config, launch)
            yield {
                "part": part,
                "kernel": launch.role,
                "tile": "x".join(map(str, result.tile)),
                "clocks": result.issue,
                "registers": result.registers,
                "stack, B": result.stack,
                "shared, B": result.shared,
                "programs held": result.resident,
                "bytes, U": moved(launch) / u,
            }


def moved(launch: Launch) -> int:
    """Return the bytes of the tensors that a launch takes and gives, each once; rows of a group share k and v."""
    given = {id(x): x for x in (*launch.arguments.values(), *launch.reads, *launch.writes) if isinstance(x, Tensor)}
    return sum(x.nbytes for x in given.values())


def theirs(peer: Peer, D: int, arch: str) -> dict[str, Any] | None:
    """Compile a kernel of theirs in each tuning, and return the row of the one that issues least."""
    rows = (compiled(peer, D, arch, tuning) for tuning in peer.tunings)
    return min((row for row in rows if row is not None), key=lambda row: row["clocks"], default=None)


def compiled(peer: Peer, D: int, arch: str, tuning: tuple[int, int, int, int]) -> dict[str, Any] | None:
    """Compile a kernel of theirs in one tuning; None where it does not fit."""
    function = getattr(importlib.import_module(f"fla.ops.{peer.module}"), peer.function)
    while not isinstance(function, triton.runtime.jit.JITFunction):
        function = function.fn
    BK, BV, warps, stages = min(tuning[0], D), min(tuning[1], D), *tuning[2:]
    sums = tuning[0] == 0
    constants = {"K": D, "V": D, "S": D, "BT": CHUNK, "BS": BV if sums else CHUNK, "BK": BK, "BV": BV, "NG": 1}
    constants |= {"B": 1, "H": HEADS, "HQ": HEADS, "HV": HEADS}
    types: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if name in peer.tensors:
            types[name] = f"*{peer.tensors[name]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name == "T":
            types[name] = "i32"
        elif name == "scale" and not parameter.is_constexpr and not sums and peer.name != "states":
            types[name] = "fp32"
        else:
            # Flags are off: no gates, no packed sequences, no states from outside.
            types[name] = "constexpr"
            values[(i,)] = constants.get(name, False if parameter.is_constexpr else None)
    source = ASTSource(function, types, values, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    try:
        found = triton.compile(source, target=gpu_target(arch), options=options)
    # Some tunings do not fit; compilers have no error in common.
    except Exception as error:
        print(f"  {peer.name}, D = {D}, {tuning}: {type(error).__name__}", flush=True)
        return None
    has = compile_check.PROCESSORS[arch]
    figures, listing = compile_check._nvidia(found, has.matrix)
    if found.metadata.shared > has.shared:
        return None
    loop = listing.largest()
    tiles = D // BV if sums or not peer.loops else (D // BK) * (D // BV)
    if peer.loops:
        run = listing.executed((), *loop) if loop else float(listing.count())
    else:
        # A chunk's loop over the columns of K, or of V.
        run = listing.executed((D // BK,))
    # States are a matrix per chunk, all others a vector per token.
    numbers = {name: D * D / CHUNK if name in ("h", "dh") else D for name in peer.tensors}
    size = {BF: 2, F32: 4}
    return {
        "part": peer.part,
        "kernel": peer.name,
        "tile": "x".join(map(str, (BV if sums else f"{BK}x{BV}", warps, stages))),
        "clocks": round(run * warps / 4 / CHUNK * tiles, 1),
        "registers": figures["registers"],
        "stack, B": figures["stack"],
        "shared, B": found.metadata.shared,
        "programs held": compile_check.resident(arch, figures["registers"], found.metadata.shared, warps),
        "bytes, U": sum(numbers[name] * size[dtype] for name, dtype in peer.tensors.items()) / (2 * D),
    }


def eager(D: int) -> Iterator[dict[str, Any]]:
    """Run the feature map and the normaliser of theirs, and count what PyTorch's operations move."""
    from suites.traffic import Counter

    utils = importlib.import_module("fla.ops.linear_attn.utils")
    sum_of_keys = utils.chunk_global_cumsum
    # Listed among the kernels; here only its result is needed.
    utils.chunk_global_cumsum = lambda k, **_: k.detach()
    try:
        q, k, o = (torch.randn(1, 64, 2, D, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        steps: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
            "feature map, PyTorch": (lambda q, k: torch.cat([elu(q) + 1, elu(k) + 1]), (q, k)),
            "normaliser, PyTorch": (partial(_normalised, utils), (o, q, k)),
        }
        for name, (function, inputs) in steps.items():
            found = None
            for part in ("forward", "backward"):
                with Counter(nn.Module()) as counter:
                    if found is None:
                        found = function(*inputs)
                    else:
                        torch.autograd.grad(found, inputs, torch.ones_like(found))
                # To look at both sides at once is ours, not theirs.
                joined = (1, 4 * q.nbytes) if name.startswith("feature") and part == "forward" else (0, 0)
                yield {
                    "part": part,
                    "kernel": name,
                    "operations": counter.operations - joined[0],
                    "bytes, U": (counter.bytes - joined[1]) / q.nbytes,
                }
    finally:
        utils.chunk_global_cumsum = sum_of_keys


def _normalised(utils: Any, o: Tensor, q: Tensor, k: Tensor) -> Tensor:
    found: Tensor = utils.normalize_with_z_state(o, q, k, 1.0, None, reverse=False, cu_seqlens=None)[0]
    return found


def total(rows: Sequence[dict[str, Any]], who: str) -> list[dict[str, Any]]:
    """Return what each pass comes to: launches, clocks, bytes."""
    found = []
    for part in ("forward", "backward"):
        mine = [row for row in rows if row["part"] == part]
        found.append(
            {
                "part": part,
                "kernels of": who,
                "launches": sum(row.get("operations", 1) for row in mine),
                "clocks of kernels": round(sum(row.get("clocks", 0.0) for row in mine), 1),
                "bytes, U": sum(row["bytes, U"] for row in mine),
                "most stack, B": max((row.get("stack, B", 0) for row in mine), default=0),
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = argparse.ArgumentParser(
        prog="run.py --suite compiled", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/compiled.json"), help="(%(default)s)")
    parser.add_argument("--arch", default="sm_90", choices=[x for x in compile_check.PROCESSORS if x[0] == "s"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="head sizes (%(default)s)")
    arguments = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        sys.exit("Interpreted kernels cannot be compiled: unset TRITON_INTERPRET.")
    facts = provenance("compiled", argv or []) | {"triton": triton.__version__, "fla": _version()}
    result: dict[str, Any] = {"provenance": facts, "arch": arguments.arch, "sizes": {}}
    for D in arguments.sizes:
        tables = {"ours": list(ours(Config(arguments.arch, "bf16", D, D, 1)))}
        print(f"D = {D}: ours", flush=True)
        if facts["fla"] is not None:
            found = (theirs(peer, D, arguments.arch) for peer in PEERS)
            tables["flash-linear-attention"] = [*(row for row in found if row is not None), *eager(D)]
            print(f"D = {D}: theirs", flush=True)
        result["sizes"][D] = tables
    write(arguments.output, result, page(result))
    print(f"wrote {arguments.output} and .md")


def page(result: dict[str, Any]) -> str:
    """Return what was found as a page: what each pass comes to, and the kernels."""
    facts = result["provenance"]
    parts = [
        "# Compiled kernels side by side\n",
        facts_line(facts),
        f"{result['arch']}, Triton {facts['triton']}, flash-linear-attention {facts['fla']}. Nothing was run.\n",
        TEXT.format(per_u=2 * 128 * 132 * 1755 / 4e6),
    ]
    for D, tables in result["sizes"].items():
        sums = itertools.chain.from_iterable(total(rows, who) for who, rows in tables.items())
        parts += [f"## D = {D}, as many key heads as query heads\n", markdown(list(sums))]
        for who, rows in tables.items():
            parts += [f"### {who}\n", markdown(rows)]
    return "\n".join(parts)


def _version() -> str | None:
    """Return the version of flash-linear-attention, None where it is not installed."""
    try:
        with warnings.catch_warnings():
            # It looks for a GPU.
            warnings.simplefilter("ignore")
            fla = importlib.import_module("fla")
    except ImportError:
        sys.stderr.write('flash-linear-attention is not installed (pip install "hf_linear_attn[peers]"); ours alone\n')
        return None
    return str(fla.__version__)
