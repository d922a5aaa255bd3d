"""What the kernels of the delta rule share: where a chunk lies, what its keys are weighed with, and its inverse."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.delta_rule.reference import NORM_EPS
from hf_linear_attn.ops.triton.primitives import back, between, exact

EPS = tl.constexpr(NORM_EPS)
BASE: tl.constexpr = tl.constexpr(16)
"""Tokens whose inverse is found row by row; larger ones are put together from these."""


@triton.jit
def unit_inverse(a, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``(I + a)^-1`` of a strictly lower triangular ``a [BT, BT]``, fp32, of up to two blocks.

    Blocks are solved by substitution, row by row, all at once; ``[[P, 0], [a, Q]]^-1`` then has ``-Q^-1 a P^-1`` below
    its diagonal. A series of powers would take fewer steps and loses all digits where keys repeat.
    """
    tl.static_assert(BT <= 2 * BASE)
    o = tl.arange(0, BT)
    row = o[:, None]
    column = o[None, :]
    same = row // BASE == column // BASE
    block = tl.where(same, a, 0.0)
    x = tl.where(row == column, 1.0, 0.0)
    for i in range(1, BASE):
        # Row i of each block, laid along the rows that it is multiplied with.
        factors = tl.sum(tl.where(row % BASE == i, block, 0.0), 0)
        change = tl.sum(factors[:, None] * x, 0)
        x -= tl.where((row % BASE == i) & same, change[None, :], 0.0)
    if BT > BASE:
        below = tl.where(same, 0.0, a)
        x -= exact(exact(x, below, PRECISION), x, PRECISION)
    return x


@triton.jit
def length_scale(squares, NORM: tl.constexpr):
    """Return what divides vectors by their lengths."""
    if NORM:
        return tl.rsqrt(squares + EPS)
    else:
        return tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def decay_between(b, earlier, visible, GATED: tl.constexpr):
    """Return what is left of column j's token at row i, 0 where not visible; sums of log decays are to base 2."""
    if GATED:
        return tl.where(visible, tl.exp2(between(b, earlier)), 0.0)
    else:
        return tl.where(visible, 1.0, 0.0)


@triton.jit
def decay_since(b, visible, GATED: tl.constexpr):
    """Return the transpose of :func:`decay_between`: what is left of row i's token at row j."""
    if GATED:
        return tl.where(visible, tl.exp2(between(back(b), back(b))), 0.0)
    else:
        return tl.where(visible, 1.0, 0.0)


@triton.jit
def store_sums(b, at, sums, rows):
    """Store sums of log decays, two numbers of fp32 each: a difference is as exact behind a reset as before it."""
    tl.store(b + 2 * at, sums[0], mask=rows)
    tl.store(b + 2 * at + 1, sums[1], mask=rows)


@triton.jit
def load_decay(b, at, c, end, ot, GATED: tl.constexpr):
    """Return a chunk's sums of log decays, what they leave until its end, and what all of them leave."""
    if GATED:
        rows = ot < (end - c).to(tl.int32)
        last = tl.minimum(c + ot.shape[0], end) - 1
        total = tl.load(b + 2 * (at + last), mask=last >= c, other=0.0)
        rest = tl.load(b + 2 * (at + last) + 1, mask=last >= c, other=0.0)
        high = tl.where(rows, tl.load(b + 2 * (at + c + ot), mask=rows, other=0.0), total)
        low = tl.where(rows, tl.load(b + 2 * (at + c + ot) + 1, mask=rows, other=0.0), rest)
        return (high, low), tl.exp2((total - high) + (rest - low)), tl.exp2(total)
    else:
        one = tl.full(ot.shape, 1.0, tl.float32)
        return (one, one), one, 1.0


@triton.jit
def faded(b, GATED: tl.constexpr):
    """Return what a chunk's tokens have left of the state before it."""
    if GATED:
        return tl.exp2(b[0])
    else:
        return b[0]


@triton.jit
def of_units(x, y, NORM: tl.constexpr):
    """Return the gradient of rows times their length, given ``x``, that of ``y``, which are rows by their lengths."""
    if NORM:
        return x - y * tl.sum(x * y, 1)[:, None]
    else:
        return x


@triton.jit
def sequence_bounds(cu, bounds, n, T, NSEG, BOUNDS: tl.constexpr, VARLEN: tl.constexpr):
    """Return the row of sequence n, its first token and its end, its first chunk and the one after its last."""
    if VARLEN:
        row = tl.zeros([], tl.int64)
        first = tl.load(cu + n)
        end = tl.load(cu + n + 1)
    else:
        row = n
        first = tl.zeros([], tl.int64)
        end = first + T
    if BOUNDS:
        i_0 = tl.load(bounds + n)
        i_1 = tl.load(bounds + n + 1)
    else:
        i_0 = n * NSEG
        i_1 = i_0 + NSEG
    return row, first, end, i_0, i_1


@triton.jit
def overwrite(s, x, y, weight):
    """Return a state after a token has overwritten what stands at its key ``x``, and what it has added there."""
    y = weight * (y - tl.sum(x[:, None] * s, 0))
    return s + x[:, None] * y[None, :], y


@triton.jit
def read(s, q, od, F: tl.constexpr, NORM: tl.constexpr):
    """Return what the query at ``q`` reads of a state."""
    x = tl.load(q + od, mask=od < F, other=0.0).to(tl.float32)
    x *= length_scale(tl.sum(x * x, 0), NORM)
    return tl.sum(x[:, None] * s, 0)
