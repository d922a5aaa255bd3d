"""Gradients of the keys that are kept beyond the window.

Queries of any distance see a kept key. What a block of queries gives the keys that it may see is written apart, and a
second kernel sums up what a key gets, from the block in which it enters to the one in which it goes.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.triton.plan import Launch, Tile, planned
from hf_linear_attn.ops.triton.primitives import LOG2E, dot, load_operand, load_tile, operand, product, store_tile
from hf_linear_attn.ops.window.triton.problem import Kept, WindowProblem, fp32
from hf_linear_attn.ops.window.triton.sight import NEVER, load_kept


@triton.jit(do_not_specialize=["T", "K", "NQ", "scaling"])
def window_dkept_kernel(
    q, kept_k, kept_v, held, begins, ends, lse, do, delta, part_k, part_v,
    T, K, NQ, scaling, HKV,
    q_b, q_h, q_t, do_b, do_h, do_t,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what a block of queries gives BN of the kept keys that it may see."""
    EXACT_D: tl.constexpr = D == BD
    EXACT_V: tl.constexpr = V == BV
    E: tl.constexpr = C + BLOCK
    TILES: tl.constexpr = (E + BN - 1) // BN
    pid = tl.program_id(0)
    i_hk = pid % HKV
    i_n = (pid // HKV) % TILES
    i_q = (pid // HKV // TILES) % NQ
    i_b = (pid // HKV // TILES // NQ).to(tl.int64)
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    ot = tl.arange(0, BT)
    e = i_n * BN + tl.arange(0, BN)
    kv_head = i_b * HKV + i_hk
    begin_q = i_q.to(tl.int64) * BLOCK
    # [BN, BD] and [BN, BV]
    kk, vv, begin, end = load_kept(
        kept_k + kv_head * K * D, kept_v + kv_head * K * V, held + (kv_head * NQ + i_q) * C,
        begins + i_b * K, ends + kv_head * K, e, C + begin_q, K, od, ov,
        D, V, EXACT_D, EXACT_V, C, BLOCK, PRECISION,
    )  # fmt: skip
    base2 = scaling * LOG2E
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    for g in range(G):
        i_h = (i_hk * G + g).to(tl.int64)
        row = (i_b * (HKV * G) + i_h) * T + ot
        for c in range(begin_q, tl.minimum(begin_q + BLOCK, T), BT):
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
            visible = (begin[:, None] <= (c + ot)[None, :]) & ((c + ot)[None, :] < end[:, None])
            p = tl.where(visible, tl.exp2(product(kk, tl.trans(x), PRECISION) * base2 - z[None, :]), 0.0)
            acc_v = dot(operand(p, x.dtype, PRECISION), dd, acc_v, PRECISION)
            ds = p * (product(vv, tl.trans(dd), PRECISION) - dl[None, :]) * scaling
            acc_k = dot(operand(ds, x.dtype, PRECISION), x, acc_k, PRECISION)
    part = (kv_head * NQ + i_q) * E
    store_tile(part_k + part * D, e[:, None] * D + od[None, :], acc_k, e < E, od < D, EXACT_D)
    store_tile(part_v + part * V, e[:, None] * V + ov[None, :], acc_v, e < E, ov < V, EXACT_V)


@triton.jit(do_not_specialize=["T", "K", "NQ"])
def kept_sums_kernel(
    part_k, part_v, slot, begins, ends, dkept_k, dkept_v,
    T, K, NQ, HKV,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum what one kept key gets: of the block in which it enters, and of those that find it in its place."""
    E: tl.constexpr = C + BLOCK
    pid = tl.program_id(0)
    i = (pid % K).to(tl.int64)
    kv_head = (pid // K).to(tl.int64)
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    begin = tl.load(begins + kv_head // HKV * K + i)
    end = tl.minimum(tl.load(ends + kv_head * K + i), T)
    new = i >= C
    place = tl.load(slot + kv_head * T + (i - C), mask=new, other=0)
    place = tl.where(new, place, i)
    # What never came, or never found a place, is seen by nobody.
    end = tl.where((begin < NEVER) & (place >= 0), end, 0)
    entry = tl.maximum(i - C, 0)
    part_k += kv_head * NQ * E * D
    part_v += kv_head * NQ * E * V
    dk = tl.zeros([BD], tl.float32)
    dv = tl.zeros([BV], tl.float32)
    for block in range(entry // BLOCK, (end + BLOCK - 1) // BLOCK):
        row = block * E + tl.where(new & (block == entry // BLOCK), C + entry % BLOCK, place)
        dk += tl.load(part_k + row * D + od, mask=od < D, other=0.0)
        dv += tl.load(part_v + row * V + ov, mask=ov < V, other=0.0)
    row = kv_head * K + i
    tl.store(dkept_k + row * D + od, dk.to(dkept_k.dtype.element_ty), mask=od < D)
    tl.store(dkept_v + row * V + ov, dv.to(dkept_v.dtype.element_ty), mask=ov < V)


def kept_launches(p: WindowProblem, kept: Kept, given: Mapping[str, Tensor]) -> list[Launch]:
    """Plan the gradients of kept keys and their values, ``given`` with ``do``, ``lse`` and ``delta`` by their names."""
    (B, _, _, D), (_, HKV, K, V) = p.q.shape, kept.v.shape
    chosen = p.tile("window_dkv")
    known = p.shared(chosen) | dict(given)
    blocks, entries = kept.held.shape[2], kept.places + known["BLOCK"]
    parts = {"part_k": fp32(p, B, HKV, blocks, entries, D), "part_v": fp32(p, B, HKV, blocks, entries, V)}
    known, programs = known | parts, B * HKV * blocks * -(-entries // chosen.width)
    of_parts, gradients = tuple(parts.values()), (given["dkept_k"], given["dkept_v"])
    reads = (p.q, *kept[:2], given["do"], given["lse"], given["delta"])
    return [
        planned("window_dkept", window_dkept_kernel, programs, known, chosen, reads, of_parts),
        planned("kept_sums", kept_sums_kernel, B * HKV * K, known, Tile(1, 1, 1, 1), of_parts, gradients),
    ]
