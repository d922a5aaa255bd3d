"""The kernels of gradients whose walks carry their sums in registers, one per gradient, without atomics.

With ``w = 1 / den`` per query, ``delta = do . o`` and fq = w phi_q::

    dphi_q = w (tril(do v^T - delta) phi_k + do S^T - delta z^T)      a walk forwards, S and z as in the forward
    dphi_k = tril(do v^T - delta)^T fq + v R^T + r                    a walk in reverse, R += fq^T do, r -= fq^T delta
    dv     = tril(fq phi_k^T)^T do + phi_k R                          the same walk, without r

so that `do` enters every product as it was loaded and the division costs one multiplication per feature. R and r start
from the gradient of the final state and end as that of the initial one. Where sums fade, every term has the factor that
it has in the forward, and R fades like S, from behind. Each kernel holds the contracted dimension
whole and tiles the other: dq and dk tile D (state ``[V, BD]``), dv tiles V (state ``[D, BV]``). Chunks have BT tokens;
accumulators are fp32.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.linear_attention.triton.fade import products
from hf_linear_attn.ops.linear_attention.triton.steps import (
    attend,
    faded,
    fold,
    in_parts,
    kept_by_chunk,
    load_sums,
    read,
    sums_at,
    sums_since,
    weighted_queries,
)
from hf_linear_attn.ops.triton.primitives import (
    INTERPRETED,
    back,
    derivative,
    key_rows,
    keys_of,
    load_features,
    load_operand,
    load_tile,
    mask_of,
    rows_before,
    segment_bounds,
    store_tile,
)


@triton.jit(do_not_specialize=["rows", "T"])
def delta_kernel(
    o, do, delta,
    rows, T, H,
    o_b, o_h, o_t, do_b, do_h, do_t,
    V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write ``delta = do . o`` of every query."""
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = r < rows
    t = r % T
    h = (r // T) % H
    b = r // T // H
    ov = tl.arange(0, BV)
    # [BT, BV]
    x = load_tile(o, (b * o_b + h * o_h + t * o_t)[:, None] + ov[None, :], inside, ov < V, V == BV)
    y = load_tile(do, (b * do_b + h * do_h + t * do_t)[:, None] + ov[None, :], inside, ov < V, V == BV)
    tl.store(delta + r, tl.sum(x.to(tl.float32) * y.to(tl.float32), 1), mask=inside)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "d_b"])
def reverse_state_kernel(
    q, o, do, den, delta, states, table, b,
    T, L, NSEG, HKV,
    q_b, q_h, q_t, o_b, o_h, o_t, do_b, do_h, do_t, d_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, VARLEN: tl.constexpr, FADED: tl.constexpr, KNOWN: tl.constexpr, PRECISION: tl.constexpr,
    PIN: tl.constexpr,
):  # fmt: skip
    """Sum ``fq^T do`` and ``-fq^T delta`` over one segment and the query heads of a group; write delta, or read it."""
    ND: tl.constexpr = (D + BD - 1) // BD
    EXACT_D: tl.constexpr = D % BD == 0
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_d = pid % ND
    i_hk = (pid // ND) % HKV
    i_s = pid // (ND * HKV)
    _, row, _, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    od = i_d * BD + tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    r = tl.zeros([BD, BV], tl.float32)
    rz = tl.zeros([BD], tl.float32)
    # On AMD the parts take longer than they save.
    BY_PRODUCT: tl.constexpr = q.dtype.element_ty == tl.bfloat16 and (PIN or INTERPRETED)
    if BY_PRODUCT:
        drawn = tl.zeros([BD, 16], tl.float32)
    if FADED:
        b += (row * HKV + i_hk) * 2 * T
    for g in range(G):
        i_h = (i_hk * G + g).to(tl.int64)
        q_g = q + row * q_b + i_h * q_h
        do_g = do + row * do_b + i_h * do_h
        offset = row * d_b + i_h * T
        for c in range(start, end, BT):
            rows = rows_before(end, c, ot)
            # [BT, BV]
            dd = load_operand(do_g + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
            left = 1.0
            if FADED:
                left = tl.exp2(sums_since(b, T, start, start, c, end, ot))
            # [BT, BD]
            fq = weighted_queries(
                q_g + c * q_t, ot[:, None] * q_t + od[None, :], den + offset + c + ot, rows, od < D,
                EXACT_D, MAP, PRECISION, PIN, left, FADED,
            )  # fmt: skip
            if not KNOWN:
                o_g = o + row * o_b + i_h * o_h + c * o_t
                oo = load_tile(o_g, ot[:, None] * o_t + ov[None, :], rows, ov < V, EXACT_V)
                dl = tl.sum(oo.to(tl.float32) * dd.to(tl.float32), 1)
                if i_d == 0:
                    tl.store(delta + offset + c + ot, dl, mask=rows)
            r = fold(fq, dd, r, PRECISION)
            if KNOWN:
                dl = tl.load(delta + offset + c + ot, mask=rows, other=0.0)
            if BY_PRODUCT:
                drawn = fold(fq, tl.trans(in_parts(dl, fq.dtype)), drawn, PRECISION)
            else:
                rz -= tl.sum(fq.to(tl.float32) * dl[:, None], 0)
    if BY_PRODUCT:
        rz = -tl.sum(drawn, 1)
    states += (i_s.to(tl.int64) * HKV + i_hk) * (D * V + D)
    tl.store(states + od[:, None] * V + ov[None, :], r, mask=(od < D)[:, None] & (ov < V)[None, :])
    tl.store(states + D * V + od, rz, mask=od < D)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "d_b", "m_b"])
def dq_kernel(
    q, k, v, mask, do, den, delta, dq, kv0, z0, states, table, b, asked,
    T, L, NSEG, delay, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, d_b, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Walk one segment of one query head forwards and write dq."""
    ND: tl.constexpr = (D + BD - 1) // BD
    EXACT_D: tl.constexpr = D % BD == 0
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_d = pid % ND
    i_h = (pid // ND) % H
    i_s = pid // (ND * H)
    i_hk = i_h // G
    n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    od = i_d * BD + tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    q += row * q_b + i_h.to(tl.int64) * q_h
    dq += row * dq_b + i_h.to(tl.int64) * dq_h
    do += row * do_b + i_h.to(tl.int64) * do_h
    den += row * d_b + i_h.to(tl.int64) * T
    delta += row * d_b + i_h.to(tl.int64) * T
    if CAUSAL:
        k = keys_of(k, row, i_hk, k_b, k_h, k_t, delay, DELAYED)
        v = keys_of(v, row, i_hk, v_b, v_h, v_t, delay, DELAYED)
        if FADED:
            b += (row * (H // G) + i_hk) * 2 * T
            asked += ((row * H + i_h) * ND + i_d) * T
        if MASKED:
            mask = mask_of(mask, row, m_b, delay, DELAYED)
    # [BV, BD]: the state, transposed
    in_state = (ov < V)[:, None] & (od < D)[None, :]
    o_state = od[None, :] * V + ov[:, None]
    sh, nh = i_s.to(tl.int64) * (H // G) + i_hk, n * (H // G) + i_hk
    s, z = load_sums(states, kv0, z0, sh, nh, o_state, in_state, od, D, V, SOURCE)
    causal = ot[:, None] >= ot[None, :]
    for c in range(start, end, BT):
        rows = rows_before(end, c, ot)
        # [BT, BV]
        dd = load_operand(do + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
        dl = tl.load(delta + c + ot, mask=rows, other=0.0)
        acc = read(dd, s, PRECISION)
        acc -= dl[:, None] * z[None, :]
        if CAUSAL:
            _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
            # [BT, BV]
            vv = load_operand(v + c * v_t, ot[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
            # [BT, BD]
            fk = load_features(
                k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN
            )
            if FADED:
                at = sums_at(b, T, c, end, ot)
                acc *= tl.exp2(sums_since(b, T, c, start, c, end, ot))[:, None]
                acc, _p = attend(dd, vv, fk, dl[:, None], causal, acc, PRECISION, PIN, at, at, FADED, LAST=True)
                kept, left = kept_by_chunk(b, T, c, start, end, ot, BT)
                s = fold(vv, faded(fk, kept, PRECISION), s * left, PRECISION)
                z = z * left + tl.sum(fk.to(tl.float32) * kept[:, None], 0)
            else:
                acc, _p = attend(
                    dd, vv, fk, dl[:, None], causal, acc, PRECISION, PIN, APART=BV > 64 and BT > 32, LAST=True
                )
                s = fold(vv, fk, s, PRECISION)
                z += tl.sum(fk.to(tl.float32), 0)
        # [BT, BD]
        x = load_tile(q + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
        w = 1.0 / tl.load(den + c + ot, mask=rows, other=1.0)
        if FADED:
            tl.store(asked + c + ot, products(x, acc, od < D, MAP) * w, mask=rows)
        acc = acc * w[:, None] * derivative(x, MAP)
        store_tile(dq + c * dq_t, ot[:, None] * dq_t + od[None, :], acc, rows, od < D, EXACT_D)


@triton.jit(do_not_specialize=["T", "S", "L", "NSEG", "delay", "d_b", "m_b"])
def dk_kernel(
    q, k, v, mask, do, den, delta, dk, kv1, z1, dkv0, dz0, states, table, b, drawn,
    T, S, L, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, d_b, m_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr, FINAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Walk one segment of one key head in reverse and write dk."""
    ND: tl.constexpr = (D + BD - 1) // BD
    EXACT_D: tl.constexpr = D % BD == 0
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_d = pid % ND
    i_hk = (pid // ND) % HKV
    i_s = pid // (ND * HKV)
    n, row, first, start, end = segment_bounds(table, i_s, S, L, NSEG, VARLEN)
    od = i_d * BD + tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    k = keys_of(k, row, i_hk, k_b, k_h, k_t, delay, DELAYED)
    v = keys_of(v, row, i_hk, v_b, v_h, v_t, delay, DELAYED)
    dk = keys_of(dk, row, i_hk, dk_b, dk_h, dk_t, delay, DELAYED)
    if FADED:
        b += (row * HKV + i_hk) * 2 * T
        drawn += ((row * HKV + i_hk) * ND + i_d) * T
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    q += row * q_b
    do += row * do_b
    den += row * d_b
    delta += row * d_b
    # [BV, BD]: the reverse state, transposed
    in_state = (ov < V)[:, None] & (od < D)[None, :]
    o_state = od[None, :] * V + ov[:, None]
    sh, nh = i_s.to(tl.int64) * HKV + i_hk, n * HKV + i_hk
    r, rz = load_sums(states, kv1, z1, sh, nh, o_state, in_state, od, D, V, SOURCE)
    causal = ot[:, None] <= ot[None, :]
    chunks = tl.cdiv(end - start, BT)
    for i in range(0, chunks):
        c = start + (chunks - 1 - i) * BT
        rows = rows_before(end, c, ot)
        there, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        # [BT, BV]
        vv = load_operand(v + c * v_t, ot[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        acc = read(vv, r, PRECISION)
        acc += rz[None, :]
        at = None
        left = 1.0
        if FADED:
            at = back(sums_at(b, T, c, end, ot))
            left = tl.exp2(sums_since(b, T, c, start, c, end, ot))
            kept, whole = kept_by_chunk(b, T, c, start, end, ot, BT)
            acc *= kept[:, None]
            r *= whole
            rz *= whole
        if CAUSAL:
            for g in range(G):
                i_h = (i_hk * G + g).to(tl.int64)
                # [BT, BV]
                dd = load_operand(
                    do + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION
                )
                # [BT, BD]
                fq = weighted_queries(
                    q + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], den + i_h * T + c + ot, rows, od < D,
                    EXACT_D, MAP, PRECISION, PIN,
                )  # fmt: skip
                dl = tl.load(delta + i_h * T + c + ot, mask=rows, other=0.0)
                acc, _p = attend(vv, dd, fq, dl[None, :], causal, acc, PRECISION, PIN, at, at, FADED, LAST=True)
                r = fold(dd, faded(fq, left, PRECISION, FADED), r, PRECISION)
                if FADED:
                    dl *= left
                rz -= tl.sum(fq.to(tl.float32) * dl[:, None], 0)
        # [BT, BD]
        x = load_tile(k + c * k_t, ot[:, None] * k_t + od[None, :], there, od < D, EXACT_D)
        if FADED:
            tl.store(drawn + c + ot, tl.where(counts, products(x, acc, od < D, MAP), 0.0), mask=rows)
        acc = acc * derivative(x, MAP)
        if MASKED:
            acc = tl.where(counts[:, None], acc, 0.0)
        store_tile(dk + c * dk_t, ot[:, None] * dk_t + od[None, :], acc, there, od < D, EXACT_D)
    if FINAL:
        tl.store(dkv0 + nh * (D * V) + o_state, r, mask=in_state)
        tl.store(dz0 + nh * D + od, rz, mask=od < D)


@triton.jit(do_not_specialize=["T", "S", "L", "NSEG", "delay", "d_b", "m_b"])
def dv_kernel(
    q, k, mask, do, den, dv, kv1, states, table, b,
    T, S, L, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, do_b, do_h, do_t, dv_b, dv_h, dv_t, d_b, m_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr, ADD: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Walk one segment of one key head in reverse and write dv, or add it to what is there."""
    NV: tl.constexpr = (V + BV - 1) // BV
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    i_v = pid % NV
    i_hk = (pid // NV) % HKV
    i_s = pid // (NV * HKV)
    n, row, first, start, end = segment_bounds(table, i_s, S, L, NSEG, VARLEN)
    od = tl.arange(0, BD)
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    k += row * k_b + i_hk.to(tl.int64) * k_h
    dv += row * dv_b + i_hk.to(tl.int64) * dv_h
    if FADED:
        b += (row * HKV + i_hk) * 2 * T
    if MASKED:
        mask += row * m_b
    if DELAYED:
        k -= delay.to(tl.int64) * k_t
        dv -= delay.to(tl.int64) * dv_t
        if MASKED:
            mask -= delay
    q += row * q_b
    do += row * do_b
    den += row * d_b
    in_state = (od < D)[:, None] & (ov < V)[None, :]
    o_state = od[:, None] * V + ov[None, :]
    # [BD, BV]
    if SOURCE == "segment":
        states += (i_s.to(tl.int64) * HKV + i_hk) * (D * V + D)
        r = tl.load(states + o_state, mask=in_state, other=0.0)
    elif SOURCE == "sequence":
        r = tl.load(kv1 + (n * HKV + i_hk) * (D * V) + o_state, mask=in_state, other=0.0)
    else:
        r = tl.zeros([BD, BV], tl.float32)
    causal = ot[:, None] <= ot[None, :]
    chunks = tl.cdiv(end - start, BT)
    for i in range(0, chunks):
        c = start + (chunks - 1 - i) * BT
        rows = rows_before(end, c, ot)
        there, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        # [BT, BD]
        fk = load_features(k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN)
        acc = read(fk, r, PRECISION)
        at = None
        left = 1.0
        if FADED:
            at = back(sums_at(b, T, c, end, ot))
            left = tl.exp2(sums_since(b, T, c, start, c, end, ot))
            kept, whole = kept_by_chunk(b, T, c, start, end, ot, BT)
            acc *= kept[:, None]
            r *= whole
        if CAUSAL:
            for g in range(G):
                i_h = (i_hk * G + g).to(tl.int64)
                # [BT, BD]
                fq = weighted_queries(
                    q + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], den + i_h * T + c + ot, rows, od < D,
                    EXACT_D, MAP, PRECISION, PIN,
                )  # fmt: skip
                # [BT, BV]
                dd = load_operand(
                    do + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION
                )
                if FADED:
                    acc, _p = attend(fk, fq, dd, 0.0, causal, acc, PRECISION, PIN, at, at, FADED)
                    r = fold(fq, faded(dd, left, PRECISION), r, PRECISION)
                else:
                    acc, _p = attend(fk, fq, dd, 0.0, causal, acc, PRECISION, PIN)
                    r = fold(fq, dd, r, PRECISION)
        if MASKED:
            acc = tl.where(counts[:, None], acc, 0.0)
        if ADD:
            acc += load_tile(dv + c * dv_t, ot[:, None] * dv_t + ov[None, :], there, ov < V, EXACT_V)
        store_tile(dv + c * dv_t, ot[:, None] * dv_t + ov[None, :], acc, there, ov < V, EXACT_V)
