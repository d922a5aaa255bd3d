"""The steps that all walks share.

Every walk, forwards or in reverse, with a state in registers or in memory, does the same with one tile of its rows and
one of the tokens that they see: ``acc += tril(a b^T - less) c``, and where it carries a state ``S += b^T c``.

Where sums fade (FADED), with b the sums of log decays up to a token, what lies between two tokens is a factor
``exp(b_i - b_j)`` on a weight, or on a row before it is added to a state. Every factor is at most 1. A sum is two
numbers of fp32, and differences are taken of both, so that no digits are lost in what a long sequence sums up to, nor
behind a reset, which is so large a term that nothing is left of what came before it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.triton.primitives import (
    between,
    dot,
    load_features,
    load_tile,
    opaque,
    operand,
    phi,
    product,
    rounded,
)


@triton.jit
def attend(
    a, b, c, less, visible, acc,
    PRECISION: tl.constexpr, PIN: tl.constexpr, of_rows=None, of_columns=None,
    FADED: tl.constexpr = False, APART: tl.constexpr = False, LAST: tl.constexpr = False,
):  # fmt: skip
    """Return ``acc + p c`` and ``p = a b^T - less`` where visible, else 0; faded :func:`between` rows and columns.

    ``LAST`` rounds weights to what products take after they are selected. Else the compiler rounds first and selects
    numbers of 16 bits one by one, which takes longer where something was subtracted.

    ``APART`` adds acc, a product of its own, to a finished ``p c``. As accumulator of both it would be held twice where
    eight warps share out a chunk of 64 rows, in registers that a carried state needs.
    """
    p = product(a, tl.trans(b), PRECISION) - less
    return weigh(p, c, visible, acc, PRECISION, PIN, of_rows, of_columns, FADED, APART, LAST)


@triton.jit
def weigh(
    p, c, visible, acc,
    PRECISION: tl.constexpr, PIN: tl.constexpr, of_rows, of_columns,
    FADED: tl.constexpr = False, APART: tl.constexpr = False, LAST: tl.constexpr = False,
):  # fmt: skip
    """Return ``acc + p c`` and p, of products that are there already; see :func:`attend`."""
    if FADED:
        p *= tl.exp2(between(of_rows, of_columns))
    p = tl.where(visible, p, 0.0)
    if LAST:
        p = opaque(p, PIN)
    if APART:
        return acc + opaque(product(operand(p, c.dtype, PRECISION), c, PRECISION), PIN), p
    else:
        return dot(operand(p, c.dtype, PRECISION), c, acc, PRECISION), p


@triton.jit
def features_product(
    a, a_t, oa, of_a, b, b_t, ob, of_b,
    D: tl.constexpr, BD: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Return ``phi(a) phi(b)^T`` of rows whose D features come in tiles of BD, loaded anew each time."""
    p = tl.zeros([oa.shape[0], ob.shape[0]], tl.float32)
    for d in range(0, D, BD):
        od = d + tl.arange(0, BD)
        fa = load_features(a, oa[:, None] * a_t + od[None, :], of_a, od < D, D % BD == 0, MAP, PRECISION, PIN)
        fb = load_features(b, ob[:, None] * b_t + od[None, :], of_b, od < D, D % BD == 0, MAP, PRECISION, PIN)
        p = dot(fa, tl.trans(fb), p, PRECISION)
    return p


@triton.jit
def read_stored(
    a, a_t, oa, of_a, state, ov,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Return ``phi(a) S`` of such rows, for a state that a scan wrote."""
    acc = tl.zeros([oa.shape[0], ov.shape[0]], tl.float32)
    for d in range(0, D, BD):
        od = d + tl.arange(0, BD)
        fa = load_features(a, oa[:, None] * a_t + od[None, :], of_a, od < D, D % BD == 0, MAP, PRECISION, PIN)
        s = load_tile(state, od[:, None] * V + ov[None, :], od < D, ov < V, ov.shape[0] == V)
        acc = dot(fa, s, acc, PRECISION)
    return acc


@triton.jit
def read_mass(
    a, a_t, oa, of_a, parts,
    D: tl.constexpr, BD: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Return ``phi(a) z`` of such rows, likewise: z is three numbers whose sum it is."""
    o3 = tl.arange(0, 16)
    total = tl.zeros([oa.shape[0], 16], tl.float32)
    for d in range(0, D, BD):
        od = d + tl.arange(0, BD)
        fa = load_features(a, oa[:, None] * a_t + od[None, :], of_a, od < D, D % BD == 0, MAP, PRECISION, PIN)
        z = load_tile(parts, o3[:, None] * D + od[None, :], o3 < 3, od < D, D % BD == 0)
        total = dot(fa, tl.trans(z), total, PRECISION)
    return tl.sum(total, 1)


@triton.jit
def fold(b, c, state, PRECISION: tl.constexpr):
    """Return ``state + b^T c``."""
    return dot(tl.trans(b), c, state, PRECISION)


@triton.jit
def counted_in(b, count, PRECISION: tl.constexpr):
    """Return ``count + b^T 1`` of a count of 16 equal columns: so narrow a product costs less than sums of fp32."""
    return dot(tl.trans(b), tl.trans(tl.full([16, b.shape[0]], 1.0, b.dtype)), count, PRECISION)


@triton.jit
def in_parts(x, dtype: tl.constexpr):
    """Return numbers of fp32 as three of bf16 whose sum they are, the first rows of 16."""
    high = x.to(dtype)
    x -= high.to(tl.float32)
    middle = x.to(dtype)
    x -= middle.to(tl.float32)
    o = tl.arange(0, 16)[:, None]
    rest = tl.where(o == 2, x.to(dtype)[None, :], 0.0)
    return tl.where(o == 0, high[None, :], tl.where(o == 1, middle[None, :], rest)).to(dtype)


@triton.jit
def read(a, state, PRECISION: tl.constexpr):
    """Return ``a S``, with a state rounded to what products take."""
    return product(a, operand(state, a.dtype, PRECISION), PRECISION)


@triton.jit
def load_sums(
    states, kv0, z0, segment, sequence, o_state, in_state, od,
    D: tl.constexpr, V: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Return the sums that a walk of a head starts from, and their normaliser: by segment or sequence and head."""
    if SOURCE == "segment":
        states += segment * (D * V + D)
        s = tl.load(states + o_state, mask=in_state, other=0.0)
        z = tl.load(states + D * V + od, mask=od < D, other=0.0)
    elif SOURCE == "sequence":
        s = tl.load(kv0 + sequence * (D * V) + o_state, mask=in_state, other=0.0)
        z = tl.load(z0 + sequence * D + od, mask=od < D, other=0.0)
    else:
        s = tl.zeros(o_state.shape, tl.float32)
        z = tl.zeros(od.shape, tl.float32)
    return s, z


@triton.jit
def guarded(total, eps, SIGNED: tl.constexpr):
    """Move normalisers away from 0 without changing their sign."""
    if SIGNED:
        return tl.where(total < 0, total - eps, total + eps)
    else:
        return total + eps


@triton.jit
def weighted_queries(
    q, offsets, den, rows, columns,
    EXACT: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
    left=1.0, FADED: tl.constexpr = False,
):  # fmt: skip
    """Load ``phi(q) / den``, which is 0 in no row: what these are multiplied with is 0 outside."""
    x = load_tile(q, offsets, rows, columns, EXACT)
    w = 1.0 / tl.load(den, mask=rows, other=1.0)
    if FADED:
        w *= left
    return rounded(phi(x, MAP) * w[:, None], x.dtype, PRECISION, PIN)


@triton.jit
def sums_at(b, T, c, end, ot):
    """Return the sums of log decays up to the rows from ``c`` on, as :func:`between` takes them."""
    at = c + tl.minimum(ot, (end - 1 - c).to(tl.int32))
    return tl.load(b + at), tl.load(b + T + at)


@triton.jit
def sums_since(b, T, base, start, c, end, ot):
    """Return what log decays sum up to from row ``base`` of a segment, or its end, to the rows from ``c`` on.

    They are powers of 2. Sums since the segment's ``start`` are two numbers whose sum they are, T apart, so that a
    difference of long ones is as exact as one of short ones. Rows beyond the segment's end get what its last row has.
    """
    high, low = sums_at(b, T, c, end, ot)
    known = base > start
    high -= tl.load(b + base - 1, mask=known, other=0.0)
    low -= tl.load(b + T + base - 1, mask=known, other=0.0)
    return high + low


@triton.jit
def sums_until(b, T, base, start, c, end, ot):
    """Return what log decays sum up to after the rows from ``c`` on, before row ``base``; see :func:`sums_since`."""
    return tl.minimum(-sums_since(b, T, base, start, c, end, ot), 0.0)


@triton.jit
def kept_by_chunk(b, T, c, start, end, ot, BT: tl.constexpr):
    """Return what the chunk of BT rows at ``c`` leaves: of each row at its end, and of what stood before it."""
    stop = tl.minimum(c + BT, end)
    kept = tl.exp2(sums_until(b, T, stop, start, c, end, ot))
    return kept, tl.exp2(sums_since(b, T, c, start, stop - 1, end, 0))


@triton.jit
def faded(x, left, PRECISION: tl.constexpr, FADED: tl.constexpr = True):
    """Return rows times what is left of them, as products take them; where nothing fades, as they are."""
    if FADED:
        x = operand(x.to(tl.float32) * left[:, None], x.dtype, PRECISION)
    return x


@triton.jit
def whole_z(parts, od, inside, D: tl.constexpr):
    """Return in fp32 the sum of keys of which a scan wrote three parts."""
    o3 = tl.arange(0, 4)
    return tl.sum(load_tile(parts, od[:, None] + o3[None, :] * D, inside, o3 < 3, False).to(tl.float32), 1)
