"""What the window's forward does where a value is NaN or infinite: see linear attention's ``mend``.

Here a NaN would be in all rows whose tile reads the tile of its key, before it and after it has left their sight.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.linear_attention.triton.steps import fresh
from hf_linear_attn.ops.triton.primitives import LOG2E, dot, load_operand, load_tile, operand, product, store_tile
from hf_linear_attn.ops.window.triton.sight import key_codes, near, sees_sink


@triton.jit
def mend_window(
    given, T, S, P, W, scaling, H, G, of_q, of_k, of_v, of_f, of_o, c_b,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    SINKS: tl.constexpr, BS: tl.constexpr,
    MASKED: tl.constexpr, OWN: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write once more those of BT rows that see nothing broken, from what the kernel has written of their weights.

    ``given`` are q, k, v, codes, the sinks' k and v, which of them are seen, f, o, log-sum-exp and scores as the kernel
    got them; ``of_q`` to ``of_o`` their strides of a batch's row, a head and a token.
    """
    BM: tl.constexpr = 16
    q, k, v, codes, sink_k, sink_v, seen, f, o, lse, score = given
    zero = fresh(PIN)
    pid = tl.program_id(0) + zero
    i_h = pid % H
    c = ((pid // H) % tl.cdiv(T, BT)).to(tl.int64) * BT
    i_b = (pid // H // tl.cdiv(T, BT)).to(tl.int64)
    om = tl.arange(0, BM)
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV) + zero
    base2 = scaling * LOG2E
    kv_head = i_b * (H // G) + i_h // G
    at = (i_b * H + i_h) * T
    q += i_b * of_q[0] + i_h.to(tl.int64) * of_q[1]
    o += i_b * of_o[0] + i_h.to(tl.int64) * of_o[1]
    k += i_b * of_k[0] + (i_h // G).to(tl.int64) * of_k[1]
    v += i_b * of_v[0] + (i_h // G).to(tl.int64) * of_v[1]
    if MASKED:
        codes += i_b * c_b
    for r in range(c, tl.minimum(c + BT, T), BM):
        rows = r + om < T
        x = load_operand(q + r * of_q[2], om[:, None] * of_q[2] + od[None, :], rows, od < D, False, PRECISION)
        z = tl.load(lse + at + r + om, mask=rows, other=0.0)
        acc = tl.zeros([BM, BV], tl.float32)
        spoiled = tl.zeros([BM], tl.int32)
        for j in range(tl.maximum(P + r - W + 1, 0), P + r + BM, BM):
            _, code = key_codes(codes, j, om, S, MASKED)
            kk = load_operand(k + j * of_k[2], om[:, None] * of_k[2] + od[None, :], code != 0, od < D, False, PRECISION)
            vv = load_operand(v + j * of_v[2], om[:, None] * of_v[2] + ov[None, :], code != 0, ov < V, False, PRECISION)
            visible = near((P + r + om)[:, None] - (j + om)[None, :], code[None, :], W)
            acc, spoiled = add_sound(x, kk, vv, visible, base2, z, acc, spoiled, PRECISION)
        if SINKS > 0:
            os = tl.arange(0, BS)
            visible = sees_sink(seen, i_b * T + r + om, os, rows, SINKS)
            here = tl.max(visible.to(tl.int32), 0) != 0
            place = kv_head * SINKS
            kk = load_operand(sink_k + place * D, os[:, None] * D + od[None, :], here, od < D, False, PRECISION)
            vv = load_operand(sink_v + place * V, os[:, None] * V + ov[None, :], here, ov < V, False, PRECISION)
            acc, spoiled = add_sound(x, kk, vv, visible, base2, z, acc, spoiled, PRECISION)
        if OWN:
            w = tl.exp2(tl.load(score + at + r + om, mask=rows, other=float("-inf")) - z)
            ff = f + i_b * of_f[0] + i_h.to(tl.int64) * of_f[1] + r * of_f[2]
            ff = load_tile(ff, om[:, None] * of_f[2] + ov[None, :], rows, ov < V, False)
            acc += w[:, None] * ff.to(tl.float32)
        store_tile(o + r * of_o[2], om[:, None] * of_o[2] + ov[None, :], acc, rows & (spoiled == 0), ov < V, False)


@triton.jit
def add_sound(x, kk, vv, visible, base2, z, acc, spoiled, PRECISION: tl.constexpr):
    """Add what visible keys hold that is finite, and tell which rows see one that isn't."""
    broken = tl.sum(vv.to(tl.float32) * 0.0, 1) != 0.0
    spoiled = tl.maximum(spoiled, tl.max((visible & broken[None, :]).to(tl.int32), 1))
    p = tl.where(visible, tl.exp2(product(x, tl.trans(kk), PRECISION) * base2 - z[:, None]), 0.0)
    sound = tl.where(broken[:, None], 0.0, vv.to(tl.float32)).to(vv.dtype)
    return dot(operand(p, x.dtype, PRECISION), sound, acc, PRECISION), spoiled
