"""The kernel that computes what a step of many rows reads of a paired map, before the step.

A step's programs compute features where they read them: each reads the weights of its heads, and a head of a row has as
many programs as there are tiles of columns. Of few rows that is less than a launch costs. Here a program takes one
head, and its weights ``[BD, BM]`` once for BT rows.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
import triton
import triton.language as tl

from hf_linear_attn.ops.features.triton.kernels import WEIGHTS, halves, load_weight, project
from hf_linear_attn.ops.hybrid.records import HybridStep
from hf_linear_attn.ops.hybrid.triton.step import Ahead, Traded, of_heads, of_rows, slot_of
from hf_linear_attn.ops.triton.plan import Launch, Target, padded, planned, precision, tile
from hf_linear_attn.ops.triton.primitives import load_turned

FEWEST = 8
"""Rows of which features are computed ahead: an estimate, from weights that are read and what a launch takes."""

TILE = 16
"""Rows of a program: as few as products take."""


@triton.jit
def write_features(
    x, at, turns, turn, reads, rows, od, om, weight, power, p, factor, sharpness, o, to,
    D: tl.constexpr, M: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    MAP: tl.constexpr, QUERY: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write the features of the vectors at so many offsets from x, to as many offsets from o; the power is at ``p``.

    Vectors that are not read are 0.
    """
    kind: tl.constexpr = tl.float32 if x.dtype.element_ty == tl.float16 else x.dtype.element_ty
    w, rest = load_weight(weight, M, od, om, D, M, kind, PRECISION, SPLIT)
    a = 0.0
    if MAP == "norm_preserving":
        a = tl.load(power + p).to(tl.float32)
    # [BT, BD]
    xx = load_turned(x, at, turns, turn, od, reads, D, R, PAIRS, AT_END, EXACT, PRECISION)
    # [BT, BM]
    y = project(xx, w, rest, factor, PRECISION, SPLIT)
    above, below = halves((y,), a, sharpness, (om,), M, MAP, QUERY, x.dtype.element_ty, False)
    inside = rows[:, None] & (om < M)[None, :]
    tl.store(o + to[:, None] + om[None, :], above[0], mask=inside)
    tl.store(o + to[:, None] + M + om[None, :], below[0], mask=inside)


@triton.jit(do_not_specialize=["length", "B", "N", "W", "factor", "sharpness", "t_b"])
def ahead_kernel(
    q, seen, length, rows, near_k, near_mask, near_turns, turns, gone, gone_turns, told,
    weight_q, power_q, weight_k, power_k, phi_q, phi_k,
    B, HKV, N, W, factor, sharpness, q_b, q_h, t_b, nk_p, nt_p, wq_h, pq_h, wk_h, pk_h,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr, MAP: tl.constexpr,
    STATIC: tl.constexpr, POOL: tl.constexpr, KEEPS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute the features of one head of queries, or of one head of the keys that leave the window, for some rows."""
    pid = tl.program_id(0)
    heads = HKV * (G + 1)
    i_h = (pid % heads).to(tl.int64)
    i_b = (pid // heads) * BT + tl.arange(0, BT)
    inside = i_b < B
    i_b = i_b.to(tl.int64)
    od = tl.arange(0, BD)
    om = tl.arange(0, BM)
    if i_h < HKV * G:
        write_features(
            q, i_b * q_b + i_h * q_h, turns, i_b * t_b, inside, inside, od, om,
            weight_q + i_h * wq_h, power_q, i_h * pq_h, factor, sharpness, phi_q, (i_b * HKV * G + i_h) * (2 * M),
            D, M, R, PAIRS, AT_END, MAP, True, D == BD, PRECISION, SPLIT,
        )  # fmt: skip
    else:
        i_hk = i_h - HKV * G
        bh = i_b * HKV + i_hk
        # A slot that holds nothing is not read, whatever stands there.
        if KEEPS:
            leaves = tl.load(told + 2 * bh + 1, mask=inside, other=0) != 0
            x, at, of_x, turn = gone, bh * D, gone_turns, bh * R
        else:
            state = i_b
            place = length
            if POOL:
                state = tl.load(rows + i_b, mask=inside, other=0)
                place = tl.load(length + i_b, mask=inside, other=0)
            elif STATIC:
                place = tl.load(length)
            old = slot_of(place + 1, N, W)
            if POOL:
                leaves = tl.load(seen + i_b, mask=inside, other=0) >= N + W
            else:
                leaves = tl.load(near_mask + i_b * (N + W + 1) + old, mask=inside, other=0) != 0
            x, at = near_k, state * nk_p + (i_hk * (N + W + 1) + old) * D
            of_x, turn = near_turns, state * nt_p + old * D
        write_features(
            x, at, of_x, turn, inside & leaves, inside, od, om,
            weight_k + i_hk * wk_h, power_k, i_hk * pk_h, factor, 0.0, phi_k, bh * (2 * M),
            D, M, R, PAIRS, AT_END, MAP, False, D == BD, PRECISION, SPLIT,
        )  # fmt: skip


def ahead_launch(target: Target, step: HybridStep, traded: Traded | None) -> tuple[Ahead, Launch] | None:
    """Plan what comes before a step of many rows: return the features, allocated, and the launch.

    Arguments are those of :func:`hybrid_launch`. None where the step computes features itself: of few rows, where
    there are no weights to read, and where a program does not hold them.
    """
    q, near_k = step.q, step.near_k
    B, (_, HKV, slots, D), H = len(q), near_k.shape, q.shape[1]
    if step.weight_q is None or step.mix == "window" or B < FEWEST:
        return None
    M = step.weight_q.shape[2]
    if padded(D) * padded(M) > WEIGHTS:
        return None
    found = Ahead(*(torch.empty(B, heads, 2 * M, dtype=torch.float32, device=q.device) for heads in (H, HKV)))
    names = ("q", "seen", "rows", "near_k", "near_mask", "near_turns", "turns")
    tensors = {name: getattr(step, name) for name in (*names, "weight_q", "power_q", "weight_k", "power_k")}
    tensors |= dict.fromkeys(Traded._fields) if traded is None else traded._asdict()
    arguments = {
        **tensors,
        **found._asdict(),
        **{"length": step.length if step.place is None else step.place, "B": B, "HKV": HKV, "N": step.sinks},
        **{"W": slots - step.sinks - 1, "factor": step.factor, "sharpness": step.sharpness},
        "t_b": 0 if step.turns is None or len(step.turns) == 1 else step.turns.stride(0),
        **{"nk_p": of_rows(near_k), "nt_p": of_rows(step.near_turns)},
        **{"wq_h": of_heads(step.weight_q), "pq_h": of_heads(step.power_q)},
        **{"wk_h": of_heads(step.weight_k), "pk_h": of_heads(step.power_k)},
        **{"G": H // HKV, "D": D, "M": M, "BD": padded(D), "BM": padded(M), "BT": TILE},
        **{"R": 0 if step.turns is None else step.turns.shape[2], "PAIRS": step.pairs, "AT_END": step.at_end},
        **{"MAP": step.phi, "STATIC": step.place is not None, "POOL": step.rows is not None},
        # As the kernel of features has it, but that its tile is of fewer rows.
        **{"KEEPS": traded is not None, "PRECISION": precision(target, q.dtype, 2 * max(D, M))},
        "SPLIT": q.dtype == torch.bfloat16,
    }
    reads = tuple(x for x in tensors.values() if x is not None)
    chosen = tile(target, q.dtype, "features", D, M, 0)._replace(tokens=TILE, width=padded(M))
    role = "ahead_kept" if traded is not None else "ahead" if step.rows is None else "ahead_rows"
    programs = HKV * (H // HKV + 1) * -(-B // TILE)
    return found, planned(role, ahead_kernel, programs, arguments, chosen, reads, tuple(found))
