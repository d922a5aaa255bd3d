"""What the forward does where a key, a value or a gate is NaN or infinite, which almost never happens.

Products multiply what a query does not see yet by 0, and 0 times a NaN is one; the inverse of a chunk lies between its
keys, too. So a broken key is in all rows of its chunk. It is in every feature of the state after it, too, and stays
there: a look at one feature of the final state tells whether any key of a sequence was broken. Only then the first such
state is looked for among those that the walk left, and of the chunk before it the rows before the broken key are
written once more, token by token. Rows after it show it anyway, and so do all later chunks.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.delta_rule.triton.steps import length_scale, overwrite, read, sequence_bounds
from hf_linear_attn.ops.triton.primitives import log2_decay


@triton.jit(do_not_specialize=["T", "NSEG", "delay", "m_b"])
def mend_kernel(
    q, k, v, beta, g, mask, states, kv, o, cu, bounds,
    T, NSEG, delay, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, beta_b, beta_h, beta_t, g_b, g_h, g_t, o_b, o_h, o_t, m_b,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    BOUNDS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write once more the rows before a sequence's first broken key that share its chunk, for a tile of values."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    h = ((pid // NV) % HKV).to(tl.int64)
    n = (pid // (NV * HKV)).to(tl.int64)
    od = tl.arange(0, BD)
    ov = (pid % NV) * BV + tl.arange(0, BV)
    if is_finite(tl.load(kv + (n * HKV + h) * (F * V) + ov, mask=ov < V, other=0.0)):
        return
    row, first, end, i_0, i_1 = sequence_bounds(cu, bounds, n, T, NSEG, BOUNDS, VARLEN)
    if i_0 >= i_1:
        return
    # The state before chunk i_1 is broken, that before i_0 only where the first one is, which everybody sees.
    states += h * (F * V) + ov
    c = first
    while i_1 - i_0 > 1:
        middle = (i_0 + i_1) // 2
        if is_finite(tl.load(states + middle * HKV * (F * V), mask=ov < V, other=0.0)):
            c += (middle - i_0) * BT
            i_0 = middle
        else:
            i_1 = middle
    in_state = (od < F)[:, None] & (ov < V)[None, :]
    s = tl.load(states[None, :] + i_0 * HKV * (F * V) + od[:, None] * V, mask=in_state, other=0.0).to(tl.float32)
    # Row t has key t - delay.
    k += row * k_b + h * k_h - delay.to(tl.int64) * k_t
    v += row * v_b + h * v_h - delay.to(tl.int64) * v_t
    beta += row * beta_b + h * beta_h - delay.to(tl.int64) * beta_t
    g += row * g_b + h * g_h - delay.to(tl.int64) * g_t
    end = tl.minimum(c + BT, end)
    while c < end:
        counts = c >= first + delay
        if MASKED:
            counts = counts & (tl.load(mask + row * m_b + c - delay, mask=counts, other=0) != 0)
        # Of keys that do not count nothing is read, since 0 times a NaN is one.
        x = tl.load(k + c * k_t + od, mask=od < tl.where(counts, F, 0), other=0.0).to(tl.float32)
        y = tl.load(v + c * v_t + ov, mask=ov < tl.where(counts, V, 0), other=0.0).to(tl.float32)
        weight = tl.load(beta + c * beta_t, mask=counts, other=0.0).to(tl.float32)
        x *= length_scale(tl.sum(x * x, 0), NORM)
        if GATED:
            s *= tl.exp2(log2_decay(tl.load(g + c * g_t, mask=counts, other=0.0)))
        s, y = overwrite(s, x, y, weight)
        # Whatever is broken breaks what is added, and every row from there on.
        if is_finite(y):
            for i in range(G):
                i_h = h * G + i
                seen = read(s, q + row * q_b + i_h * q_h + c * q_t, od, F, NORM).to(o.dtype.element_ty)
                tl.store(o + row * o_b + i_h * o_h + c * o_t + ov, seen, mask=ov < V)
            c += 1
        else:
            c = end


@triton.jit
def is_finite(x):
    """Tell whether all of a vector is finite."""
    return tl.sum(x.to(tl.float32) * 0.0, 0) == 0.0
