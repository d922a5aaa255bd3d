"""Forward kernels: each chunk's inverse, the walk that carries the state, and what queries read.

With b a chunk's running sums of log decays, E = exp(b), G_ij = exp(b_i - b_j), r the reciprocal lengths of keys::

    X  = (I + strict_tril(r_i r_j K K^T * G) diag(beta))^-1        delta_inverse, a program per chunk, in fp32
    W  = X (r E K),   U = X V                                      delta_prepare, a program per chunk
    R  = U - W S                                                   delta_walk, a program per head and tile of values
    S' = exp(b_C) S + K^T (r beta exp(b_C - b) R)
    O  = (E Q S + tril(Q K^T * G) (r beta R)) / |q|                delta_read, a program per chunk, head, tile of values

R is what the values add to what stands at their keys; beta R is written. Lengths are factors on rows of fp32, so that
what products take are the keys as they are. Tiles: K ``[BT, BK]``, V ``[BT, BV]``, S ``[BD, BV]`` with F whole.
Operands have the input's dtype, accumulators are fp32.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.delta_rule.triton.problem import DeltaProblem
from hf_linear_attn.ops.delta_rule.triton.steps import (
    decay_between,
    faded,
    length_scale,
    load_decay,
    sequence_bounds,
    store_sums,
    unit_inverse,
)
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Segments
from hf_linear_attn.ops.triton.primitives import (
    dot,
    exact,
    in_two,
    key_rows,
    keys_of,
    load_operand,
    log2_decay,
    mask_of,
    operand,
    product,
    rows_before,
    segment_bounds,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def inverse_kernel(
    k, beta, g, mask, inverse, b, r, table,
    T, NSEG, delay, HKV,
    k_b, k_h, k_t, beta_b, beta_h, beta_t, g_b, g_h, g_t, m_b,
    F: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a chunk's inverse, its sums of log decays and the lengths of its keys.

    By halves of BH tokens, since products of fp32 of a whole chunk do not fit into registers.
    """
    pid = tl.program_id(0)
    h = (pid % HKV).to(tl.int64)
    _n, row, first, c, end = segment_bounds(table, pid // HKV, T, BT, NSEG, VARLEN)
    if c >= end:
        return
    oh = tl.arange(0, BH)
    at = (row * HKV + h) * T + c
    k = keys_of(k, row, h, k_b, k_h, k_t, delay, DELAYED) + c * k_t
    beta = keys_of(beta, row, h, beta_b, beta_h, beta_t, delay, DELAYED) + c * beta_t
    if GATED:
        g = keys_of(g, row, h, g_b, g_h, g_t, delay, DELAYED) + c * g_t
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    # Of the first half and of the second; without one its rows do not count.
    rows_1 = rows_before(end, c, oh)
    _, counts_1 = key_rows(mask, c, rows_1, oh, first, delay, MASKED, DELAYED)
    rows_2 = rows_before(end, c, BH + oh) & (BH < BT)
    _, counts_2 = key_rows(mask, c, rows_2, BH + oh, first, delay, MASKED, DELAYED)
    weight_1 = tl.load(beta + oh * beta_t, mask=counts_1, other=0.0).to(tl.float32)
    weight_2 = tl.load(beta + (BH + oh) * beta_t, mask=counts_2, other=0.0).to(tl.float32)
    sums_1 = None
    sums_2 = None
    if GATED:
        g_1 = log2_decay(tl.load(g + oh * g_t, mask=counts_1, other=0.0)).to(tl.float64)
        g_2 = log2_decay(tl.load(g + (BH + oh) * g_t, mask=counts_2, other=0.0)).to(tl.float64)
        sums_1 = in_two(tl.cumsum(g_1, 0))
        sums_2 = in_two(tl.cumsum(g_2, 0) + tl.sum(g_1))
        store_sums(b, at + oh, sums_1, rows_1)
        store_sums(b, at + BH + oh, sums_2, rows_2)
    p = tl.zeros([BH, BH], tl.float32)
    q = tl.zeros([BH, BH], tl.float32)
    below = tl.zeros([BH, BH], tl.float32)
    squares_1 = tl.zeros([BH], tl.float32)
    squares_2 = tl.zeros([BH], tl.float32)
    for d in range(0, F, BK):
        od = d + tl.arange(0, BK)
        # [BH, BK]
        x = load_operand(k, oh[:, None] * k_t + od[None, :], counts_1, od < F, F % BK == 0, PRECISION)
        p = dot(x, tl.trans(x), p, PRECISION)
        squares_1 += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        if BH < BT:
            y = load_operand(k, (BH + oh)[:, None] * k_t + od[None, :], counts_2, od < F, F % BK == 0, PRECISION)
            q = dot(y, tl.trans(y), q, PRECISION)
            below = dot(y, tl.trans(x), below, PRECISION)
            squares_2 += tl.sum(y.to(tl.float32) * y.to(tl.float32), 1)
    scale_1 = length_scale(squares_1, NORM)
    scale_2 = length_scale(squares_2, NORM)
    if NORM:
        tl.store(r + at + oh, scale_1, mask=rows_1)
        tl.store(r + at + BH + oh, scale_2, mask=rows_2)
    lower = oh[:, None] > oh[None, :]
    p *= scale_1[:, None] * (scale_1 * weight_1)[None, :] * decay_between(sums_1, sums_1, lower, GATED)
    p = unit_inverse(p, BH, PRECISION)
    o_inverse = inverse + (at + oh)[:, None] * BT + oh[None, :]
    tl.store(o_inverse, p.to(inverse.dtype.element_ty), mask=rows_1[:, None])
    if BH < BT:
        q *= scale_2[:, None] * (scale_2 * weight_2)[None, :] * decay_between(sums_2, sums_2, lower, GATED)
        q = unit_inverse(q, BH, PRECISION)
        below *= scale_2[:, None] * (scale_1 * weight_1)[None, :]
        below *= decay_between(sums_2, sums_1, oh[:, None] >= 0, GATED)
        below = -exact(exact(q, below, PRECISION), p, PRECISION)
        tl.store(o_inverse + BH, tl.zeros([BH, BH], inverse.dtype.element_ty), mask=rows_1[:, None])
        tl.store(o_inverse + BH * BT, below.to(inverse.dtype.element_ty), mask=rows_2[:, None])
        tl.store(o_inverse + BH * BT + BH, q.to(inverse.dtype.element_ty), mask=rows_2[:, None])


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def prepare_kernel(
    k, v, mask, inverse, w, u, b, r, table,
    T, NSEG, delay, HKV,
    k_b, k_h, k_t, v_b, v_h, v_t, m_b,
    F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a chunk's inverse times its keys and values."""
    pid = tl.program_id(0)
    h = (pid % HKV).to(tl.int64)
    _n, row, first, c, end = segment_bounds(table, pid // HKV, T, BT, NSEG, VARLEN)
    if c >= end:
        return
    ot = tl.arange(0, BT)
    at = (row * HKV + h) * T
    k = keys_of(k, row, h, k_b, k_h, k_t, delay, DELAYED) + c * k_t
    v = keys_of(v, row, h, v_b, v_h, v_t, delay, DELAYED) + c * v_t
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    rows = rows_before(end, c, ot)
    _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
    sums, _after, _all = load_decay(b, at, c, end, ot, GATED)
    fading = faded(sums, GATED)
    at += c
    if NORM:
        fading *= tl.load(r + at + ot, mask=rows, other=0.0)
    # [BT, BT]
    x = load_operand(inverse + at * BT, ot[:, None] * BT + ot[None, :], rows, ot < BT, True, PRECISION)
    for d in range(0, F, BK):
        od = d + tl.arange(0, BK)
        # [BT, BK]
        y = load_operand(k, ot[:, None] * k_t + od[None, :], counts, od < F, F % BK == 0, PRECISION)
        y = operand(y.to(tl.float32) * fading[:, None], x.dtype, PRECISION)
        y = product(x, y, PRECISION)
        store_tile(w + at * F, ot[:, None] * F + od[None, :], y, rows, od < F, F % BK == 0)
    for d in range(0, V, BV):
        ov = d + tl.arange(0, BV)
        # [BT, BV]
        y = load_operand(v, ot[:, None] * v_t + ov[None, :], counts, ov < V, V % BV == 0, PRECISION)
        y = product(x, y, PRECISION)
        store_tile(u + at * V, ot[:, None] * V + ov[None, :], y, rows, ov < V, V % BV == 0)


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def walk_kernel(
    k, beta, mask, w, u, b, r, kv0, kv, states, cu, bounds,
    T, NSEG, delay, HKV,
    k_b, k_h, k_t, beta_b, beta_h, beta_t, m_b,
    F: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    INITIAL: tl.constexpr, BOUNDS: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before each chunk, in u's place what its values add, and the final state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    h = ((pid // NV) % HKV).to(tl.int64)
    n = (pid // (NV * HKV)).to(tl.int64)
    row, first, end, i_0, i_1 = sequence_bounds(cu, bounds, n, T, NSEG, BOUNDS, VARLEN)
    od = tl.arange(0, BD)
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    at = (row * HKV + h) * T
    k = keys_of(k, row, h, k_b, k_h, k_t, delay, DELAYED)
    beta = keys_of(beta, row, h, beta_b, beta_h, beta_t, delay, DELAYED)
    w += at * F
    u += at * V
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    in_state = (od < F)[:, None] & (ov < V)[None, :]
    o_state = od[:, None] * V + ov[None, :]
    # [BD, BV]
    s = tl.zeros([BD, BV], tl.float32)
    if INITIAL:
        s = tl.load(kv0 + (n * HKV + h) * (F * V) + o_state, mask=in_state, other=0.0)
    for i in range(i_0, i_1):
        c = first + (i - i_0) * BT
        rows = rows_before(end, c, ot)
        _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        before = states + (i * HKV + h) * (F * V) + o_state
        tl.store(before, s.to(states.dtype.element_ty), mask=in_state)
        # [BT, BD]
        ww = load_operand(w + c * F, ot[:, None] * F + od[None, :], rows, od < F, F == BD, PRECISION)
        # [BT, BV]
        o_u = ot[:, None] * V + ov[None, :]
        y = load_operand(u + c * V, o_u, rows, ov < V, V % BV == 0, PRECISION).to(tl.float32)
        y -= product(ww, operand(s, ww.dtype, PRECISION), PRECISION)
        store_tile(u + c * V, o_u, y, rows, ov < V, V % BV == 0)
        _sums, after, all_of_it = load_decay(b, at, c, end, ot, GATED)
        weight = after * tl.load(beta + (c + ot) * beta_t, mask=counts, other=0.0).to(tl.float32)
        if NORM:
            weight *= tl.load(r + at + c + ot, mask=rows, other=0.0)
        # [BT, BD]
        x = load_operand(k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < F, F == BD, PRECISION)
        if GATED:
            s *= all_of_it
        s = dot(tl.trans(x), operand(y * weight[:, None], x.dtype, PRECISION), s, PRECISION)
    tl.store(kv + (n * HKV + h) * (F * V) + o_state, s, mask=in_state)


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def read_kernel(
    q, k, beta, mask, u, b, r, states, o, table,
    T, NSEG, delay, HKV, G,
    q_b, q_h, q_t, k_b, k_h, k_t, beta_b, beta_h, beta_t, o_b, o_h, o_t, m_b,
    F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a chunk's queries of one head, for a tile of values."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = ((pid // NV) % (HKV * G)).to(tl.int64)
    i_s = pid // (NV * HKV * G)
    _n, row, first, c, end = segment_bounds(table, i_s, T, BT, NSEG, VARLEN)
    if c >= end:
        return
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    h = i_h // G
    at = (row * HKV + h) * T
    q += row * q_b + i_h * q_h + c * q_t
    k = keys_of(k, row, h, k_b, k_h, k_t, delay, DELAYED) + c * k_t
    beta = keys_of(beta, row, h, beta_b, beta_h, beta_t, delay, DELAYED) + c * beta_t
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    rows = rows_before(end, c, ot)
    _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
    states += (i_s.to(tl.int64) * HKV + h) * (F * V)
    acc = tl.zeros([BT, BV], tl.float32)
    p = tl.zeros([BT, BT], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for d in range(0, F, BK):
        od = d + tl.arange(0, BK)
        # [BT, BK]
        y = load_operand(q, ot[:, None] * q_t + od[None, :], rows, od < F, F % BK == 0, PRECISION)
        x = load_operand(k, ot[:, None] * k_t + od[None, :], counts, od < F, F % BK == 0, PRECISION)
        # [BK, BV]
        s = load_operand(states, od[:, None] * V + ov[None, :], od < F, ov < V, V % BV == 0, PRECISION)
        p = dot(y, tl.trans(x), p, PRECISION)
        acc = dot(y, s, acc, PRECISION)
        squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), 1)
    sums, _after, _all = load_decay(b, at, c, end, ot, GATED)
    weight = tl.load(beta + ot * beta_t, mask=counts, other=0.0).to(tl.float32)
    if NORM:
        weight *= tl.load(r + at + c + ot, mask=rows, other=0.0)
    if GATED:
        acc *= faded(sums, GATED)[:, None]
    p = p * decay_between(sums, sums, ot[:, None] >= ot[None, :], GATED) * weight[None, :]
    # [BT, BV]
    y = load_operand(u + (at + c) * V, ot[:, None] * V + ov[None, :], rows, ov < V, V % BV == 0, PRECISION)
    acc = dot(operand(p, y.dtype, PRECISION), y, acc, PRECISION)
    acc *= length_scale(squares, NORM)[:, None]
    o += row * o_b + i_h * o_h + c * o_t
    store_tile(o, ot[:, None] * o_t + ov[None, :], acc, rows, ov < V, V % BV == 0)


class Forward(NamedTuple):
    """What the forward computes: outputs ``[B, H, T, V]`` and the final state ``[B or N, HKV, F, V]``."""

    o: Tensor
    kv: Tensor


class Walked(NamedTuple):
    """What is known of all chunks after the walk, beside the queries that see a key first.

    Attributes:
        inverse: X ``[B, HKV, T, C]``.
        w: W ``[B, HKV, T, F]``.
        u: R ``[B, HKV, T, V]``.
        b: Sums of log decays to base 2, as two numbers whose sum they are ``[B, HKV, T, 2]``, or None.
        r: Reciprocal lengths of keys ``[B, HKV, T]``, or None.
        states: State before each chunk ``[chunks, HKV, F, V]``.
    """

    inverse: Tensor
    w: Tensor
    u: Tensor
    b: Tensor | None
    r: Tensor | None
    states: Tensor


def allocate_forward(p: DeltaProblem) -> Forward:
    """Allocate the results of the forward."""
    return Forward(empty_like_tokens(p.q, p.v.shape[3]), p.state())


def walk_launches(p: DeltaProblem, chunks: Segments, kv: Tensor) -> tuple[Walked, list[Launch]]:
    """Plan the inverse of each chunk and the walk, which writes the final state to ``kv``; return what they leave."""
    k, v = p.k, p.v
    F, V, HKV = k.shape[3], v.shape[3], k.shape[1]
    found = Walked(
        p.of_keys(p.tokens),
        p.of_keys(F),
        p.of_keys(V),
        None if p.log_decay is None else p.of_keys(2, torch.float32),
        p.numbers(HKV) if p.l2norm else None,
        p.states(chunks),
    )
    known = p.shared(chunks) | found._asdict() | {"kv": kv}
    programs = chunks.count * HKV
    inverse = p.launch("delta_inverse", inverse_kernel, programs, known, (k,), (found.inverse,))
    prepare = p.launch("delta_prepare", prepare_kernel, programs, known, (k, v, found.inverse), (found.w, found.u))
    programs = p.rows * HKV * -(-V // p.tile("delta_walk").width)
    reads, writes = (k, found.w, found.u), (found.u, found.states, kv)
    walk = p.launch("delta_walk", walk_kernel, programs, known, reads, writes)
    return found, [inverse, prepare, walk]


def forward_launches(p: DeltaProblem) -> tuple[Forward, list[Launch]]:
    """Plan the forward: the results, allocated but not computed, and the launches that compute them, in order."""
    chunks, out = p.chunks(), allocate_forward(p)
    found, launches = walk_launches(p, chunks, out.kv)
    known = p.shared(chunks) | found._asdict() | {"o": out.o}
    programs = chunks.count * p.q.shape[1] * -(-p.v.shape[3] // p.tile("delta_read").width)
    read = p.launch("delta_read", read_kernel, programs, known, (p.q, p.k, found.u, found.states), (out.o,))
    return out, [*launches, read]
