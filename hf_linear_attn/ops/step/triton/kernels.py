"""The decode kernel: a few tokens against the state, in place, in one launch.

Each program holds one tile ``[BD, BV]`` of S and the whole of z in fp32 registers, reads its tokens one by one, serves
all query heads of the group, and stores what it holds. Every program needs the old z, so none may overwrite a z that
another one still reads: z has one private copy per program of a head, and all copies stay equal. In a pool, where the
rows' states lie anywhere, there are no copies, and one program takes all columns.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.step.checks import check_decode
from hf_linear_attn.ops.triton.plan import Launch, Target, of_mask, padded, planned, tile
from hf_linear_attn.ops.triton.primitives import log2_decay, phi


@triton.jit(do_not_specialize=["T", "eps", "m_b"])
def decode_kernel(
    q, k, v, mask, rows, o, kv, z, g,
    T, eps, HKV,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, g_b, g_h, g_t, m_b, kv_p, z_p,
    G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, SIGNED: tl.constexpr, MASKED: tl.constexpr, FADED: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Fold T tokens into the state of one key head and write the outputs of its query heads."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_c = pid % C
    bh = (pid // C).to(tl.int64)
    i_b = bh // HKV
    i_hk = bh % HKV
    if POOL:
        i_p = tl.load(rows + i_b)
        kv += i_p * kv_p + i_hk * (D * V)
        z += i_p * z_p + i_hk * D
    else:
        kv += bh * (D * V)
        z += (bh * C + i_c) * D
    od = tl.arange(0, BD)
    q += i_b * q_b
    k += i_b * k_b + i_hk * k_h
    v += i_b * v_b + i_hk * v_h
    o += i_b * o_b
    z_old = tl.load(z + od, mask=od < D, other=0.0)
    z_new = z_old
    for i_v in range(i_c, NV, C):
        ov = i_v * BV + tl.arange(0, BV)
        in_state = (od < D)[:, None] & (ov < V)[None, :]
        state = kv + od[:, None] * V + ov[None, :]
        # [BD, BV]
        s = tl.load(state, mask=in_state, other=0.0)
        z_new = z_old
        for i_t in range(T):
            t = i_t + tl.zeros([], tl.int64)
            x = tl.load(k + t * k_t + od, mask=od < D, other=0.0)
            fk = tl.where(od < D, phi(x, MAP), 0.0)
            vv = tl.load(v + t * v_t + ov, mask=ov < V, other=0.0).to(tl.float32)
            if MASKED:
                counts = tl.load(mask + i_b * m_b + t) != 0
                # Of both: 0 times a NaN is one.
                fk, vv = tl.where(counts, fk, 0.0), tl.where(counts, vv, 0.0)
            if FADED:
                decay = log2_decay(tl.load(g + i_b * g_b + i_hk * g_h + t * g_t))
                if MASKED:
                    decay = tl.where(counts, decay, 0.0)
                s *= tl.exp2(decay)
                z_new *= tl.exp2(decay)
            s += fk[:, None] * vv[None, :]
            z_new += fk
            for i in range(G):
                i_h = i_hk * G + i
                x = tl.load(q + i_h * q_h + t * q_t + od, mask=od < D, other=0.0)
                fq = phi(x, MAP)
                num = tl.sum(fq[:, None] * s, 0)
                den = tl.sum(fq * z_new, 0)
                if SIGNED:
                    den = tl.where(den < 0, den - eps, den + eps)
                else:
                    den += eps
                y = (num / den).to(o.dtype.element_ty)
                tl.store(o + i_h * o_h + t * o_t + ov, y, mask=ov < V)
        tl.store(state, s, mask=in_state)
    tl.store(z + od, z_new, mask=od < D)


def decode_launch(
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    z: Tensor,
    mask: Tensor | None,
    phi: str,
    eps: float,
    log_decay: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """Plan one decode step; return the output, allocated, and the launch.

    Arguments are those of :func:`decode_step_`, tokens as kernels read them, the mask as uint8, and ``z`` with copies.

    Raises:
        ArgumentError: If tokens and state do not fit together: the kernel would write beyond them.
        ArgumentTypeError: If the state is not fp32.
    """
    check_decode(q, k, v, kv, z, rows)
    (_, HKV, C, D), B, V, G = z.shape, len(q), v.shape[3], q.shape[1] // k.shape[1]
    o = empty_like_tokens(q, V)
    chosen = tile(target, q.dtype, "decode", D, V, G)
    width = chosen.width
    # A program without a tile would leave its copy of z behind.
    while -(-V // width) < C:
        width //= 2
    known = {
        **{"q": q, "k": k, "v": v, "o": o, "kv": kv, "z": z, "g": log_decay, "rows": rows, "T": q.shape[2], "eps": eps},
        **{"HKV": HKV, "G": G, "C": C, "D": D, "V": V, "BD": padded(D), "BV": width},
        **of_mask(mask),
        **{"MAP": phi, "SIGNED": not elementwise_map(phi).non_negative, "FADED": log_decay is not None},
        **{"POOL": rows is not None, "kv_p": kv.stride(0), "z_p": z.stride(0)},
    }
    role = "decode" if rows is None else "decode_rows"
    return o, planned(role, decode_kernel, B * HKV * C, known, chosen, (q, k, v, kv, z), (o, kv, z))
