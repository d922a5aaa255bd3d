"""Backward kernels, one per gradient, without atomics.

With ``w = 1 / den`` per query, ``delta = do . o`` and fq = w phi_q::

    dphi_q = w (tril(do v^T - delta) phi_k + do S^T - delta z^T)      a walk forwards, S and z as in the forward
    dphi_k = tril(do v^T - delta)^T fq + v R^T + r                    a walk in reverse, R += fq^T do, r -= fq^T delta
    dv     = tril(fq phi_k^T)^T do + phi_k R                          the same walk, without r

so that `do` enters every product as it was loaded and the division costs one multiplication per feature. R and r start
from the gradient of the final state and end as that of the initial one. Each kernel holds the contracted dimension
whole and tiles the other: dq and dk tile D (state ``[V, BD]``), dv tiles V (state ``[D, BV]``). Chunks have BT tokens;
accumulators are fp32.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.linear_attention.triton.forward import Forward, scan_launch
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, Tile, padded, strides, walk
from hf_linear_attn.ops.triton.primitives import (
    derivative,
    dot,
    key_rows,
    load_features,
    load_operand,
    load_tile,
    operand,
    phi,
    product,
    rounded,
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
    q, o, do, den, delta, states, table,
    T, L, NSEG, HKV,
    q_b, q_h, q_t, o_b, o_h, o_t, do_b, do_h, do_t, d_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
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
    for g in range(G):
        i_h = (i_hk * G + g).to(tl.int64)
        q_g = q + row * q_b + i_h * q_h
        o_g = o + row * o_b + i_h * o_h
        do_g = do + row * do_b + i_h * do_h
        offset = row * d_b + i_h * T
        for c in range(start, end, BT):
            rows = c + ot < end
            # [BT, BV]
            dd = load_operand(do_g + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
            oo = load_tile(o_g + c * o_t, ot[:, None] * o_t + ov[None, :], rows, ov < V, EXACT_V)
            # [BT, BD]
            x = load_tile(q_g + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
            w = 1.0 / tl.load(den + offset + c + ot, mask=rows, other=1.0)
            dl = tl.sum(oo.to(tl.float32) * dd.to(tl.float32), 1)
            if i_d == 0:
                tl.store(delta + offset + c + ot, dl, mask=rows)
            fq = rounded(phi(x, MAP) * w[:, None], x.dtype, PRECISION, PIN)
            r = dot(tl.trans(fq), dd, r, PRECISION)
            rz -= tl.sum(fq.to(tl.float32) * dl[:, None], 0)
    states += (i_s.to(tl.int64) * HKV + i_hk) * (D * V + D)
    tl.store(states + od[:, None] * V + ov[None, :], r, mask=(od < D)[:, None] & (ov < V)[None, :])
    tl.store(states + D * V + od, rz, mask=od < D)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "d_b", "m_b"])
def dq_kernel(
    q, k, v, mask, do, den, delta, dq, kv0, z0, states, table,
    T, L, NSEG, delay, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, d_b, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
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
        rows = c + ot < end
        # [BT, BV]
        dd = load_operand(do + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION)
        dl = tl.load(delta + c + ot, mask=rows, other=0.0)
        acc = product(dd, operand(s, dd.dtype, PRECISION), PRECISION)
        acc -= dl[:, None] * z[None, :]
        if CAUSAL:
            _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
            # [BT, BV]
            vv = load_operand(v + c * v_t, ot[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
            # [BT, BD]
            fk = load_features(
                k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN
            )
            p = tl.where(causal, product(dd, tl.trans(vv), PRECISION) - dl[:, None], 0.0)
            acc = dot(operand(p, dd.dtype, PRECISION), fk, acc, PRECISION)
            s = dot(tl.trans(vv), fk, s, PRECISION)
            z += tl.sum(fk.to(tl.float32), 0)
        # [BT, BD]
        x = load_tile(q + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
        w = 1.0 / tl.load(den + c + ot, mask=rows, other=1.0)
        acc = acc * w[:, None] * derivative(x, MAP)
        store_tile(dq + c * dq_t, ot[:, None] * dq_t + od[None, :], acc, rows, od < D, EXACT_D)


@triton.jit(do_not_specialize=["T", "S", "L", "NSEG", "delay", "d_b", "m_b"])
def dk_kernel(
    q, k, v, mask, do, den, delta, dk, kv1, z1, dkv0, dz0, states, table,
    T, S, L, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, d_b, m_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr, FINAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
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
        rows = c + ot < end
        there, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        # [BT, BV]
        vv = load_operand(v + c * v_t, ot[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        acc = product(vv, operand(r, vv.dtype, PRECISION), PRECISION)
        acc += rz[None, :]
        if CAUSAL:
            for g in range(G):
                i_h = (i_hk * G + g).to(tl.int64)
                # [BT, BV]
                dd = load_operand(
                    do + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION
                )
                # [BT, BD]
                x = load_tile(q + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
                w = 1.0 / tl.load(den + i_h * T + c + ot, mask=rows, other=1.0)
                dl = tl.load(delta + i_h * T + c + ot, mask=rows, other=0.0)
                fq = rounded(phi(x, MAP) * w[:, None], x.dtype, PRECISION, PIN)
                p = tl.where(causal, product(vv, tl.trans(dd), PRECISION) - dl[None, :], 0.0)
                acc = dot(operand(p, x.dtype, PRECISION), fq, acc, PRECISION)
                r = dot(tl.trans(dd), fq, r, PRECISION)
                rz -= tl.sum(fq.to(tl.float32) * dl[:, None], 0)
        # [BT, BD]
        x = load_tile(k + c * k_t, ot[:, None] * k_t + od[None, :], there, od < D, EXACT_D)
        acc = acc * derivative(x, MAP)
        if MASKED:
            acc = tl.where(counts[:, None], acc, 0.0)
        store_tile(dk + c * dk_t, ot[:, None] * dk_t + od[None, :], acc, there, od < D, EXACT_D)
    if FINAL:
        tl.store(dkv0 + (n * HKV + i_hk) * (D * V) + o_state, r, mask=in_state)
        tl.store(dz0 + (n * HKV + i_hk) * D + od, rz, mask=od < D)


@triton.jit(do_not_specialize=["T", "S", "L", "NSEG", "delay", "d_b", "m_b"])
def dv_kernel(
    q, k, mask, do, den, dv, kv1, states, table,
    T, S, L, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, do_b, do_h, do_t, dv_b, dv_h, dv_t, d_b, m_b,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
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
        rows = c + ot < end
        there, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
        # [BT, BD]
        fk = load_features(k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN)
        acc = product(fk, operand(r, fk.dtype, PRECISION), PRECISION)
        if CAUSAL:
            for g in range(G):
                i_h = (i_hk * G + g).to(tl.int64)
                # [BT, BD]
                x = load_tile(q + i_h * q_h + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
                # [BT, BV]
                dd = load_operand(
                    do + i_h * do_h + c * do_t, ot[:, None] * do_t + ov[None, :], rows, ov < V, EXACT_V, PRECISION
                )
                w = 1.0 / tl.load(den + i_h * T + c + ot, mask=rows, other=1.0)
                fq = rounded(phi(x, MAP) * w[:, None], x.dtype, PRECISION, PIN)
                p = tl.where(causal, product(fk, tl.trans(fq), PRECISION), 0.0)
                acc = dot(operand(p, x.dtype, PRECISION), dd, acc, PRECISION)
                r = dot(tl.trans(fq), dd, r, PRECISION)
        if MASKED:
            acc = tl.where(counts[:, None], acc, 0.0)
        store_tile(dv + c * dv_t, ot[:, None] * dv_t + ov[None, :], acc, there, ov < V, EXACT_V)


class Saved(NamedTuple):
    """What the backward needs of the forward's results.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        den: Guarded normalisers ``[B, H, T]``, fp32.
        kv: Final state ``[B or N, HKV, D, V]`` where not causal.
        z: Its normaliser.
        prefixes: Where dq walks segments, what they start from: ``[segments, HKV, D V + D]`` of packed sequences,
            else ``[B, segments - 1, HKV, D V + D]``, since the first one starts from the initial state.
    """

    o: Tensor
    den: Tensor
    kv: Tensor | None
    z: Tensor | None
    prefixes: Tensor | None


def query_segments(p: Problem) -> Segments:
    """Cut the sequences for dq: where causal, at some of the forward's cuts, since there prefixes are known."""
    tokens = p.q.shape[2]
    if not p.causal:
        return p.segments("dq", tokens)
    forwards = p.segments("forward", tokens)
    return p.coarser("dq", tokens, forwards) if forwards.split else forwards


def save(p: Problem, out: Forward) -> Saved:
    """Pick what the backward needs; dq has more programs per segment than the forward, so it needs fewer prefixes."""
    if not p.causal:
        return Saved(out.o, out.den, out.kv, out.z, None)
    coarse = query_segments(p)
    prefixes: Tensor | None = None
    if coarse.split:
        fine = p.segments("forward", p.q.shape[2])
        if coarse.table is None or coarse.bounds is None or fine.bounds is None:
            every = coarse.length // fine.length
            prefixes = out.prefixes.unflatten(0, (p.rows, fine.per_row))[:, every::every].contiguous()
        else:
            n, first, start, _ = coarse.table.unbind(1)
            index = fine.bounds[n] + (start - first) // fine.length
            prefixes = out.prefixes[index.clamp_(max=fine.count - 1)]
    return Saved(out.o, out.den, None, None, prefixes)


def query_starts(p: Problem, prefixes: Tensor) -> Tensor:
    """Return what each of dq's segments starts from, ``[segments, HKV, D V + D]``."""
    if p.cu_seqlens is not None:
        return prefixes
    first = torch.zeros_like(prefixes[:, 0])
    if p.kv0 is not None and p.z0 is not None:
        torch.cat([p.kv0.flatten(2), p.z0], 2, out=first)
    return torch.cat([first[:, None], prefixes], 1).flatten(0, 1)


class Wanted(NamedTuple):
    """Which gradients somebody asked for."""

    q: bool = True
    k: bool = True
    v: bool = True
    state: bool = True


EVERY = Wanted()


class Backward(NamedTuple):
    """Gradients of q, k, v and of the initial state; empty where nobody asked for them."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dkv0: Tensor
    dz0: Tensor


def allocate_backward(p: Problem, wanted: Wanted) -> Backward:
    """Allocate the gradients; keys that no query sees, because they lag, get zeros."""

    def tokens(x: Tensor, asked: bool) -> Tensor:
        return empty_like_tokens(x, x.shape[3]) if asked else x.new_empty(0)

    # The walk that ends in the initial state's gradient is dk's.
    dk, dv = tokens(p.k, wanted.k or wanted.state), tokens(p.v, wanted.v)
    if p.delay:
        dk.zero_()
        dv.zero_()
    state = p.rows, p.k.shape[1], p.k.shape[3]
    return Backward(
        tokens(p.q, wanted.q),
        dk,
        dv,
        torch.empty(*state, p.v.shape[3], dtype=torch.float32, device=p.q.device),
        torch.empty(state, dtype=torch.float32, device=p.q.device),
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


def backward_launches(
    p: Problem, saved: Saved, do: Tensor, dkv: Tensor | None, dz: Tensor | None, wanted: Wanted = EVERY
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
    q, k, v, o, den = p.q, p.k, p.v, saved.o, saved.den
    (_, H, T, D), (_, HKV, S, V), G = q.shape, v.shape, p.group
    out = allocate_backward(p, wanted)
    delta = torch.empty_like(den)
    # dv has the fewest programs per segment of the two that walk keys.
    of_keys = p.segments("dv", S)
    launches = []
    states: Tensor | None = None
    seed: tuple[Tensor | None, Tensor | None] = dkv, dz
    of_key_side = wanted.k or wanted.v or wanted.state
    if of_key_side and (of_keys.split or not p.causal):
        chosen = p.tile("reverse_state")
        summed = of_keys if p.causal else p.segments("reverse_state", T)
        states = p.states(summed)
        arguments = {
            **{"q": q, "o": o, "do": do, "den": den, "delta": delta, "states": states, "T": T, "HKV": HKV},
            **strides("q", q),
            **strides("o", o),
            **strides("do", do),
            **{"d_b": den.stride(0), "G": G, "BD": chosen.width, "BV": padded(V), "BT": chosen.tokens},
            **p.sizes(),
            **walk(summed),
        }
        programs = summed.count * HKV * -(-D // chosen.width)
        launches += [
            Launch("reverse_state", reverse_state_kernel, programs, arguments, chosen, (q, o, do, den), (delta,)),
            scan_launch(p, states, summed, seed, (out.dkv0, out.dz0), reverse=True),
        ]
        if not p.causal:
            seed = out.dkv0, out.dz0
    elif wanted.q or wanted.k or wanted.state:
        launches.append(delta_launch(p.tile("delta"), o, do, delta))

    shared = {
        **{"q": q, "k": k, "do": do, "den": den, "T": T, "d_b": den.stride(0), "CAUSAL": p.causal},
        **strides("q", q),
        **strides("k", k),
        **strides("do", do),
        **p.sizes(),
        **p.keys(),
    }
    errors = (do, den, delta)
    if wanted.q:
        chosen = p.tile("dq")
        of_queries = query_segments(p)
        kv0, z0 = (p.kv0, p.z0) if p.causal else (saved.kv, saved.z)
        starts = None if saved.prefixes is None else query_starts(p, saved.prefixes)
        arguments = {
            **shared,
            **{"v": v, "delta": delta, "dq": out.dq, "kv0": kv0, "z0": z0, "states": starts, "H": H, "G": G},
            **strides("v", v),
            **strides("dq", out.dq),
            **{"BD": chosen.width, "BV": padded(V), "BT": chosen.tokens},
            **walk(of_queries),
            "SOURCE": "segment" if starts is not None else "none" if kv0 is None else "sequence",
        }
        reads: tuple[Tensor, ...] = (q, *errors, k, v) if p.causal else (q, *errors)
        programs = of_queries.count * H * -(-D // chosen.width)
        launches.append(Launch("dq", dq_kernel, programs, arguments, chosen, reads, (out.dq,)))

    split = p.causal and of_keys.split
    shared |= {"S": S, "HKV": HKV, "G": G, "kv1": seed[0], "states": states, **walk(of_keys)}
    shared["SOURCE"] = "segment" if split else "none" if seed[0] is None else "sequence"
    final = p.causal and not split and wanted.state
    if wanted.k or final:
        chosen = p.tile("dk")
        arguments = {
            **shared,
            **{"v": v, "delta": delta, "dk": out.dk, "z1": seed[1], "dkv0": out.dkv0, "dz0": out.dz0},
            **strides("v", v),
            **strides("dk", out.dk),
            **{"BD": chosen.width, "BV": padded(V), "BT": chosen.tokens, "FINAL": final},
        }
        reads = (k, v, q, *errors) if p.causal else (k, v)
        programs = of_keys.count * HKV * -(-D // chosen.width)
        launches.append(Launch("dk", dk_kernel, programs, arguments, chosen, reads, (out.dk,)))
    if wanted.v:
        chosen = p.tile("dv")
        arguments = {
            **shared,
            "dv": out.dv,
            **strides("dv", out.dv),
            **{"BD": padded(D), "BV": chosen.width, "BT": chosen.tokens},
        }
        reads = (k, q, do, den) if p.causal else (k,)
        programs = of_keys.count * HKV * -(-V // chosen.width)
        launches.append(Launch("dv", dv_kernel, programs, arguments, chosen, reads, (out.dv,)))
    return out, launches
