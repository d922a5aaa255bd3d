"""The kernels of gradients that read stored sums, in place of carrying them; formulas as in `gradients.py`.

A program has BT tokens. It begins with the sums that their segment starts from, read from memory, and goes through what
of the segment its tokens see, or are seen by: wide states take no registers while others are multiplied. Gradients of
keys and values come from one kernel.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.linear_attention.triton.fade import products
from hf_linear_attn.ops.linear_attention.triton.steps import (
    attend,
    features_product,
    read_stored,
    sums_at,
    sums_since,
    sums_until,
    weigh,
    weighted_queries,
    whole_z,
)
from hf_linear_attn.ops.triton.primitives import (
    back,
    derivative,
    key_rows,
    keys_of,
    load_features,
    load_operand,
    load_tile,
    mask_of,
    product,
    rows_before,
    segment_bounds,
    store_tile,
)


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
    EXACT_D: tl.constexpr = D % BD == 0
    EXACT_V: tl.constexpr = V == BV
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d = tl.program_id(0) % ND
    pid = tl.program_id(0) // ND
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(L, BT)
    i_s = pid // H // tl.cdiv(L, BT)
    i_hk = i_h // G
    _n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    c = start + i_t * BT
    if c >= end:
        return
    od = i_d * BD + tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    q += row * q_b + i_h.to(tl.int64) * q_h + c * q_t
    dq += row * dq_b + i_h.to(tl.int64) * dq_h + c * dq_t
    do += row * do_b + i_h.to(tl.int64) * do_h + c * do_t
    den += row * d_b + i_h.to(tl.int64) * T + c
    delta += row * d_b + i_h.to(tl.int64) * T + c
    k = keys_of(k, row, i_hk, k_b, k_h, k_t, delay, DELAYED)
    v = keys_of(v, row, i_hk, v_b, v_h, v_t, delay, DELAYED)
    if FADED:
        b += (row * (H // G) + i_hk) * 2 * T
        asked += ((row * H + i_h) * ND + i_d) * T + c
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    rows = rows_before(end, c, ot)
    # [BT, BV]
    dd = load_operand(do, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
    dl = tl.load(delta + ot, mask=rows, other=0.0)
    sh = i_s.to(tl.int64) * (H // G) + i_hk
    # [BD, BV]
    s = load_tile(starts + sh * (D * V), od[:, None] * V + ov[None, :], od < D, ov < V, EXACT_V)
    acc = product(dd, tl.trans(s), PRECISION)
    acc -= dl[:, None] * whole_z(parts + sh * (3 * D), od, od < D, D)[None, :]
    at = None
    if FADED:
        acc *= tl.exp2(sums_since(b, T, start, start, c, end, ot))[:, None]
        at = sums_at(b, T, c, end, ot)
    for j in range(start, tl.minimum(c + BT, end), BN):
        _, counts = key_rows(mask, j, rows_before(end, j, on), on, first, delay, MASKED, DELAYED)
        # [BN, BV]
        vv = load_operand(v + j * v_t, on[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        # [BN, BD]
        fk = load_features(k + j * k_t, on[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN)
        visible = (c - j).to(tl.int32) + ot[:, None] >= on[None, :]
        before = None
        if FADED:
            before = sums_at(b, T, j, end, on)
        acc, _p = attend(dd, vv, fk, dl[:, None], visible, acc, PRECISION, PIN, at, before, FADED, LAST=True)
    # [BT, BD]
    x = load_tile(q, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
    w = 1.0 / tl.load(den + ot, mask=rows, other=1.0)
    if FADED:
        tl.store(asked + ot, products(x, acc, od < D, MAP) * w, mask=rows)
    acc = acc * w[:, None] * derivative(x, MAP)
    store_tile(dq, ot[:, None] * dq_t + od[None, :], acc, rows, od < D, EXACT_D)


@triton.jit
def write_keys(
    q, k, v, mask, do, den, delta, dk, dv, starts, parts, b, drawn,
    i_d, i_hk, sh, row, first, j, start, end, T, delay,
    q_h, q_t, k_t, v_t, do_h, do_t, dk_t, dv_t,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr, ADD: tl.constexpr,
    MAP: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write dk, dv or both of BT keys of a head, from key ``j`` on, where keys, values and what is theirs begin."""
    EXACT_D: tl.constexpr = D % BD == 0
    WHOLE: tl.constexpr = BD >= D
    EXACT_V: tl.constexpr = V == BV
    od = i_d * BD + tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    there, counts = key_rows(mask, j, rows_before(end, j, ot), ot, first, delay, MASKED, DELAYED)
    starts += sh * (D * V)
    if OF_K or WHOLE:
        # [BD, BV]
        r = load_tile(starts, od[:, None] * V + ov[None, :], od < D, ov < V, EXACT_V)
    if OF_K:
        # [BT, BV]
        vv = load_operand(v, ot[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        acc_k = product(vv, tl.trans(r), PRECISION)
        acc_k += whole_z(parts + sh * (3 * D), od, od < D, D)[None, :]
    if OF_V and WHOLE:
        # [BT, BD]
        fk = load_features(k, ot[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN)
        acc_v = product(fk, r, PRECISION)
    elif OF_V:
        acc_v = read_stored(k, k_t, ot, counts, starts, ov, D, V, BD, MAP, PRECISION, PIN)
    at = None
    if FADED:
        at = back(sums_at(b, T, j, end, ot))
        kept = tl.exp2(sums_until(b, T, end, start, j, end, ot))[:, None]
        if OF_K:
            acc_k *= kept
        if OF_V:
            acc_v *= kept
    for g in range(G):
        i_h = (i_hk * G + g).to(tl.int64)
        for c in range(start + (j - start) // BN * BN, end, BN):
            rows = rows_before(end, c, on)
            if OF_K or WHOLE:
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
            after = None
            if FADED:
                after = back(sums_at(b, T, c, end, on))
            if OF_V and WHOLE:
                acc_v, _p = attend(
                    fk, fq, dd, 0.0, visible, acc_v, PRECISION, PIN, at, after, FADED,
                    LAST=OF_K and MAP != "identity",
                )  # fmt: skip
            elif OF_V:
                x = q + i_h * q_h + c * q_t
                p = features_product(k, k_t, ot, counts, x, q_t, on, rows, D, BD, MAP, PRECISION, PIN)
                w = 1.0 / tl.load(den + i_h * T + c + on, mask=rows, other=1.0)
                acc_v, _p = weigh(p * w[None, :], dd, visible, acc_v, PRECISION, PIN, at, after, FADED)
            if OF_K:
                dl = tl.load(delta + i_h * T + c + on, mask=rows, other=0.0)
                acc_k, _p = attend(vv, dd, fq, dl[None, :], visible, acc_k, PRECISION, PIN, at, after, FADED, LAST=True)
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
        if ADD:
            acc_v += load_tile(dv, ot[:, None] * dv_t + ov[None, :], there, ov < V, EXACT_V)
        store_tile(dv, ot[:, None] * dv_t + ov[None, :], acc_v, there, ov < V, EXACT_V)


@triton.jit(do_not_specialize=["T", "S", "L", "NSEG", "delay", "d_b", "m_b"])
def stored_dkv_kernel(
    q, k, v, mask, do, den, delta, dk, dv, starts, parts, table, b, drawn,
    T, S, L, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, d_b, m_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, OF_K: tl.constexpr, OF_V: tl.constexpr, APART: tl.constexpr,
    ADD: tl.constexpr, MAP: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    FADED: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write dk, dv or both of BT keys, from their segment's end and its queries from there on, BN at a time.

    ``APART``: dk and dv are of programs of their own, side by side, so that what both read crosses memory once.
    ``ADD``: dv is added to what is there.
    """
    # Programs share out the features where one of them does not hold all, but for dv, which needs all.
    ND: tl.constexpr = (D + BD - 1) // BD if OF_K else 1
    SHARE: tl.constexpr = ND + 1 if APART else ND
    i_d = tl.program_id(0) % SHARE
    pid = tl.program_id(0) // SHARE
    i_hk = pid % HKV
    i_t = (pid // HKV) % tl.cdiv(L, BT)
    i_s = pid // HKV // tl.cdiv(L, BT)
    _n, row, first, start, end = segment_bounds(table, i_s, S, L, NSEG, VARLEN)
    j = start + i_t * BT
    if j >= end:
        return
    k += row * k_b + i_hk.to(tl.int64) * k_h + j * k_t
    v += row * v_b + i_hk.to(tl.int64) * v_h + j * v_t
    dk += row * dk_b + i_hk.to(tl.int64) * dk_h + j * dk_t
    dv += row * dv_b + i_hk.to(tl.int64) * dv_h + j * dv_t
    if FADED:
        b += (row * HKV + i_hk) * 2 * T
        drawn += ((row * HKV + i_hk) * ND + i_d) * T + j
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
    sh = i_s.to(tl.int64) * HKV + i_hk
    if APART:
        if i_d < ND:
            write_keys(
                q, k, v, mask, do, den, delta, dk, dv, starts, parts, b, drawn,
                i_d, i_hk, sh, row, first, j, start, end, T, delay, q_h, q_t, k_t, v_t, do_h, do_t, dk_t, dv_t,
                G, D, V, BD, BV, BT, BN, True, False, ADD, MAP, MASKED, DELAYED, FADED, PRECISION, PIN,
            )  # fmt: skip
        else:
            write_keys(
                q, k, v, mask, do, den, delta, dk, dv, starts, parts, b, drawn,
                0, i_hk, sh, row, first, j, start, end, T, delay, q_h, q_t, k_t, v_t, do_h, do_t, dk_t, dv_t,
                G, D, V, BD, BV, BT, BN, False, True, ADD, MAP, MASKED, DELAYED, FADED, PRECISION, PIN,
            )  # fmt: skip
    else:
        write_keys(
            q, k, v, mask, do, den, delta, dk, dv, starts, parts, b, drawn,
            i_d, i_hk, sh, row, first, j, start, end, T, delay, q_h, q_t, k_t, v_t, do_h, do_t, dk_t, dv_t,
            G, D, V, BD, BV, BT, BN, OF_K, OF_V, ADD, MAP, MASKED, DELAYED, FADED, PRECISION, PIN,
        )  # fmt: skip
