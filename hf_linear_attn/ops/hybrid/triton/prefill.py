"""The kernel that reads text in one: the queries' features, both branches and their join.

A program takes BT queries of one head. From the rows of q, turned back, it computes their features as two halves, reads
the state at the start of their segment and the segment's keys (`stored_forward` of linear attention, F = 2 M), and
divides: that is f, the value of a key of each query's own. Then it takes the same rows, as they are, through the keys
in their sight, the sinks and that key (`window`). Neither features of queries nor f are read from memory; where
gradients are asked for they are written for these, as are what both branches divided by.

Features of keys are computed before, once for all heads of a group; segments are summed and scanned as for linear
attention, and keys summed up by blocks as for the window.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.dispatch import numbers
from hf_linear_attn.ops.features.triton.kernels import (
    add_projected,
    halves,
    in_halves,
    load_halves,
)
from hf_linear_attn.ops.hybrid.records import Prefill, Prefilled
from hf_linear_attn.ops.linear_attention.triton.forward import state_launch, summed
from hf_linear_attn.ops.linear_attention.triton.model import stored_cut
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import Launch, Problem, Target, padded, planned, precision, tile
from hf_linear_attn.ops.triton.primitives import (
    column_parts,
    dot,
    dot_into,
    dot_over,
    key_rows,
    load_parts,
    load_plain,
    load_tile,
    operand,
    rows_before,
    segment_bounds,
    store_parts,
    zeros,
)
from hf_linear_attn.ops.window.triton.forward import attend_near, joined, own_score
from hf_linear_attn.ops.window.triton.problem import BLOCK
from hf_linear_attn.ops.window.triton.sight import first_key
from hf_linear_attn.ops.window.triton.sums import key_scan_kernel, key_sums_kernel

NARROW = numbers(triton.__version__) >= (3, 8)
"""Whether this Triton multiplies tiles of less than 64 columns right on sm_90."""


@triton.jit
def attend_far(
    above, below, phi_k, v, mask, starts, parts, sh, c, start, end, first, delay, eps, ot, on, om, ov, f_t, v_t,
    M: tl.constexpr, V: tl.constexpr, EXACT_M: tl.constexpr, EXACT_V: tl.constexpr,
    MASKED: tl.constexpr, DELAYED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what linear attention gives to rows of features ``above`` and ``below``, all in parts, and normalisers."""
    # [2 M, V], and [3, 2 M]
    state = starts + sh * (2 * M * V)
    parts += sh * (6 * M)
    acc = zeros(ot.shape[0], ov)
    mass = tl.zeros([ot.shape[0], 16], tl.float32)
    o3 = tl.arange(0, 16)
    for half in tl.static_range(2):
        phi_q = below if half else above
        for i in tl.static_range(len(om)):
            # [., V], and [16, .] of which three rows have z
            s = load_parts(state + half * M * V, om[i][:, None] * V, ov, om[i] < M, V, EXACT_V, "ieee")
            acc = dot_into(phi_q[i], s, acc, PRECISION)
            z = load_tile(parts + half * M, o3[:, None] * (2 * M) + om[i][None, :], o3 < 3, om[i] < M, EXACT_M)
            mass = dot(phi_q[i], tl.trans(z), mass, PRECISION)
    total = tl.sum(mass, 1)
    for j in range(start, tl.minimum(c + ot.shape[0], end), on.shape[0]):
        _, counts = key_rows(mask, j, rows_before(end, j, on), on, first, delay, MASKED, DELAYED)
        # [BN, M] twice, and [BN, V]
        fk = load_parts(phi_k + j * f_t, on[:, None] * f_t, om, counts, M, EXACT_M, PRECISION)
        p = dot_over(above, fk, tl.zeros([ot.shape[0], on.shape[0]], tl.float32), PRECISION)
        fk = load_parts(phi_k + j * f_t + M, on[:, None] * f_t, om, counts, M, EXACT_M, PRECISION)
        p = dot_over(below, fk, p, PRECISION)
        vv = load_parts(v + j * v_t, on[:, None] * v_t, ov, counts, V, EXACT_V, PRECISION)
        p = tl.where((c - j).to(tl.int32) + ot[:, None] >= on[None, :], p, 0.0)
        acc = dot_into(operand(p, vv[0].dtype, PRECISION), vv, acc, PRECISION)
        total += tl.sum(p, 1)
    total += eps
    over = 1.0 / total
    return [part * over[:, None] for part in acc], total


@triton.jit(
    do_not_specialize=[
        "T", "S", "P", "W", "NB", "L", "NSEG", "delay", "eps", "scaling", "factor", "sharpness", "c_b", "m_b",
    ]
)  # fmt: skip
def prefill_kernel(
    q, turns, k, v, phi_k, codes, mask, sink_k, sink_v, seen, number, prefix, starts, parts,
    weight, power, bias, direction, o, table, phi_q, far, den, lse, score,
    T, S, P, W, NB, L, NSEG, delay, eps, scaling, factor, sharpness, H, G,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, f_b, f_h, f_t, o_b, o_h, o_t,
    phi_q_b, phi_q_h, phi_q_t, far_b, far_h, far_t, t_b, c_b, m_b, w_h, w_d, p_h,
    D: tl.constexpr, M: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
    REST_D: tl.constexpr, REST_M: tl.constexpr, REST_V: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SINKS: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr, HALVES: tl.constexpr,
    MAP: tl.constexpr, QUERY: tl.constexpr,
    CODED: tl.constexpr, MASKED: tl.constexpr, DELAYED: tl.constexpr, SPLIT: tl.constexpr, TRAINS: tl.constexpr,
    PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write the outputs of BT queries, and where gradients are asked for what these are computed from."""
    EXACT_D: tl.constexpr = D == BD + REST_D
    EXACT_M: tl.constexpr = M == BM + REST_M
    EXACT_V: tl.constexpr = V == BV + REST_V
    kind: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float16 else q.dtype.element_ty
    pid = tl.program_id(0)
    i_h = pid % H
    i_t = (pid // H) % tl.cdiv(L, BT)
    i_s = pid // H // tl.cdiv(L, BT)
    _n, row, first, start, end = segment_bounds(table, i_s, T, L, NSEG, False)
    c = start + i_t * BT
    if c >= end:
        return
    i_hk = i_h // G
    od = column_parts(BD, REST_D)
    om = column_parts(BM, REST_M)
    ov = column_parts(BV, REST_V)
    ot = tl.arange(0, BT)
    on = tl.arange(0, BN)
    rows = rows_before(end, c, ot)
    q += row * q_b + i_h.to(tl.int64) * q_h + c * q_t
    k += row * k_b + i_hk.to(tl.int64) * k_h
    v += row * v_b + i_hk.to(tl.int64) * v_h
    phi_k += row * f_b + i_hk.to(tl.int64) * f_h
    far_v = v
    if CODED:
        codes += row * c_b
    if MASKED:
        mask += row * m_b
    if R > 0:
        turns += row * t_b + c * R
    if DELAYED:
        phi_k -= delay.to(tl.int64) * f_t
        far_v -= delay.to(tl.int64) * v_t
        if MASKED:
            mask -= delay
    weight += i_h.to(tl.int64) * w_h
    # [BT, M]
    y = zeros(BT, om)
    if HALVES:
        # [BT, HALF] twice
        HALF: tl.constexpr = D // 2
        oh = tl.arange(0, HALF)
        x = load_halves(q, q_t, turns, ot, rows, D, R, PRECISION, False)
        y = add_projected(x, weight, w_d, (oh, HALF + oh), om, y, D, M, kind, PRECISION, SPLIT)
    else:
        x = [load_plain(q, q_t, turns, ot, part, rows, D, R, PAIRS, AT_END, EXACT_D, PRECISION) for part in od]
        y = add_projected(x, weight, w_d, od, om, y, D, M, kind, PRECISION, SPLIT)
    y = [factor * part for part in y]
    a = 0.0
    if MAP == "norm_preserving":
        a = tl.load(power + i_h.to(tl.int64) * p_h).to(tl.float32)
    above, below = halves(y, a, sharpness, om, M, MAP, QUERY, q.dtype.element_ty, PIN)
    if TRAINS:
        phi_q += row * phi_q_b + i_h.to(tl.int64) * phi_q_h + c * phi_q_t
        store_parts(phi_q, ot[:, None] * phi_q_t, om, above, rows, M, EXACT_M)
        store_parts(phi_q + M, ot[:, None] * phi_q_t, om, below, rows, M, EXACT_M)
    above = [operand(part, kind, PRECISION) for part in above]
    below = [operand(part, kind, PRECISION) for part in below]
    sh = i_s.to(tl.int64) * (H // G) + i_hk
    f, normaliser = attend_far(
        above, below, phi_k, far_v, mask, starts, parts, sh, c, start, end, first, delay, eps, ot, on, om, ov, f_t, v_t,
        M, V, EXACT_M, EXACT_V, MASKED, DELAYED, PRECISION,
    )  # fmt: skip
    # As rounded as where it crosses memory, and half as many registers.
    f = [part.to(q.dtype.element_ty) for part in f]
    at = (row * H + i_h) * T + c + ot
    if TRAINS:
        far += row * far_b + i_h.to(tl.int64) * far_h + c * far_t
        store_parts(far, ot[:, None] * far_t, ov, f, rows, V, EXACT_V)
        tl.store(den + at, normaliser, mask=rows)
    x = load_parts(q, ot[:, None] * q_t, od, rows, D, EXACT_D, PRECISION)
    kv_head = row * (H // G) + i_hk
    begin = first_key(c, P, W, BLOCK)
    m, mass, acc, products = attend_near(
        x, k, v, codes, begin, c, rows, od, ov, ot, on, T, S, P, W, scaling, k_t, v_t, kv_head, row,
        sink_k, sink_v, seen, D, V, EXACT_D, EXACT_V, SINKS, BS, CODED, True, PRECISION,
    )  # fmt: skip
    if TRAINS:
        # Read again, it takes no registers meanwhile.
        tl.debug_barrier()
        f = load_parts(far, ot[:, None] * far_t, ov, rows, V, EXACT_V, "ieee")
    n = tl.load(number + row * T + c + ot, mask=rows, other=0).to(tl.float32)
    keys = prefix + (kv_head * NB + begin // BLOCK) * D
    e = own_score(x, products, n, keys, bias + i_h, direction + i_h * D, od, scaling, D)
    largest = tl.maximum(m, e)
    own = tl.exp2(e - largest)
    old = tl.exp2(m - largest)
    acc = joined(acc, old, f, own)
    mass = mass * old + own
    if TRAINS:
        tl.store(lse + at, largest + tl.log2(mass), mask=rows)
        tl.store(score + at, e, mask=rows)
    o += row * o_b + i_h.to(tl.int64) * o_h + c * o_t
    store_parts(o, ot[:, None] * o_t, ov, [part / mass[:, None] for part in acc], rows, V, EXACT_V)


def in_parts(dim: int, whole: int) -> tuple[int, int]:
    """Return the sizes of two tiles that hold ``dim`` exactly, 64 and 16 or 32, or else that of a ``whole`` one and 0.

    ptxas 12.8 (Triton 3.6 and 3.7) computes wrong addresses of the narrow one: see :func:`padded_for`.
    """
    if NARROW and dim in (80, 96):
        return 64, dim - 64
    return whole, 0


def linear_problem(target: Target, p: Prefill) -> Problem:
    """Return the linear branch, but for its queries' features."""
    count = p.q.shape[2]
    delay = p.window - (p.k.shape[2] - count)
    return Problem(target, p.q, p.features, p.v[:, :, :count], p.counts, None, p.kv, p.z, "identity", True, delay)


def allocate_prefill(p: Prefill) -> Prefilled:
    """Allocate the results."""
    (B, HKV, _, F), D, V = p.features.shape, p.k.shape[3], p.v.shape[3]

    def sums(*sizes: int) -> Tensor:
        return torch.empty(B, HKV, *sizes, dtype=torch.float32, device=p.q.device)

    return Prefilled(empty_like_tokens(p.q, V), sums(F, V), sums(F), sums(D))


def key_launches(target: Target, p: Prefill, total: Tensor) -> tuple[Tensor, list[Launch]]:
    """Plan the sums of keys before each block, of those that leave the window, and that of all.

    Args:
        target: The device.
        p: The call, laid out as :func:`prefill_launches` asks.
        total: Where the last is written ``[B, HKV, D]``.

    Returns:
        Sums before blocks ``[B, HKV, blocks, D]``, and the launches.
    """
    B, HKV, S, D = p.k.shape
    gone = S - p.window
    # One more than there are whole ones: what comes after the last is before it, too.
    blocks = gone // BLOCK + 1
    sums, prefix = (torch.empty(B, HKV, blocks, D, dtype=torch.float32, device=p.q.device) for _ in range(2))
    adding, scanning = (tile(target, p.q.dtype, role, D, p.v.shape[3], 0) for role in ("key_sums", "key_scan"))
    width = min(scanning.width, padded(D))
    of_blocks = {
        **{"k": p.k, "codes": p.key_mask, "sums": sums, "S": gone, "N": blocks, "HKV": HKV, "c_b": S},
        **{"D": D, "BD": padded(D), "BLOCK": BLOCK, "MASKED": p.key_mask is not None},
    }
    before = {
        **{"x": sums, "before": p.far_keys, "out": prefix, "total": total, "N": blocks, "G": 1},
        **{"D": D, "BD": width, "BN": scanning.tokens, "INITIAL": p.far_keys is not None, "REVERSE": False},
    }
    return prefix, [
        planned("key_sums", key_sums_kernel, B * HKV * blocks, of_blocks, adding, (p.k,), (sums,)),
        planned("key_scan", key_scan_kernel, B * HKV * -(-D // width), before, scanning, (sums,), (prefix,)),
    ]


class Left(NamedTuple):
    """What the kernel leaves for gradients.

    Attributes:
        phi_q: Features of queries ``[B, H, T, F]``.
        far: What linear attention gives them ``[B, H, T, V]``.
        den: By what it divided ``[B, H, T]``, fp32.
        lse: Log-sum-exp of the scores ``[B, H, T]``, fp32, base 2.
        score: Scores of the queries' own keys ``[B, H, T]``, fp32, base 2.
    """

    phi_q: Tensor | None = None
    far: Tensor | None = None
    den: Tensor | None = None
    lse: Tensor | None = None
    score: Tensor | None = None


NOTHING = Left()


def read_launches(
    target: Target, p: Prefill, o: Tensor, states: tuple[Tensor, Tensor], prefix: Tensor, left: Left = NOTHING
) -> list[Launch]:
    """Plan the reading of some tokens whose keys are summed up already.

    Args:
        target: The device.
        p: The call, laid out as :func:`prefill_launches` asks.
        o: Where the outputs go.
        states: Where the linear branch's state after the tokens goes, and its normaliser.
        prefix: Sums of keys before each block of them ``[B, HKV, blocks, D]``, fp32.
        left: What is left for gradients.
    """
    linear = linear_problem(target, p)
    (_, H, T, D), S, V, (copies, _, M) = p.q.shape, p.k.shape[2], p.v.shape[3], p.learned.shape
    chosen = linear.tile("prefill")
    cut = stored_cut(linear)
    segments = linear.segments(T, cut.length)
    sums = state_launch(linear, segments)
    starts, launches = summed(linear, sums, segments, (p.kv, p.z), states, reverse=False, stored=True)
    sinks = 0 if p.sink_k is None else p.sink_k.shape[2]
    trains = left.lse is not None
    of_d, of_m, of_v = in_parts(D, padded(D)), in_parts(M, padded(M)), in_parts(V, linear.padded(V))
    if of_d[1]:
        # Addresses of parts leave no registers for a pipeline.
        chosen = chosen._replace(stages=1)
    known: dict[str, Any] = {
        **linear.shared(segments),
        **{"q": p.q, "turns": p.turns, "k": p.k, "v": p.v, "phi_k": p.features, "f": p.features, "o": o},
        **{"sink_k": p.sink_k, "sink_v": p.sink_v, "seen": p.seen, "number": p.number, "prefix": prefix},
        **{"starts": starts.states, "parts": starts.parts, "weight": p.weight_q, "power": p.power_q},
        **{"bias": p.bias, "direction": p.weight, "codes": p.key_mask, "CODED": p.key_mask is not None},
        **{"T": T, "S": S, "P": S - T, "W": p.window, "NB": prefix.shape[2], "eps": p.eps, "scaling": p.scaling},
        **{"factor": p.factor, "sharpness": p.sharpness, "H": H, "G": linear.group},
        **{"t_b": 0 if p.turns is None or len(p.turns) == 1 else p.turns.stride(0), "c_b": S},
        **{"w_h": 0 if copies == 1 else D * M, "w_d": M, "p_h": 0 if p.power_q is None or len(p.power_q) == 1 else 1},
        **{"D": D, "M": M, "V": V, "BD": of_d[0], "BM": of_m[0], "BV": of_v[0]},
        **{"REST_D": of_d[1], "REST_M": of_m[1], "REST_V": of_v[1]},
        **{"BT": chosen.tokens, "BN": chosen.width, "SINKS": sinks, "BS": padded(sinks) if sinks else 16},
        **{"R": 0 if p.turns is None else p.turns.shape[2], "PAIRS": p.pairs, "AT_END": p.at_end},
        "HALVES": in_halves(D, of_d[0], 0 if p.turns is None else p.turns.shape[2], p.pairs),
        **{"MAP": p.phi, "QUERY": p.sharpness > 0, "SPLIT": p.q.dtype == torch.bfloat16, "BLOCK": BLOCK},
        **{"PRECISION": precision(target, p.q.dtype, max(2 * M, V)), "TRAINS": trains, **left._asdict()},
    }
    programs = segments.count * -(-cut.length // chosen.tokens) * H
    reads = (p.q, p.k, p.v, p.features, *(() if p.turns is None else (p.turns,)))
    writes = (o, *(x for x in left if x is not None))
    role = "prefill_train" if trains else "prefill"
    return [*launches, planned(role, prefill_kernel, programs, known, chosen, reads, writes)]


def prefill_launches(target: Target, p: Prefill) -> tuple[Prefilled, list[Launch]]:
    """Plan the reading of some tokens.

    Args:
        target: The device.
        p: The call, with inputs in the layout that kernels read: all but q, k, v and their features contiguous, masks
            as uint8, and as the key mask the codes of keys, bit 0 for those that the window shows and bit 1 for those
            that count.

    Returns:
        The results, allocated but not computed, and the launches that compute them, in order.
    """
    out = allocate_prefill(p)
    prefix, of_keys = key_launches(target, p, out.far_keys)
    return out, [*of_keys, *read_launches(target, p, out.o, (out.kv, out.z), prefix)]
