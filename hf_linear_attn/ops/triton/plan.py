"""What is launched, and with which tiles: the launch record, the tile table and the cut into segments.

Nothing here needs a GPU or runs a kernel, so that the same plan can be compiled ahead of time and have its traffic
counted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

TABLE_VERSION = 2
"""Version of the tile table's format; a table of another version is refused."""

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Dtypes as the table names them."""

TILED = dict.fromkeys(("state", "reverse_state", "dq", "dk"), "D")
TILED |= dict.fromkeys(("forward", "dv", "decode", "hybrid"), "V")
"""Kernels whose programs share a head, and the dimension that they share out."""

WIDEST, HELD = 256, 128
"""Features that a walk which reads its states holds whole, and the most of them at a time where there are more."""
STATE_BYTES = {"gfx942": 32 << 10}
"""Bytes of a state that it then holds at a time; elsewhere twice as many."""

HELD_WARPS = 8
"""Warps that a processor holds of kernels that need all of its registers."""


class Target(NamedTuple):
    """The device that a plan is for.

    Attributes:
        arch: ``"sm_80"``, ``"sm_86"``, ``"sm_89"``, ``"sm_90"``, ``"gfx942"`` or ``"interpreter"``.
        processors: Number of multiprocessors or compute units.
    """

    arch: str
    processors: int


@cache
def target_of(device: torch.device) -> Target | None:
    """Return the target that a device stands for, or None where the kernels do not run."""
    if device.type == "cpu":
        return Target("interpreter", 4)
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch: str | None = "gfx942" if properties.gcnArchName.startswith("gfx942") else None
    else:
        major, minor = properties.major, properties.minor
        # Consumer Blackwell has Ada's shared memory; data-centre Blackwell has more than Hopper's.
        newer = {9: "sm_90", 10: "sm_90", 11: "sm_90", 12: "sm_89"}
        arch = {0: "sm_80", 6: "sm_86", 7: "sm_86", 9: "sm_89"}.get(minor) if major == 8 else newer.get(major)
    return None if arch is None else Target(arch, properties.multi_processor_count)


class Tile(NamedTuple):
    """Sizes with which a kernel is launched.

    Attributes:
        tokens: Tokens per chunk, BT.
        width: Columns of the tiled dimension per program; keys per tile of the window's kernels.
        warps: Warps per program.
        stages: Depth of the software pipeline.
    """

    tokens: int
    width: int
    warps: int
    stages: int


Key = tuple[str, str, str, int, int, int]
"""Arch, dtype (``"bf16"``, ``"fp16"`` or ``"fp32"``), role, D, V and group; a group of 0 fits any."""


def parse_table(text: str) -> dict[Key, Tile]:
    """Read a tile table: JSON with ``version`` and ``tiles``, rows of a :data:`Key` and a :class:`Tile`.

    Raises:
        ValueError: If the table has another version.
    """
    table = json.loads(text)
    if table["version"] != TABLE_VERSION:
        raise ValueError(f"tile table has version {table['version']}, not {TABLE_VERSION}; tune again")
    return {tuple(row[:6]): Tile(*row[6:]) for row in table["tiles"]}


def format_table(table: Mapping[Key, Tile]) -> str:
    """Write a tile table as :func:`parse_table` reads it, one row per line."""
    columns = ["arch", "dtype", "role", "D", "V", "group", *Tile._fields]
    rows = ",\n".join("    " + json.dumps([*key, *chosen]) for key, chosen in table.items())
    return f'{{\n  "version": {TABLE_VERSION},\n  "columns": {json.dumps(columns)},\n  "tiles": [\n{rows}\n  ]\n}}\n'


@cache
def tile_table() -> Mapping[Key, Tile]:
    """Return the table that ships with the package."""
    return parse_table(files(__package__).joinpath("tiles.json").read_text())


def padded(dim: int) -> int:
    """Return the size of the tile that holds ``dim`` whole: a power of two, at least the matrix units' 16."""
    return max(16, 1 << (dim - 1).bit_length())


def padded_for(target: Target, dtype: torch.dtype, dim: int) -> int:
    """Return the size of the tile that holds ``dim`` whole in products of linear attention.

    Warp groups multiply bf16 on sm_90. Of operands that are narrower than 64 columns, whose rows are laid out in
    another way, ptxas 12.8 (Triton 3.6 and 3.7) computes wrong addresses: on an H100 results were wrong, or a launch
    read where it may not.
    """
    whole = padded(dim)
    return max(64, whole) if target.arch == "sm_90" and dtype == torch.bfloat16 else whole


def bucket(dim: int) -> int:
    """Return the size under which tiles for ``dim`` are filed: 64, 128, 256 or, of features, 512."""
    return max(64, padded(dim))


def filed(D: int, V: int) -> tuple[int, int]:
    """Return the sizes under which a tile for D features and values of V is filed."""
    features, values = bucket(D), bucket(V)
    # Where features are that wide, they decide.
    return features, max(values, WIDEST) if features > WIDEST else values


def tile(target: Target, dtype: torch.dtype, role: str, D: int, V: int, group: int, *, faded: bool = False) -> Tile:
    """Look up the tile of a kernel, for D features and values of size V, cut down to the dimension that it tiles.

    Where sums fade a role of its own, ``"faded_forward"``, comes before the other.
    """
    table = tile_table()
    # Under torch.compile with dynamic shapes sizes are symbols; a head's size is worth a compilation of its own.
    D, V, group = int(D), int(V), int(group)
    kind = KINDS[dtype]
    # A value wider or narrower than the head has no row of its own: the larger of both decides.
    sizes = filed(D, V)
    keys: tuple[Key, ...] = (
        (target.arch, kind, role, *sizes, group),
        (target.arch, kind, role, *sizes, 0),
        (target.arch, kind, role, max(sizes), max(sizes), 0),
    )
    if faded:
        keys = ((target.arch, kind, f"faded_{role}", *sizes, 0), *keys)
    found = next(table[key] for key in keys if key in table)
    if role in TILED:
        shared = V if TILED[role] == "V" else D
        # A step multiplies nothing by warp groups, and its state is cut alike whatever the dtype.
        whole = padded(shared) if role in ("decode", "hybrid") else padded_for(target, dtype, shared)
        return found._replace(width=min(found.width, whole))
    return found


def has_tile(target: Target, dtype: torch.dtype, role: str, D: int, V: int) -> bool:
    """Tell whether the table has a tile for a kernel that not every size has; arguments as of :func:`tile`."""
    return (target.arch, KINDS[dtype], role, *filed(D, V), 0) in tile_table()


@dataclass(frozen=True)
class Segments:
    """Sequences cut into pieces that are walked side by side.

    Attributes:
        count: Number of segments in all, an upper bound for packed sequences.
        length: Tokens per segment.
        per_row: Segments per sequence, 1 for packed sequences (their table says more).
        split: Whether a sequence may have more than one.
        table: ``[count, 4]`` int64 of packed sequences: sequence, its first token, start, end.
        bounds: ``[N + 1]`` int64: the first segment of each packed sequence.
    """

    count: int
    length: int
    per_row: int
    split: bool
    table: Tensor | None = None
    bounds: Tensor | None = None


def cut(tokens: int, rows: int, length: int, cu_seqlens: Tensor | None) -> Segments:
    """Cut ``rows`` sequences of so many tokens, or so many packed ones in all, into segments of a length.

    Tables are built on the device, without waiting for it.
    """
    if cu_seqlens is None:
        per_row = -(-tokens // length)
        return Segments(rows * per_row, length, per_row, per_row > 1)
    split = length < tokens
    count = -(-tokens // length) + rows if split else rows
    return Segments(count, length, 1, split, *packed_tables(cu_seqlens, count, length if split else None))


def packed_tables(cu_seqlens: Tensor, count: int, length: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the table of at most ``count`` segments of packed sequences and the first one of each.

    A length of None is whole sequences, of which each is the one segment.
    """
    first, last = cu_seqlens[:-1], cu_seqlens[1:]
    numbers = torch.arange(count, device=first.device)
    if length is None:
        return torch.stack([numbers, first, first, last], 1), None
    bounds = torch.zeros_like(cu_seqlens)
    bounds[1:] = ((last - first + length - 1) // length).cumsum(0)
    n = torch.searchsorted(bounds[1:], numbers, right=True).clamp_(max=len(first) - 1)
    start = first[n] + (numbers - bounds[n]) * length
    # Numbers past the last segment start at or after their end: they are empty.
    return torch.stack([n, first[n], start, torch.minimum(start + length, last[n])], 1), bounds


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        role: Name of the kernel.
        kernel: The jitted function.
        programs: Size of the grid.
        arguments: All arguments by name.
        tile: Warps and stages.
        reads: Tensors that cross memory once into the kernel.
        writes: Tensors that cross it once out of it.
    """

    role: str
    kernel: Any
    programs: int
    arguments: dict[str, Any]
    tile: Tile
    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()

    def run(self, arguments: Mapping[str, Any] | None = None) -> Any:
        """Launch the kernel, with other arguments and options where given; return what Triton compiled, or None."""
        given = self.arguments | self.options if arguments is None else arguments
        return self.kernel[(self.programs,)](**given)

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options of the launch."""
        # Fused multiply-adds are asked for by name because Triton's default is about to change.
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": True}


def planned(
    role: str,
    kernel: Any,
    programs: int,
    known: Mapping[str, Any],
    chosen: Tile,
    reads: tuple[Tensor, ...] = (),
    writes: tuple[Tensor, ...] = (),
) -> Launch:
    """Plan a launch with those of the known arguments that its kernel has, and the strides of its tensors.

    Kernels call a tensor's batch, head and token strides ``x_b``, ``x_h`` and ``x_t``; they are 0 where there is none.
    """

    def argument(name: str) -> Any:
        if name in known:
            return known[name]
        x = known[name[:-2]]
        return 0 if x is None or x.ndim < 3 else x.stride("bht".index(name[-1]))

    return Launch(role, kernel, programs, {name: argument(name) for name in kernel.arg_names}, chosen, reads, writes)


def of_mask(mask: Tensor | None) -> dict[str, Any]:
    """Return the arguments that say which tokens are real."""
    return {"mask": mask, "m_b": 0 if mask is None else mask.stride(0), "MASKED": mask is not None}


def readable(x: Tensor) -> Tensor:
    """Return ``x`` with the layout that kernels need: last stride 1, and a chunk within 32-bit offsets."""
    return x if x.stride(3) == 1 and x.stride(2) < 2**24 else x.contiguous()


def takes_tf32() -> bool:
    """Tell whether products of fp32 may be taken in tf32, by any of PyTorch's switches, old or new.

    The setting for products on NVIDIA's GPUs follows all of them. PyTorch's older questions raise where both kinds of
    switches have been used.
    """
    found: bool = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return found


def precision(target: Target, dtype: torch.dtype, dim: int) -> str:
    """Return how products are computed, in Triton's word, where the larger dimension of a tile is ``dim``."""
    if not target.arch.startswith("sm_") or dtype == torch.bfloat16:
        return "ieee"
    if dtype == torch.float16 or takes_tf32():
        return "tf32"
    # Of three products of 256 columns the assembler makes kilobytes of stack; plain fp32 needs a few hundred.
    return "ieee" if bucket(dim) > 128 else "tf32x3"


class Problem(NamedTuple):
    """One :class:`LinearCall`, with inputs in the layout that kernels read.

    Attributes:
        target: The device.
        mask: Key mask ``[B, S]``, uint8, or None.
        cu_seqlens: Boundaries of packed sequences, int64, or None.
    """

    target: Target
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    kv0: Tensor | None
    z0: Tensor | None
    phi: str
    causal: bool
    delay: int
    log_decay: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def rows(self) -> int:
        """Number of sequences, and of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def tile(self, role: str) -> Tile:
        """Return the tile with which a kernel is launched."""
        sizes = self.k.shape[3], self.v.shape[3], self.group
        return tile(self.target, self.q.dtype, role, *sizes, faded=self.log_decay is not None)

    def padded(self, dim: int) -> int:
        """Return the size of the tile that holds ``dim`` whole."""
        return padded_for(self.target, self.q.dtype, dim)

    def held(self) -> int:
        """Return how many features a walk that reads its states holds at a time."""
        whole = self.padded(self.k.shape[3])
        if whole <= WIDEST:
            return whole
        # Products take fp16 as tf32.
        size = 2 if self.q.dtype == torch.bfloat16 else 4
        most = STATE_BYTES.get(self.target.arch, 64 << 10) // (size * self.padded(self.v.shape[3]))
        return min(HELD, most)

    def has(self, role: str) -> bool:
        """Tell whether the table has a tile for a kernel that not every size has."""
        return has_tile(self.target, self.q.dtype, role, int(self.k.shape[3]), int(self.v.shape[3]))

    @property
    def keys_apart(self) -> bool:
        """Whether gradients of keys and of values are of programs of their own in the launch that gives both.

        Sums of both in one program take more registers than there are, but for warp groups of up to 128 features,
        whose operands lie in shared memory.
        """
        return self.k.shape[3] > HELD or self.target.arch not in ("sm_90", "interpreter")

    def segments(self, tokens: int, length: int) -> Segments:
        """Cut the sequences into segments of so many tokens."""
        return cut(tokens, self.rows, length, self.cu_seqlens)

    def states(self, segments: Segments) -> Tensor:
        """Allocate the sums of each segment: ``[segments, HKV, D V + D]``, fp32."""
        sizes = segments.count, self.k.shape[1], self.k.shape[3] * (self.v.shape[3] + 1)
        return torch.empty(sizes, dtype=torch.float32, device=self.q.device)

    @property
    def precision(self) -> str:
        """How products are computed."""
        return precision(self.target, self.q.dtype, max(self.k.shape[3], self.v.shape[3]))

    def shared(self, segments: Segments) -> dict[str, Any]:
        """Return what kernels are told of the problem and of its cut."""
        q, k, v = self.q, self.k, self.v
        return {
            **{"q": q, "k": k, "v": v, "T": q.shape[2], "S": k.shape[2]},
            **{"H": q.shape[1], "HKV": k.shape[1], "G": self.group, "D": k.shape[3], "V": v.shape[3]},
            **{"table": segments.table, "L": segments.length, "NSEG": segments.per_row},
            **of_mask(self.mask),
            **{"delay": self.delay, "DELAYED": self.delay > 0, "VARLEN": self.cu_seqlens is not None},
            **{"MAP": self.phi, "CAUSAL": self.causal, "PRECISION": self.precision},
            # Inline assembly, see primitives.rounded.
            "PIN": self.target.arch.startswith("sm_"),
        }
