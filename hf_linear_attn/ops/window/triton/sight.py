"""Which keys a query of the window sees, and where the tiles in its sight begin."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.triton.primitives import load_operand, load_parts
from hf_linear_attn.ops.window.problem import NOWHERE

NEVER = tl.constexpr(NOWHERE)
FARTHEST = tl.constexpr(2**31 - 1)


@triton.jit
def first_key(t, P, W, BLOCK: tl.constexpr):
    """Return where the tiles of a query's block begin."""
    return tl.maximum(P + t // BLOCK * BLOCK - W + 1, 0) // BLOCK * BLOCK


@triton.jit
def key_codes(codes, j, oj, S, MASKED: tl.constexpr):
    """Return which rows of a tile hold a key, and which keys are real (bit 0) and count once out of sight (bit 1).

    Neither keys nor values of rows whose code is 0 are read: 0 times a NaN is one.
    """
    there = oj < (S - j).to(tl.int32)
    code = tl.where(there, 3, 0)
    if MASKED:
        code = tl.load(codes + j + oj, mask=there, other=0).to(tl.int32)
    return there, code


@triton.jit
def near(distance, code, W):
    """Return which pairs a window holds; a query sees itself even where it is padding, so that no row is empty."""
    # How far each key is seen is found once for all queries, and no distance below 0 is as small.
    reach = tl.where((code & 1) != 0, W, 1)
    return distance.to(tl.uint32) < reach.to(tl.uint32)


@triton.jit
def far(distance, code, W):
    """Return which pairs of a tile are out of sight and count."""
    return distance >= tl.where((code & 2) != 0, W, FARTHEST)


@triton.jit
def load_sinks(
    sink_k, sink_v, seen, queries, rows, kv_head, os, od, ov,
    D: tl.constexpr, V: tl.constexpr, EXACT_D: tl.constexpr, EXACT_V: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return which query of a tile sees which sink, and the sinks' keys and values, in parts."""
    there = rows[:, None] & (os < SINKS)[None, :]
    visible = tl.load(seen + queries[:, None] * SINKS + os[None, :], mask=there, other=0) != 0
    # Nothing else is read, since 0 times a NaN is one.
    seen_here = tl.max(visible.to(tl.int32), 0) != 0
    # [BS, D] and [BS, V]
    kk = load_parts(sink_k + kv_head * SINKS * D, os[:, None] * D, od, seen_here, D, EXACT_D, PRECISION)
    vv = load_parts(sink_v + kv_head * SINKS * V, os[:, None] * V, ov, seen_here, V, EXACT_V, PRECISION)
    return visible, kk, vv


@triton.jit
def load_kept(
    kept_k, kept_v, held, begins, ends, e, first, K, od, ov,
    D: tl.constexpr, V: tl.constexpr, EXACT_D: tl.constexpr, EXACT_V: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return keys kept beyond the window, their values, the first query that sees each and the first that does not.

    Those of a block of queries are C that lie in places before it, and as many as it has queries, ``first`` and those
    behind it, of which one may enter at each; of all these the ones numbered ``e``.
    """
    index = tl.load(held + e, mask=e < C, other=0)
    index = tl.where(e < C, index, first + (e - C))
    there = (e < C + BLOCK) & (index < K)
    begin = tl.load(begins + index, mask=there, other=NEVER)
    end = tl.load(ends + index, mask=there, other=0)
    # Nothing else is read, since 0 times a NaN is one.
    rows = begin < end
    kk = load_operand(kept_k, index[:, None] * D + od[None, :], rows, od < D, EXACT_D, PRECISION)
    vv = load_operand(kept_v, index[:, None] * V + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
    return kk, vv, begin, end
