"""Kernels of exact softmax over a window, the sinks, and one more key per query that stands for all the others.

Query t is array index P + t of the keys, of which P come from before the first query. It sees the W keys up to its own
and its sinks; n more lie further back, and what linear attention makes of them is the value f of a key of its own::

    e_t = log n + scaling q_t.m + bias + weight.q_t            m: the mean of those n keys
    o_t = (sum_j exp(s_tj) v_j + exp(e_t) f_t) / (sum_j exp(s_tj) + exp(e_t))

A program takes BT queries of one head through the BN-wide tiles of keys in their sight. Tiles begin at multiples of
BLOCK, so the first ones also hold keys that are out of sight already: their products with q, which the matrix units
compute anyway, count towards q.m, and all keys before the first tile come as one sum per BLOCK (`key_sums` and
`key_scan`). In the backward the same pairs carry the gradient of e, and the sums' gradients return to the keys by a
scan in reverse. Where keys are kept beyond the window, the score of an own key is given.

Kept keys come as further tiles: those that lay in the C places before the block of queries, gathered, and those that
entered within it. Each has a first query that sees it and a first that does not.

Scores are kept in base 2. Operands have the input's dtype, accumulators are fp32, no sum crosses programs but in a
fixed order.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment,var-annotated"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, planned
from hf_linear_attn.ops.triton.primitives import (
    LOG2E,
    column_parts,
    dot_into,
    dot_over,
    load_parts,
    operand,
    product,
    store_parts,
    zeros,
)
from hf_linear_attn.ops.window.triton.problem import WindowProblem, fp32
from hf_linear_attn.ops.window.triton.sight import far, first_key, key_codes, load_kept, load_sinks, near
from hf_linear_attn.ops.window.triton.sums import key_sums_kernel, scan_launch


@triton.jit
def take_in(m, mass, acc, s, vv, BLIND: tl.constexpr, PRECISION: tl.constexpr):
    """Take scores in base 2 and their values into each row's largest score and the sums relative to it.

    Values and their sums are in parts. ``BLIND`` says that there may be rows which have seen nothing yet.
    """
    largest = tl.maximum(m, tl.max(s, 1))
    origin = largest
    if BLIND:
        origin = tl.where(largest == float("-inf"), 0.0, largest)
    p = tl.exp2(s - origin[:, None])
    old = tl.exp2(m - origin)
    mass = mass * old + tl.sum(p, 1)
    acc = [part * old[:, None] for part in acc]
    return largest, mass, dot_into(operand(p, vv[0].dtype, PRECISION), vv, acc, PRECISION)


@triton.jit
def attend_near(
    x, k, v, codes, start, c, rows, od, ov, ot, on, T, S, P, W, scaling, k_t, v_t, kv_head, i_b,
    sink_k, sink_v, seen,
    D: tl.constexpr, V: tl.constexpr, EXACT_D: tl.constexpr, EXACT_V: tl.constexpr,
    SINKS: tl.constexpr, BS: tl.constexpr, MASKED: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from the queries ``x``, in parts, to the tiles of keys from ``start`` on, and to the sinks.

    Returns:
        Each row's largest score in base 2, the sums of weights and, in parts, of weighted values relative to it, and
        where SUMS the sum of products with the keys of these tiles that are out of sight and count.
    """
    BT: tl.constexpr = ot.shape[0]
    BN: tl.constexpr = on.shape[0]
    base2 = scaling * LOG2E
    m = tl.full([BT], float("-inf"), tl.float32)
    mass = tl.zeros([BT], tl.float32)
    acc = zeros(BT, ov)
    products = tl.zeros([BT], tl.float32)
    for i in range(start.to(tl.int32), (P + c).to(tl.int32) + BT, BN):
        j = tl.cast(i, tl.int64)
        _, code = key_codes(codes, j, on, S, MASKED)
        # [BN, D] and [BN, V]
        kk = load_parts(k + j * k_t, on[:, None] * k_t, od, code != 0, D, EXACT_D, PRECISION)
        vv = load_parts(v + j * v_t, on[:, None] * v_t, ov, code != 0, V, EXACT_V, PRECISION)
        code = code[None, :]
        distance = (P + c - j).to(tl.int32) + ot[:, None] - on[None, :]
        s = dot_over(x, kk, tl.zeros([BT, BN], tl.float32), PRECISION)
        if SUMS:
            products += tl.sum(tl.where(far(distance, code, W), s, 0.0), 1)
        s = tl.where(near(distance, code, W), s * base2, float("-inf"))
        m, mass, acc = take_in(m, mass, acc, s, vv, True, PRECISION)
    if SINKS > 0:
        os = tl.arange(0, BS)
        visible, kk, vv = load_sinks(
            sink_k, sink_v, seen, i_b * T + c + ot, rows, kv_head, os, od, ov,
            D, V, EXACT_D, EXACT_V, SINKS, PRECISION,
        )  # fmt: skip
        s = dot_over(x, kk, tl.zeros([BT, BS], tl.float32), PRECISION)
        s = tl.where(visible, s * base2, float("-inf"))
        m, mass, acc = take_in(m, mass, acc, s, vv, False, PRECISION)
    return m, mass, acc, products


@triton.jit
def joined(acc, old, f, own):
    """Return the weighted values ``old acc + own f``, in parts, with weights of rows."""
    y = ()
    for i in tl.static_range(len(acc)):
        y += (acc[i] * old[:, None] + own[:, None] * f[i].to(tl.float32),)
    return y


@triton.jit
def own_score(x, products, n, keys, bias, weight, od, scaling, D: tl.constexpr):
    """Return the scores of the queries' own keys in base 2, which stand for n keys each; -inf where n is 0."""
    direct = tl.load(bias).to(tl.float32)
    for i in tl.static_range(len(od)):
        y = x[i].to(tl.float32)
        u = tl.load(weight + od[i], mask=od[i] < D, other=0.0).to(tl.float32)
        before = tl.load(keys + od[i], mask=od[i] < D, other=0.0)
        products += tl.sum(y * before[None, :], 1)
        direct += tl.sum(y * u[None, :], 1)
    some = tl.maximum(n, 1.0)
    e = products * (scaling / some) + tl.log(some) + direct
    return tl.where(n > 0, e * LOG2E, float("-inf"))


@triton.jit(do_not_specialize=["T", "S", "P", "W", "NB", "K", "NQ", "scaling", "c_b"])
def window_kernel(
    q, k, v, codes, sink_k, sink_v, seen, f, number, prefix, bias, weight, given,
    kept_k, kept_v, held, begins, ends, o, lse, score,
    T, S, P, W, NB, K, NQ, scaling, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, f_b, f_h, f_t, o_b, o_h, o_t, c_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of BT queries, their log-sum-exp and the scores of their own keys."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    pid = tl.program_id(0)
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(T, BT)
    i_b = (pid // H // tl.cdiv(T, BT)).to(tl.int64)
    i_hk = i_h // G
    c = i_t.to(tl.int64) * BT
    od = column_parts(BD, 0)
    ov = column_parts(BV, 0)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    rows = ot < (T - c).to(tl.int32)
    kv_head = i_b * (H // G) + i_hk
    row = (i_b * H + i_h) * T + c + ot
    k += i_b * k_b + i_hk.to(tl.int64) * k_h
    v += i_b * v_b + i_hk.to(tl.int64) * v_h
    if MASKED:
        codes += i_b * c_b
    # [BT, D]
    q += i_b * q_b + i_h.to(tl.int64) * q_h + c * q_t
    x = load_parts(q, ot[:, None] * q_t, od, rows, D, EXACT_D, PRECISION)
    start = first_key(c, P, W, BLOCK)
    m, mass, acc, products = attend_near(
        x, k, v, codes, start, c, rows, od, ov, ot, on, T, S, P, W, scaling, k_t, v_t, kv_head, i_b,
        sink_k, sink_v, seen, D, V, EXACT_D, EXACT_V, SINKS, BS, MASKED, SUMS, PRECISION,
    )  # fmt: skip
    if C > 0:
        block = c // BLOCK
        kept_k += kv_head * K * D
        kept_v += kv_head * K * V
        held += (kv_head * NQ + block) * C
        for i in range(0, C + (c - block * BLOCK).to(tl.int32) + BT, BN):
            kk, vv, begin, end = load_kept(
                kept_k, kept_v, held, begins + i_b * K, ends + kv_head * K, i + on, C + block * BLOCK, K, od[0], ov[0],
                D, V, EXACT_D, EXACT_V, C, BLOCK, PRECISION,
            )  # fmt: skip
            visible = (begin[None, :] <= (c + ot)[:, None]) & ((c + ot)[:, None] < end[None, :])
            s = tl.where(visible, product(x[0], tl.trans(kk), PRECISION) * (scaling * LOG2E), float("-inf"))
            m, mass, acc = take_in(m, mass, acc, s, (vv,), False, PRECISION)
    if OWN:
        if SUMS:
            n = tl.load(number + i_b * T + c + ot, mask=rows, other=0).to(tl.float32)
            keys = prefix + (kv_head * NB + start // BLOCK) * D
            e = own_score(x, products, n, keys, bias + i_h, weight + i_h * D, od, scaling, D)
        else:
            e = tl.load(given + row, mask=rows, other=float("-inf")) * LOG2E
        largest = tl.maximum(m, e)
        w = tl.exp2(e - largest)
        old = tl.exp2(m - largest)
        mass = mass * old + w
        # [BT, V]
        f += i_b * f_b + i_h.to(tl.int64) * f_h + c * f_t
        acc = joined(acc, old, load_parts(f, ot[:, None] * f_t, ov, rows, V, EXACT_V, "ieee"), w)
        m = largest
        tl.store(score + row, e, mask=rows)
    o += i_b * o_b + i_h.to(tl.int64) * o_h + c * o_t
    store_parts(o, ot[:, None] * o_t, ov, [part / mass[:, None] for part in acc], rows, V, EXACT_V)
    tl.store(lse + row, m + tl.log2(mass), mask=rows)


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


def allocate_window(p: WindowProblem) -> WindowForward:
    """Allocate the results of the forward."""
    (B, H, T, _), HKV, D = p.q.shape, p.k.shape[1], p.k.shape[3]
    own = p.f is not None
    return WindowForward(
        empty_like_tokens(p.q, p.v.shape[3]),
        fp32(p, B, H, T),
        fp32(p, B, H, T) if own else fp32(p, 0),
        fp32(p, B, HKV, p.blocks, D) if p.sums else fp32(p, 0),
    )


def sum_launches(p: WindowProblem, prefix: Tensor) -> list[Launch]:
    """Plan the sums of keys before each beginning of tiles, which are written to ``prefix``."""
    B, HKV, _, D = p.k.shape
    # The last block of keys is before no tile, but all of them have one.
    chosen, sums = p.tile("key_sums"), fp32(p, B, HKV, p.blocks, D)
    known = p.shared(chosen) | {"sums": sums, "N": p.blocks}
    of_blocks = planned("key_sums", key_sums_kernel, B * HKV * p.blocks, known, chosen, (p.k,), (sums,))
    return [of_blocks, scan_launch(p, sums, p.before, prefix, fp32(p, B, HKV, D), reverse=False)]


def window_launches(p: WindowProblem) -> tuple[WindowForward, list[Launch]]:
    """Plan the forward: the results, allocated but not computed, and the launches that compute them, in order."""
    q, k, v = p.q, p.k, p.v
    B, H, T, _ = q.shape
    out = allocate_window(p)
    launches = sum_launches(p, out.prefix) if p.sums else []
    chosen = p.tile("window")
    reads = (q, k, v, *(() if p.f is None else (p.f,)), *(() if p.kept is None else p.kept[:2]))
    writes = (out.o, out.lse) if p.f is None else (out.o, out.lse, out.score)
    known, programs = p.shared(chosen) | out._asdict(), B * H * -(-T // chosen.tokens)
    launches.append(planned(p.role("window"), window_kernel, programs, known, chosen, reads, writes))
    return out, launches
