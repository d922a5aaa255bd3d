"""What all kernels share: the elementwise maps, tile loads, rounding, and the cut of a sequence into segments.

Formulas are those of :mod:`hf_linear_attn.feature_maps.elementwise`, written for few instructions: elu + 1 as
``max(x, 0) + exp2(min(x, 0) log2 e)`` needs no compare and select. A NaN stays one: maxima and minima propagate it, so
that a run which diverges does not look well.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment,var-annotated"

import triton
import triton.language as tl

from hf_linear_attn.feature_maps.elementwise import EXP_CLAMP
from hf_linear_attn.ops.chunks import LEAST_LOG_DECAY

# The interpreter multiplies the bit patterns of bf16 operands: there, and only there, dots upcast them.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
CLAMP = tl.constexpr(EXP_CLAMP)
LEAST = tl.constexpr(LEAST_LOG_DECAY)
ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return ``acc + a b``, accumulated in fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return ``a b`` in fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def exact(a, b, PRECISION: tl.constexpr):
    """Return ``a b`` of fp32 operands in fp32, whatever other products are computed in."""
    if INTERPRETED or PRECISION == "ieee":
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def log2_decay(g):
    """Return a log decay as a power of 2; one whose power is 0, minus infinity too, as a finite number."""
    return tl.maximum(g.to(tl.float32), LEAST, propagate_nan=ALL) * LOG2E


@triton.jit
def resets(g, counts):
    """Return 1 where a log decay leaves nothing of what came before, else 0."""
    return (tl.load(g, mask=counts, other=0.0).to(tl.float32) <= LEAST).to(tl.int32)


@triton.jit
def sum_anew(a, of_a, b, of_b):
    """Add up neighbours in a scan, that begins anew at a reset."""
    return tl.where(of_b != 0, b, a + b), of_a | of_b


@triton.jit
def in_two(x):
    """Return numbers of fp64 as two of fp32 whose sum they are."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def back(sums):
    """Return sums for a matrix whose rows come before its columns."""
    return -sums[0], -sums[1]


@triton.jit
def between(later, earlier):
    """Return what log decays sum up to from columns' tokens to rows', at most 0; sums are two numbers of fp32 each."""
    high = later[0][:, None] - earlier[0][None, :]
    return tl.minimum(high + (later[1][:, None] - earlier[1][None, :]), 0.0)


@triton.jit
def phi(x, MAP: tl.constexpr):
    """Return the features of ``x`` in fp32."""
    x = x.to(tl.float32)
    if MAP == "elu":
        y = tl.maximum(x, 0.0, propagate_nan=ALL) + tl.exp2(tl.minimum(x, 0.0, propagate_nan=ALL) * LOG2E)
    elif MAP == "relu":
        y = tl.maximum(x, 0.0, propagate_nan=ALL)
    elif MAP == "squared_relu":
        y = tl.maximum(x, 0.0, propagate_nan=ALL)
        y = y * y
    elif MAP == "exp":
        y = tl.exp2(tl.minimum(x, CLAMP, propagate_nan=ALL) * LOG2E)
    elif MAP == "sigmoid":
        y = 1.0 / (1.0 + tl.exp2(-x * LOG2E))
    else:
        tl.static_assert(MAP == "identity")
        y = x
    return y


@triton.jit
def derivative(x, MAP: tl.constexpr):
    """Return ``phi'(x)`` in fp32."""
    x = x.to(tl.float32)
    if MAP == "elu":
        y = tl.exp2(tl.minimum(x, 0.0, propagate_nan=ALL) * LOG2E)
    elif MAP == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif MAP == "squared_relu":
        y = 2.0 * tl.maximum(x, 0.0, propagate_nan=ALL)
    elif MAP == "exp":
        y = tl.where(x <= CLAMP, tl.exp2(tl.minimum(x, CLAMP, propagate_nan=ALL) * LOG2E), 0.0)
    elif MAP == "sigmoid":
        y = 1.0 / (1.0 + tl.exp2(-x * LOG2E))
        y = y * (1.0 - y)
    else:
        tl.static_assert(MAP == "identity")
        y = tl.full(x.shape, 1.0, tl.float32)
    return y


@triton.jit
def operand(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Round a tile to what products take: to ``dtype``, and where they are of tf32 to that.

    The matrix units would cut the rest of an fp32 operand off, which makes every sum of positive terms too small.
    """
    y = x.to(dtype)
    if PRECISION == "tf32":
        y = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [y], dtype=y.dtype, is_pure=True, pack=1)
    return y


@triton.jit
def rounded(x, dtype: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr):
    """Round features to what products take, once.

    Without the barrier Triton recomputes the map for every layout in which the tile is consumed.
    """
    y = x.to(dtype)
    if PIN:
        if PRECISION == "tf32":
            y = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [y], dtype=y.dtype, is_pure=False, pack=1)
        elif dtype == tl.float32:
            y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [y], dtype=y.dtype, is_pure=False, pack=1)
        else:
            y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [y], dtype=y.dtype, is_pure=False, pack=2)
    return y


@triton.jit
def opaque(x, PIN: tl.constexpr):
    """Return numbers of fp32 as they are, so that the compiler does not move what comes after ahead of this."""
    if PIN:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1)
    return x


@triton.jit
def log2(x, PIN: tl.constexpr):
    """Return logarithms of normal numbers of fp32 as one instruction gives them, to 2^-22; tl.log2 takes twenty."""
    if PIN:
        found = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        found = tl.log2(x)
    return found


@triton.jit
def load_tile(pointer, offsets, rows, columns, EXACT: tl.constexpr, OUTSIDE: tl.constexpr = 0.0):
    """Load a tile, zeros outside if not told; ``EXACT``: every column is inside, which saves instructions.

    Sums over tokens and their reciprocals leave fp16's range, so fp16 is widened here and multiplied as tf32, which has
    the same mantissa and fp32's exponent: memory traffic is that of fp16, and nothing over- or underflows.
    """
    if EXACT:
        x = tl.load(pointer + offsets, mask=rows[:, None], other=OUTSIDE)
    else:
        x = tl.load(pointer + offsets, mask=rows[:, None] & columns[None, :], other=OUTSIDE)
    if x.dtype == tl.float16:
        x = x.to(tl.float32)
    return x


@triton.jit
def load_operand(pointer, offsets, rows, columns, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Load a tile that products take as it is; fp16 is tf32 already."""
    x = load_tile(pointer, offsets, rows, columns, EXACT)
    if pointer.dtype.element_ty == tl.float32:
        x = operand(x, tl.float32, PRECISION)
    return x


@triton.jit
def column_parts(WHOLE: tl.constexpr, REST: tl.constexpr):
    """Return the numbers of a dimension's columns in parts: WHOLE of them, and the REST if that is not 0.

    A tile in parts is a tuple of as many tiles, each of the columns of one part. A comprehension's variable, once
    compiled, is left behind, so it must not have the name of another.
    """
    if REST > 0:
        return tl.arange(0, WHOLE), WHOLE + tl.arange(0, REST)
    else:
        return (tl.arange(0, WHOLE),)


@triton.jit
def zeros(BT: tl.constexpr, oc):
    """Return zeros in fp32, BT rows in parts of columns ``oc``."""
    return [tl.zeros([BT, part.shape[0]], tl.float32) for part in oc]


@triton.jit
def load_parts(pointer, at, oc, rows, C: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """Load rows at offsets ``at`` in parts of their C columns ``oc``, each as :func:`load_operand` does."""
    return [load_operand(pointer, at + part[None, :], rows, part < C, EXACT, PRECISION) for part in oc]


@triton.jit
def store_parts(pointer, at, oc, x, rows, C: tl.constexpr, EXACT: tl.constexpr):
    """Store rows at offsets ``at`` in parts of their C columns ``oc``, leaving out what is outside."""
    for i in tl.static_range(len(oc)):
        store_tile(pointer, at + oc[i][None, :], x[i], rows, oc[i] < C, EXACT)


@triton.jit
def sum_rows(x):
    """Return the sum of each row of a tile in parts."""
    total = tl.sum(x[0], 1)
    for i in tl.static_range(1, len(x)):
        total += tl.sum(x[i], 1)
    return total


@triton.jit
def max_rows(x):
    """Return the largest of each row of a tile in parts."""
    largest = tl.max(x[0], 1)
    for i in tl.static_range(1, len(x)):
        largest = tl.maximum(largest, tl.max(x[i], 1))
    return largest


@triton.jit
def dot_over(a, b, acc, PRECISION: tl.constexpr):
    """Return ``acc + a b^T`` of two tiles in parts."""
    for i in tl.static_range(len(a)):
        acc = dot(a[i], tl.trans(b[i]), acc, PRECISION)
    return acc


@triton.jit
def dot_into(a, b, acc, PRECISION: tl.constexpr):
    """Return ``acc + a b``, where acc and b are in parts."""
    y = ()
    for i in tl.static_range(len(b)):
        y += (dot(a, b[i], acc[i], PRECISION),)
    return y


@triton.jit
def pairs_of(od, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr):
    """Return which entries of a vector are turned, R in all; their pair, whether they are its first, and the other."""
    START: tl.constexpr = D - R if AT_END else 0
    HALF: tl.constexpr = R // 2
    e = od - START
    if PAIRS == "half":
        pair = e % HALF
        first = e < HALF
        other = tl.where(first, e + HALF, e - HALF)
    else:
        pair = e // 2
        first = e % 2 == 0
        other = e ^ 1
    return (e >= 0) & (e < R), pair, first, START + other


@triton.jit
def turn_back(x, other, cos, sin, first, moved, DERIVE: tl.constexpr = False):
    """Undo a rotation, times its factor, of entries from the other ones of their pairs; as rounded as ``x``.

    ``DERIVE`` gives the gradient of what was so turned back, from that of what it became.
    """
    wide = x.to(tl.float32)
    if DERIVE:
        other = -other
    back = wide * cos + tl.where(first, other, -other) * sin
    # Of a slot that holds no token, the angles are 0.
    square = tl.maximum(cos * cos + sin * sin, 1.1754943508222875e-38)
    return tl.where(moved, back / square, wide).to(x.dtype)


@triton.jit
def load_turned(
    pointer, at, turns, turn, od, rows,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, DERIVE: tl.constexpr = False,
):  # fmt: skip
    """Load vectors at offsets ``at`` as :func:`load_operand` does; where R entries are turned, turned back.

    Angles are at offsets ``turn``.
    """
    x = load_tile(pointer, at[:, None] + od[None, :], rows, od < D, EXACT)
    if R > 0:
        moved, pair, first, other = pairs_of(od, D, R, PAIRS, AT_END)
        inside = rows[:, None] & moved[None, :]
        place = turns + turn[:, None] + pair[None, :]
        cos = tl.load(place, mask=inside, other=1.0).to(tl.float32)
        sin = tl.load(place + R // 2, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(pointer + at[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
        x = turn_back(x, y, cos, sin, first[None, :], moved[None, :], DERIVE)
    if pointer.dtype.element_ty == tl.float32:
        x = operand(x, tl.float32, PRECISION)
    return x


@triton.jit
def load_plain(
    pointer, stride, turns, ot, od, rows,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, DERIVE: tl.constexpr = False,
):  # fmt: skip
    """Load a tile of tokens so, that lie a stride apart, and their angles R."""
    return load_turned(pointer, ot * stride, turns, ot * R, od, rows, D, R, PAIRS, AT_END, EXACT, PRECISION, DERIVE)


@triton.jit
def load_features(
    pointer, offsets, rows, columns,
    EXACT: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Load a tile's features with zeros outside, whatever stands there.

    ``phi(0)`` need not be 0 but ``phi(-inf)`` is, so that nothing needs to be selected; on AMD loads give zeros for
    less than that.
    """
    if MAP == "elu" or MAP == "exp" or MAP == "sigmoid":
        if PIN or INTERPRETED:
            x = load_tile(pointer, offsets, rows, columns, EXACT, float("-inf"))
            y = phi(x, MAP)
        else:
            x = load_tile(pointer, offsets, rows, columns, EXACT)
            y = tl.where(rows[:, None], phi(x, MAP), 0.0)
            if not EXACT:
                y = tl.where(columns[None, :], y, 0.0)
    else:
        x = load_tile(pointer, offsets, rows, columns, EXACT)
        y = phi(x, MAP)
    return rounded(y, x.dtype, PRECISION, PIN)


@triton.jit
def store_tile(pointer, offsets, x, rows, columns, EXACT: tl.constexpr):
    """Store a tile, leaving out what is outside."""
    if EXACT:
        tl.store(pointer + offsets, x.to(pointer.dtype.element_ty), mask=rows[:, None])
    else:
        tl.store(pointer + offsets, x.to(pointer.dtype.element_ty), mask=rows[:, None] & columns[None, :])


@triton.jit
def segment_bounds(table, i_s, T, L, NSEG, VARLEN: tl.constexpr):
    """Return sequence, row of the batch, first token of the sequence, and token range of segment ``i_s``."""
    if VARLEN:
        n = tl.load(table + 4 * i_s)
        row = tl.zeros([], dtype=tl.int64)
        first = tl.load(table + 4 * i_s + 1)
        start = tl.load(table + 4 * i_s + 2)
        end = tl.load(table + 4 * i_s + 3)
    else:
        n = (i_s // NSEG).to(tl.int64)
        row = n
        first = tl.zeros([], dtype=tl.int64)
        start = ((i_s % NSEG) * L).to(tl.int64)
        end = tl.minimum(start + L, T)
    return n, row, first, start, end


@triton.jit
def keys_of(x, row, head, x_b, x_h, x_t, delay, DELAYED: tl.constexpr):
    """Return where what belongs to a head's keys begins; where they lag, so that row t is beside query t."""
    x += row * x_b + head.to(tl.int64) * x_h
    if DELAYED:
        x -= delay.to(tl.int64) * x_t
    return x


@triton.jit
def mask_of(mask, row, m_b, delay, DELAYED: tl.constexpr):
    """Return where the mask of a row's keys begins, likewise; there must be one, as Triton 3.6 returns no None."""
    mask += row * m_b
    if DELAYED:
        mask -= delay
    return mask


@triton.jit
def rows_before(end, c, ot):
    """Return which rows of the chunk at ``c`` lie before ``end``, told in 32 bits."""
    return ot < (end - c).to(tl.int32)


@triton.jit
def key_rows(mask, c, rows, ot, first, delay, MASKED: tl.constexpr, DELAYED: tl.constexpr):
    """Return which rows of the chunk at ``c`` hold a key, and which of those a key that counts.

    With a delay, row t holds key ``t - delay`` of its sequence: lagging keys are a shifted read, nothing else. Rows of
    keys that do not count are not even read, since 0 times a NaN is one.
    """
    there = rows
    if DELAYED:
        there = rows & (ot >= (first + delay - c).to(tl.int32))
    counts = there
    if MASKED:
        counts = there & (tl.load(mask + c + ot, mask=there, other=0) != 0)
    return there, counts
