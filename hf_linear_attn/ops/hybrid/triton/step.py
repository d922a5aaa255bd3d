"""The kernel of a whole step of a layer with a window, in one launch.

A token t comes and the token t - W leaves the window. With F features and the sums ``S [F, V]``, ``z [F]``::

    S = a S + phi(k_{t-W}) v_{t-W}^T   z = a z + phi(k_{t-W})   m: the mean of the n keys beyond the window
    f = phi(q)^T S / (phi(q)^T z + eps)
    o = (sum_j exp(s_j) v_j + exp(e) f) / (sum_j exp(s_j) + exp(e))     e = log n + scaling q.m + bias + weight.q

over the W keys of the window and the sinks, where the mix is "key"; "gate" and "window" join otherwise. Where sums
fade, ``a = exp(-softplus(b + u.k_{t-W} + w.v_{t-W}))``; else it is 1. A program takes a key head of a row with all its
query heads, and a tile of BV columns of V. It holds ``S [F, BV]`` in fp32 registers, walks the slots in tiles
``[BP, BD]``, and reads the weights of a paired map in tiles ``[BK, BM]``; of many rows its features are given
(``ahead.py``). Everything but the operands of the slots' products is fp32.

Programs of one head, and of one row, run at the same time. What one of them writes none of the others may read:

* The token is written into a slot that holds no token of the window. It comes to the programs as k and v.
* Whether a sink has come is told by the number of tokens seen, not by its flag, and a token that becomes a sink is read
  from k and v, too. That number is raised after the launch.
* z and the keys' sum have a copy per program of a head; all of them stay equal. In a pool, which has no copies, one
  program takes all columns.

In a pool the rows' states lie anywhere, and their lengths tell what a mask of slots would.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.features.triton.kernels import halves
from hf_linear_attn.ops.hybrid.records import HybridStep
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Target, padded, planned, precision, tile
from hf_linear_attn.ops.triton.primitives import (
    ALL,
    LOG2E,
    dot,
    load_operand,
    operand,
    pairs_of,
    phi,
    product,
    turn_back,
)

PRODUCTS = 4096
"""Entries of a tile of a map's weights, which are summed up by rows at the end."""


@triton.jit
def load_vector(x, od, columns, turns, t, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr):
    """Load entries of a vector; where R of its D are turned, turned back."""
    y = tl.load(x + od, mask=od < columns, other=0.0)
    if R > 0:
        moved, pair, first, other = pairs_of(od, D, R, PAIRS, AT_END)
        moved = moved & (od < columns)
        cos = tl.load(turns + t + pair, mask=moved, other=1.0).to(tl.float32)
        sin = tl.load(turns + t + R // 2 + pair, mask=moved, other=0.0).to(tl.float32)
        y = turn_back(y, tl.load(x + other, mask=moved, other=0.0).to(tl.float32), cos, sin, first, moved)
    return y


@triton.jit
def features_of_head(
    x, columns, turns, t, weight, power, w, p, factor, sharpness,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    MAP: tl.constexpr, PAIR: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """Return the features of a vector and, of a paired map, their second half.

    Its head's weights begin at ``w``, its power is at ``p``. Of a vector without columns, all features are 0.
    """
    om = tl.arange(0, BM)
    if PAIR:
        # [BK, BM]
        products = tl.zeros([BK, BM], tl.float32)
        for d in range(0, D, BK):
            od = d + tl.arange(0, BK)
            xx = load_vector(x, od, columns, turns, t, D, R, PAIRS, AT_END).to(tl.float32)
            inside = (od < D)[:, None] & (om < M)[None, :]
            ww = tl.load(weight + w + od[:, None] * M + om[None, :], mask=inside, other=0.0).to(tl.float32)
            products += xx[:, None] * ww
        y = tl.sum(products, 0)[None, :] * factor
        a = 0.0
        if MAP == "norm_preserving":
            a = tl.load(power + p).to(tl.float32)
        above, below = halves((y,), a, sharpness, (om,), M, MAP, QUERY, x.dtype.element_ty, False)
        first = tl.where(columns > 0, tl.reshape(above[0], [BM]), 0.0)
        second = tl.where(columns > 0, tl.reshape(below[0], [BM]), 0.0)
    else:
        xx = load_vector(x, om, columns, turns, t, D, R, PAIRS, AT_END)
        first = tl.where(om < columns, phi(xx, MAP), 0.0)
        second = first
    return first, second


@triton.jit
def load_halves(phi, om, columns, M: tl.constexpr):
    """Load the features of a vector that were computed ahead, 0 where it has no columns."""
    return tl.load(phi + om, mask=om < columns, other=0.0), tl.load(phi + M + om, mask=om < columns, other=0.0)


@triton.jit
def fading(
    gone, gone_v, columns, turns, t, bias, of_key, of_value, i_hk, od,
    D: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
):  # fmt: skip
    """Return what a key that leaves the window leaves of the sums; all, where it has no columns."""
    k = load_vector(gone, od, columns, turns, t, D, R, PAIRS, AT_END).to(tl.float32)
    u = tl.load(of_key + i_hk * D + od, mask=od < D, other=0.0).to(tl.float32)
    score = tl.load(bias + i_hk).to(tl.float32) + tl.sum(k * u, 0)
    for c in range(0, V, BV):
        ov = c + tl.arange(0, BV)
        v = tl.load(gone_v + ov, mask=ov < tl.where(columns > 0, V, 0), other=0.0).to(tl.float32)
        w = tl.load(of_value + i_hk * V + ov, mask=ov < V, other=0.0).to(tl.float32)
        score += tl.sum(v * w, 0)
    # Of softplus, the form that no score overflows.
    softplus = tl.maximum(score, 0.0, propagate_nan=ALL) + tl.log(1.0 + tl.exp2(-tl.abs(score) * LOG2E))
    return tl.where(columns > 0, tl.exp2(-softplus * LOG2E), 1.0)


@triton.jit
def slot_of(place, N, W):
    """Return the slot of the token of a number; that of the token W before it is the next one's."""
    return (N + place % (W + 1)).to(tl.int64)


@triton.jit
def stand(rows, length, seen, key_mask, i_b, m_b, N, W, MASKED: tl.constexpr, STATIC: tl.constexpr, POOL: tl.constexpr):
    """Return where a row's state lies, the slots that are new and old, the tokens read, and if the new one is real."""
    i_p = i_b
    place = length
    if POOL:
        i_p = tl.load(rows + i_b)
        place = tl.load(length + i_b)
    elif STATIC:
        place = tl.load(length)
    new = slot_of(place, N, W)
    old = slot_of(place + 1, N, W)
    read = tl.load(seen + i_b)
    real = read >= 0
    if MASKED:
        real = tl.load(key_mask + i_b * m_b) != 0
    return i_p, new, old, read, real


@triton.jit
def attend(
    x, m, total, acc, keys, values, op, sees, od, ov, scaling,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to a tile of keys ``[BP, BD]`` and values ``[BP, BV]``; return the new maximum, sum and numerator."""
    offset = op.to(tl.int64)[:, None]
    kk = load_operand(keys, offset * D + od[None, :], sees, od < D, D == BD, PRECISION)
    vv = load_operand(values, offset * V + ov[None, :], sees, ov < V, V % BV == 0, PRECISION)
    scores = product(x, tl.trans(kk), PRECISION) * (scaling * LOG2E)
    scores = tl.where(sees[None, :], scores, float("-inf"))
    largest = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - largest[:, None])
    before = tl.exp2(m - largest)
    total = total * before + tl.sum(p, 1)
    return largest, total, dot(operand(p, x.dtype, PRECISION), vv, acc * before[:, None], PRECISION)


@triton.jit(do_not_specialize=["length", "N", "W", "scaling", "eps", "factor", "sharpness", "m_b", "t_b"])
def hybrid_kernel(
    q, k, v, key_mask, seen, length, rows, kv, z, far_keys, near_k, near_v, near_mask, near_turns, turns,
    weight_q, power_q, weight_k, power_k, decay_bias, decay_key, decay_value, bias, weight,
    kept_k, kept_v, gone, gone_v, gone_turns, told, phi_q, phi_k, o,
    HKV, N, W, scaling, eps, factor, sharpness,
    q_b, q_h, k_b, k_h, v_b, v_h, o_b, o_h, m_b, t_b, wq_h, pq_h, wk_h, pk_h,
    kv_p, z_p, f_p, nk_p, nv_p, nt_p, kk_p, kw_p,
    G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, V: tl.constexpr, M: tl.constexpr,
    GP: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    MAP: tl.constexpr, PAIR: tl.constexpr, SIGNED: tl.constexpr, FADES: tl.constexpr, MIX: tl.constexpr,
    MASKED: tl.constexpr, STATIC: tl.constexpr, POOL: tl.constexpr, K: tl.constexpr, GIVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Read one token of one key head, fold the one that leaves, and write the outputs of its query heads."""
    NV: tl.constexpr = (V + BV - 1) // BV
    F: tl.constexpr = 2 * M if PAIR else M
    pid = tl.program_id(0)
    i_c = pid % C
    bh = (pid // C).to(tl.int64)
    i_b = bh // HKV
    i_hk = bh % HKV
    od = tl.arange(0, BD)
    om = tl.arange(0, BM)
    og = tl.arange(0, GP)
    heads = i_hk * G + og
    slots = N + W + 1
    i_p, new, old, read, real = stand(rows, length, seen, key_mask, i_b, m_b, N, W, MASKED, STATIC, POOL)
    becomes_sink = real & (read < N)
    enters = real & (read >= N)
    if not POOL:
        near_mask += i_b * slots
    near_k += i_p * nk_p + i_hk * slots * D
    near_v += i_p * nv_p + i_hk * slots * V
    if R > 0:
        near_turns += i_p * nt_p
        turns += i_b * t_b
    q += i_b * q_b
    k += i_b * k_b + i_hk * k_h
    v += i_b * v_b + i_hk * v_h
    o += i_b * o_b
    # The token goes to the free slot. Of one that is masked, nothing is read.
    key = tl.load(k + od, mask=od < tl.where(real, D, 0), other=0.0)
    if i_c == 0:
        tl.store(near_k + new * D + od, key, mask=od < D)
        tl.store(near_k + read * D + od, key, mask=od < tl.where(becomes_sink, D, 0))
        if i_hk == 0:
            if not POOL:
                tl.store(near_mask + new, enters)
                tl.store(near_mask + read, becomes_sink, mask=becomes_sink)
            if R > 0:
                tl.store(near_turns + new * D + od, tl.load(turns + od, mask=od < R, other=0.0), mask=od < R)
    # [GP, BD]
    x = load_operand(q, heads[:, None] * q_h + od[None, :], og < G, od < D, D == BD, PRECISION)
    wide = x.to(tl.float32)
    own = tl.sum(wide * key.to(tl.float32)[None, :], 1) * (scaling * LOG2E)
    if MIX != "window":
        if K > 0:
            # What goes was chosen before, of the keys that were kept and of the one that leaves the window.
            leaves = tl.load(told + 2 * bh + 1) != 0
            gone += bh * D
            gone_v += bh * V
            of_gone, at = gone_turns, bh * R
        else:
            leaves = read >= N + W if POOL else tl.load(near_mask + old) != 0
            gone = near_k + old * D
            gone_v = near_v + old * V
            of_gone, at = near_turns, old * D
        columns = tl.where(leaves, D, 0)
        if GIVEN:
            fk, fk2 = load_halves(phi_k + bh * F, om, tl.where(leaves, M, 0), M)
        else:
            fk, fk2 = features_of_head(
                gone, columns, of_gone, at, weight_k, power_k, i_hk * wk_h, i_hk * pk_h, factor, 0.0,
                D, M, BD, BM, BK, R, PAIRS, AT_END, MAP, PAIR, False,
            )  # fmt: skip
        fade = 1.0
        if FADES:
            fade = fading(
                gone, gone_v, columns, of_gone, at, decay_bias, decay_key, decay_value, i_hk, od,
                D, V, BV, R, PAIRS, AT_END,
            )  # fmt: skip
        z += i_p * z_p + (i_hk * C + i_c) * F
        zz = tl.load(z + om, mask=om < M, other=0.0) * fade + fk
        zz2 = zz
        if PAIR:
            zz2 = tl.load(z + M + om, mask=om < M, other=0.0) * fade + fk2
        # Of a linear part: what each query gives it besides, and its direction.
        u = tl.load(weight + heads[:, None] * D + od[None, :], mask=(og < G)[:, None] & (od < D)[None, :], other=0.0)
        score = tl.load(bias + heads, mask=og < G, other=0.0).to(tl.float32) + tl.sum(wide * u.to(tl.float32), 1)
        keys = tl.zeros([BD], tl.float32)
        if MIX == "key":
            far_keys += i_p * f_p + (i_hk * C + i_c) * D
            keys = tl.load(far_keys + od, mask=od < D, other=0.0)
            keys += tl.load(gone + od, mask=od < columns, other=0.0).to(tl.float32)
    for i_v in range(i_c, NV, C):
        ov = i_v * BV + tl.arange(0, BV)
        value = tl.load(v + ov, mask=ov < tl.where(real, V, 0), other=0.0)
        tl.store(near_v + new * V + ov, value, mask=ov < V)
        tl.store(near_v + read * V + ov, value, mask=ov < tl.where(becomes_sink, V, 0))
        # [GP, BV]
        far = tl.zeros([GP, BV], tl.float32)
        if MIX != "window":
            gone_vv = tl.load(gone_v + ov, mask=ov < tl.where(leaves, V, 0), other=0.0).to(tl.float32)
            # [BM, BV]
            state = kv + i_p * kv_p + i_hk * (F * V) + om[:, None] * V + ov[None, :]
            inside = (om < M)[:, None] & (ov < V)[None, :]
            s = tl.load(state, mask=inside, other=0.0) * fade + fk[:, None] * gone_vv[None, :]
            tl.store(state, s, mask=inside)
            s2 = s
            if PAIR:
                s2 = tl.load(state + M * V, mask=inside, other=0.0) * fade + fk2[:, None] * gone_vv[None, :]
                tl.store(state + M * V, s2, mask=inside)
            for g in range(G):
                i_h = i_hk * G + g
                if GIVEN:
                    fq, fq2 = load_halves(phi_q + (bh * G + g) * F, om, M, M)
                else:
                    fq, fq2 = features_of_head(
                        q + i_h * q_h, D, turns, 0, weight_q, power_q, i_h * wq_h, i_h * pq_h, factor, sharpness,
                        D, M, BD, BM, BK, R, PAIRS, AT_END, MAP, PAIR, True,
                    )  # fmt: skip
                y, mass = fq[:, None] * s, fq * zz
                if PAIR:
                    y, mass = y + fq2[:, None] * s2, mass + fq2 * zz2
                num, den = tl.sum(y, 0), tl.sum(mass, 0)
                if SIGNED:
                    den = tl.where(den < 0, den - eps, den + eps)
                else:
                    den += eps
                far = tl.where((og == g)[:, None], (num / den)[None, :], far)
        # A query sees itself, whatever else it sees: no row is empty.
        m = own
        total = tl.full([GP], 1.0, tl.float32)
        acc = tl.zeros([GP, BV], tl.float32) + value.to(tl.float32)[None, :]
        held = tl.zeros([], tl.int32)
        for j in range(0, slots, BP):
            op = j + tl.arange(0, BP)
            if POOL:
                # The token that came to a slot last.
                came = read - 1 - (read - 1 - (op - N) + (W + 1)) % (W + 1)
                flag = (op >= N) & (op < slots) & (came >= N) & (came >= read - W)
            else:
                flag = tl.load(near_mask + op, mask=(op >= N) & (op < slots), other=0) != 0
            ring = flag & (op != new) & (op != old)
            held += tl.sum(ring.to(tl.int32), 0)
            sees = ring | ((op < N) & (op < read))
            m, total, acc = attend(x, m, total, acc, near_k, near_v, op, sees, od, ov, scaling, D, V, BD, BV, PRECISION)
        if K > 0:
            taken = tl.load(told + 2 * bh)
            own_k = kept_k + i_p * kk_p + i_hk * (K * D)
            own_v = kept_v + i_p * kw_p + i_hk * (K * V)
            for j in range(0, K, BP):
                op = j + tl.arange(0, BP)
                m, total, acc = attend(
                    x, m, total, acc, own_k, own_v, op, op < taken, od, ov, scaling, D, V, BD, BV, PRECISION
                )
        if MIX != "window":
            count = read + real.to(tl.int64)
            n = count - tl.minimum(count, N) - held - enters.to(tl.int64)
            n = tl.maximum(n - K, 0).to(tl.float32)
            if MIX == "key":
                some = tl.maximum(n, 1.0)
                e = score + tl.sum(wide * keys[None, :], 1) * (scaling / some) + tl.log(some)
                e = tl.where(n > 0, e * LOG2E, float("-inf"))
                largest = tl.maximum(m, e)
                share = tl.exp2(e - largest)
                before = tl.exp2(m - largest)
                total = total * before + share
                y = (acc * before[:, None] + share[:, None] * far) / total[:, None]
            else:
                gate = tl.where(n > 0, 1.0 / (1.0 + tl.exp2(-score * LOG2E)), 0.0)
                y = acc / total[:, None]
                y += gate[:, None] * (far - y)
        else:
            y = acc / total[:, None]
        place_o = o + heads[:, None] * o_h + ov[None, :]
        tl.store(place_o, y.to(o.dtype.element_ty), mask=(og < G)[:, None] & (ov < V)[None, :])
    if MIX != "window":
        tl.store(z + om, zz, mask=om < M)
        if PAIR:
            tl.store(z + M + om, zz2, mask=om < M)
        if MIX == "key":
            tl.store(far_keys + od, keys, mask=od < D)


class Traded(NamedTuple):
    """What goes from what is kept, where a key has left the window and may have taken a place.

    Attributes:
        gone: The key, as the model made it ``[B, HKV, D]``; anything where none goes, as all but the last.
        gone_v: Its value ``[B, HKV, V]``.
        gone_turns: By which it is turned ``[B, HKV, R]``; None where nobody turns it back.
        told: How many places are taken then, and whether one goes ``[B, HKV, 2]`` int64.
    """

    gone: Tensor
    gone_v: Tensor
    gone_turns: Tensor | None
    told: Tensor


class Ahead(NamedTuple):
    """Features that a step is given, where they were computed before it.

    Attributes:
        phi_q: Those of the queries ``[B, H, F]`` fp32.
        phi_k: Those of the key that the linear branch may fold ``[B, HKV, F]`` fp32; anything where it folds none.
    """

    phi_q: Tensor
    phi_k: Tensor


def hybrid_launch(
    target: Target, step: HybridStep, traded: Traded | None = None, ahead: Ahead | None = None
) -> tuple[Tensor, Launch]:
    """Plan one step.

    Args:
        target: The device.
        step: The step, with q, k and v in the layout that kernels read and everything else contiguous.
        traded: What goes, where keys are kept; None where none are.
        ahead: Features that were computed before; None where the step computes them.

    Returns:
        The output, allocated, and the launch.
    """
    q, k, v, near_k, z = step.q, step.k, step.v, step.near_k, step.z
    B, (_, HKV, slots, D), V, G = len(q), near_k.shape, v.shape[3], q.shape[1] // k.shape[1]
    o = empty_like_tokens(q, V)
    paired = step.weight_k is not None
    M = D if step.weight_k is None else step.weight_k.shape[2]
    if ahead is not None:
        step = step._replace(weight_q=None, power_q=None, weight_k=None, power_k=None)
    chosen = tile(target, q.dtype, "hybrid", 2 * M if paired else M, V, G)
    width = chosen.width
    copies = -(-V // width) if z is None else z.shape[2] if z.ndim == 4 else 1
    # A program without a tile would leave its copies behind.
    while -(-V // width) < copies:
        width //= 2
    tensors = {
        **{"q": q, "k": k, "v": v, "key_mask": step.key_mask, "seen": step.seen, "rows": step.rows},
        **{"kv": step.kv, "z": z},
        **{"far_keys": step.far_keys, "near_k": near_k, "near_v": step.near_v, "near_mask": step.near_mask},
        **{"near_turns": step.near_turns, "turns": step.turns},
        **{"weight_q": step.weight_q, "power_q": step.power_q, "weight_k": step.weight_k, "power_k": step.power_k},
        **{"decay_bias": step.decay_bias, "decay_key": step.decay_key, "decay_value": step.decay_value},
        **{"bias": step.bias, "weight": step.weight, "o": o},
        **{"kept_k": None if step.kept is None else step.kept.k, "kept_v": None if step.kept is None else step.kept.v},
        **(dict.fromkeys(Traded._fields) if traded is None else traded._asdict()),
        **(dict.fromkeys(Ahead._fields) if ahead is None else ahead._asdict()),
    }
    arguments = {
        **tensors,
        **{"length": step.length if step.place is None else step.place, "HKV": HKV, "N": step.sinks},
        **{"W": slots - step.sinks - 1, "scaling": step.scaling, "eps": step.eps},
        **{"factor": step.factor, "sharpness": step.sharpness},
        "m_b": 0 if step.key_mask is None else step.key_mask.stride(0),
        "t_b": 0 if step.turns is None or len(step.turns) == 1 else step.turns.stride(0),
        **{"wq_h": of_heads(step.weight_q), "pq_h": of_heads(step.power_q)},
        **{"wk_h": of_heads(step.weight_k), "pk_h": of_heads(step.power_k)},
        **{"kv_p": of_rows(step.kv), "z_p": of_rows(z), "f_p": of_rows(step.far_keys)},
        **{"nk_p": of_rows(near_k), "nv_p": of_rows(step.near_v), "nt_p": of_rows(step.near_turns)},
        **{"kk_p": of_rows(tensors["kept_k"]), "kw_p": of_rows(tensors["kept_v"])},
        "K": 0 if step.kept is None else step.kept.k.shape[2],
        **{"G": G, "C": copies, "D": D, "V": V, "M": M},
        **{"GP": padded(G), "BD": padded(D), "BV": width, "BM": padded(M), "BP": chosen.tokens},
        **{"BK": max(1, PRODUCTS // padded(M)), "MAP": step.phi, "PAIR": paired, "GIVEN": ahead is not None},
        **{"R": 0 if step.turns is None else step.turns.shape[2], "PAIRS": step.pairs, "AT_END": step.at_end},
        "SIGNED": not paired and not elementwise_map(step.phi).non_negative,
        "FADES": step.decay_bias is not None,
        **{"MIX": step.mix, "MASKED": step.key_mask is not None, "STATIC": step.place is not None},
        "POOL": step.rows is not None,
        "PRECISION": precision(target, q.dtype, max(D, V)),
    }
    reads = tuple(x for name, x in tensors.items() if x is not None and name != "o")
    written = (o, step.kv, z, step.far_keys, step.near_turns)
    role = "hybrid" if ahead is None else "hybrid_given"
    role += "_kept" if step.kept is not None else "" if step.rows is None else "_rows"
    writes = tuple(x for x in written if x is not None)
    return o, planned(role, hybrid_kernel, B * HKV * copies, arguments, chosen, reads, writes)


def of_rows(x: Tensor | None) -> int:
    """Return the distance between the states of two rows."""
    return 0 if x is None else x.stride(0)


def of_heads(x: Tensor | None) -> int:
    """Return the distance between the weights of two heads; 0 where all share them."""
    return 0 if x is None or len(x) == 1 else x.stride(0)
