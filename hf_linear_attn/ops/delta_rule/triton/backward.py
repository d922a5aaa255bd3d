"""Backward kernels: the forward's walk again, what queries ask of the chunk's values, the walk back, and gradients.

In the forward's words, with y = x / |x| for queries and keys and ``P = Y_q Y_k^T * G`` where a query sees a key::

    dN  = P^T dO + exp(b_C - b) Y_k dS'                                         delta_local and delta_back
    dS  = exp(b_C) dS' + (E Y_q)^T dO - W^T (beta dN)                           delta_back, chunks in reverse
    dY_q = (dO (beta R)^T * G) Y_k + E dO S^T                                   delta_dq, a program per chunk and head
    dV  = X^T (beta dN),   J = dV R^T
    dY_k = -(L + L^T) Y_k + (dO (beta R)^T * G)^T Y_q - E dV S^T + exp(b_C - b) beta R dS'^T
    dbeta = dN . R - (Y_k Y_k^T * G * J)^T 1                                    delta_dk, a program per chunk

where L is ``J diag(beta) * G`` below its diagonal. The gradient of a log decay is the sum over all that it fades: pairs
of tokens on both sides of it, and the states before and after the chunk. Pairs of a token with itself, which nothing
fades, are left out: where decays are strong, sums over rows less sums over columns would be lost in them.
All sums stay inside one program, in a fixed order.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.delta_rule.triton.forward import walk_launches
from hf_linear_attn.ops.delta_rule.triton.problem import DeltaProblem
from hf_linear_attn.ops.delta_rule.triton.steps import (
    decay_between,
    decay_since,
    faded,
    length_scale,
    load_decay,
    of_units,
    sequence_bounds,
)
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch
from hf_linear_attn.ops.triton.primitives import (
    dot,
    key_rows,
    keys_of,
    load_operand,
    mask_of,
    operand,
    product,
    resets,
    rows_before,
    segment_bounds,
    store_tile,
    sum_anew,
)


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def local_kernel(
    q, k, do, mask, b, r, dn, table,
    T, NSEG, delay, HKV, G,
    q_b, q_h, q_t, k_b, k_h, k_t, do_b, do_h, do_t, m_b,
    F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what the queries of a chunk ask of its values, summed over the heads of a group."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    h = ((pid // NV) % HKV).to(tl.int64)
    i_s = pid // (NV * HKV)
    _n, row, first, c, end = segment_bounds(table, i_s, T, BT, NSEG, VARLEN)
    if c >= end:
        return
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    at = (row * HKV + h) * T
    k = keys_of(k, row, h, k_b, k_h, k_t, delay, DELAYED) + c * k_t
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    rows = rows_before(end, c, ot)
    _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
    sums, _after, _all = load_decay(b, at, c, end, ot, GATED)
    acc = tl.zeros([BT, BV], tl.float32)
    for g in range(G):
        i_h = h * G + g
        p = tl.zeros([BT, BT], tl.float32)
        squares = tl.zeros([BT], tl.float32)
        for d in range(0, F, BK):
            od = d + tl.arange(0, BK)
            # [BT, BK]
            x = load_operand(k, ot[:, None] * k_t + od[None, :], counts, od < F, F % BK == 0, PRECISION)
            y = load_operand(
                q + row * q_b + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < F, F % BK == 0,
                PRECISION,
            )  # fmt: skip
            p = dot(x, tl.trans(y), p, PRECISION)
            squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), 1)
        # Keys are rows: a product is never transposed, see benchmarks/compile_check.py.
        p = p * decay_since(sums, ot[:, None] <= ot[None, :], GATED) * length_scale(squares, NORM)[None, :]
        # [BT, BV]
        y = load_operand(
            do + row * do_b + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, V % BV == 0,
            PRECISION,
        )  # fmt: skip
        acc = dot(operand(p, y.dtype, PRECISION), y, acc, PRECISION)
    if NORM:
        acc *= tl.load(r + at + c + ot, mask=rows, other=0.0)[:, None]
    store_tile(dn + (at + c) * V, ot[:, None] * V + ov[None, :], acc, rows, ov < V, V % BV == 0)


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def back_kernel(
    q, k, beta, do, mask, w, dn, b, r, dkv, dkv0, ends, cu, bounds,
    T, NSEG, delay, HKV, G,
    q_b, q_h, q_t, k_b, k_h, k_t, beta_b, beta_h, beta_t, do_b, do_h, do_t, m_b,
    F: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    FINAL: tl.constexpr, BOUNDS: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk back: write the gradient of the state after each chunk, complete dn, and write that of the initial state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    EXACT_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    i_v = pid % NV
    h = ((pid // NV) % HKV).to(tl.int64)
    n = (pid // (NV * HKV)).to(tl.int64)
    row, first, end, i_0, i_1 = sequence_bounds(cu, bounds, n, T, NSEG, BOUNDS, VARLEN)
    od = tl.arange(0, BD)
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    at = (row * HKV + h) * T
    q += row * q_b
    do += row * do_b
    k = keys_of(k, row, h, k_b, k_h, k_t, delay, DELAYED)
    beta = keys_of(beta, row, h, beta_b, beta_h, beta_t, delay, DELAYED)
    w += at * F
    dn += at * V
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    in_state = (od < F)[:, None] & (ov < V)[None, :]
    o_state = od[:, None] * V + ov[None, :]
    # [BD, BV]
    ds = tl.zeros([BD, BV], tl.float32)
    if FINAL:
        ds = tl.load(dkv + (n * HKV + h) * (F * V) + o_state, mask=in_state, other=0.0)
    for j in range(0, i_1 - i_0):
        i = i_1 - 1 - j
        c = first + (i - i_0) * BT
        rows = rows_before(end, c, ot)
        _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        tl.store(ends + (i * HKV + h) * (F * V) + o_state, ds.to(ends.dtype.element_ty), mask=in_state)
        sums, after, all_of_it = load_decay(b, at, c, end, ot, GATED)
        if NORM:
            after *= tl.load(r + at + c + ot, mask=rows, other=0.0)
        # [BT, BD]
        x = load_operand(k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < F, F == BD, PRECISION)
        # [BT, BV]
        o_n = ot[:, None] * V + ov[None, :]
        y = load_operand(dn + c * V, o_n, rows, ov < V, EXACT_V, PRECISION).to(tl.float32)
        y += product(x, operand(ds, x.dtype, PRECISION), PRECISION) * after[:, None]
        store_tile(dn + c * V, o_n, y, rows, ov < V, EXACT_V)
        weight = tl.load(beta + (c + ot) * beta_t, mask=counts, other=0.0).to(tl.float32)
        if GATED:
            ds *= all_of_it
        # [BT, BD]
        x = load_operand(w + c * F, ot[:, None] * F + od[None, :], rows, od < F, F == BD, PRECISION)
        ds = dot(tl.trans(x), operand(-y * weight[:, None], x.dtype, PRECISION), ds, PRECISION)
        for g in range(G):
            i_h = h * G + g
            # [BT, BD] and [BT, BV]
            x = load_operand(q + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < F, F == BD, PRECISION)
            y = load_operand(
                do + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION
            ).to(tl.float32)
            y *= (faded(sums, GATED) * length_scale(tl.sum(x.to(tl.float32) * x.to(tl.float32), 1), NORM))[:, None]
            ds = dot(tl.trans(x), operand(y, x.dtype, PRECISION), ds, PRECISION)
    tl.store(dkv0 + (n * HKV + h) * (F * V) + o_state, ds, mask=in_state)


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def dq_kernel(
    q, k, beta, do, mask, u, b, r, states, dq, dg_q, table,
    T, NSEG, delay, HKV, G,
    q_b, q_h, q_t, k_b, k_h, k_t, beta_b, beta_h, beta_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, m_b,
    F: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq of a chunk's queries of one head, and what they ask of log decays."""
    EXACT_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    i_h = (pid % (HKV * G)).to(tl.int64)
    i_s = pid // (HKV * G)
    _n, row, first, c, end = segment_bounds(table, i_s, T, BT, NSEG, VARLEN)
    if c >= end:
        return
    od = tl.arange(0, BD)
    ot = tl.arange(0, BT)
    h = i_h // G
    at = (row * HKV + h) * T
    q += row * q_b + i_h * q_h + c * q_t
    do += row * do_b + i_h * do_h + c * do_t
    dq += row * dq_b + i_h * dq_h + c * dq_t
    k = keys_of(k, row, h, k_b, k_h, k_t, delay, DELAYED) + c * k_t
    beta = keys_of(beta, row, h, beta_b, beta_h, beta_t, delay, DELAYED) + c * beta_t
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    rows = rows_before(end, c, ot)
    _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
    states += (i_s.to(tl.int64) * HKV + h) * (F * V)
    acc = tl.zeros([BT, BD], tl.float32)
    dp = tl.zeros([BT, BT], tl.float32)
    for d in range(0, V, BV):
        ov = d + tl.arange(0, BV)
        # [BT, BV]
        y = load_operand(do, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
        x = load_operand(u + (at + c) * V, ot[:, None] * V + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
        # [BD, BV]
        s = load_operand(states, od[:, None] * V + ov[None, :], od < F, ov < V, EXACT_V, PRECISION)
        dp = dot(y, tl.trans(x), dp, PRECISION)
        acc = dot(y, tl.trans(s), acc, PRECISION)
    sums, _after, _all = load_decay(b, at, c, end, ot, GATED)
    weight = tl.load(beta + ot * beta_t, mask=counts, other=0.0).to(tl.float32)
    if NORM:
        weight *= tl.load(r + at + c + ot, mask=rows, other=0.0)
    dp = dp * decay_between(sums, sums, ot[:, None] >= ot[None, :], GATED) * weight[None, :]
    # [BT, BD]
    x = load_operand(q, ot[:, None] * q_t + od[None, :], rows, od < F, F == BD, PRECISION)
    y = load_operand(k, ot[:, None] * k_t + od[None, :], counts, od < F, F == BD, PRECISION)
    scale = length_scale(tl.sum(x.to(tl.float32) * x.to(tl.float32), 1), NORM)
    if GATED:
        acc *= faded(sums, GATED)[:, None]
        pairs = dp * product(x, tl.trans(y), PRECISION) * scale[:, None]
        pairs = tl.where(ot[:, None] > ot[None, :], pairs, 0.0)
        dg = tl.sum(acc * x.to(tl.float32), 1) * scale + tl.sum(pairs, 1) - tl.sum(pairs, 0)
        tl.store(dg_q + (row * HKV * G + i_h) * T + c + ot, dg, mask=rows)
    acc = dot(operand(dp, y.dtype, PRECISION), y, acc, PRECISION)
    acc = of_units(acc, x.to(tl.float32) * scale[:, None], NORM) * scale[:, None]
    store_tile(dq, ot[:, None] * dq_t + od[None, :], acc, rows, od < F, F == BD)


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def dk_kernel(
    q, k, beta, g, do, mask, inverse, u, dn, b, r, states, ends, dk, dv, dbeta, dg, dg_q, table,
    T, NSEG, delay, HKV, G,
    q_b, q_h, q_t, k_b, k_h, k_t, beta_b, beta_h, beta_t, g_b, g_h, g_t, do_b, do_h, do_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, dbeta_b, dbeta_h, dbeta_t, dg_b, dg_h, dg_t, m_b,
    F: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk, dv and the gradients of a chunk's gates."""
    EXACT_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    h = (pid % HKV).to(tl.int64)
    i_s = pid // HKV
    _n, row, first, c, end = segment_bounds(table, i_s, T, BT, NSEG, VARLEN)
    if c >= end:
        return
    od = tl.arange(0, BD)
    ot = tl.arange(0, BT)
    at = (row * HKV + h) * T
    q += row * q_b + c * q_t
    do += row * do_b + c * do_t
    k += row * k_b + h * k_h + c * k_t
    beta += row * beta_b + h * beta_h + c * beta_t
    dk += row * dk_b + h * dk_h + c * dk_t
    dv += row * dv_b + h * dv_h + c * dv_t
    dbeta += row * dbeta_b + h * dbeta_h + c * dbeta_t
    if GATED:
        g += row * g_b + h * g_h + c * g_t
        dg += row * dg_b + h * dg_h + c * dg_t
    if MASKED:
        mask += row * m_b
    if DELAYED:
        k -= delay.to(tl.int64) * k_t
        beta -= delay.to(tl.int64) * beta_t
        dk -= delay.to(tl.int64) * dk_t
        dv -= delay.to(tl.int64) * dv_t
        dbeta -= delay.to(tl.int64) * dbeta_t
        if GATED:
            g -= delay.to(tl.int64) * g_t
            dg -= delay.to(tl.int64) * dg_t
        if MASKED:
            mask -= delay
    rows = rows_before(end, c, ot)
    there, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
    states += (i_s.to(tl.int64) * HKV + h) * (F * V)
    ends += (i_s.to(tl.int64) * HKV + h) * (F * V)
    u += (at + c) * V
    dn += (at + c) * V
    sums, after, all_of_it = load_decay(b, at, c, end, ot, GATED)
    fading = faded(sums, GATED)
    weight = tl.load(beta + ot * beta_t, mask=counts, other=0.0).to(tl.float32)
    below = ot[:, None] > ot[None, :]
    everywhere = ot < BT
    # [BT, BD] and [BT, BT]
    x = load_operand(k, ot[:, None] * k_t + od[None, :], counts, od < F, F == BD, PRECISION)
    z = load_operand(inverse + (at + c) * BT, ot[:, None] * BT + ot[None, :], rows, everywhere, True, PRECISION)
    scale = tl.full([BT], 1.0, tl.float32)
    if NORM:
        scale = tl.load(r + at + c + ot, mask=rows, other=0.0)
    joint = tl.zeros([BT, BT], tl.float32)
    turned = tl.zeros([BT, BT], tl.float32)
    d_weight = tl.zeros([BT], tl.float32)
    for d in range(0, V, BV):
        ov = d + tl.arange(0, BV)
        o_n = ot[:, None] * V + ov[None, :]
        # [BT, BV]
        y = load_operand(dn, o_n, rows, ov < V, EXACT_V, PRECISION).to(tl.float32)
        e = load_operand(u, o_n, rows, ov < V, EXACT_V, PRECISION)
        d_weight += tl.sum(y * e.to(tl.float32), 1)
        y = product(tl.trans(z), operand(y * weight[:, None], z.dtype, PRECISION), PRECISION)
        store_tile(dv, ot[:, None] * dv_t + ov[None, :], tl.where(counts[:, None], y, 0.0), there, ov < V, EXACT_V)
        y = operand(y, e.dtype, PRECISION)
        joint = dot(y, tl.trans(e), joint, PRECISION)
        # Its transpose is a product of its own, since a product is never transposed, see benchmarks/compile_check.py.
        turned = dot(e, tl.trans(y), turned, PRECISION)
    within = decay_between(sums, sums, below, GATED)
    kk = product(x, tl.trans(x), PRECISION) * scale[:, None] * scale[None, :] * within
    d_weight -= tl.sum(kk * joint, 0)
    joint = -joint * weight[None, :]
    of_pairs = tl.sum(kk * joint, 1) - tl.sum(kk * joint, 0)
    joint = joint * within * scale[None, :]
    acc = product(operand(joint, x.dtype, PRECISION), x, PRECISION)
    turned = turned * decay_since(sums, ot[:, None] < ot[None, :], GATED) * -weight[:, None] * scale[None, :]
    acc = dot(operand(turned, x.dtype, PRECISION), x, acc, PRECISION)
    of_past = tl.zeros([BT], tl.float32)
    of_future = tl.zeros([BT], tl.float32)
    of_state = 0.0
    # Values once more: registers do not hold what pairs and what states give at once.
    for d in range(0, V, BV):
        ov = d + tl.arange(0, BV)
        o_n = ot[:, None] * V + ov[None, :]
        # [BT, BV]
        y = load_operand(dn, o_n, rows, ov < V, EXACT_V, PRECISION).to(tl.float32)
        y = product(tl.trans(z), operand(y * weight[:, None], z.dtype, PRECISION), PRECISION)
        y = -operand(y, x.dtype, PRECISION).to(tl.float32) * fading[:, None]
        # [BD, BV]
        s = load_operand(states, od[:, None] * V + ov[None, :], od < F, ov < V, EXACT_V, PRECISION)
        t = load_operand(ends, od[:, None] * V + ov[None, :], od < F, ov < V, EXACT_V, PRECISION)
        # [BT, BD], one after the other: accumulators of both would not fit into the tensor memory of sm_100.
        share = product(operand(y, s.dtype, PRECISION), tl.trans(s), PRECISION)
        acc += share
        if GATED:
            of_past += tl.sum(share * x.to(tl.float32), 1)
            of_state += tl.sum(s.to(tl.float32) * t.to(tl.float32))
        e = load_operand(u, o_n, rows, ov < V, EXACT_V, PRECISION)
        y = e.to(tl.float32) * (weight * after)[:, None]
        share = product(operand(y, t.dtype, PRECISION), tl.trans(t), PRECISION)
        acc += share
        if GATED:
            of_future += tl.sum(share * x.to(tl.float32), 1)
    decay = tl.zeros([BT], tl.float32)
    for i in range(G):
        i_h = h * G + i
        dp = tl.zeros([BT, BT], tl.float32)
        for d in range(0, V, BV):
            ov = d + tl.arange(0, BV)
            # [BT, BV]
            y = load_operand(do + i_h * do_h, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
            e = load_operand(u, ot[:, None] * V + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
            dp = dot(e, tl.trans(y), dp, PRECISION)
        # [BT, BD]
        y = load_operand(q + i_h * q_h, ot[:, None] * q_t + od[None, :], rows, od < F, F == BD, PRECISION)
        of_q = length_scale(tl.sum(y.to(tl.float32) * y.to(tl.float32), 1), NORM)
        # Loaded once more: registers do not hold them all along.
        again, _after, _all = load_decay(b, at, c, end, ot, GATED)
        dp = dp * decay_since(again, ot[:, None] <= ot[None, :], GATED) * weight[:, None] * of_q[None, :]
        acc = dot(operand(dp, y.dtype, PRECISION), y, acc, PRECISION)
        if GATED:
            decay += tl.load(dg_q + (row * HKV * G + i_h) * T + c + ot, mask=rows, other=0.0)
    acc = of_units(acc, x.to(tl.float32) * scale[:, None], NORM) * scale[:, None]
    acc = tl.where(counts[:, None], acc, 0.0)
    store_tile(dk, ot[:, None] * dk_t + od[None, :], acc, there, od < F, F == BD)
    d_weight = tl.where(counts, d_weight, 0.0)
    tl.store(dbeta + ot * dbeta_t, d_weight.to(dbeta.dtype.element_ty), mask=there)
    if GATED:
        # From a reset on nothing is drawn from before it, but for what was rounded.
        is_reset = resets(g + ot * g_t, counts)
        decay = tl.where(is_reset == 0, decay + of_past * scale + of_pairs, 0.0)
        decay, _ = tl.associative_scan((decay, is_reset), 0, sum_anew, reverse=True)
        of_future *= scale
        decay += tl.cumsum(of_future, 0) - of_future + all_of_it * of_state
        decay = tl.where(counts, decay, 0.0)
        tl.store(dg + ot * dg_t, decay.to(dg.dtype.element_ty), mask=there)


class Backward(NamedTuple):
    """Gradients of q, k, v, beta, the log decay (empty where there is none) and the initial state."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    dg: Tensor
    dkv0: Tensor


def allocate_backward(p: DeltaProblem) -> Backward:
    """Allocate the gradients."""
    dg = p.beta.new_empty(0) if p.log_decay is None else torch.empty_like(p.log_decay)
    dq, dk, dv = (empty_like_tokens(x, x.shape[3]) for x in (p.q, p.k, p.v))
    return Backward(dq, dk, dv, torch.empty_like(p.beta), dg, p.state())


def backward_launches(p: DeltaProblem, do: Tensor, dkv: Tensor | None) -> tuple[Backward, list[Launch]]:
    """Plan the backward: the gradients, allocated but not computed, and the launches that compute them, in order.

    That of the final state is fp32 and contiguous, or None where the loss does not depend on it.
    """
    chunks, out = p.chunks(), allocate_backward(p)
    found, launches = walk_launches(p, chunks, p.state())
    V, HKV, H = p.v.shape[3], p.k.shape[1], p.q.shape[1]
    dn, ends = p.of_keys(V), p.states(chunks)
    dg_q = None if p.log_decay is None else p.numbers(H)
    known = p.shared(chunks) | found._asdict() | out._asdict()
    known |= {"do": do, "dkv": dkv, "dn": dn, "ends": ends, "dg_q": dg_q, "FINAL": dkv is not None}
    q, k, u, states = p.q, p.k, found.u, found.states
    tiles = -(-V // p.tile("delta_local").width)
    programs = chunks.count * HKV
    launches.append(p.launch("delta_local", local_kernel, programs * tiles, known, (q, k, do), (dn,)))
    tiles = -(-V // p.tile("delta_back").width)
    reads: tuple[Tensor, ...] = (q, k, do, found.w, dn)
    writes: tuple[Tensor, ...] = (dn, ends, out.dkv0)
    launches.append(p.launch("delta_back", back_kernel, p.rows * HKV * tiles, known, reads, writes))
    launches.append(p.launch("delta_dq", dq_kernel, chunks.count * H, known, (q, k, do, u, states), (out.dq,)))
    reads, writes = (q, k, do, u, found.inverse, states, ends, dn), (out.dk, out.dv, out.dbeta, out.dg)
    launches.append(p.launch("delta_dk", dk_kernel, programs, known, reads, writes))
    return out, launches
