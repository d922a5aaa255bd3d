"""A call of the delta rule as its kernels see it: inputs, tiles, and how it is cut into chunks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.ops.triton.plan import (
    Launch,
    Segments,
    Target,
    Tile,
    bucket,
    cut,
    of_mask,
    padded,
    padded_for,
    planned,
    precision,
)

WALKS = ("delta_walk", "delta_back")
"""Kernels that carry a state, of which a program holds a tile ``[F, BV]`` in registers."""

OF_KEYS = ("delta_dq", "delta_dk")
"""Kernels that hold the gradients of a chunk's keys or queries, ``[C, F]``, whole."""


def tile(target: Target, dtype: torch.dtype, role: str, F: int, V: int) -> Tile:
    """Return the tile of a kernel: tokens of a chunk, columns of values per program or turn, warps, stages.

    These fit into registers and shared memory as the compiler reports them; they have not been timed against others.
    """
    F, V = int(F), int(V)
    wide = bucket(F) // 64
    if target.arch == "interpreter":
        return Tile(32, min(32, padded(V)), 1, 1)
    # Chunks of fp32, of AMD, and of 256 features before Hopper do not fit into shared memory or registers otherwise.
    large = dtype == torch.bfloat16 and (target.arch == "sm_90" or (target.arch.startswith("sm_") and wide <= 2))
    tokens = 64 if large else 32
    # Of narrower operands ptxas 12.8 makes wrong code there, see plan.padded_for.
    least = padded_for(target, dtype, 1)
    width = 32 if role in WALKS or (role in OF_KEYS and least < 64) else 64
    if wide > 1 and dtype != torch.bfloat16:
        # Products of fp32 hold their operands in registers, beyond 128 features as plain multiplications.
        tokens, width = 16, 16
    eight = wide > 2 or (role in OF_KEYS and target.arch.startswith("sm_"))
    return Tile(tokens, min(width, max(least, padded(V))), 8 if eight else 4, 1)


class DeltaProblem(NamedTuple):
    """One :class:`DeltaCall`, with inputs in the layout that kernels read.

    Attributes:
        target: The device.
        mask: Key mask ``[B, T]``, uint8, or None.
        cu_seqlens: Boundaries of packed sequences, int64, or None.
    """

    target: Target
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    kv0: Tensor | None
    delay: int
    l2norm: bool

    @property
    def rows(self) -> int:
        """Number of sequences, and of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def wide(self) -> torch.dtype:
        """Dtype of operands that are kept between kernels; products take fp16 as tf32."""
        return torch.float32 if self.q.dtype == torch.float16 else self.q.dtype

    def padded(self, dim: int) -> int:
        """Return the size of the tile that holds ``dim`` whole."""
        return padded_for(self.target, self.q.dtype, dim)

    def tile(self, role: str) -> Tile:
        """Return the tile with which a kernel is launched."""
        return tile(self.target, self.q.dtype, role, self.k.shape[3], self.v.shape[3])

    @property
    def tokens(self) -> int:
        """Tokens of a chunk, C; the same for all kernels."""
        return self.tile("delta_walk").tokens

    def chunks(self) -> Segments:
        """Cut the sequences into chunks."""
        return cut(self.q.shape[2], self.rows, self.tokens, self.cu_seqlens)

    def of_keys(self, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate rows for keys, ``[B, HKV, T, dim]``, beside the queries that see them first."""
        sizes = self.q.shape[0], self.k.shape[1], self.q.shape[2], dim
        return torch.empty(sizes, dtype=dtype or self.wide, device=self.q.device)

    def numbers(self, heads: int) -> Tensor:
        """Allocate a number for each token of so many heads, ``[B, heads, T]``, fp32."""
        return torch.empty(self.q.shape[0], heads, self.q.shape[2], dtype=torch.float32, device=self.q.device)

    def states(self, chunks: Segments) -> Tensor:
        """Allocate a state per chunk, ``[chunks, HKV, F, V]``."""
        sizes = chunks.count, self.k.shape[1], self.k.shape[3], self.v.shape[3]
        return torch.empty(sizes, dtype=self.wide, device=self.q.device)

    def state(self) -> Tensor:
        """Allocate a state per sequence, ``[B or N, HKV, F, V]``, fp32."""
        sizes = self.rows, self.k.shape[1], self.k.shape[3], self.v.shape[3]
        return torch.empty(sizes, dtype=torch.float32, device=self.q.device)

    def shared(self, chunks: Segments) -> dict[str, Any]:
        """Return what kernels are told of the problem and of its chunks."""
        q, k, v, F = self.q, self.k, self.v, self.k.shape[3]
        return {
            **{"q": q, "k": k, "v": v, "beta": self.beta, "g": self.log_decay, "kv0": self.kv0, "T": q.shape[2]},
            **{"HKV": k.shape[1], "G": q.shape[1] // k.shape[1], "F": F, "V": v.shape[3]},
            **{"table": chunks.table, "NSEG": chunks.per_row, "cu": self.cu_seqlens, "bounds": chunks.bounds},
            **{"BT": self.tokens, "BH": min(32, self.tokens), "BK": min(64, self.padded(F)), "BD": self.padded(F)},
            **of_mask(self.mask),
            **{"delay": self.delay, "DELAYED": self.delay > 0, "INITIAL": self.kv0 is not None},
            **{"GATED": self.log_decay is not None, "NORM": self.l2norm, "VARLEN": self.cu_seqlens is not None},
            "BOUNDS": chunks.bounds is not None,
            "PRECISION": precision(self.target, q.dtype, max(F, v.shape[3])),
        }

    def launch(
        self,
        role: str,
        kernel: Any,
        programs: int,
        known: Mapping[str, Any],
        reads: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
    ) -> Launch:
        """Plan a launch; arguments as of :func:`planned`."""
        chosen = self.tile(role)
        return planned(role, kernel, programs, {**known, "BV": chosen.width}, chosen, reads, writes)
