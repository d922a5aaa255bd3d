"""Sums of the keys that are out of sight: one per block, then those of all blocks before, or of all behind."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.triton.plan import Launch, padded, planned
from hf_linear_attn.ops.triton.primitives import load_tile
from hf_linear_attn.ops.window.triton.problem import WindowProblem


@triton.jit(do_not_specialize=["S", "N", "c_b"])
def key_sums_kernel(
    k, codes, sums,
    S, N, HKV,
    k_b, k_h, k_t, c_b,
    D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum the keys of one block that count once they are out of sight."""
    pid = tl.program_id(0)
    i_h = pid % HKV
    i_n = (pid // HKV) % N
    i_b = (pid // HKV // N).to(tl.int64)
    j = i_n.to(tl.int64) * BLOCK
    oj = tl.arange(0, BLOCK)
    od = tl.arange(0, BD)
    counts = j + oj < S
    if MASKED:
        counts = counts & ((tl.load(codes + i_b * c_b + j + oj, mask=counts, other=0) & 2) != 0)
    # [BLOCK, BD]
    k += i_b * k_b + i_h.to(tl.int64) * k_h + j * k_t
    x = load_tile(k, oj[:, None] * k_t + od[None, :], counts, od < D, D == BD)
    tl.store(sums + ((i_b * HKV + i_h) * N + i_n) * D + od, tl.sum(x.to(tl.float32), 0), mask=od < D)


@triton.jit(do_not_specialize=["N"])
def key_scan_kernel(
    x, before, out, total,
    N,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the sum of all rows before each of N (after it where REVERSE), over G neighbours, and that of all."""
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    bh = (pid // ND).to(tl.int64)
    od = (pid % ND) * BD + tl.arange(0, BD)
    on = tl.arange(0, BN)
    acc = tl.zeros([BD], tl.float32)
    if INITIAL:
        acc = tl.load(before + bh * D + od, mask=od < D, other=0.0)
    # Each row of a tile takes in the row before it, so that none sees itself: a NaN less itself is one.
    for c in range(0, N + 1, BN):
        i = c + on
        before_i = i - 1
        there = ((before_i >= 0) & (before_i < N))[:, None] & (od < D)[None, :]
        inside = (i < N)[:, None] & (od < D)[None, :]
        if REVERSE:
            i = N - 1 - i
            before_i = N - 1 - before_i
        # [BN, BD]
        y = tl.zeros([BN, BD], tl.float32)
        for g in range(G):
            rows = (bh * G + g) * N + before_i
            y += tl.load(x + rows[:, None] * D + od[None, :], mask=there, other=0.0)
        rows = bh * N + i
        tl.store(out + rows[:, None] * D + od[None, :], acc[None, :] + tl.cumsum(y, 0), mask=inside)
        acc += tl.sum(y, 0)
    tl.store(total + bh * D + od, acc, mask=od < D)


def scan_launch(
    p: WindowProblem, x: Tensor, before: Tensor | None, out: Tensor, total: Tensor, *, reverse: bool
) -> Launch:
    """Plan the scan of ``x [B, HKV or H, N, D]`` into ``out [B, HKV, N, D]``."""
    chosen, D = p.tile("key_scan"), x.shape[3]
    width = min(chosen.width, padded(D))
    known = {
        **{"x": x, "before": before, "out": out, "total": total, "N": x.shape[2], "G": x.shape[1] // out.shape[1]},
        **{"D": D, "BD": width, "BN": chosen.tokens, "INITIAL": before is not None, "REVERSE": reverse},
    }
    programs = out.shape[0] * out.shape[1] * -(-D // width)
    return planned("key_scan", key_scan_kernel, programs, known, chosen, (x,), (out,))
