"""What a call of the window's kernels is given, in the layout that they read."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.ops.triton.plan import Target, Tile, padded, precision, tile
from hf_linear_attn.ops.window.problem import KeptKeys

BLOCK = 64
"""Tokens per sum of keys, and between two lists of kept keys; tiles of queries and of keys divide it."""


class Kept(NamedTuple):
    """Keys kept beyond the window, as of :class:`KeptKeys`, all contiguous.

    Attributes:
        k: ``[B, HKV, C + T, D]``.
        v: ``[B, HKV, C + T, V]``.
        slot: ``[B, HKV, T]`` int64.
        begins: ``[B, C + T]`` int64.
        ends: ``[B, HKV, C + T]`` int64.
        held: Which lie in the places before each block of queries ``[B, HKV, blocks, C]`` int64.
    """

    k: Tensor
    v: Tensor
    slot: Tensor
    begins: Tensor
    ends: Tensor
    held: Tensor

    @property
    def places(self) -> int:
        """C."""
        return self.held.shape[3]


def held_by_block(kept: KeptKeys) -> Tensor:
    """Return which keys lie in the places before each block of queries, ``[B, HKV, blocks, C]`` int64."""
    return kept.held(BLOCK, -(-kept.slot.shape[2] // BLOCK))


class WindowProblem(NamedTuple):
    """One call of the op, with inputs in the layout that kernels read.

    Attributes:
        target: The device.
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, S, D]``: those from before the first query, then its own.
        v: Values ``[B, HKV, S, V]``.
        codes: ``[B, S]`` uint8, bit 0 for real keys and bit 1 for those that count once out of sight; None: all do.
        sink_k: Keys ``[B, HKV, n, D]``, contiguous, or None.
        sink_v: Values ``[B, HKV, n, V]``.
        seen: Which query sees which sink, ``[B, T, n]`` uint8, contiguous.
        f: Values of the queries' own keys ``[B, H, T, V]``, or None: there are no such keys.
        number: Keys that each stands for ``[B, T]`` int64, contiguous.
        before: Sum of those that ``k`` does not hold ``[B, HKV, D]`` fp32, contiguous, or None.
        bias: ``[H]``.
        weight: ``[H, D]``, contiguous.
        given: Scores of the queries' own keys ``[B, H, T]`` fp32, contiguous, -inf where there is none; None where
            kernels compute them of the five before.
        kept: Keys kept beyond the window, or None.
        window: Keys in sight, a query's own included.
        scaling: Factor on ``q.k``.
    """

    target: Target
    q: Tensor
    k: Tensor
    v: Tensor
    codes: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    seen: Tensor | None
    f: Tensor | None
    number: Tensor | None
    before: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    given: Tensor | None
    kept: Kept | None
    window: int
    scaling: float

    @property
    def past(self) -> int:
        """Keys from before the first query."""
        return self.k.shape[2] - self.q.shape[2]

    @property
    def sinks(self) -> int:
        """Sinks per row."""
        return 0 if self.sink_k is None else self.sink_k.shape[2]

    @property
    def blocks(self) -> int:
        """Different beginnings of tiles of keys."""
        last = (self.q.shape[2] - 1) // BLOCK * BLOCK
        return max(self.past + last - self.window + 1, 0) // BLOCK + 1

    @property
    def sums(self) -> bool:
        """Whether kernels score own keys, by the sum of the keys that each stands for."""
        return self.f is not None and self.given is None

    def role(self, name: str) -> str:
        """Return what a kernel is called that reads kept keys, too, where there are some."""
        return name if self.kept is None else f"{name}_kept"

    def tile(self, role: str) -> Tile:
        """Return the tile with which a kernel is launched."""
        group = self.q.shape[1] // self.k.shape[1]
        return tile(self.target, self.q.dtype, role, self.k.shape[3], self.v.shape[3], group)

    def shared(self, chosen: Tile) -> dict[str, Any]:
        """Return what kernels are told of the problem and of a tile."""
        (_, H, T, _), (_, HKV, S, D), V = self.q.shape, self.k.shape, self.v.shape[3]
        return {
            **{"q": self.q, "k": self.k, "v": self.v, "codes": self.codes, "c_b": S, "number": self.number},
            **{"sink_k": self.sink_k, "sink_v": self.sink_v, "seen": self.seen, "f": self.f},
            **{"bias": self.bias, "weight": self.weight, "W": self.window, "scaling": self.scaling},
            **{"T": T, "S": S, "P": self.past, "NB": self.blocks, "H": H, "HKV": HKV, "G": H // HKV},
            **{"D": D, "V": V, "BD": padded(D), "BV": padded(V), "BT": chosen.tokens, "BN": chosen.width},
            **{"BLOCK": BLOCK, "SINKS": self.sinks, "BS": padded(self.sinks) if self.sinks else 16},
            **{"MASKED": self.codes is not None, "OWN": self.f is not None, "SUMS": self.sums, "given": self.given},
            **self._kept(),
            "PRECISION": precision(self.target, self.q.dtype, max(D, V)),
        }

    def _kept(self) -> dict[str, Any]:
        kept = self.kept
        if kept is None:
            names = "kept_k", "kept_v", "slot", "begins", "ends", "held"
            return {**dict.fromkeys(names), "C": 0, "K": 0, "NQ": 0}
        return {
            **{"kept_k": kept.k, "kept_v": kept.v, "slot": kept.slot, "begins": kept.begins, "ends": kept.ends},
            **{"held": kept.held, "C": kept.places, "K": kept.k.shape[2], "NQ": kept.held.shape[2]},
        }


def fp32(p: WindowProblem, *sizes: int) -> Tensor:
    """Return an empty fp32 tensor on the problem's device."""
    return torch.empty(sizes, dtype=torch.float32, device=p.q.device)
