"""Kernels of exact softmax over a window, the sinks, and one more key per query that stands for all the others.

Query t is array index P + t of the keys, of which P come from before the first query. It sees the W keys up to its own
and its sinks; n more lie further back, and what linear attention makes of them is the value f of a key of its own::

    e_t = log n + scaling q_t.m + bias + weight.q_t            m: the mean of those n keys
    o_t = (sum_j exp(s_tj) v_j + exp(e_t) f_t) / (sum_j exp(s_tj) + exp(e_t))

A program takes BT queries of one head through the BN-wide tiles of keys in their sight. Tiles begin at multiples of
BLOCK, so the first ones also hold keys that are out of sight already: their products with q, which the matrix units
compute anyway, count towards q.m, and all keys before the first tile come as one sum per BLOCK (`key_sums` and
`key_scan`). In the backward the same pairs carry the gradient of e, and the sums' gradients return to the keys by a
scan in reverse.

Scores are kept in base 2. Operands have the input's dtype, accumulators are fp32, no sum crosses programs but in a
fixed order.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.linear_attention.triton.backward import delta_launch
from hf_linear_attn.ops.linear_attention.triton.steps import is_broken
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded, precision, strides, tile
from hf_linear_attn.ops.triton.primitives import LOG2E, dot, load_operand, load_tile, operand, product, store_tile
from hf_linear_attn.ops.window.triton.mend import mend_window
from hf_linear_attn.ops.window.triton.sight import far, first_key, key_codes, near, sees_sink

BLOCK = 64
"""Tokens per sum of keys; tiles of queries and of keys divide it."""


@triton.jit(do_not_specialize=["S", "N", "c_b"])
def key_sums_kernel(
    k, codes, sums,
    S, N, HKV,
    k_b, k_h, k_t, c_b,
    D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum the keys of one block that count once they are out of sight."""
    pid = tl.program_id(0)
    i_h = pid % HKV
    i_n = (pid // HKV) % N
    i_b = (pid // HKV // N).to(tl.int64)
    j = i_n.to(tl.int64) * BLOCK
    oj = tl.arange(0, BLOCK)
    od = tl.arange(0, BD)
    counts = j + oj < S
    if MASKED:
        counts = counts & ((tl.load(codes + i_b * c_b + j + oj, mask=counts, other=0) & 2) != 0)
    # [BLOCK, BD]
    k += i_b * k_b + i_h.to(tl.int64) * k_h + j * k_t
    x = load_tile(k, oj[:, None] * k_t + od[None, :], counts, od < D, D == BD)
    tl.store(sums + ((i_b * HKV + i_h) * N + i_n) * D + od, tl.sum(x.to(tl.float32), 0), mask=od < D)


@triton.jit(do_not_specialize=["N"])
def key_scan_kernel(
    x, before, out, total,
    N,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the sum of all rows before each of N (after it where REVERSE), over G neighbours, and that of all."""
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    bh = (pid // ND).to(tl.int64)
    od = (pid % ND) * BD + tl.arange(0, BD)
    on = tl.arange(0, BN)
    acc = tl.zeros([BD], tl.float32)
    if INITIAL:
        acc = tl.load(before + bh * D + od, mask=od < D, other=0.0)
    # Each row of a tile takes in the row before it, so that none sees itself: a NaN less itself is one.
    for c in range(0, N + 1, BN):
        i = c + on
        before_i = i - 1
        there = ((before_i >= 0) & (before_i < N))[:, None] & (od < D)[None, :]
        inside = (i < N)[:, None] & (od < D)[None, :]
        if REVERSE:
            i = N - 1 - i
            before_i = N - 1 - before_i
        # [BN, BD]
        y = tl.zeros([BN, BD], tl.float32)
        for g in range(G):
            rows = (bh * G + g) * N + before_i
            y += tl.load(x + rows[:, None] * D + od[None, :], mask=there, other=0.0)
        rows = bh * N + i
        tl.store(out + rows[:, None] * D + od[None, :], acc[None, :] + tl.cumsum(y, 0), mask=inside)
        acc += tl.sum(y, 0)
    tl.store(total + bh * D + od, acc, mask=od < D)


@triton.jit
def attend_near(
    x, k, v, codes, start, c, rows, od, ov, ot, on, T, S, P, W, scaling, k_t, v_t, kv_head, i_b,
    sink_k, sink_v, seen,
    D: tl.constexpr, V: tl.constexpr, EXACT_D: tl.constexpr, EXACT_V: tl.constexpr,
    SINKS: tl.constexpr, BS: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from the queries ``x [BT, BD]`` to the tiles of keys from ``start`` on, and to the sinks.

    Returns:
        Each row's largest score in base 2, the sums of weights and of weighted values relative to it, and where OWN the
        sum of products with the keys of these tiles that are out of sight and count.
    """
    BT: tl.constexpr = x.shape[0]
    BN: tl.constexpr = on.shape[0]
    BV: tl.constexpr = ov.shape[0]
    base2 = scaling * LOG2E
    m = tl.full([BT], float("-inf"), tl.float32)
    mass = tl.zeros([BT], tl.float32)
    acc = tl.zeros([BT, BV], tl.float32)
    products = tl.zeros([BT], tl.float32)
    for j in range(start, P + c + BT, BN):
        _, code = key_codes(codes, j, on, S, MASKED)
        # [BN, BD] and [BN, BV]
        kk = load_operand(k + j * k_t, on[:, None] * k_t + od[None, :], code != 0, od < D, EXACT_D, PRECISION)
        vv = load_operand(v + j * v_t, on[:, None] * v_t + ov[None, :], code != 0, ov < V, EXACT_V, PRECISION)
        code = code[None, :]
        distance = (P + c - j).to(tl.int32) + ot[:, None] - on[None, :]
        s = product(x, tl.trans(kk), PRECISION)
        if OWN:
            products += tl.sum(tl.where(far(distance, code, W), s, 0.0), 1)
        s = tl.where(near(distance, code, W), s * base2, float("-inf"))
        largest = tl.maximum(m, tl.max(s, 1))
        # Tiles come in which a row sees nothing yet.
        origin = tl.where(largest == float("-inf"), 0.0, largest)
        p = tl.exp2(s - origin[:, None])
        old = tl.exp2(m - origin)
        mass = mass * old + tl.sum(p, 1)
        acc = dot(operand(p, x.dtype, PRECISION), vv, acc * old[:, None], PRECISION)
        m = largest
    if SINKS > 0:
        os = tl.arange(0, BS)
        visible = sees_sink(seen, i_b * T + c + ot, os, rows, SINKS)
        # Nothing else is read, since 0 times a NaN is one.
        seen_here = tl.max(visible.to(tl.int32), 0) != 0
        # [BS, BD] and [BS, BV]
        kk = load_operand(
            sink_k + kv_head * SINKS * D, os[:, None] * D + od[None, :], seen_here, od < D, EXACT_D, PRECISION
        )
        vv = load_operand(
            sink_v + kv_head * SINKS * V, os[:, None] * V + ov[None, :], seen_here, ov < V, EXACT_V, PRECISION
        )
        s = tl.where(visible, product(x, tl.trans(kk), PRECISION) * base2, float("-inf"))
        largest = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - largest[:, None])
        old = tl.exp2(m - largest)
        mass = mass * old + tl.sum(p, 1)
        acc = dot(operand(p, x.dtype, PRECISION), vv, acc * old[:, None], PRECISION)
        m = largest
    return m, mass, acc, products


@triton.jit
def own_score(x, products, n, keys, bias, weight, od, scaling, D: tl.constexpr):
    """Return the scores of the queries' own keys in base 2, which stand for n keys each; -inf where n is 0."""
    y = x.to(tl.float32)
    u = tl.load(weight + od, mask=od < D, other=0.0).to(tl.float32)
    before = tl.load(keys + od, mask=od < D, other=0.0)
    some = tl.maximum(n, 1.0)
    e = (products + tl.sum(y * before[None, :], 1)) * (scaling / some) + tl.log(some)
    e += tl.load(bias).to(tl.float32) + tl.sum(y * u[None, :], 1)
    return tl.where(n > 0, e * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["T", "S", "P", "W", "NB", "scaling", "c_b"])
def window_kernel(
    q, k, v, codes, sink_k, sink_v, seen, f, number, prefix, bias, weight, o, lse, score,
    T, S, P, W, NB, scaling, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, f_b, f_h, f_t, o_b, o_h, o_t, c_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write the outputs of BT queries, their log-sum-exp and the scores of their own keys."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    given = q, k, v, codes, sink_k, sink_v, seen, f, o, lse, score
    pid = tl.program_id(0)
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(T, BT)
    i_b = (pid // H // tl.cdiv(T, BT)).to(tl.int64)
    i_hk = i_h // G
    c = i_t.to(tl.int64) * BT
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    rows = ot < (T - c).to(tl.int32)
    kv_head = i_b * (H // G) + i_hk
    row = (i_b * H + i_h) * T + c + ot
    k += i_b * k_b + i_hk.to(tl.int64) * k_h
    v += i_b * v_b + i_hk.to(tl.int64) * v_h
    if MASKED:
        codes += i_b * c_b
    # [BT, BD]
    q += i_b * q_b + i_h.to(tl.int64) * q_h + c * q_t
    x = load_operand(q, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D, PRECISION)
    start = first_key(c, P, W, BLOCK)
    m, mass, acc, products = attend_near(
        x, k, v, codes, start, c, rows, od, ov, ot, on, T, S, P, W, scaling, k_t, v_t, kv_head, i_b,
        sink_k, sink_v, seen, D, V, EXACT_D, EXACT_V, SINKS, BS, MASKED, OWN, PRECISION,
    )  # fmt: skip
    if OWN:
        n = tl.load(number + i_b * T + c + ot, mask=rows, other=0).to(tl.float32)
        keys = prefix + (kv_head * NB + start // BLOCK) * D
        e = own_score(x, products, n, keys, bias + i_h, weight + i_h * D, od, scaling, D)
        largest = tl.maximum(m, e)
        w = tl.exp2(e - largest)
        old = tl.exp2(m - largest)
        mass = mass * old + w
        # [BT, BV]
        f += i_b * f_b + i_h.to(tl.int64) * f_h + c * f_t
        ff = load_tile(f, ot[:, None] * f_t + ov[None, :], rows, ov < V, EXACT_V)
        acc = acc * old[:, None] + w[:, None] * ff.to(tl.float32)
        m = largest
        tl.store(score + row, e, mask=rows)
    o += i_b * o_b + i_h.to(tl.int64) * o_h + c * o_t
    store_tile(o, ot[:, None] * o_t + ov[None, :], acc / mass[:, None], rows, ov < V, EXACT_V)
    tl.store(lse + row, m + tl.log2(mass), mask=rows)
    if is_broken(tl.sum(acc, 1)):
        # What is read there was written here, by other threads.
        tl.debug_barrier()
        mend_window(
            given, T, S, P, W, scaling, H, G,
            (q_b, q_h, q_t), (k_b, k_h, k_t), (v_b, v_h, v_t), (f_b, f_h, f_t), (o_b, o_h, o_t), c_b,
            D, V, BD, BV, BT, SINKS, BS, MASKED, OWN, PRECISION, PIN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "S", "P", "W", "NB", "scaling", "c_b"])
def window_dq_kernel(
    q, k, v, codes, sink_k, sink_v, seen, f, number, prefix, weight, lse, score, do, delta,
    dq, df, dscore, dsums, dweight, dsink_k, dsink_v,
    T, S, P, W, NB, scaling, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, f_b, f_h, f_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, df_b, df_h, df_t,
    c_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, OF_Q: tl.constexpr, OF_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what BT queries of a head get: dq, df, their scores' gradients, and their parts of smaller gradients."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(T, BT)
    i_b = (pid // H // tl.cdiv(T, BT)).to(tl.int64)
    i_hk = i_h // G
    c = i_t.to(tl.int64) * BT
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    rows = ot < (T - c).to(tl.int32)
    kv_head = i_b * (H // G) + i_hk
    row = (i_b * H + i_h) * T + c + ot
    part = (i_b * H + i_h) * tl.cdiv(T, BT) + i_t
    k += i_b * k_b + i_hk.to(tl.int64) * k_h
    v += i_b * v_b + i_hk.to(tl.int64) * v_h
    if MASKED:
        codes += i_b * c_b
    # [BT, BD] and [BT, BV]
    q += i_b * q_b + i_h.to(tl.int64) * q_h + c * q_t
    x = load_operand(q, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D, PRECISION)
    do += i_b * do_b + i_h.to(tl.int64) * do_h + c * do_t
    dd = load_operand(do, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
    dl = tl.load(delta + row, mask=rows, other=0.0)
    z = tl.load(lse + row, mask=rows, other=0.0)
    base2 = scaling * LOG2E
    acc = tl.zeros([BT, BD], tl.float32)
    start = first_key(c, P, W, BLOCK)
    if OWN:
        # [BT, BV]
        f += i_b * f_b + i_h.to(tl.int64) * f_h + c * f_t
        ff = load_tile(f, ot[:, None] * f_t + ov[None, :], rows, ov < V, EXACT_V)
        w = tl.exp2(tl.load(score + row, mask=rows, other=float("-inf")) - z)
        df += i_b * df_b + i_h.to(tl.int64) * df_h + c * df_t
        store_tile(df, ot[:, None] * df_t + ov[None, :], w[:, None] * dd.to(tl.float32), rows, ov < V, EXACT_V)
        de = w * (tl.sum(ff.to(tl.float32) * dd.to(tl.float32), 1) - dl)
        tl.store(dscore + row, de, mask=rows)
        n = tl.load(number + i_b * T + c + ot, mask=rows, other=0).to(tl.float32)
        dm = de * scaling / tl.maximum(n, 1.0)
        y = x.to(tl.float32)
        tl.store(dsums + part * D + od, tl.sum(y * dm[:, None], 0), mask=od < D)
        tl.store(dweight + part * D + od, tl.sum(y * de[:, None], 0), mask=od < D)
        u = tl.load(weight + i_h * D + od, mask=od < D, other=0.0).to(tl.float32)
        keys = tl.load(prefix + (kv_head * NB + start // BLOCK) * D + od, mask=od < D, other=0.0)
        acc += dm[:, None] * keys[None, :] + de[:, None] * u[None, :]
    if OF_Q:
        for j in range(start, P + c + BT, BN):
            _, code = key_codes(codes, j, on, S, MASKED)
            # [BN, BD] and [BN, BV]
            kk = load_operand(k + j * k_t, on[:, None] * k_t + od[None, :], code != 0, od < D, EXACT_D, PRECISION)
            vv = load_operand(v + j * v_t, on[:, None] * v_t + ov[None, :], code != 0, ov < V, EXACT_V, PRECISION)
            code = code[None, :]
            distance = (P + c - j).to(tl.int32) + ot[:, None] - on[None, :]
            s = product(x, tl.trans(kk), PRECISION)
            p = tl.where(near(distance, code, W), tl.exp2(s * base2 - z[:, None]), 0.0)
            ds = p * (product(dd, tl.trans(vv), PRECISION) - dl[:, None]) * scaling
            if OWN:
                ds += tl.where(far(distance, code, W), dm[:, None], 0.0)
            acc = dot(operand(ds, x.dtype, PRECISION), kk, acc, PRECISION)
    if SINKS > 0 and (OF_Q or OF_SINKS):
        os = tl.arange(0, BS)
        visible = sees_sink(seen, i_b * T + c + ot, os, rows, SINKS)
        # Nothing else is read, since 0 times a NaN is one.
        seen_here = tl.max(visible.to(tl.int32), 0) != 0
        # [BS, BD] and [BS, BV]
        kk = load_operand(
            sink_k + kv_head * SINKS * D, os[:, None] * D + od[None, :], seen_here, od < D, EXACT_D, PRECISION
        )
        vv = load_operand(
            sink_v + kv_head * SINKS * V, os[:, None] * V + ov[None, :], seen_here, ov < V, EXACT_V, PRECISION
        )
        p = tl.where(visible, tl.exp2(product(x, tl.trans(kk), PRECISION) * base2 - z[:, None]), 0.0)
        ds = p * (product(dd, tl.trans(vv), PRECISION) - dl[:, None]) * scaling
        ds = operand(ds, x.dtype, PRECISION)
        acc = dot(ds, kk, acc, PRECISION)
        if OF_SINKS:
            dk = product(tl.trans(ds), x, PRECISION)
            dv = product(tl.trans(operand(p, x.dtype, PRECISION)), dd, PRECISION)
            inside = (os < SINKS)[:, None]
            tl.store(dsink_k + part * SINKS * D + os[:, None] * D + od[None, :], dk, mask=inside & (od < D)[None, :])
            tl.store(dsink_v + part * SINKS * V + os[:, None] * V + ov[None, :], dv, mask=inside & (ov < V)[None, :])
    if OF_Q:
        dq += i_b * dq_b + i_h.to(tl.int64) * dq_h + c * dq_t
        store_tile(dq, ot[:, None] * dq_t + od[None, :], acc, rows, od < D, EXACT_D)


@triton.jit(do_not_specialize=["T", "S", "P", "W", "NT", "scaling", "c_b"])
def window_dkv_kernel(
    q, k, v, codes, number, lse, dscore, do, delta, later, dk, dv,
    T, S, P, W, NT, scaling, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, c_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of BN keys of a head."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_hk = pid % HKV
    i_n = (pid // HKV) % tl.cdiv(S, BN)
    i_b = (pid // HKV // tl.cdiv(S, BN)).to(tl.int64)
    j = i_n.to(tl.int64) * BN
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    if MASKED:
        codes += i_b * c_b
    there, code = key_codes(codes, j, on, S, MASKED)
    # [BN, BD] and [BN, BV]
    k += i_b * k_b + i_hk.to(tl.int64) * k_h + j * k_t
    v += i_b * v_b + i_hk.to(tl.int64) * v_h + j * v_t
    kk = load_operand(k, on[:, None] * k_t + od[None, :], code != 0, od < D, EXACT_D, PRECISION)
    vv = load_operand(v, on[:, None] * v_t + ov[None, :], code != 0, ov < V, EXACT_V, PRECISION)
    real = (code != 0)[:, None]
    code = code[:, None]
    base2 = scaling * LOG2E
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    # From the first query that sees one of these keys to the last.
    begin = tl.maximum(j - P, 0) // BT * BT
    end = tl.minimum(j + BN - 1 + W - P, T)
    if OWN:
        # To the end of the last block of queries whose tiles begin no later than here. Those after it count the keys in
        # a sum; there is one after each tile of PART queries.
        last = (j // BLOCK * BLOCK + BLOCK - 2 + W - P) // BLOCK
        end = tl.minimum((last + 1) * BLOCK, T)
        i_p = (last + 1) * (BLOCK // PART) - 1
        if i_p < NT:
            r = tl.load(later + ((i_b * HKV + i_hk) * NT + i_p) * D + od, mask=od < D, other=0.0)
            acc_k += tl.where((code & 2) != 0, r[None, :], 0.0)
    for g in range(G):
        i_h = (i_hk * G + g).to(tl.int64)
        row = (i_b * (HKV * G) + i_h) * T + ot
        for c in range(begin, end, BT):
            rows = ot < (T - c).to(tl.int32)
            # [BT, BD] and [BT, BV]
            x = load_operand(
                q + i_b * q_b + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D, PRECISION
            )
            dd = load_tile(
                do + i_b * do_b + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V
            )
            dl = tl.load(delta + row + c, mask=rows, other=0.0)
            z = tl.load(lse + row + c, mask=rows, other=0.0)
            distance = (P + c - j).to(tl.int32) + ot[None, :] - on[:, None]
            s = product(kk, tl.trans(x), PRECISION)
            p = tl.where(near(distance, code, W), tl.exp2(s * base2 - z[None, :]), 0.0)
            acc_v = dot(operand(p, x.dtype, PRECISION), dd, acc_v, PRECISION)
            ds = p * (product(vv, tl.trans(dd), PRECISION) - dl[None, :]) * scaling
            if OWN:
                n = tl.load(number + i_b * T + c + ot, mask=rows, other=0).to(tl.float32)
                dm = tl.load(dscore + row + c, mask=rows, other=0.0) * scaling / tl.maximum(n, 1.0)
                ds += tl.where(far(distance, code, W), dm[None, :], 0.0)
            acc_k = dot(operand(ds, x.dtype, PRECISION), x, acc_k, PRECISION)
    dk += i_b * dk_b + i_hk.to(tl.int64) * dk_h + j * dk_t
    dv += i_b * dv_b + i_hk.to(tl.int64) * dv_h + j * dv_t
    if MASKED:
        acc_k, acc_v = tl.where(real, acc_k, 0.0), tl.where(real, acc_v, 0.0)
    store_tile(dk, on[:, None] * dk_t + od[None, :], acc_k, there, od < D, EXACT_D)
    store_tile(dv, on[:, None] * dv_t + ov[None, :], acc_v, there, ov < V, EXACT_V)


class WindowProblem(NamedTuple):
    """One call of the op, with inputs in the layout that kernels read.

    Attributes:
        target: The device.
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, S, D]``: those from before the first query, then its own.
        v: Values ``[B, HKV, S, V]``.
        codes: ``[B, S]`` uint8, bit 0 for real keys and bit 1 for those that count once out of sight; None: all do.
        sink_k: Keys ``[B, HKV, n, D]``, contiguous, or None.
        sink_v: Values ``[B, HKV, n, V]``.
        seen: Which query sees which sink, ``[B, T, n]`` uint8, contiguous.
        f: Values of the queries' own keys ``[B, H, T, V]``, or None: there are no such keys.
        number: Keys that each stands for ``[B, T]`` int64, contiguous.
        before: Sum of those that ``k`` does not hold ``[B, HKV, D]`` fp32, contiguous, or None.
        bias: ``[H]``.
        weight: ``[H, D]``, contiguous.
        window: Keys in sight, a query's own included.
        scaling: Factor on ``q.k``.
    """

    target: Target
    q: Tensor
    k: Tensor
    v: Tensor
    codes: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    seen: Tensor | None
    f: Tensor | None
    number: Tensor | None
    before: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    window: int
    scaling: float

    @property
    def past(self) -> int:
        """Keys from before the first query."""
        return self.k.shape[2] - self.q.shape[2]

    @property
    def sinks(self) -> int:
        """Sinks per row."""
        return 0 if self.sink_k is None else self.sink_k.shape[2]

    @property
    def blocks(self) -> int:
        """Different beginnings of tiles of keys."""
        last = (self.q.shape[2] - 1) // BLOCK * BLOCK
        return max(self.past + last - self.window + 1, 0) // BLOCK + 1

    def tile(self, role: str) -> Tile:
        """Return the tile with which a kernel is launched."""
        group = self.q.shape[1] // self.k.shape[1]
        return tile(self.target, self.q.dtype, role, self.k.shape[3], self.v.shape[3], group)

    def shared(self, chosen: Tile) -> dict[str, Any]:
        """Return the arguments that all kernels over pairs take."""
        q, k, v = self.q, self.k, self.v
        D, V = k.shape[3], v.shape[3]
        return {
            **{"q": q, "k": k, "v": v, "codes": self.codes, "number": self.number},
            **{"T": q.shape[2], "S": k.shape[2], "P": self.past, "W": self.window, "scaling": self.scaling},
            **strides("q", q),
            **strides("k", k),
            **strides("v", v),
            **{"c_b": k.shape[2], "D": D, "V": V, "BD": padded(D), "BV": padded(V)},
            **{"BT": chosen.tokens, "BN": chosen.width, "BLOCK": BLOCK},
            **{"MASKED": self.codes is not None, "OWN": self.f is not None},
            "PRECISION": precision(self.target, q.dtype, max(D, V)),
        }

    def of_queries(self) -> dict[str, Any]:
        """Return the arguments that kernels over queries take besides."""
        f = self.q if self.f is None else self.f
        return {
            **{"sink_k": self.sink_k, "sink_v": self.sink_v, "seen": self.seen, "f": self.f, "weight": self.weight},
            **{"H": self.q.shape[1], "G": self.q.shape[1] // self.k.shape[1], "NB": self.blocks},
            **strides("f", f),
            **{"SINKS": self.sinks, "BS": padded(self.sinks) if self.sinks else 16},
        }


class WindowForward(NamedTuple):
    """What the forward leaves behind.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        lse: Log-sum-exp of the scores ``[B, H, T]``, fp32, base 2.
        score: Scores of the queries' own keys ``[B, H, T]``, fp32, base 2; empty where there are none.
        prefix: Sums of the keys before each beginning of tiles, ``[B, HKV, blocks, D]``, fp32; empty likewise.
    """

    o: Tensor
    lse: Tensor
    score: Tensor
    prefix: Tensor


def _empty(p: WindowProblem, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=p.q.device)


def allocate_window(p: WindowProblem) -> WindowForward:
    """Allocate the results of the forward."""
    (B, H, T, _), HKV, D = p.q.shape, p.k.shape[1], p.k.shape[3]
    own = p.f is not None
    return WindowForward(
        empty_like_tokens(p.q, p.v.shape[3]),
        _empty(p, B, H, T),
        _empty(p, B, H, T) if own else _empty(p, 0),
        _empty(p, B, HKV, p.blocks, D) if own else _empty(p, 0),
    )


def scan_launch(
    p: WindowProblem, x: Tensor, before: Tensor | None, out: Tensor, total: Tensor, *, reverse: bool
) -> Launch:
    """Plan the scan of ``x [B, HKV or H, N, D]`` into ``out [B, HKV, N, D]``."""
    chosen, D = p.tile("key_scan"), x.shape[3]
    width = min(chosen.width, padded(D))
    arguments = {
        **{"x": x, "before": before, "out": out, "total": total, "N": x.shape[2], "G": x.shape[1] // out.shape[1]},
        **{"D": D, "BD": width, "BN": chosen.tokens, "INITIAL": before is not None, "REVERSE": reverse},
    }
    programs = out.shape[0] * out.shape[1] * -(-D // width)
    return Launch("key_scan", key_scan_kernel, programs, arguments, chosen, (x,), (out,))


def window_launches(p: WindowProblem) -> tuple[WindowForward, list[Launch]]:
    """Plan the forward.

    Returns:
        The results, allocated but not computed, and the launches that compute them, in order.
    """
    q, k, v = p.q, p.k, p.v
    (B, H, T, _), (_, HKV, S, D) = q.shape, k.shape
    out = allocate_window(p)
    launches = []
    if p.f is not None and p.blocks > 1:
        # The last block of keys is before no tile.
        chosen, sums = p.tile("key_sums"), _empty(p, B, HKV, p.blocks, D)
        arguments = {
            **{"k": k, "codes": p.codes, "sums": sums, "S": S, "N": p.blocks, "HKV": HKV},
            **strides("k", k),
            **{"c_b": S, "D": D, "BD": padded(D), "BLOCK": BLOCK, "MASKED": p.codes is not None},
        }
        launches.append(Launch("key_sums", key_sums_kernel, B * HKV * p.blocks, arguments, chosen, (k,), (sums,)))
        launches.append(scan_launch(p, sums, p.before, out.prefix, _empty(p, B, HKV, D), reverse=False))
    elif p.f is not None:
        out.prefix.zero_() if p.before is None else out.prefix.copy_(p.before[:, :, None])
    chosen = p.tile("window")
    arguments = {
        **p.shared(chosen),
        **p.of_queries(),
        **{"bias": p.bias, "prefix": out.prefix, "o": out.o, "lse": out.lse, "score": out.score},
        "PIN": p.target.arch.startswith("sm_"),
        **strides("o", out.o),
    }
    own: tuple[Tensor, ...] = () if p.f is None else (p.f,)
    writes = (out.o, out.lse) if p.f is None else (out.o, out.lse, out.score)
    programs = B * H * -(-T // chosen.tokens)
    launches.append(Launch("window", window_kernel, programs, arguments, chosen, (q, k, v, *own), writes))
    return out, launches


class WindowWanted(NamedTuple):
    """Which gradients somebody asked for; those of the queries' own keys are few and always computed.

    Attributes:
        q: Of the queries.
        kv: Of the keys, of their values, or of the sum of keys from before.
        sinks: Of the sinks' keys or values.
    """

    q: bool = True
    kv: bool = True
    sinks: bool = True


EVERY = WindowWanted()


class WindowBackward(NamedTuple):
    """What the kernels of the backward write; tensors are empty where nobody asked.

    Attributes:
        dq: ``[B, H, T, D]``.
        dk: ``[B, HKV, S, D]``.
        dv: ``[B, HKV, S, V]``.
        df: ``[B, H, T, V]``; this and all that follow are empty also where there is nothing to derive by.
        dscore: Gradient of the scores of own keys ``[B, H, T]``, fp32, and so are the others.
        dweight: That of the weight, by tile of queries ``[B, H, tiles, D]``.
        dbefore: That of the sum of keys from before ``[B, HKV, D]``.
        dsink_k: That of the sinks, by tile of queries ``[B, H, tiles, n, D]``.
        dsink_v: ``[B, H, tiles, n, V]``.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    df: Tensor
    dscore: Tensor
    dweight: Tensor
    dbefore: Tensor
    dsink_k: Tensor
    dsink_v: Tensor


def allocate_window_backward(p: WindowProblem, wanted: WindowWanted) -> WindowBackward:
    """Allocate the gradients."""
    (B, H, T, D), (_, HKV, _, V) = p.q.shape, p.v.shape
    own = p.f is not None
    tiles = -(-T // p.tile("window_dq").tokens)

    def tokens(x: Tensor, dim: int, asked: bool) -> Tensor:
        return empty_like_tokens(x, dim) if asked else x.new_empty(0)

    def rows(asked: bool, *sizes: int) -> Tensor:
        return _empty(p, *sizes) if asked else _empty(p, 0)

    return WindowBackward(
        tokens(p.q, D, wanted.q),
        tokens(p.k, D, wanted.kv),
        tokens(p.v, V, wanted.kv),
        tokens(p.q, V, own),
        rows(own, B, H, T),
        rows(own, B, H, tiles, D),
        rows(own and wanted.kv, B, HKV, D),
        rows(wanted.sinks, B, H, tiles, p.sinks, D),
        rows(wanted.sinks, B, H, tiles, p.sinks, V),
    )


def window_backward_launches(
    p: WindowProblem, saved: WindowForward, do: Tensor, wanted: WindowWanted = EVERY
) -> tuple[WindowBackward, list[Launch]]:
    """Plan the backward.

    Args:
        p: The problem of the forward.
        saved: Its results.
        do: Gradient of o.
        wanted: Which gradients are asked for.

    Returns:
        The gradients, allocated but not computed, and the launches that compute them, in order.
    """
    q, k, v = p.q, p.k, p.v
    (B, H, T, D), (_, HKV, S, _) = q.shape, v.shape
    own = p.f is not None
    of_queries, of_keys = p.tile("window_dq"), p.tile("window_dkv")
    tiles = -(-T // of_queries.tokens)
    out = allocate_window_backward(p, wanted)
    delta = torch.empty_like(saved.lse)
    dsums = torch.empty_like(out.dweight)
    launches = [delta_launch(p.tile("delta"), saved.o, do, delta)]
    rows = {"lse": saved.lse, "do": do, "delta": delta, "dscore": out.dscore}
    arguments = {
        **p.shared(of_queries),
        **p.of_queries(),
        **rows,
        **{"prefix": saved.prefix, "score": saved.score, "dq": out.dq, "df": out.df, "dsums": dsums},
        **{"dweight": out.dweight, "dsink_k": out.dsink_k, "dsink_v": out.dsink_v},
        **strides("do", do),
        **strides("dq", out.dq if wanted.q else q),
        **strides("df", out.df if own else q),
        **{"OF_Q": wanted.q, "OF_SINKS": wanted.sinks},
    }
    reads: tuple[Tensor, ...] = (q, do, saved.lse, delta)
    writes: tuple[Tensor, ...] = ()
    if wanted.q:
        reads, writes = (*reads, k, v), (out.dq,)
    if p.f is not None:
        reads, writes = (*reads, p.f, saved.score), (*writes, out.df, out.dscore)
    launches.append(Launch("window_dq", window_dq_kernel, B * H * tiles, arguments, of_queries, reads, writes))
    if not wanted.kv:
        return out, launches
    later = out.dweight
    if own:
        later = _empty(p, B, HKV, tiles, D)
        launches.append(scan_launch(p, dsums, None, later, out.dbefore, reverse=True))
    arguments = {
        **p.shared(of_keys),
        **rows,
        **{"later": later, "dk": out.dk, "dv": out.dv, "NT": tiles, "HKV": HKV, "G": H // HKV},
        **strides("do", do),
        **strides("dk", out.dk),
        **strides("dv", out.dv),
        "PART": of_queries.tokens,
    }
    reads = (q, k, v, do, saved.lse, delta, *((out.dscore,) if own else ()))
    programs = B * HKV * -(-S // of_keys.width)
    launches.append(Launch("window_dkv", window_dkv_kernel, programs, arguments, of_keys, reads, (out.dk, out.dv)))
    return out, launches
