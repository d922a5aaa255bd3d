"""Backward kernels, one per gradient, without atomics.

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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.linear_attention.triton.fade import Fades, Starts, fade_back_launch, fade_launches, products
from hf_linear_attn.ops.linear_attention.triton.forward import (
    Forward,
    allocate_state,
    state_launch,
    summed,
)
from hf_linear_attn.ops.linear_attention.triton.model import Cut, both_cut, dkv_cut, dq_cut, lone_cut
from hf_linear_attn.ops.linear_attention.triton.steps import (
    attend,
    faded,
    fold,
    in_parts,
    kept_by_chunk,
    read,
    sums_since,
    sums_until,
    weighted_queries,
    whole_z,
)
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, Tile, padded, strides, walk
from hf_linear_attn.ops.triton.primitives import (
    INTERPRETED,
    derivative,
    key_rows,
    load_features,
    load_operand,
    load_tile,
    product,
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
    MAP: tl.constexpr, VARLEN: tl.constexpr, FADED: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Sum ``fq^T do`` and ``-fq^T delta`` over one segment and the query heads of a group; write delta."""
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
        o_g = o + row * o_b + i_h * o_h
        do_g = do + row * do_b + i_h * do_h
        offset = row * d_b + i_h * T
        for c in range(start, end, BT):
            rows = rows_before(end, c, ot)
            # [BT, BV]
            dd = load_operand(do_g + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
            oo = load_tile(o_g + c * o_t, ot[:, None] * o_t + ov[None, :], rows, ov < V, EXACT_V)
            left = 1.0
            if FADED:
                left = tl.exp2(sums_since(b, T, start, start, c, end, ot))
            # [BT, BD]
            fq = weighted_queries(
                q_g + c * q_t, ot[:, None] * q_t + od[None, :], den + offset + c + ot, rows, od < D,
                EXACT_D, MAP, PRECISION, PIN, left, FADED,
            )  # fmt: skip
            dl = tl.sum(oo.to(tl.float32) * dd.to(tl.float32), 1)
            if i_d == 0:
                tl.store(delta + offset + c + ot, dl, mask=rows)
            r = fold(fq, dd, r, PRECISION)
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
        k += row * k_b + i_hk.to(tl.int64) * k_h
        v += row * v_b + i_hk.to(tl.int64) * v_h
        if FADED:
            b += (row * (H // G) + i_hk) * 2 * T
            asked += ((row * H + i_h) * ND + i_d) * T
        if MASKED:
            mask += row * m_b
        if DELAYED:
            k -= delay.to(tl.int64) * k_t
            v -= delay.to(tl.int64) * v_t
            if MASKED:
                mask -= delay
    # [BV, BD]: the state, transposed
    in_state = (ov < V)[:, None] & (od < D)[None, :]
    o_state = od[None, :] * V + ov[:, None]
    if SOURCE == "segment":
        states += (i_s.to(tl.int64) * (H // G) + i_hk) * (D * V + D)
        s = tl.load(states + o_state, mask=in_state, other=0.0)
        z = tl.load(states + D * V + od, mask=od < D, other=0.0)
    elif SOURCE == "sequence":
        s = tl.load(kv0 + (n * (H // G) + i_hk) * (D * V) + o_state, mask=in_state, other=0.0)
        z = tl.load(z0 + (n * (H // G) + i_hk) * D + od, mask=od < D, other=0.0)
    else:
        s = tl.zeros([BV, BD], tl.float32)
        z = tl.zeros([BD], tl.float32)
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
                since = sums_since(b, T, c, start, c, end, ot)
                acc *= tl.exp2(since)[:, None]
                acc, _p = attend(dd, vv, fk, dl[:, None], causal, acc, PRECISION, PIN, since, since, FADED, LAST=True)
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
    k += row * k_b + i_hk.to(tl.int64) * k_h
    v += row * v_b + i_hk.to(tl.int64) * v_h
    dk += row * dk_b + i_hk.to(tl.int64) * dk_h
    if FADED:
        b += (row * HKV + i_hk) * 2 * T
        drawn += ((row * HKV + i_hk) * ND + i_d) * T
    if MASKED:
        mask += row * m_b
    if DELAYED:
        k -= delay.to(tl.int64) * k_t
        v -= delay.to(tl.int64) * v_t
        dk -= delay.to(tl.int64) * dk_t
        if MASKED:
            mask -= delay
    q += row * q_b
    do += row * do_b
    den += row * d_b
    delta += row * d_b
    # [BV, BD]: the reverse state, transposed
    in_state = (ov < V)[:, None] & (od < D)[None, :]
    o_state = od[None, :] * V + ov[:, None]
    if SOURCE == "segment":
        states += (i_s.to(tl.int64) * HKV + i_hk) * (D * V + D)
        r = tl.load(states + o_state, mask=in_state, other=0.0)
        rz = tl.load(states + D * V + od, mask=od < D, other=0.0)
    elif SOURCE == "sequence":
        r = tl.load(kv1 + (n * HKV + i_hk) * (D * V) + o_state, mask=in_state, other=0.0)
        rz = tl.load(z1 + (n * HKV + i_hk) * D + od, mask=od < D, other=0.0)
    else:
        r = tl.zeros([BV, BD], tl.float32)
        rz = tl.zeros([BD], tl.float32)
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
        since = 0.0
        left = 1.0
        if FADED:
            since = sums_since(b, T, c, start, c, end, ot)
            left = tl.exp2(since)
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
                if FADED:
                    acc, _p = attend(
                        vv, dd, fq, dl[None, :], causal, acc, PRECISION, PIN, -since, -since, FADED, LAST=True
                    )
                    r = fold(dd, faded(fq, left, PRECISION), r, PRECISION)
                    rz -= tl.sum(fq.to(tl.float32) * (dl * left)[:, None], 0)
                else:
                    acc, _p = attend(vv, dd, fq, dl[None, :], causal, acc, PRECISION, PIN, LAST=True)
                    r = fold(dd, fq, r, PRECISION)
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
        tl.store(dkv0 + (n * HKV + i_hk) * (D * V) + o_state, r, mask=in_state)
        tl.store(dz0 + (n * HKV + i_hk) * D + od, rz, mask=od < D)


@triton.jit(do_not_specialize=["T", "S", "L", "NSEG", "delay", "d_b", "m_b"])
def dv_kernel(
    q, k, mask, do, den, dv, kv1, states, table, b,
    T, S, L, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, do_b, do_h, do_t, dv_b, dv_h, dv_t, d_b, m_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Walk one segment of one key head in reverse and write dv."""
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
        since = 0.0
        left = 1.0
        if FADED:
            since = sums_since(b, T, c, start, c, end, ot)
            left = tl.exp2(since)
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
                    acc, _p = attend(fk, fq, dd, 0.0, causal, acc, PRECISION, PIN, -since, -since, FADED)
                    r = fold(fq, faded(dd, left, PRECISION), r, PRECISION)
                else:
                    acc, _p = attend(fk, fq, dd, 0.0, causal, acc, PRECISION, PIN)
                    r = fold(fq, dd, r, PRECISION)
        if MASKED:
            acc = tl.where(counts[:, None], acc, 0.0)
        store_tile(dv + c * dv_t, ot[:, None] * dv_t + ov[None, :], acc, there, ov < V, EXACT_V)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "d_b", "m_b"])
def stored_dq_kernel(
    q, k, v, mask, do, den, delta, dq, starts, parts, table, b, asked,
    T, L, NSEG, delay, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, d_b, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    MAP: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write dq of BT queries, from their segment's start and its keys so far."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(L, BT)
    i_s = pid // H // tl.cdiv(L, BT)
    i_hk = i_h // G
    _n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    c = start + i_t * BT
    if c >= end:
        return
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    q += row * q_b + i_h.to(tl.int64) * q_h + c * q_t
    dq += row * dq_b + i_h.to(tl.int64) * dq_h + c * dq_t
    do += row * do_b + i_h.to(tl.int64) * do_h + c * do_t
    den += row * d_b + i_h.to(tl.int64) * T + c
    delta += row * d_b + i_h.to(tl.int64) * T + c
    k += row * k_b + i_hk.to(tl.int64) * k_h
    v += row * v_b + i_hk.to(tl.int64) * v_h
    if FADED:
        b += (row * (H // G) + i_hk) * 2 * T
        asked += (row * H + i_h) * T + c
    if MASKED:
        mask += row * m_b
    if DELAYED:
        k -= delay.to(tl.int64) * k_t
        v -= delay.to(tl.int64) * v_t
        if MASKED:
            mask -= delay
    rows = rows_before(end, c, ot)
    # [BT, BV]
    dd = load_operand(do, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
    dl = tl.load(delta + ot, mask=rows, other=0.0)
    sh = i_s.to(tl.int64) * (H // G) + i_hk
    # [BD, BV]
    s = load_tile(starts + sh * (D * V), od[:, None] * V + ov[None, :], od < D, ov < V, EXACT_V)
    acc = product(dd, tl.trans(s), PRECISION)
    acc -= dl[:, None] * whole_z(parts + sh * (3 * D), od, od < D, D)[None, :]
    since = 0.0
    if FADED:
        acc *= tl.exp2(sums_since(b, T, start, start, c, end, ot))[:, None]
        since = sums_since(b, T, c, start, c, end, ot)
    for j in range(start, tl.minimum(c + BT, end), BN):
        _, counts = key_rows(mask, j, rows_before(end, j, on), on, first, delay, MASKED, DELAYED)
        # [BN, BV]
        vv = load_operand(v + j * v_t, on[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        # [BN, BD]
        fk = load_features(k + j * k_t, on[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN)
        visible = (c - j).to(tl.int32) + ot[:, None] >= on[None, :]
        if FADED:
            before = sums_since(b, T, c, start, j, end, on)
            acc, _p = attend(dd, vv, fk, dl[:, None], visible, acc, PRECISION, PIN, since, before, FADED, LAST=True)
        else:
            acc, _p = attend(dd, vv, fk, dl[:, None], visible, acc, PRECISION, PIN, LAST=True)
    # [BT, BD]
    x = load_tile(q, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
    w = 1.0 / tl.load(den + ot, mask=rows, other=1.0)
    if FADED:
        tl.store(asked + ot, products(x, acc, od < D, MAP) * w, mask=rows)
    acc = acc * w[:, None] * derivative(x, MAP)
    store_tile(dq, ot[:, None] * dq_t + od[None, :], acc, rows, od < D, EXACT_D)


@triton.jit(do_not_specialize=["T", "S", "L", "NSEG", "delay", "d_b", "m_b"])
def stored_dkv_kernel(
    q, k, v, mask, do, den, delta, dk, dv, starts, parts, table, b, drawn,
    T, S, L, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, d_b, m_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr,
    MAP: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write dk, dv or both of BT keys, from their segment's end and its queries from there on, BN at a time."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_hk = pid % HKV
    i_t = (pid // HKV) % tl.cdiv(L, BT)
    i_s = pid // HKV // tl.cdiv(L, BT)
    _n, row, first, start, end = segment_bounds(table, i_s, S, L, NSEG, VARLEN)
    j = start + i_t * BT
    if j >= end:
        return
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    k += row * k_b + i_hk.to(tl.int64) * k_h + j * k_t
    v += row * v_b + i_hk.to(tl.int64) * v_h + j * v_t
    dk += row * dk_b + i_hk.to(tl.int64) * dk_h + j * dk_t
    dv += row * dv_b + i_hk.to(tl.int64) * dv_h + j * dv_t
    if FADED:
        b += (row * HKV + i_hk) * 2 * T
        drawn += (row * HKV + i_hk) * T + j
    if MASKED:
        mask += row * m_b
    if DELAYED:
        k -= delay.to(tl.int64) * k_t
        v -= delay.to(tl.int64) * v_t
        dk -= delay.to(tl.int64) * dk_t
        dv -= delay.to(tl.int64) * dv_t
        if MASKED:
            mask -= delay
    q += row * q_b
    do += row * do_b
    den += row * d_b
    delta += row * d_b
    there, counts = key_rows(mask, j, rows_before(end, j, ot), ot, first, delay, MASKED, DELAYED)
    sh = i_s.to(tl.int64) * HKV + i_hk
    # [BD, BV]
    r = load_tile(starts + sh * (D * V), od[:, None] * V + ov[None, :], od < D, ov < V, EXACT_V)
    if OF_K:
        # [BT, BV]
        vv = load_operand(v, ot[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        acc_k = product(vv, tl.trans(r), PRECISION)
        acc_k += whole_z(parts + sh * (3 * D), od, od < D, D)[None, :]
    if OF_V:
        # [BT, BD]
        fk = load_features(k, ot[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN)
        acc_v = product(fk, r, PRECISION)
    since = 0.0
    if FADED:
        since = sums_since(b, T, j, start, j, end, ot)
        kept = tl.exp2(sums_until(b, T, end, start, j, end, ot))[:, None]
        if OF_K:
            acc_k *= kept
        if OF_V:
            acc_v *= kept
    for g in range(G):
        i_h = (i_hk * G + g).to(tl.int64)
        for c in range(start + i_t * BT // BN * BN, end, BN):
            rows = rows_before(end, c, on)
            # [BN, BD]
            fq = weighted_queries(
                q + i_h * q_h + c * q_t, on[:, None] * q_t + od[None, :], den + i_h * T + c + on, rows, od < D,
                EXACT_D, MAP, PRECISION, PIN,
            )  # fmt: skip
            # [BN, BV]
            dd = load_operand(
                do + i_h * do_h + c * do_t, on[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION
            )
            visible = (c - j).to(tl.int32) + on[None, :] >= ot[:, None]
            after = 0.0
            if FADED:
                after = -sums_since(b, T, j, start, c, end, on)
            if OF_V:
                acc_v, _p = attend(
                    fk, fq, dd, 0.0, visible, acc_v, PRECISION, PIN, -since, after, FADED,
                    LAST=OF_K and MAP != "identity",
                )  # fmt: skip
            if OF_K:
                dl = tl.load(delta + i_h * T + c + on, mask=rows, other=0.0)
                acc_k, _p = attend(
                    vv, dd, fq, dl[None, :], visible, acc_k, PRECISION, PIN, -since, after, FADED, LAST=True
                )
    if OF_K:
        # [BT, BD]
        x = load_tile(k, ot[:, None] * k_t + od[None, :], there, od < D, EXACT_D)
        if FADED:
            found = tl.where(counts, products(x, acc_k, od < D, MAP), 0.0)
            tl.store(drawn + ot, found, mask=rows_before(end, j, ot))
        acc_k = acc_k * derivative(x, MAP)
        if MASKED:
            acc_k = tl.where(counts[:, None], acc_k, 0.0)
        store_tile(dk, ot[:, None] * dk_t + od[None, :], acc_k, there, od < D, EXACT_D)
    if OF_V:
        if MASKED:
            acc_v = tl.where(counts[:, None], acc_v, 0.0)
        store_tile(dv, ot[:, None] * dv_t + ov[None, :], acc_v, there, ov < V, EXACT_V)


class Saved(NamedTuple):
    """What the backward needs of the forward's results.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        den: Guarded normalisers ``[B, H, T]``, fp32.
        kv: Final state ``[B or N, HKV, D, V]`` where not causal.
        z: Its normaliser.
    """

    o: Tensor
    den: Tensor
    kv: Tensor | None
    z: Tensor | None


def save(p: Problem, out: Forward) -> Saved:
    """Pick what the backward needs; states that segments start from are summed anew."""
    return Saved(out.o, out.den, *((None, None) if p.causal else (out.kv, out.z)))


class Wanted(NamedTuple):
    """Which gradients somebody asked for."""

    q: bool = True
    k: bool = True
    v: bool = True
    state: bool = True
    log_decay: bool = True


EVERY = Wanted()


class Backward(NamedTuple):
    """Gradients of q, k, v, of the initial state and of log decays; empty where nobody asked for them."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dkv0: Tensor
    dz0: Tensor
    dlog_decay: Tensor


def allocate_backward(p: Problem, wanted: Wanted) -> Backward:
    """Allocate the gradients; keys that no query sees, because they lag, get zeros."""

    def tokens(x: Tensor, asked: bool) -> Tensor:
        return empty_like_tokens(x, x.shape[3]) if asked else x.new_empty(0)

    of_decay = wanted.log_decay and p.log_decay is not None
    # The walk that ends in the initial state's gradient is dk's, and log decays are found by it and by dq's.
    dk, dv = tokens(p.k, wanted.k or wanted.state or of_decay), tokens(p.v, wanted.v)
    dlog_decay = p.q.new_empty(0)
    if of_decay and p.log_decay is not None:
        dlog_decay = torch.empty(p.log_decay.shape, dtype=p.log_decay.dtype, device=p.q.device)
    if p.delay:
        for x in (dk, dv, dlog_decay):
            x.zero_()
    state = p.rows, p.k.shape[1], p.k.shape[3]
    return Backward(
        tokens(p.q, wanted.q or of_decay),
        dk,
        dv,
        torch.empty(*state, p.v.shape[3], dtype=torch.float32, device=p.q.device),
        torch.empty(state, dtype=torch.float32, device=p.q.device),
        dlog_decay,
    )


def delta_launch(chosen: Tile, o: Tensor, do: Tensor, delta: Tensor) -> Launch:
    """Plan ``delta = do . o``."""
    (_, H, T, V), rows = o.shape, delta.numel()
    arguments = {
        **{"o": o, "do": do, "delta": delta, "rows": rows, "T": T, "H": H},
        **strides("o", o),
        **strides("do", do),
        **{"V": V, "BV": padded(V), "BT": chosen.tokens},
    }
    return Launch("delta", delta_kernel, -(-rows // chosen.tokens), arguments, chosen, (o, do), (delta,))


def reverse_state_launch(
    p: Problem, saved: Saved, do: Tensor, delta: Tensor, segments: Segments, fades: Fades
) -> Launch:
    """Plan the sums over each segment's queries, and delta."""
    q, o, den, chosen = p.q, saved.o, saved.den, p.tile("reverse_state")
    arguments = {
        **{"q": q, "o": o, "do": do, "den": den, "delta": delta, "states": p.states(segments)},
        **{"T": q.shape[2], "HKV": p.k.shape[1], "d_b": den.stride(0), "G": p.group},
        **strides("q", q),
        **strides("o", o),
        **strides("do", do),
        **{"BD": chosen.width, "BV": p.padded(p.v.shape[3]), "BT": chosen.tokens},
        **p.sizes(),
        **walk(segments),
        **fades.arguments(),
    }
    programs = segments.count * p.k.shape[1] * -(-p.k.shape[3] // chosen.width)
    return Launch("reverse_state", reverse_state_kernel, programs, arguments, chosen, (q, o, do, den), (delta,))


def backward_launches(
    p: Problem,
    saved: Saved,
    do: Tensor,
    dkv: Tensor | None,
    dz: Tensor | None,
    wanted: Wanted = EVERY,
) -> tuple[Backward, list[Launch]]:
    """Plan the backward.

    Args:
        p: The problem of the forward.
        saved: What :func:`save` kept of its results.
        do: Gradient of o.
        dkv: Gradient of the final state, fp32, contiguous, or None where nobody derives by it.
        dz: Gradient of its normaliser, or None likewise.
        wanted: Which gradients are asked for.

    Returns:
        The gradients, allocated but not computed, and the launches that compute them, in order.
    """
    out = allocate_backward(p, wanted)
    delta = torch.empty_like(saved.den)
    of_decay = wanted.log_decay and p.log_decay is not None
    of_keys = wanted.k or wanted.v or wanted.state or of_decay
    # What a decay changes is a product of what comes before it and of what comes after: both are cut alike.
    cut = dkv_cut(p) if p.log_decay is None else both_cut(p)
    segments = p.segments(p.k.shape[2], cut.length)
    fades, launches = fade_launches(p, segments)
    ends = Starts()
    seed: tuple[Tensor | None, Tensor | None] = dkv, dz
    if of_keys and (cut.stored or segments.split or not p.causal):
        summing = segments if p.causal else p.segments(p.q.shape[2], lone_cut(p, "reverse_state").length)
        sums = reverse_state_launch(p, saved, do, delta, summing, fades)
        initial = out.dkv0, out.dz0
        ends, before = summed(p, sums, summing, seed, initial, reverse=True, stored=cut.stored, fades=fades)
        launches += before
        if not p.causal:
            seed = out.dkv0, out.dz0
    elif wanted.q or wanted.k or wanted.state or of_decay:
        launches.append(delta_launch(p.tile("delta"), saved.o, do, delta))
    shared = {
        **{"q": p.q, "k": p.k, "do": do, "den": saved.den, "T": p.q.shape[2], "d_b": saved.den.stride(0)},
        **strides("q", p.q),
        **strides("k", p.k),
        **strides("do", do),
        **p.sizes(),
        **p.keys(),
        **fades.arguments(),
    }
    errors = do, saved.den, delta
    starts, asked = Starts(), None
    if wanted.q or of_decay:
        of_queries = dq_cut(p) if p.log_decay is None else cut
        starts, before = starts_launches(p, of_queries, fades)
        launches += before
        asked = _rows_of(p, "dq", p.q, of_queries)
        launches.append(dq_launch(p, saved, errors, out, shared, of_queries, starts, asked))
    shared |= {"S": p.k.shape[2], "HKV": p.k.shape[1], "G": p.group, **walk(segments)}
    drawn = _rows_of(p, "dk", p.k, cut)
    if of_keys and cut.stored:
        launches += stored_key_launches(p, errors, out, wanted, shared, ends, drawn)
    elif of_keys:
        shared["SOURCE"] = "segment" if ends.states is not None else "none" if seed[0] is None else "sequence"
        shared |= {"kv1": seed[0], "states": ends.states, "CAUSAL": p.causal}
        launches += key_launches(p, errors, out, wanted, shared, seed[1], segments, drawn)
    if of_decay and drawn is not None and asked is not None:
        initial = out.dkv0, out.dz0
        launches.append(fade_back_launch(p, segments, drawn, asked, out.dlog_decay, initial, starts, ends))
    return out, launches


Errors = tuple[Tensor, Tensor, Tensor]
"""The gradient of o, the normalisers, and delta."""


def _rows_of(p: Problem, role: str, x: Tensor, cut: Cut) -> Tensor | None:
    """Allocate a number per token and tile of features ``[B, heads, tiles, T]``, where sums fade."""
    if p.log_decay is None:
        return None
    tiles = 1 if cut.stored else -(-x.shape[3] // p.tile(role).width)
    return torch.empty(*x.shape[:2], tiles, x.shape[2], dtype=torch.float32, device=x.device)


def starts_launches(p: Problem, cut: Cut, fades: Fades) -> tuple[Starts, list[Launch]]:
    """Plan what segments start from, of keys; nothing where they are whole sequences."""
    segments = p.segments(p.q.shape[2], cut.length)
    if not p.causal or not (cut.stored or segments.split):
        return Starts(), []
    initial, unread = (p.kv0, p.z0), allocate_state(p)
    sums = state_launch(p, segments, fades)
    return summed(p, sums, segments, initial, unread, reverse=False, stored=cut.stored, fades=fades)


def dq_launch(
    p: Problem,
    saved: Saved,
    errors: Errors,
    out: Backward,
    shared: dict[str, Any],
    cut: Cut,
    starts: Starts,
    asked: Tensor | None,
) -> Launch:
    """Plan dq."""
    q, k, v = p.q, p.k, p.v
    (_, H, T, D), V = q.shape, v.shape[3]
    segments = p.segments(T, cut.length)
    arguments = {
        **shared,
        **{"v": v, "delta": errors[2], "dq": out.dq, "H": H, "G": p.group, "BV": p.padded(V)},
        "asked": asked,
        **strides("v", v),
        **strides("dq", out.dq),
        **walk(segments),
    }
    reads: tuple[Tensor, ...] = (q, *errors, k, v) if p.causal else (q, *errors)
    if cut.stored:
        chosen = p.tile("stored_dq")
        arguments |= {"starts": starts.states, "parts": starts.parts}
        arguments |= {"BD": p.padded(D), "BT": chosen.tokens, "BN": chosen.width}
        programs = segments.count * -(-cut.length // chosen.tokens) * H
        return Launch("stored_dq", stored_dq_kernel, programs, arguments, chosen, reads, (out.dq,))
    chosen = p.tile("dq")
    kv0, z0 = (p.kv0, p.z0) if p.causal else (saved.kv, saved.z)
    arguments |= {
        **{"kv0": kv0, "z0": z0, "states": starts.states, "BD": chosen.width, "BT": chosen.tokens},
        **{"CAUSAL": p.causal},
        "SOURCE": "segment" if starts.states is not None else "none" if kv0 is None else "sequence",
    }
    programs = segments.count * H * -(-D // chosen.width)
    return Launch("dq", dq_kernel, programs, arguments, chosen, reads, (out.dq,))


def stored_key_launches(
    p: Problem,
    errors: Errors,
    out: Backward,
    wanted: Wanted,
    shared: dict[str, Any],
    ends: Starts,
    drawn: Tensor | None,
) -> list[Launch]:
    """Plan dk and dv from stored states: in one launch where the table says that they fit into one."""
    q, k, v = p.q, p.k, p.v
    of_k = wanted.k or (wanted.log_decay and drawn is not None)
    roles = [role for role, asked in (("stored_dk", of_k), ("stored_dv", wanted.v)) if asked]
    if len(roles) == 2 and p.has("stored_dkv"):
        roles = ["stored_dkv"]
    launches: list[Launch] = []
    for role in roles:
        chosen, of_k, of_v = p.tile(role), "k" in role[7:], "v" in role[7:]
        arguments = {
            **shared,
            **{"v": v, "delta": errors[2], "dk": out.dk, "dv": out.dv, "starts": ends.states, "parts": ends.parts},
            "drawn": drawn,
            **strides("v", v),
            **strides("dk", out.dk if of_k else k),
            **strides("dv", out.dv if of_v else v),
            **{"BD": p.padded(k.shape[3]), "BV": p.padded(v.shape[3]), "BT": chosen.tokens, "BN": chosen.width},
            **{"OF_K": of_k, "OF_V": of_v},
        }
        programs = shared["table"].shape[0] if p.cu_seqlens is not None else p.rows * shared["NSEG"]
        programs *= -(-shared["L"] // chosen.tokens) * k.shape[1]
        writes = (*((out.dk,) if of_k else ()), *((out.dv,) if of_v else ()))
        reads: tuple[Tensor, ...] = (q, k, v, *errors) if of_k else (q, k, *errors[:2])
        launches.append(Launch(role, stored_dkv_kernel, programs, arguments, chosen, reads, writes))
    return launches


def key_launches(
    p: Problem,
    errors: Errors,
    out: Backward,
    wanted: Wanted,
    shared: dict[str, Any],
    dz: Tensor | None,
    segments: Segments,
    drawn: Tensor | None,
) -> list[Launch]:
    """Plan dk and dv with states in registers; where sequences are whole, dk ends with the initial state's gradient."""
    q, k, v = p.q, p.k, p.v
    D, V = k.shape[3], v.shape[3]
    launches: list[Launch] = []
    of_decay = wanted.log_decay and drawn is not None
    final = p.causal and not segments.split and (wanted.state or (of_decay and p.kv0 is not None))
    if wanted.k or final or of_decay:
        chosen = p.tile("dk")
        arguments = {
            **shared,
            **{"v": v, "delta": errors[2], "dk": out.dk, "z1": dz, "dkv0": out.dkv0, "dz0": out.dz0},
            "drawn": drawn,
            **strides("v", v),
            **strides("dk", out.dk),
            **{"BD": chosen.width, "BV": p.padded(V), "BT": chosen.tokens, "FINAL": final},
        }
        reads: tuple[Tensor, ...] = (k, v, q, *errors) if p.causal else (k, v)
        programs = segments.count * k.shape[1] * -(-D // chosen.width)
        launches.append(Launch("dk", dk_kernel, programs, arguments, chosen, reads, (out.dk,)))
    if wanted.v:
        chosen = p.tile("dv")
        arguments = {
            **shared,
            "dv": out.dv,
            **strides("dv", out.dv),
            **{"BD": p.padded(D), "BV": chosen.width, "BT": chosen.tokens},
        }
        reads = (k, q, *errors[:2]) if p.causal else (k,)
        programs = segments.count * k.shape[1] * -(-V // chosen.width)
        launches.append(Launch("dv", dv_kernel, programs, arguments, chosen, reads, (out.dv,)))
    return launches
