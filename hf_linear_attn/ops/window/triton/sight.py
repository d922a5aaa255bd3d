"""Which keys a query of the window sees, and where the tiles in its sight begin."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl


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
    return (distance >= 0) & (distance < W) & (((code & 1) != 0) | (distance == 0))


@triton.jit
def far(distance, code, W):
    """Return which pairs of a tile are out of sight and count."""
    return (distance >= W) & ((code & 2) != 0)


@triton.jit
def sees_sink(seen, queries, os, rows, SINKS: tl.constexpr):
    """Return which query of a tile sees which sink."""
    there = rows[:, None] & (os < SINKS)[None, :]
    return tl.load(seen + queries[:, None] * SINKS + os[None, :], mask=there, other=0) != 0
