"""What a forward walk does where a value is NaN or infinite, which almost never happens.

Products multiply the values of keys that a query does not see yet by 0, and 0 times a NaN is one: it is in all rows of
its chunk. To clean values before every product would cost a quarter of a walk, so walks look once, at the end, whether
anything of theirs is not finite, and then write the rows before the first such value once more.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.linear_attention.triton.steps import guarded, sums_since, whole_z
from hf_linear_attn.ops.triton.primitives import (
    dot,
    key_rows,
    load_features,
    load_operand,
    load_tile,
    operand,
    rows_before,
    store_tile,
)


@triton.jit
def is_broken(x):
    """Tell whether anything in a tile is not finite."""
    return tl.sum(x * 0.0, 0) != 0.0


@triton.jit
def first_broken(
    v, mask, v_t, c, end, first, delay, ov,
    V: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
):  # fmt: skip
    """Return the first row from ``c`` on of which a value is not finite, or the end."""
    BM: tl.constexpr = 16
    om = tl.arange(0, BM)
    found = end
    while c < found:
        _, counts = key_rows(mask, c, rows_before(end, c, om), om, first, delay, MASKED, DELAYED)
        x = load_tile(v + c * v_t, om[:, None] * v_t + ov[None, :], counts, ov < V, False).to(tl.float32)
        least = tl.min(tl.where(tl.sum(x * 0.0, 1) == 0.0, BM, om), 0)
        if least < BM:
            found = c + least
        c += BM
    return found


@triton.jit
def fresh(PIN: tl.constexpr):
    """Return 0, which the compiler doesn't know: what is computed from it isn't kept in registers all along a walk."""
    if PIN:
        return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return 0


@triton.jit
def mend(
    given, s, z,
    T, start, c, end, row, first, delay, eps, i_h, ov, H, G, of_q, of_k, of_v, of_o, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, STARTS: tl.constexpr,
    MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write once more the rows of a chunk before its first broken value, if there is any from row ``c`` to the end.

    Rows after it show it anyway, and so do all later chunks. Tiles are small, so that this needs fewer registers than
    the walk that it stands in.

    Args:
        given: q, k, v, mask, o and the sums of log decays, as the kernel was given them.
        s: The state at the start of the segment.
        z: Its normaliser.
        T: Rows of the sequence.
        start: The segment's first row.
        c: The first row of a chunk of BT rows.
        end: Where the segment ends, or the chunk.
        row: The row of the batch.
        first: The sequence's first row.
        delay: How far keys lag.
        eps: What normalisers are guarded with.
        i_h: The query head.
        ov: Columns of v.
        H: Query heads.
        G: Query heads per key head.
        of_q: Strides of a batch's row, of a head and of a token; of the others alike.
        of_k: Of k.
        of_v: Of v.
        of_o: Of o.
        m_b: Stride of the mask.
        STARTS: ``"none"``, ``"carried"`` or ``"stored"``, as the scan wrote them.
    """
    q, k, v, mask, o, b = given
    i_hk = i_h // G
    q_t = of_q[2]
    k_t = of_k[2]
    v_t = of_v[2]
    o_t = of_o[2]
    q += row * of_q[0] + i_h.to(tl.int64) * of_q[1]
    o += row * of_o[0] + i_h.to(tl.int64) * of_o[1]
    k += row * of_k[0] + i_hk.to(tl.int64) * of_k[1]
    v += row * of_v[0] + i_hk.to(tl.int64) * of_v[1]
    if FADED:
        b += (row * (H // G) + i_hk) * 2 * T
    if MASKED:
        mask += row * m_b
    if DELAYED:
        k -= delay.to(tl.int64) * k_t
        v -= delay.to(tl.int64) * v_t
        if MASKED:
            mask -= delay
    BM: tl.constexpr = 16
    BK: tl.constexpr = BD if BD <= 64 else 32
    stop = first_broken(v, mask, v_t, c, end, first, delay, ov, V, MASKED, DELAYED)
    if stop < end:
        om = tl.arange(0, BM)
        c = stop - (stop - c) % BT
        for r in range(c, stop, BM):
            rows = rows_before(stop, r, om)
            acc = tl.zeros([BM, ov.shape[0]], tl.float32)
            total = tl.zeros([BM], tl.float32)
            if STARTS != "none":
                for d in range(0, D, BK):
                    od = d + tl.arange(0, BK)
                    fq = load_features(
                        q + r * q_t, om[:, None] * q_t + od[None, :], rows, od < D, False, MAP, PRECISION, PIN
                    )
                    x = load_tile(s, od[:, None] * V + ov[None, :], od < D, ov < V, False)
                    acc = dot(fq, operand(x, fq.dtype, PRECISION), acc, PRECISION)
                    if STARTS == "stored":
                        y = whole_z(z, od, od < D)
                    else:
                        y = tl.load(z + od, mask=od < D, other=0.0)
                    total += tl.sum(fq.to(tl.float32) * y[None, :], 1)
            since = 0.0
            if FADED:
                left = tl.exp2(sums_since(b, T, start, start, r, end, om))
                acc *= left[:, None]
                total *= left
                since = sums_since(b, T, r, start, r, end, om)
            for j in range(start, tl.minimum(r + BM, stop), BM):
                _, counts = key_rows(mask, j, rows_before(stop, j, om), om, first, delay, MASKED, DELAYED)
                p = tl.zeros([BM, BM], tl.float32)
                for d in range(0, D, BK):
                    od = d + tl.arange(0, BK)
                    fq = load_features(
                        q + r * q_t, om[:, None] * q_t + od[None, :], rows, od < D, False, MAP, PRECISION, PIN
                    )
                    fk = load_features(
                        k + j * k_t, om[:, None] * k_t + od[None, :], counts, od < D, False, MAP, PRECISION, PIN
                    )
                    p = dot(fq, tl.trans(fk), p, PRECISION)
                vv = load_operand(v + j * v_t, om[:, None] * v_t + ov[None, :], counts, ov < V, False, PRECISION)
                if FADED:
                    before = sums_since(b, T, r, start, j, end, om)
                    p *= tl.exp2(tl.minimum(since[:, None] - before[None, :], 0.0))
                p = tl.where(r + om[:, None] >= j + om[None, :], p, 0.0)
                acc = dot(operand(p, vv.dtype, PRECISION), vv, acc, PRECISION)
                total += tl.sum(p, 1)
            acc = acc * (1.0 / guarded(total, eps, SIGNED))[:, None]
            store_tile(o + r * o_t, om[:, None] * o_t + ov[None, :], acc, rows, ov < V, False)
