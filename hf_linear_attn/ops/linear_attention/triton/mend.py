"""What a forward walk does where a value is NaN or infinite, which almost never happens.

Products multiply the values of keys that a query does not see yet by 0, and 0 times a NaN is one: it is in all rows of
its chunk. To clean values before every product would cost a quarter of a walk, so walks look once, at the end, whether
anything of theirs is not finite, and then write the rows before the first such value once more. A walk that has no
registers left to look is followed by a launch that does it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,index"

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.linear_attention.triton.steps import fresh, guarded, is_broken, sums_at, sums_since, whole_z
from hf_linear_attn.ops.triton.plan import Launch, Problem
from hf_linear_attn.ops.triton.primitives import (
    between,
    dot,
    key_rows,
    load_features,
    load_operand,
    load_tile,
    operand,
    rows_before,
    segment_bounds,
    store_tile,
)


def can_look(p: Problem) -> bool:
    """Tell whether a walk that carries its state has registers left to look; else its loop is 13 to 24% longer."""
    features, values = int(p.k.shape[3]), int(p.v.shape[3])
    if max(features, values) <= 64 or p.target.arch == "interpreter":
        return True
    return p.target.arch not in ("sm_86", "sm_89") and values > 64


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

    ``given`` are q, k, v, mask, o and the sums of log decays as the kernel got them; ``of_q`` to ``of_o`` their strides
    of a batch's row, a head and a token. ``s`` and ``z`` are the state at the start of the segment: none, as a walk
    carries it, or as the scan stores it (STARTS). ``c`` is the first row of a chunk of BT rows, and ``end`` where the
    chunk or the segment ends.
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
                    if STARTS == "stored":  # noqa: SIM108 - known when compiling
                        y = whole_z(z, od, od < D, D)
                    else:
                        y = tl.load(z + od, mask=od < D, other=0.0)
                    total += tl.sum(fq.to(tl.float32) * y[None, :], 1)
            at = None
            if FADED:
                left = tl.exp2(sums_since(b, T, start, start, r, end, om))
                acc *= left[:, None]
                total *= left
                at = sums_at(b, T, r, end, om)
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
                    p *= tl.exp2(between(at, sums_at(b, T, j, end, om)))
                p = tl.where(r + om[:, None] >= j + om[None, :], p, 0.0)
                acc = dot(operand(p, vv.dtype, PRECISION), vv, acc, PRECISION)
                total += tl.sum(p, 1)
            acc = acc * (1.0 / guarded(total, eps, SIGNED))[:, None]
            store_tile(o + r * o_t, om[:, None] * o_t + ov[None, :], acc, rows, ov < V, False)


@triton.jit
def mend_tile(
    given, starts, parts, table, T, L, NSEG, delay, eps, H, G, of_q, of_k, of_v, of_o, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, VARLEN: tl.constexpr,
    MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Mend the tile of a program that reads stored states; where it lies is computed anew, which spares registers."""
    zero = fresh(PIN)
    pid = tl.program_id(0) + zero
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(L, BT)
    i_s = pid // H // tl.cdiv(L, BT)
    _n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    c = start + i_t * BT
    at = i_s.to(tl.int64) * (H // G) + i_h // G
    mend(
        given, starts + at * (D * V), parts + at * (3 * D),
        T, start, c, tl.minimum(c + BT, end), row, first, delay, eps, i_h, tl.arange(0, BV) + zero, H, G,
        of_q, of_k, of_v, of_o, m_b,
        D, V, BD, BT, MAP, SIGNED, "stored", MASKED, DELAYED, FADED, PRECISION, PIN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "eps", "m_b"])
def mend_forward_kernel(
    q, k, v, mask, o, sums, starts, z0, table, b,
    T, L, NSEG, delay, eps, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, SOURCE: tl.constexpr, VARLEN: tl.constexpr,
    MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Mend what one program of a walk that carries its state has written; programs are numbered as the walk's are."""
    NV: tl.constexpr = (V + BV - 1) // BV
    ROW: tl.constexpr = D * V + D if SOURCE == "segment" else D * V
    pid = tl.program_id(0)
    i_h = (pid // NV) % H
    i_s = pid // (NV * H)
    _n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    ov = (pid % NV) * BV + tl.arange(0, BV)
    at = i_s.to(tl.int64) * (H // G) + i_h // G
    # Any row of what the segment's keys add to the state, or of the final state, has seen all their values.
    if is_broken(tl.load(sums + at * ROW + ov, mask=ov < V, other=0.0)):
        if SOURCE == "segment":
            from_s = starts + at * ROW
            from_z = from_s + D * V
        elif SOURCE == "sequence":
            from_s = starts + at * ROW
            from_z = z0 + at * D
        else:
            from_s = None
            from_z = None
        mend(
            (q, k, v, mask, o, b), from_s, from_z, T, start, start, end, row, first, delay, eps, i_h, ov, H, G,
            (q_b, q_h, q_t), (k_b, k_h, k_t), (v_b, v_h, v_t), (o_b, o_h, o_t), m_b,
            D, V, BD, BT, MAP, SIGNED, "none" if SOURCE == "none" else "carried",
            MASKED, DELAYED, FADED, PRECISION, PIN,
        )  # fmt: skip


def mend_launch(walk: Launch, sums: Tensor) -> Launch:
    """Plan what looks after a walk that carries its state.

    Args:
        walk: The walk, which does not look.
        sums: What each segment's keys add to the state, or where sequences are whole, the final ``kv``.
    """
    of_walk = ("den", "d_b", "kv0", "kv", "z_out", "states", "CAUSAL", "FINAL", "LOOKS", "APART")
    arguments = {name: x for name, x in walk.arguments.items() if name not in of_walk}
    starts = walk.arguments["states" if arguments["SOURCE"] == "segment" else "kv0"]
    # It has neither work for many warps nor a loop worth a pipeline.
    tile = walk.tile._replace(warps=4, stages=1)
    arguments |= {"sums": sums, "starts": starts}
    return Launch("mend_forward", mend_forward_kernel, walk.programs, arguments, tile)
