"""The kernel that lets a key which leaves the window take a place among those that are kept, before a step reads them.

A program takes a key head of a row. It tells the step what goes instead, which the linear branch folds: the step's own
programs share a head, and may not read what another one of them writes.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.ops.hybrid.checks import KEPT, check_hybrid
from hf_linear_attn.ops.hybrid.records import HybridStep, KeptStep
from hf_linear_attn.ops.hybrid.triton.ahead import ahead_launch
from hf_linear_attn.ops.hybrid.triton.hidden import hidden_launch
from hf_linear_attn.ops.hybrid.triton.step import Traded, hybrid_launch, of_rows, stand
from hf_linear_attn.ops.kept.problem import AGES, ALIKE
from hf_linear_attn.ops.kept.triton import ENTRIES, LAST, apart, at_age, pick
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded
from hf_linear_attn.ops.triton.primitives import LOG2E

NET = "mean", "deviation", "weight_in", "bias_in", "weight_out", "bias_out"
"""What a net has learned, as the kernel calls it."""


@triton.jit(do_not_specialize=["length", "N", "W"])
def trade_kernel(
    seen, length, rows, near_k, near_v, near_mask, near_turns,
    kept_k, kept_v, kept_at, kept_turns, kept_nearest, kept_scores,
    given, bias_in, weight_out, bias_out, gone, gone_v, gone_turns, told,
    HKV, N, W, nk_p, nv_p, nt_p, kk_p, kv_p, ka_p, kt_p, kn_p, ks_p,
    C: tl.constexpr, D: tl.constexpr, V: tl.constexpr, U: tl.constexpr, R: tl.constexpr,
    BC: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, BA: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, TURNED: tl.constexpr, COMPARES: tl.constexpr,
    STATIC: tl.constexpr, POOL: tl.constexpr,
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
    # Whether the new token is a real one is of no account.
    i_p, new, old, read, _ = stand(rows, length, seen, seen, i_b, 0, N, W, False, STATIC, POOL)
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
        new = value.to(tl.float32)
        near_new = apart(table, tl.sum(table * table, 1), new, tl.sum(new * new, 0), ALIKE)
        near = tl.where(known, tl.minimum(near, near_new), near)
    else:
        kept_scores += i_p * ks_p + i_hk * C * AGES
        near = at_age(kept_scores, oc, now - time + W, W, known, AGES)
        ou = tl.arange(0, BU)
        oa = tl.arange(0, BA)
        op = tl.arange(0, BP)
        hidden = tl.load(bias_in + i_hk * U + ou, mask=ou < U, other=0.0).to(tl.float32)
        given += i_bh * (P * U) + op[:, None] * U + ou[None, :]
        hidden += tl.sum(tl.load(given, mask=(op < P)[:, None] & (ou < U)[None, :], other=0.0), 0)
        # What is far below 0 gives nothing, whatever the power is; it need not overflow.
        hidden = hidden / (1.0 + tl.exp2(tl.minimum(-hidden * LOG2E, 126.0)))
        inside = (ou < U)[:, None] & (oa < AGES)[None, :]
        out = tl.load(weight_out + (i_hk * U + ou)[:, None] * AGES + oa[None, :], mask=inside, other=0.0)
        said = tl.sum(hidden[:, None] * out.to(tl.float32), 0)
        said += tl.load(bias_out + i_hk * AGES + oa, mask=oa < AGES, other=0.0).to(tl.float32)
        new_score = tl.sum(tl.where(oa == 0, said, 0.0), 0)
    place, chosen, _ = pick(near, time, oc, oc, count, leaves, new_score, C, COMPARES, LAST)
    # Where it stays it takes the place of what goes; else it goes itself.
    stays = place >= 0
    at = place.to(tl.int64)
    moved = tl.where(stays, D, 0)
    goes_k = tl.load(kept_k + at * D + od, mask=od < moved, other=0.0)
    goes_v = tl.load(kept_v + at * V + ov, mask=ov < tl.where(stays, V, 0), other=0.0)
    tl.store(gone + i_bh * D + od, tl.where(od < moved, goes_k, key), mask=od < D)
    tl.store(gone_v + i_bh * V + ov, tl.where(ov < tl.where(stays, V, 0), goes_v, value), mask=ov < V)
    tl.store(kept_k + at * D + od, key, mask=od < moved)
    tl.store(kept_v + at * V + ov, value, mask=ov < tl.where(stays, V, 0))
    if TURNED:
        near_turns += i_p * nt_p
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


def trade_launch(step: HybridStep, kept: KeptStep, given: Tensor | None) -> tuple[Traded, Launch]:
    """Plan what comes before a step, as :func:`hybrid_launches` does.

    Args:
        step: The step.
        kept: Its kept keys.
        given: What the hidden units of a rule are given ``[B, HKV, parts, U]``; None where values are compared.

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
    names = ("seen", "rows", "near_k", "near_v", "near_mask", "near_turns")
    tensors = {name: getattr(step, name) for name in names} | dict(zip(KEPT, kept.changing, strict=True))
    tensors |= {"given": given} | {name: net[name] for name in ("bias_in", "weight_out", "bias_out")}
    held = {"nk": step.near_k, "nv": step.near_v, "nt": step.near_turns}
    held |= zip(("kk", "kv", "ka", "kt", "kn", "ks"), kept.changing, strict=True)
    parts = 1 if given is None else given.shape[2]
    entries = padded(C) * padded(V) if compares else padded(parts) * padded(U)
    chosen = Tile(padded(C), padded(V), min(max(entries // ENTRIES, 1), 8), 1)
    arguments = {
        **tensors,
        **found._asdict(),
        **{"length": step.length if step.place is None else step.place, "HKV": HKV, "N": step.sinks},
        "W": slots - step.sinks - 1,
        **{f"{name}_p": of_rows(x) for name, x in held.items()},
        **{"C": C, "D": D, "V": V, "U": U, "R": R, "P": parts, "BP": padded(parts), "BS": padded(slots)},
        **{"BC": padded(C), "BD": padded(D), "BV": padded(V), "BU": padded(max(U, 1)), "BA": padded(AGES)},
        **{"TURNED": kept.turns is not None, "COMPARES": compares},
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

    Raises:
        ArgumentError: If shapes or names do not fit, or a tensor of the state is not contiguous.
        ArgumentTypeError: If sums are not fp32.
    """
    check_hybrid(step)
    traded, launches = None, []
    if step.kept is not None:
        given = None
        if step.kept.scores is not None:
            given, first = hidden_launch(target, step, step.kept)
            launches.append(first)
        traded, first = trade_launch(step, step.kept, given)
        launches.append(first)
    ahead = ahead_launch(target, step, traded)
    if ahead is not None:
        launches.append(ahead[1])
    o, last = hybrid_launch(target, step, traded, None if ahead is None else ahead[0])
    return o, [*launches, last]
