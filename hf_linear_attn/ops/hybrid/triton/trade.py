"""The kernel that lets a key which leaves the window take a place among those that are kept, before a step reads them.

A program takes a key head of a row. It tells the step what goes instead, which the linear branch folds: the step's own
programs share a head, and may not read what another one of them writes.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.hybrid.checks import KEPT
from hf_linear_attn.ops.hybrid.records import HybridStep, KeptStep
from hf_linear_attn.ops.hybrid.triton.ahead import ahead_launch
from hf_linear_attn.ops.hybrid.triton.step import Traded, hybrid_launch, load_vector, of_rows, stand
from hf_linear_attn.ops.kept.problem import AGES, ALIKE
from hf_linear_attn.ops.kept.triton import ENTRIES, LAST, apart, at_age, pick
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded
from hf_linear_attn.ops.triton.primitives import LOG2E

NET = "mean", "deviation", "weight_in", "bias_in", "weight_out", "bias_out"
"""What a net has learned, as the kernel calls it."""


@triton.jit
def summed(x, first, mean, deviation, weight_in, D: tl.constexpr, U: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr):
    """Return what entries of the net's input give its hidden units ``[BU]``; the first has the number ``first``."""
    od = tl.arange(0, BD)
    ou = tl.arange(0, BU)
    usual = tl.load(mean + first + od, mask=od < D, other=0.0).to(tl.float32)
    spread = tl.load(deviation + first + od, mask=od < D, other=1.0).to(tl.float32)
    x = tl.where(od < D, (x - usual) / spread, 0.0)
    inside = (od < D)[:, None] & (ou < U)[None, :]
    weight = tl.load(weight_in + (first + od)[:, None] * U + ou[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.sum(x[:, None] * weight, 0)


@triton.jit(do_not_specialize=["length", "N", "W", "m_b", "t_b"])
def trade_kernel(
    k, v, key_mask, seen, length, rows, near_k, near_v, near_mask, near_turns, turns,
    kept_k, kept_v, kept_at, kept_turns, kept_nearest, kept_scores,
    mean, deviation, weight_in, bias_in, weight_out, bias_out, gone, gone_v, gone_turns, told,
    HKV, N, W, k_b, k_h, v_b, v_h, m_b, t_b, nk_p, nv_p, nt_p, kk_p, kv_p, ka_p, kt_p, kn_p, ks_p,
    C: tl.constexpr, D: tl.constexpr, V: tl.constexpr, U: tl.constexpr, A: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, BA: tl.constexpr, BS: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr, TURNED: tl.constexpr, COMPARES: tl.constexpr,
    MASKED: tl.constexpr, STATIC: tl.constexpr, POOL: tl.constexpr,
    AGES: tl.constexpr, ALIKE: tl.constexpr, LAST: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """Trade in one key head of a row."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // HKV
    i_hk = i_bh % HKV
    oc = tl.arange(0, BC)
    od = tl.arange(0, BD)
    ov = tl.arange(0, BV)
    os = tl.arange(0, BS)
    slots = N + W + 1
    i_p, new, old, read, real = stand(rows, length, seen, key_mask, i_b, m_b, N, W, MASKED, STATIC, POOL)
    # What the ring holds before the token comes.
    if POOL:
        came = read - 1 - (read - 1 - (os - N) + (W + 1)) % (W + 1)
        ring = (os >= N) & (os < slots) & (came >= N) & (came >= read - W) & (os != new)
        leaves = read >= N + W
    else:
        near_mask += i_b * slots
        ring = (tl.load(near_mask + os, mask=(os >= N) & (os < slots), other=0) != 0) & (os != new)
        leaves = tl.load(near_mask + old) != 0
    held = tl.sum(ring.to(tl.int32), 0)
    number = read - tl.minimum(read, N) - held
    now = read - held
    count = tl.minimum(number, C)
    near_k += i_p * nk_p
    near_v += i_p * nv_p
    own_k = near_k + (i_hk * slots + old) * D
    own_v = near_v + (i_hk * slots + old) * V
    kept_k += i_p * kk_p + i_hk * C * D
    kept_v += i_p * kv_p + i_hk * C * V
    kept_at += i_p * ka_p + i_hk * C
    if R > 0:
        near_turns += i_p * nt_p
        turns += i_b * t_b
    time = tl.load(kept_at + oc, mask=oc < C, other=LAST)
    known = oc < tl.where(leaves, count, 0)
    value = tl.load(own_v + ov, mask=ov < V, other=0.0)
    key = tl.load(own_k + od, mask=od < D, other=0.0)
    new_score = 0.0
    if COMPARES:
        kept_nearest += i_p * kn_p + i_hk * C
        near = tl.load(kept_nearest + oc, mask=oc < C, other=float("inf"))
        table = kept_v + oc[:, None] * V + ov[None, :]
        table = tl.load(table, mask=known[:, None] & (ov < V)[None, :], other=0.0).to(tl.float32)
        near = tl.where(known, tl.minimum(near, apart(table, value.to(tl.float32), ALIKE)), near)
    else:
        kept_scores += i_p * ks_p + i_hk * C * AGES
        near = at_age(kept_scores, oc, now - time + W, W, known, AGES)
        half = HKV * (D + V)
        weight_in += i_hk * 2 * half * U
        ou = tl.arange(0, BU)
        oa = tl.arange(0, BA)
        hidden = tl.load(bias_in + i_hk * U + ou, mask=ou < U, other=0.0).to(tl.float32)
        for h in range(HKV):
            of_key = h * (D + V)
            key_h = near_k + (h * slots + old) * D
            value_h = near_v + (h * slots + old) * V
            x = load_vector(key_h, od, D, near_turns, old * D, D, R, PAIRS, AT_END).to(tl.float32)
            y = tl.load(value_h + ov, mask=ov < V, other=0.0).to(tl.float32)
            hidden += summed(x, of_key, mean, deviation, weight_in, D, U, BD, BU)
            hidden += summed(y, of_key + D, mean, deviation, weight_in, V, U, BV, BU)
            x = tl.zeros([BD], tl.float32)
            y = tl.zeros([BV], tl.float32)
            for j in range(1, A + 1):
                slot = N + (new - N + 1 + j) % (W + 1)
                if slot == new:
                    # The step writes the token there while others may still read.
                    columns = tl.where(real & (read >= N), D, 0)
                    token = k + i_b * k_b + h * k_h
                    x += load_vector(token, od, columns, turns, 0, D, R, PAIRS, AT_END).to(tl.float32)
                    token = v + i_b * v_b + h * v_h
                    y += tl.load(token + ov, mask=ov < tl.where(columns > 0, V, 0), other=0.0).to(tl.float32)
                else:
                    shows = tl.sum((ring & (os == slot)).to(tl.int32), 0) > 0
                    columns = tl.where(shows, D, 0)
                    key_h = near_k + (h * slots + slot) * D
                    value_h = near_v + (h * slots + slot) * V
                    x += load_vector(key_h, od, columns, near_turns, slot * D, D, R, PAIRS, AT_END).to(tl.float32)
                    y += tl.load(value_h + ov, mask=ov < tl.where(shows, V, 0), other=0.0).to(tl.float32)
            hidden += summed(x / A, half + of_key, mean, deviation, weight_in, D, U, BD, BU)
            hidden += summed(y / A, half + of_key + D, mean, deviation, weight_in, V, U, BV, BU)
        hidden = hidden / (1.0 + tl.exp2(-hidden * LOG2E))
        inside = (ou < U)[:, None] & (oa < AGES)[None, :]
        out = tl.load(weight_out + (i_hk * U + ou)[:, None] * AGES + oa[None, :], mask=inside, other=0.0)
        said = tl.sum(hidden[:, None] * out.to(tl.float32), 0)
        said += tl.load(bias_out + i_hk * AGES + oa, mask=oa < AGES, other=0.0).to(tl.float32)
        new_score = tl.sum(tl.where(oa == 0, said, 0.0), 0)
    chosen, stays = pick(near, time, oc, count, leaves, new_score, C, COMPARES, LAST)
    # Where it stays it takes the place of what goes; else it goes itself.
    at = tl.sum(tl.where(chosen, oc, 0), 0).to(tl.int64)
    moved = tl.where(stays, D, 0)
    goes_k = tl.load(kept_k + at * D + od, mask=od < moved, other=0.0)
    goes_v = tl.load(kept_v + at * V + ov, mask=ov < tl.where(stays, V, 0), other=0.0)
    tl.store(gone + i_bh * D + od, tl.where(od < moved, goes_k, key), mask=od < D)
    tl.store(gone_v + i_bh * V + ov, tl.where(ov < tl.where(stays, V, 0), goes_v, value), mask=ov < V)
    tl.store(kept_k + at * D + od, key, mask=od < moved)
    tl.store(kept_v + at * V + ov, value, mask=ov < tl.where(stays, V, 0))
    if TURNED:
        kept_turns += i_p * kt_p + i_hk * C * D
        turned = tl.load(near_turns + old * D + od, mask=od < R, other=0.0)
        swapped = tl.where(stays, R, 0)
        goes = tl.load(kept_turns + at * D + od, mask=od < swapped, other=0.0)
        tl.store(gone_turns + i_bh * R + od, tl.where(od < swapped, goes, turned), mask=od < R)
        tl.store(kept_turns + at * D + od, turned, mask=od < swapped)
    tl.store(kept_at + oc, now, mask=chosen & (oc < C))
    if COMPARES:
        tl.store(kept_nearest + oc, tl.where(chosen, float("inf"), near), mask=oc < C)
    else:
        tl.store(kept_scores + at * AGES + oa, said, mask=oa < tl.where(stays, AGES, 0))
    tl.store(told + i_bh * 2, tl.minimum(count + leaves.to(tl.int64), C))
    tl.store(told + i_bh * 2 + 1, (leaves & (count >= C)).to(tl.int64))


def trade_launch(target: Target, step: HybridStep, kept: KeptStep) -> tuple[Traded, Launch]:
    """Plan what comes before a step, as :func:`hybrid_launches` does.

    Args:
        target: The device.
        step: The step.
        kept: Its kept keys.

    Returns:
        What goes, allocated, and the launch.
    """
    (B, HKV, _, D), V, C, slots = step.k.shape, step.v.shape[3], kept.k.shape[2], step.near_k.shape[2]
    R, compares = 0 if step.turns is None else step.turns.shape[2], kept.scores is None
    net = dict(zip(NET, kept.weights or [None] * len(NET), strict=True))
    U = kept.weights[2].shape[2] if kept.weights else 0
    found = Traded(
        gone=step.k.new_empty(B, HKV, D),
        gone_v=step.v.new_empty(B, HKV, V),
        gone_turns=None if kept.turns is None else step.k.new_empty(B, HKV, R),
        told=step.seen.new_empty(B, HKV, 2),
    )
    names = ("k", "v", "key_mask", "seen", "rows", "near_k", "near_v", "near_mask", "near_turns", "turns")
    tensors = {name: getattr(step, name) for name in names} | dict(zip(KEPT, kept.changing, strict=True)) | net
    held = {"nk": step.near_k, "nv": step.near_v, "nt": step.near_turns}
    held |= zip(("kk", "kv", "ka", "kt", "kn", "ks"), kept.changing, strict=True)
    entries = padded(C) * padded(V) if compares else 2 * padded(D) * padded(max(U, 1))
    chosen = Tile(padded(C), padded(V), min(max(entries // ENTRIES, 1), 8), 1)
    arguments = {
        **tensors,
        **found._asdict(),
        **{"length": step.length if step.place is None else step.place, "HKV": HKV, "N": step.sinks},
        "W": slots - step.sinks - 1,
        **{f"{name}_{dim}": x.stride(n) for name, x in (("k", step.k), ("v", step.v)) for n, dim in enumerate("bh")},
        "m_b": 0 if step.key_mask is None else step.key_mask.stride(0),
        "t_b": 0 if step.turns is None or len(step.turns) == 1 else step.turns.stride(0),
        **{f"{name}_p": of_rows(x) for name, x in held.items()},
        **{"C": C, "D": D, "V": V, "U": U, "A": kept.ahead},
        **{"BC": padded(C), "BD": padded(D), "BV": padded(V), "BU": padded(max(U, 1)), "BA": padded(AGES)},
        **{"BS": padded(slots), "R": R, "PAIRS": step.pairs, "AT_END": step.at_end},
        **{"TURNED": kept.turns is not None, "COMPARES": compares, "MASKED": step.key_mask is not None},
        **{"STATIC": step.place is not None, "POOL": step.rows is not None},
        **{"AGES": AGES, "ALIKE": ALIKE, "LAST": LAST, "LOG2E": LOG2E},
    }
    reads, writes = (tuple(x for x in of.values() if x is not None) for of in (tensors, found._asdict()))
    role = "trade" if compares else "trade_scored"
    return found, Launch(role, trade_kernel, B * HKV, arguments, chosen, reads, writes)


def hybrid_launches(target: Target, step: HybridStep) -> tuple[Tensor, list[Launch]]:
    """Plan one step after what comes before it: the trade where keys are kept, and the features of many rows.

    Args:
        target: The device.
        step: The step, with q, k and v in the layout that kernels read and everything else contiguous.

    Returns:
        The output, allocated, and the launches in order.
    """
    traded, launches = None, []
    if step.kept is not None:
        traded, first = trade_launch(target, step, step.kept)
        launches.append(first)
    ahead = ahead_launch(target, step, traded)
    if ahead is not None:
        launches.append(ahead[1])
    o, last = hybrid_launch(target, step, traded, None if ahead is None else ahead[0])
    return o, [*launches, last]
