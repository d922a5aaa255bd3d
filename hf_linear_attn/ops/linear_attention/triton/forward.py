"""Forward kernels: the sums of each segment, their prefix, and the walk that writes the output.

With phi_q, phi_k the features, S and z running sums in fp32 registers, and chunks c of BT tokens::

    o_c = (tril(phi_q phi_k^T) v + phi_q S) / (tril(phi_q phi_k^T) 1 + phi_q z + eps)
    S += phi_k^T v,  z += phi_k^T 1

A sequence is walked by one program per query head and tile of values. Where that leaves processors idle it is cut into
segments: `segment_state` sums each one's keys, `segment_scan` turns the sums into what each segment starts from.
Tiles: q, k ``[BT, BD]`` with the whole head; v, o ``[BT, BV]``; S ``[BD, BV]``. Operands have the input's dtype,
accumulators are fp32.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, padded, strides, walk
from hf_linear_attn.ops.triton.primitives import (
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


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "m_b"])
def segment_state_kernel(
    k, v, mask, states, table,
    T, L, NSEG, delay, HKV,
    k_b, k_h, k_t, v_b, v_h, v_t, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Sum ``phi(k)^T v`` and ``phi(k)`` over one segment."""
    ND: tl.constexpr = (D + BD - 1) // BD
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_d = (pid // NV) % ND
    i_h = (pid // (NV * ND)) % HKV
    i_s = pid // (NV * ND * HKV)
    _n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    od = i_d * BD + tl.arange(0, BD)
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    k += row * k_b + i_h.to(tl.int64) * k_h
    v += row * v_b + i_h.to(tl.int64) * v_h
    if MASKED:
        mask += row * m_b
    if DELAYED:
        k -= delay.to(tl.int64) * k_t
        v -= delay.to(tl.int64) * v_t
        if MASKED:
            mask -= delay
    s = tl.zeros([BD, BV], tl.float32)
    z = tl.zeros([BD], tl.float32)
    for c in range(start, end, BT):
        _, counts = key_rows(mask, c, c + ot < end, ot, first, delay, MASKED, DELAYED)
        # [BT, BD]
        fk = load_features(
            k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < D, D % BD == 0, MAP, PRECISION, PIN
        )
        # [BT, BV]
        vv = load_operand(v + c * v_t, ot[:, None] * v_t + ov[None, :], counts, ov < V, V % BV == 0, PRECISION)
        s = dot(tl.trans(fk), vv, s, PRECISION)
        z += tl.sum(fk.to(tl.float32), 0)
    states += (i_s.to(tl.int64) * HKV + i_h) * (D * V + D)
    tl.store(states + od[:, None] * V + ov[None, :], s, mask=(od < D)[:, None] & (ov < V)[None, :])
    if i_v == 0:
        tl.store(states + D * V + od, z, mask=od < D)


@triton.jit(do_not_specialize=["NSEG"])
def segment_scan_kernel(
    states, kv0, z0, kv, z, bounds,
    NSEG, HKV,
    DV: tl.constexpr, D: tl.constexpr, BE: tl.constexpr,
    VARLEN: tl.constexpr, REVERSE: tl.constexpr, INITIAL: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Replace each segment's sums by the sums of all before it (after it where REVERSE), in a fixed order."""
    E: tl.constexpr = DV + D
    NE: tl.constexpr = (E + BE - 1) // BE
    pid = tl.program_id(0)
    i_h = (pid // NE) % HKV
    n = pid // (NE * HKV)
    if VARLEN:
        a = tl.load(bounds + n)
        b = tl.load(bounds + n + 1)
    else:
        a = n.to(tl.int64) * NSEG
        b = a + NSEG
    oe = (pid % NE) * BE + tl.arange(0, BE)
    in_kv = oe < DV
    in_z = (oe >= DV) & (oe < E)
    nh = n.to(tl.int64) * HKV + i_h
    acc = tl.zeros([BE], tl.float32)
    if INITIAL:
        acc = tl.load(kv0 + nh * DV + oe, mask=in_kv, other=0.0)
        acc += tl.load(z0 + nh * D + oe - DV, mask=in_z, other=0.0)
    for j in range(0, b - a):
        i = a + j
        if REVERSE:
            i = b - 1 - j
        pointer = states + (i * HKV + i_h) * E + oe
        x = tl.load(pointer, mask=oe < E, other=0.0)
        if PREFIX:
            tl.store(pointer, acc, mask=oe < E)
        acc += x
    tl.store(kv + nh * DV + oe, acc, mask=in_kv)
    tl.store(z + nh * D + oe - DV, acc, mask=in_z)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "eps", "d_b", "m_b"])
def forward_kernel(
    q, k, v, mask, o, den, kv0, z0, kv, z_out, states, table,
    T, L, NSEG, delay, eps, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, d_b, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr, FINAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Walk one segment of one query head and write its outputs and normalisers."""
    NV: tl.constexpr = (V + BV - 1) // BV
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_s = pid // (NV * H)
    i_hk = i_h // G
    n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, VARLEN)
    od = tl.arange(0, BD)
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    q += row * q_b + i_h.to(tl.int64) * q_h
    o += row * o_b + i_h.to(tl.int64) * o_h
    den += row * d_b + i_h.to(tl.int64) * T
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
    in_state = (od < D)[:, None] & (ov < V)[None, :]
    o_state = od[:, None] * V + ov[None, :]
    # [BD, BV] and [BD]
    if SOURCE == "segment":
        states += (i_s.to(tl.int64) * (H // G) + i_hk) * (D * V + D)
        s = tl.load(states + o_state, mask=in_state, other=0.0)
        z = tl.load(states + D * V + od, mask=od < D, other=0.0)
    elif SOURCE == "sequence":
        s = tl.load(kv0 + (n * (H // G) + i_hk) * (D * V) + o_state, mask=in_state, other=0.0)
        z = tl.load(z0 + (n * (H // G) + i_hk) * D + od, mask=od < D, other=0.0)
    else:
        s = tl.zeros([BD, BV], tl.float32)
        z = tl.zeros([BD], tl.float32)
    causal = ot[:, None] >= ot[None, :]
    for c in range(start, end, BT):
        rows = c + ot < end
        if CAUSAL:
            _, counts = key_rows(mask, c, rows, ot, first, delay, MASKED, DELAYED)
            # [BT, BD]
            fk = load_features(
                k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN
            )
            # [BT, BV]
            vv = load_operand(v + c * v_t, ot[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        # [BT, BD]
        x = load_tile(q + c * q_t, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D)
        fq = rounded(phi(x, MAP), x.dtype, PRECISION, PIN)
        acc = product(fq, operand(s, x.dtype, PRECISION), PRECISION)
        total = tl.sum(fq.to(tl.float32) * z[None, :], 1)
        if CAUSAL:
            p = tl.where(causal, product(fq, tl.trans(fk), PRECISION), 0.0)
            total += tl.sum(p, 1)
            acc = dot(operand(p, x.dtype, PRECISION), vv, acc, PRECISION)
            s = dot(tl.trans(fk), vv, s, PRECISION)
            z += tl.sum(fk.to(tl.float32), 0)
        if SIGNED:
            total = tl.where(total < 0, total - eps, total + eps)
        else:
            total += eps
        acc = acc * (1.0 / total)[:, None]
        store_tile(o + c * o_t, ot[:, None] * o_t + ov[None, :], acc, rows, ov < V, EXACT_V)
        if i_v == 0:
            tl.store(den + c + ot, total, mask=rows)
    if FINAL:  # noqa: SIM102 - known when compiling; the other is not
        if i_h % G == 0:
            tl.store(kv + (n * (H // G) + i_hk) * (D * V) + o_state, s, mask=in_state)
            if i_v == 0:
                tl.store(z_out + (n * (H // G) + i_hk) * D + od, z, mask=od < D)


class Forward(NamedTuple):
    """What the forward leaves behind.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        den: Guarded normalisers ``[B, H, T]``, fp32.
        kv: Final state ``[B or N, HKV, D, V]``, fp32.
        z: Its normaliser.
        prefixes: What each segment starts from, ``[segments, HKV, D V + D]``; empty where sequences are whole.
    """

    o: Tensor
    den: Tensor
    kv: Tensor
    z: Tensor
    prefixes: Tensor


def allocate_forward(p: Problem, segments: Segments) -> Forward:
    """Allocate the results of the forward."""
    q, k, v = p.q, p.k, p.v

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=q.device)

    return Forward(
        empty_like_tokens(q, v.shape[3]),
        empty(*q.shape[:3]),
        empty(p.rows, k.shape[1], k.shape[3], v.shape[3]),
        empty(p.rows, k.shape[1], k.shape[3]),
        p.states(segments) if p.causal and segments.split else empty(0),
    )


def scan_launch(
    p: Problem,
    states: Tensor,
    segments: Segments,
    initial: tuple[Tensor | None, Tensor | None],
    final: tuple[Tensor, Tensor],
    *,
    reverse: bool,
) -> Launch:
    """Plan the scan over segments."""
    D, V = p.k.shape[3], p.v.shape[3]
    chosen = p.tile("scan")
    block = min(chosen.width, padded(D * V + D))
    arguments = {
        "states": states,
        "kv0": initial[0],
        "z0": initial[1],
        "kv": final[0],
        "z": final[1],
        "bounds": segments.bounds,
        "NSEG": segments.per_row,
        "HKV": p.k.shape[1],
        "DV": D * V,
        "D": D,
        "BE": block,
        # A table of whole sequences has one segment each, as dense rows do.
        "VARLEN": segments.bounds is not None,
        "REVERSE": reverse,
        "INITIAL": initial[0] is not None,
        "PREFIX": p.causal,
    }
    programs = p.rows * p.k.shape[1] * -(-(D * V + D) // block)
    return Launch("scan", segment_scan_kernel, programs, arguments, chosen)


def state_launch(p: Problem, states: Tensor, segments: Segments) -> Launch:
    """Plan the sums over each segment's keys."""
    k, v, chosen = p.k, p.v, p.tile("state")
    wide = min(chosen.width, padded(v.shape[3]))
    arguments = {
        **{"k": k, "v": v, "states": states, "T": k.shape[2], "HKV": k.shape[1]},
        **strides("k", k),
        **strides("v", v),
        **p.sizes(),
        **p.keys(),
        **walk(segments),
        **{"BD": chosen.width, "BV": wide, "BT": chosen.tokens},
    }
    tiles = -(-k.shape[3] // chosen.width) * -(-v.shape[3] // wide)
    programs = segments.count * k.shape[1] * tiles
    return Launch("state", segment_state_kernel, programs, arguments, chosen, (k, v))


def forward_launches(p: Problem, eps: float) -> tuple[Forward, list[Launch]]:
    """Plan the forward.

    Args:
        p: The problem.
        eps: Added to the normaliser, away from 0.

    Returns:
        The results, allocated but not computed, and the launches that compute them, in order.
    """
    q, k, v, chosen = p.q, p.k, p.v, p.tile("forward")
    segments = p.segments("forward", q.shape[2])
    out = allocate_forward(p, segments)
    launches = []
    kv0, z0 = p.kv0, p.z0
    split = p.causal and segments.split
    if split:
        launches.append(state_launch(p, out.prefixes, segments))
        launches.append(scan_launch(p, out.prefixes, segments, (kv0, z0), (out.kv, out.z), reverse=False))
    elif not p.causal:
        of_keys = p.segments("state", k.shape[2])
        states = p.states(of_keys)
        launches.append(state_launch(p, states, of_keys))
        launches.append(scan_launch(p, states, of_keys, (kv0, z0), (out.kv, out.z), reverse=False))
        kv0, z0 = out.kv, out.z
    arguments = {
        **{"q": q, "k": k, "v": v, "o": out.o, "den": out.den, "kv0": kv0, "z0": z0, "kv": out.kv},
        **{"z_out": out.z, "states": out.prefixes, "T": q.shape[2], "H": q.shape[1], "G": p.group, "eps": eps},
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        **strides("o", out.o),
        **{"d_b": out.den.stride(0), "BD": padded(k.shape[3]), "BV": chosen.width, "BT": chosen.tokens},
        **p.sizes(),
        **p.keys(),
        **walk(segments),
        "SIGNED": not elementwise_map(p.phi).non_negative,
        "CAUSAL": p.causal,
        "SOURCE": "segment" if split else "none" if kv0 is None else "sequence",
        "FINAL": p.causal and not split,
    }
    programs = segments.count * q.shape[1] * -(-v.shape[3] // chosen.width)
    reads = (q, k, v) if p.causal else (q,)
    launches.append(Launch("forward", forward_kernel, programs, arguments, chosen, reads, (out.o, out.den)))
    return out, launches
