"""Forward kernels: the sums of each segment, their prefix, and the walk that writes the output.

With phi_q, phi_k the features, S and z running sums in fp32 registers, and chunks c of BT tokens::

    o_c = (tril(phi_q phi_k^T) v + phi_q S) / (tril(phi_q phi_k^T) 1 + phi_q z + eps)
    S += phi_k^T v,  z += phi_k^T 1

Where sums fade, b a chunk's sums of log decays, ``phi_q`` is ``exp(b) phi_q`` where it meets S and z, the weights of
pairs are ``exp(b_i - b_j)`` times theirs, S and z fall by ``exp(b_C)``, and a key adds ``exp(b_C - b)`` of itself.

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
from hf_linear_attn.ops.linear_attention.triton.fade import Fades, Starts, fade_launches
from hf_linear_attn.ops.linear_attention.triton.model import choose
from hf_linear_attn.ops.linear_attention.triton.steps import (
    attend,
    counted_in,
    faded,
    features_product,
    fold,
    guarded,
    kept_by_chunk,
    load_sums,
    read,
    read_mass,
    read_stored,
    sums_at,
    sums_since,
    sums_until,
    weigh,
)
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Problem, Segments, Tile, padded, planned
from hf_linear_attn.ops.triton.primitives import (
    exact,
    key_rows,
    keys_of,
    load_features,
    load_operand,
    load_tile,
    mask_of,
    operand,
    phi,
    product,
    rounded,
    rows_before,
    segment_bounds,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "m_b"])
def segment_state_kernel(
    k, v, mask, states, table, b,
    T, L, NSEG, delay, HKV,
    k_b, k_h, k_t, v_b, v_h, v_t, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr,
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
    k = keys_of(k, row, i_h, k_b, k_h, k_t, delay, DELAYED)
    v = keys_of(v, row, i_h, v_b, v_h, v_t, delay, DELAYED)
    if FADED:
        b += (row * HKV + i_h) * 2 * T
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    s = tl.zeros([BD, BV], tl.float32)
    z = tl.zeros([BD], tl.float32)
    BY_PRODUCT: tl.constexpr = k.dtype.element_ty == tl.bfloat16 and not FADED
    if BY_PRODUCT:
        counted = tl.zeros([BD, 16], tl.float32)
    for c in range(start, end, BT):
        _, counts = key_rows(mask, c, rows_before(end, c, ot), ot, first, delay, MASKED, DELAYED)
        # [BT, BD]
        fk = load_features(
            k + c * k_t, ot[:, None] * k_t + od[None, :], counts, od < D, D % BD == 0, MAP, PRECISION, PIN
        )
        # [BT, BV]
        vv = load_operand(v + c * v_t, ot[:, None] * v_t + ov[None, :], counts, ov < V, V % BV == 0, PRECISION)
        if FADED:
            kept = tl.exp2(sums_until(b, T, end, start, c, end, ot))
            s = fold(fk, faded(vv, kept, PRECISION), s, PRECISION)
            z += tl.sum(fk.to(tl.float32) * kept[:, None], 0)
        else:
            s = fold(fk, vv, s, PRECISION)
            if BY_PRODUCT:
                counted = counted_in(fk, counted, PRECISION)
            else:
                z += tl.sum(fk.to(tl.float32), 0)
    if BY_PRODUCT:
        z = tl.max(counted, 1)
    states += (i_s.to(tl.int64) * HKV + i_h) * (D * V + D)
    tl.store(states + od[:, None] * V + ov[None, :], s, mask=(od < D)[:, None] & (ov < V)[None, :])
    if i_v == 0:
        tl.store(states + D * V + od, z, mask=od < D)


@triton.jit(do_not_specialize=["NSEG"])
def segment_scan_kernel(
    sums, kv0, z0, starts, parts, kv, z, bounds, totals,
    NSEG, HKV,
    DV: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    VARLEN: tl.constexpr, REVERSE: tl.constexpr, INITIAL: tl.constexpr, STARTS: tl.constexpr, FADED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sum of all segments before each one (after it where REVERSE), in a fixed order, and that of all.

    Where sums fade, each segment takes its part of what came before.

    BN segments are read at a time, since a read is waited for longer than it takes. STARTS says for which walk: one
    that carries its state gets it in fp32, with z behind it; one that reads it gets it as products take it, and z as
    three numbers of that kind whose sum it is.
    """
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
    on = tl.arange(0, BN)
    in_kv = oe < DV
    in_z = (oe >= DV) & (oe < E)
    nh = n.to(tl.int64) * HKV + i_h
    acc = tl.zeros([BE], tl.float32)
    if INITIAL:
        acc = tl.load(kv0 + nh * DV + oe, mask=in_kv, other=0.0)
        acc += tl.load(z0 + nh * D + oe - DV, mask=in_z, other=0.0)
    # Row m of a tile is what segment c + m starts from; it takes in the segment before, so that none sees itself.
    for c in range(0, b - a + 1, BN):
        i = a + c + on
        before = i - 1
        if REVERSE:
            i = b - 1 - c - on
            before = i + 1
        there = (before >= a) & (before < b)
        # [BN, BE]
        x = tl.load(sums + ((before * HKV + i_h) * E)[:, None] + oe[None, :], mask=there[:, None] & (oe < E), other=0.0)
        if FADED:
            total = tl.load(totals + before * HKV + i_h, mask=there, other=0.0)
            # [to, from, between], added up anew for each pair: differences would lose what follows a strong decay.
            between = (on[None, :, None] < on[None, None, :]) & (on[None, None, :] <= on[:, None, None])
            left = tl.exp2(tl.sum(tl.where(between, total[None, None, :], 0.0), 2))
            # 0, or NaN where a sum is not finite: it would be in segments before its own, multiplied by 0.
            odd = x - x
            x = exact(tl.where(on[:, None] >= on[None, :], left, 0.0), tl.where(odd == 0, x, 0.0), PRECISION)
            x += tl.cumsum(odd, 0) + tl.exp2(tl.cumsum(total, 0))[:, None] * acc[None, :]
        if STARTS != "none":
            y = x if FADED else acc[None, :] + tl.cumsum(x, 0)
            row = (i * HKV + i_h)[:, None]
            inside = ((i >= a) & (i < b))[:, None]
            if STARTS == "carried":
                tl.store(starts + row * E + oe[None, :], y, mask=inside & (oe < E))
            else:
                tl.store(starts + row * DV + oe[None, :], y.to(starts.dtype.element_ty), mask=inside & in_kv)
                part = parts + row * (3 * D) + oe[None, :] - DV
                for _ in tl.static_range(3):
                    high = operand(y, parts.dtype.element_ty, PRECISION)
                    tl.store(part, high, mask=inside & in_z)
                    y -= high.to(tl.float32)
                    part += D
        if FADED:
            acc = tl.sum(tl.where((on == BN - 1)[:, None], x, 0.0), 0)
        else:
            acc += tl.sum(x, 0)
    tl.store(kv + nh * DV + oe, acc, mask=in_kv)
    tl.store(z + nh * D + oe - DV, acc, mask=in_z)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "eps", "d_b", "m_b"])
def forward_kernel(
    q, k, v, mask, o, den, kv0, z0, kv, z_out, states, table, b,
    T, L, NSEG, delay, eps, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, d_b, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, CAUSAL: tl.constexpr, SOURCE: tl.constexpr, FINAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, FADED: tl.constexpr, APART: tl.constexpr,
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
        k = keys_of(k, row, i_hk, k_b, k_h, k_t, delay, DELAYED)
        v = keys_of(v, row, i_hk, v_b, v_h, v_t, delay, DELAYED)
        if FADED:
            b += (row * (H // G) + i_hk) * 2 * T
        if MASKED:
            mask = mask_of(mask, row, m_b, delay, DELAYED)
    in_state = (od < D)[:, None] & (ov < V)[None, :]
    o_state = od[:, None] * V + ov[None, :]
    sh, nh = i_s.to(tl.int64) * (H // G) + i_hk, n * (H // G) + i_hk
    # [BD, BV] and [BD]
    s, z = load_sums(states, kv0, z0, sh, nh, o_state, in_state, od, D, V, SOURCE)
    BY_PRODUCT: tl.constexpr = APART and CAUSAL and k.dtype.element_ty == tl.bfloat16 and not FADED
    if BY_PRODUCT:
        counted = z[:, None] + tl.zeros([BD, 16], tl.float32)
    causal = ot[:, None] >= ot[None, :]
    for c in range(start, end, BT):
        rows = rows_before(end, c, ot)
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
        acc = read(fq, s, PRECISION)
        if BY_PRODUCT:
            z = tl.max(counted, 1)
        total = tl.sum(fq.to(tl.float32) * z[None, :], 1)
        if FADED:
            at = sums_at(b, T, c, end, ot)
            left = tl.exp2(sums_since(b, T, c, start, c, end, ot))
            acc *= left[:, None]
            total *= left
            acc, p = attend(fq, fk, vv, 0.0, causal, acc, PRECISION, PIN, at, at, FADED)
            total += tl.sum(p, 1)
            kept, left = kept_by_chunk(b, T, c, start, end, ot, BT)
            s = fold(fk, faded(vv, kept, PRECISION), s * left, PRECISION)
            z = z * left + tl.sum(fk.to(tl.float32) * kept[:, None], 0)
        elif CAUSAL:
            acc, p = attend(fq, fk, vv, 0.0, causal, acc, PRECISION, PIN, APART=APART and BD > 64)
            total += tl.sum(p, 1)
            s = fold(fk, vv, s, PRECISION)
            if BY_PRODUCT:
                counted = counted_in(fk, counted, PRECISION)
            else:
                z += tl.sum(fk.to(tl.float32), 0)
        total = guarded(total, eps, SIGNED)
        acc = acc * (1.0 / total)[:, None]
        store_tile(o + c * o_t, ot[:, None] * o_t + ov[None, :], acc, rows, ov < V, EXACT_V)
        if i_v == 0:
            tl.store(den + c + ot, total, mask=rows)
    if BY_PRODUCT:
        z = tl.max(counted, 1)
    if FINAL:  # noqa: SIM102 - known when compiling; the other is not
        if i_h % G == 0:
            tl.store(kv + nh * (D * V) + o_state, s, mask=in_state)
            if i_v == 0:
                tl.store(z_out + nh * D + od, z, mask=od < D)


@triton.jit(do_not_specialize=["T", "L", "NSEG", "delay", "eps", "d_b", "m_b"])
def stored_forward_kernel(
    q, k, v, mask, o, den, starts, parts, table, b,
    T, L, NSEG, delay, eps, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, d_b, m_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr,
    FADED: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write the outputs and normalisers of BT queries, from their segment's start and its keys so far."""
    EXACT_D: tl.constexpr = D == BD
    WHOLE: tl.constexpr = BD >= D
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
    o += row * o_b + i_h.to(tl.int64) * o_h + c * o_t
    den += row * d_b + i_h.to(tl.int64) * T + c
    k = keys_of(k, row, i_hk, k_b, k_h, k_t, delay, DELAYED)
    v = keys_of(v, row, i_hk, v_b, v_h, v_t, delay, DELAYED)
    if FADED:
        b += (row * (H // G) + i_hk) * 2 * T
    if MASKED:
        mask = mask_of(mask, row, m_b, delay, DELAYED)
    rows = rows_before(end, c, ot)
    sh = i_s.to(tl.int64) * (H // G) + i_hk
    starts += sh * (D * V)
    parts += sh * (3 * D)
    if WHOLE:
        # [BT, BD]
        fq = load_features(q, ot[:, None] * q_t + od[None, :], rows, od < D, EXACT_D, MAP, PRECISION, PIN)
        # [BD, BV]
        s = load_tile(starts, od[:, None] * V + ov[None, :], od < D, ov < V, EXACT_V)
        acc = product(fq, s, PRECISION)
        # [16, BD], of which three rows have z: so narrow a product costs less than sums of fp32.
        o3 = tl.arange(0, 16)
        z = load_tile(parts, o3[:, None] * D + od[None, :], o3 < 3, od < D, EXACT_D)
        total = tl.sum(product(fq, tl.trans(z), PRECISION), 1)
    else:
        acc = read_stored(q, q_t, ot, rows, starts, ov, D, V, BD, MAP, PRECISION, PIN)
        total = read_mass(q, q_t, ot, rows, parts, D, BD, MAP, PRECISION, PIN)
    at = None
    if FADED:
        left = tl.exp2(sums_since(b, T, start, start, c, end, ot))
        acc *= left[:, None]
        total *= left
        at = sums_at(b, T, c, end, ot)
    for j in range(start, tl.minimum(c + BT, end), BN):
        _, counts = key_rows(mask, j, rows_before(end, j, on), on, first, delay, MASKED, DELAYED)
        # [BN, BV]
        vv = load_operand(v + j * v_t, on[:, None] * v_t + ov[None, :], counts, ov < V, EXACT_V, PRECISION)
        visible = (c - j).to(tl.int32) + ot[:, None] >= on[None, :]
        before = None
        if FADED:
            before = sums_at(b, T, j, end, on)
        if WHOLE:
            # [BN, BD]
            fk = load_features(
                k + j * k_t, on[:, None] * k_t + od[None, :], counts, od < D, EXACT_D, MAP, PRECISION, PIN
            )
            acc, p = attend(fq, fk, vv, 0.0, visible, acc, PRECISION, PIN, at, before, FADED)
        else:
            p = features_product(q, q_t, ot, rows, k + j * k_t, k_t, on, counts, D, BD, MAP, PRECISION, PIN)
            acc, p = weigh(p, vv, visible, acc, PRECISION, PIN, at, before, FADED)
        total += tl.sum(p, 1)
    total = guarded(total, eps, SIGNED)
    acc = acc * (1.0 / total)[:, None]
    store_tile(o, ot[:, None] * o_t + ov[None, :], acc, rows, ov < V, EXACT_V)
    tl.store(den + ot, total, mask=rows)


class Forward(NamedTuple):
    """What the forward leaves behind.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        den: Guarded normalisers ``[B, H, T]``, fp32.
        kv: Final state ``[B or N, HKV, D, V]``, fp32.
        z: Its normaliser.
    """

    o: Tensor
    den: Tensor
    kv: Tensor
    z: Tensor


def allocate_forward(p: Problem) -> Forward:
    """Allocate the results of the forward."""
    den = torch.empty(p.q.shape[:3], dtype=torch.float32, device=p.q.device)
    return Forward(empty_like_tokens(p.q, p.v.shape[3]), den, *allocate_state(p))


def allocate_state(p: Problem) -> tuple[Tensor, Tensor]:
    """Allocate a state per sequence."""
    sizes = p.rows, p.k.shape[1], p.k.shape[3]
    kv = torch.empty(*sizes, p.v.shape[3], dtype=torch.float32, device=p.q.device)
    return kv, torch.empty(sizes, dtype=torch.float32, device=p.q.device)


NOTHING = Fades()
"""Sums that stay as they are."""

FADED_WIDTH = 128
"""Numbers of a state that a program scans where sums fade."""


def summed(
    p: Problem,
    sums: Launch,
    segments: Segments,
    initial: tuple[Tensor | None, Tensor | None],
    final: tuple[Tensor, Tensor],
    *,
    reverse: bool,
    stored: bool,
    fades: Fades = NOTHING,
) -> tuple[Starts, list[Launch]]:
    """Plan the scan over segments, after the launch that sums each: what each starts from, and both launches.

    Where attention is not causal nothing starts from them. Walks read their states from memory where they are stored.
    """
    D, V = p.k.shape[3], p.v.shape[3]
    chosen = p.tile("scan")
    # What a segment takes of all those before it is a product, for which a wider tile would not fit into registers.
    width = chosen.width if fades.totals is None else min(chosen.width, FADED_WIDTH)
    block = min(width, padded(D * V + D))
    starts = Starts()
    if p.causal:
        sizes = segments.count, p.k.shape[1]
        if stored:
            # Products take fp16 as tf32.
            dtype = torch.float32 if p.q.dtype == torch.float16 else p.q.dtype
            shapes = ((D, V), (3, D))
            states, parts = (torch.empty(*sizes, *shape, dtype=dtype, device=p.q.device) for shape in shapes)
            starts = Starts(states, parts)
        else:
            starts = Starts(p.states(segments))
    known = {
        **p.shared(segments),
        **fades.arguments(),
        **{"sums": sums.arguments["states"], "kv0": initial[0], "z0": initial[1], "kv": final[0], "z": final[1]},
        **{"starts": starts.states, "parts": starts.parts, "bounds": segments.bounds},
        **{"DV": D * V, "BN": chosen.tokens, "BE": block},
        # A table of whole sequences has one segment each, as dense rows do.
        "VARLEN": segments.bounds is not None,
        **{"REVERSE": reverse, "INITIAL": initial[0] is not None},
        "STARTS": "none" if not p.causal else "stored" if stored else "carried",
    }
    programs = p.rows * p.k.shape[1] * -(-(D * V + D) // block)
    return starts, [sums, planned("scan", segment_scan_kernel, programs, known, chosen)]


def state_launch(p: Problem, segments: Segments, fades: Fades = NOTHING) -> Launch:
    """Plan the sums over each segment's keys."""
    k, v, chosen = p.k, p.v, p.tile("state")
    wide = min(chosen.width, p.padded(v.shape[3]))
    known = p.shared(segments) | fades.arguments() | {"states": p.states(segments), "T": k.shape[2]}
    known |= {"BD": chosen.width, "BV": wide, "BT": chosen.tokens}
    tiles = -(-k.shape[3] // chosen.width) * -(-v.shape[3] // wide)
    return planned("state", segment_state_kernel, segments.count * k.shape[1] * tiles, known, chosen, (k, v))


def takes_apart(p: Problem, chosen: Tile) -> bool:
    """Tell whether a walk gains by more products: one that sums up keys, and one of queries with the state alone."""
    narrow = p.target.arch == "sm_80" and p.k.shape[3] > 64 and p.v.shape[3] <= 64
    return chosen.tokens > 16 and not narrow


def forward_launches(p: Problem, eps: float) -> tuple[Forward, list[Launch]]:
    """Plan the forward: the results, allocated but not computed, and the launches that compute them, in order."""
    q, k, v = p.q, p.k, p.v
    cut = choose(p, "forward")
    segments = p.segments(q.shape[2], cut.length)
    out = allocate_forward(p)
    fades, launches = fade_launches(p, segments)
    kv0, z0 = p.kv0, p.z0
    starts = Starts()
    if p.causal and (cut.stored or segments.split):
        sums, states = state_launch(p, segments, fades), (out.kv, out.z)
        starts, before = summed(p, sums, segments, (kv0, z0), states, reverse=False, stored=cut.stored, fades=fades)
        launches += before
    elif not p.causal:
        of_keys = p.segments(k.shape[2], choose(p, "state").length)
        _, launches = summed(
            p, state_launch(p, of_keys), of_keys, (kv0, z0), (out.kv, out.z), reverse=False, stored=False
        )
        kv0, z0 = out.kv, out.z
    known = {
        **p.shared(segments),
        **fades.arguments(),
        **{"o": out.o, "den": out.den, "d_b": out.den.stride(0), "eps": eps, "BD": p.padded(k.shape[3])},
        **{"kv0": kv0, "z0": z0, "kv": out.kv, "z_out": out.z, "states": starts.states},
        **{"starts": starts.states, "parts": starts.parts, "SIGNED": not elementwise_map(p.phi).non_negative},
    }
    reads, writes = (q, k, v) if p.causal else (q,), (out.o, out.den)
    if cut.stored:
        chosen = p.tile("stored_forward")
        known |= {"BD": p.held(), "BV": p.padded(v.shape[3]), "BT": chosen.tokens, "BN": chosen.width}
        programs = segments.count * -(-cut.length // chosen.tokens) * q.shape[1]
        last = planned("stored_forward", stored_forward_kernel, programs, known, chosen, reads, writes)
    else:
        chosen = p.tile("forward")
        known |= {"BV": chosen.width, "BT": chosen.tokens, "FINAL": p.causal and not segments.split}
        known |= {"SOURCE": starts.source(kv0), "APART": takes_apart(p, chosen)}
        programs = segments.count * q.shape[1] * -(-v.shape[3] // chosen.width)
        last = planned("forward", forward_kernel, programs, known, chosen, reads, writes)
    return out, [*launches, last]
