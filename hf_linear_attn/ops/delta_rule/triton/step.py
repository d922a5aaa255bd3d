"""The step's kernel: a few tokens against the state, in place, in one launch.

Each program holds one tile ``[BD, BV]`` of S in fp32 registers, takes its tokens in one by one, as the recurrence
says, and serves all query heads of the group.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.delta_rule.triton.problem import DeltaProblem
from hf_linear_attn.ops.delta_rule.triton.steps import length_scale, overwrite, read
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, of_mask, padded, planned, tile
from hf_linear_attn.ops.triton.primitives import log2_decay


@triton.jit(do_not_specialize=["T", "m_b"])
def step_kernel(
    q, k, v, beta, g, mask, rows, o, kv,
    T, HKV, kv_p,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, beta_b, beta_h, beta_t, g_b, g_h, g_t, o_b, o_h, o_t, m_b,
    G: tl.constexpr, F: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Write T tokens into a tile of one key head's state and the outputs of its query heads."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    ov = (pid % NV) * BV + tl.arange(0, BV)
    bh = (pid // NV).to(tl.int64)
    i_b = bh // HKV
    h = bh % HKV
    if POOL:
        kv += tl.load(rows + i_b) * kv_p + h * (F * V)
    else:
        kv += bh * (F * V)
    od = tl.arange(0, BD)
    in_state = (od < F)[:, None] & (ov < V)[None, :]
    state = kv + od[:, None] * V + ov[None, :]
    # [BD, BV]
    s = tl.load(state, mask=in_state, other=0.0)
    for i_t in range(T):
        t = i_t + tl.zeros([], tl.int64)
        x = tl.load(k + i_b * k_b + h * k_h + t * k_t + od, mask=od < F, other=0.0).to(tl.float32)
        y = tl.load(v + i_b * v_b + h * v_h + t * v_t + ov, mask=ov < V, other=0.0).to(tl.float32)
        weight = tl.load(beta + i_b * beta_b + h * beta_h + t * beta_t).to(tl.float32)
        if MASKED:
            counts = tl.load(mask + i_b * m_b + t) != 0
            # Of all: 0 times a NaN is one.
            x, y, weight = tl.where(counts, x, 0.0), tl.where(counts, y, 0.0), tl.where(counts, weight, 0.0)
        x *= length_scale(tl.sum(x * x, 0), NORM)
        if GATED:
            decay = log2_decay(tl.load(g + i_b * g_b + h * g_h + t * g_t))
            if MASKED:
                decay = tl.where(counts, decay, 0.0)
            s *= tl.exp2(decay)
        s, _ = overwrite(s, x, y, weight)
        for i in range(G):
            i_h = h * G + i
            seen = read(s, q + i_b * q_b + i_h * q_h + t * q_t, od, F, NORM).to(o.dtype.element_ty)
            tl.store(o + i_b * o_b + i_h * o_h + t * o_t + ov, seen, mask=ov < V)
    tl.store(state, s, mask=in_state)


def step_launch(p: DeltaProblem, kv: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Launch]:
    """Plan one step of tokens without a delay; return the output, allocated, and the launch.

    State and rows are those of :func:`delta_step_`.
    """
    q, k, v = p.q, p.k, p.v
    (_, HKV, F, V), B, o = kv.shape, len(q), empty_like_tokens(q, v.shape[3])
    chosen = tile(p.target, q.dtype, "decode", F, V, q.shape[1] // HKV)
    known = {
        **{"q": q, "k": k, "v": v, "beta": p.beta, "g": p.log_decay, "o": o, "kv": kv, "rows": rows, "T": q.shape[2]},
        **{"HKV": HKV, "G": q.shape[1] // HKV, "F": F, "V": V, "BD": padded(F), "BV": chosen.width},
        **of_mask(p.mask),
        **{"GATED": p.log_decay is not None, "NORM": p.l2norm, "POOL": rows is not None, "kv_p": kv.stride(0)},
    }
    role = "delta_step" if rows is None else "delta_step_rows"
    programs = B * HKV * -(-V // chosen.width)
    return o, planned(role, step_kernel, programs, known, chosen, (q, k, v, p.beta, kv), (o, kv))
