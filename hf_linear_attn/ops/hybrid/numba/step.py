"""A whole step of a layer with a window as one loop on a CPU; what it computes is said by :mod:`.triton.hybrid`.

A unit is a key head of a row with all its query heads. Units may run side by side: what one of them writes no other
reads. As on a GPU the token is written to a slot that no unit reads, and sinks are told by the number of tokens seen.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from array import array
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.ops.hybrid.checks import check_hybrid
from hf_linear_attn.ops.hybrid.records import HybridStep
from hf_linear_attn.ops.kept.numba import keep, points_of, score_by_net
from hf_linear_attn.ops.kept.problem import AGES
from hf_linear_attn.ops.numba.compile import Entry, entry
from hf_linear_attn.ops.numba.parts import (
    GATE,
    KEY,
    MAPS,
    MIXES,
    WINDOW,
    features_of_vector,
    log2_fade,
    sigmoid,
)
from hf_linear_attn.ops.numba.primitives import (
    LOG2E,
    NOTHING,
    ONE,
    ahead,
    as_float,
    exp2,
    inner,
    multiply,
    narrow,
    pointer,
    take,
    turn,
    turn_back,
    unpacked,
    wide,
    within,
)
from hf_linear_attn.ops.numba.run import HEAD, addresses, bits, in_parts, in_rows, parts_of, scratch
from hf_linear_attn.ops.specs import MOST_PLANS, Number, meta_of, specs_of

NUMBERS = 59
"""Addresses, sizes and strides of a state and of what is learned, which a loop is told in one place."""
KEEPING = 23
"""Those of kept keys and of who chooses them."""
NOTHING_KEPT = array("q", [0] * KEEPING)


@within
def put(to, x, number):
    """Copy a vector as it is."""
    for i in range(number):
        to[i] = x[i]


@within
def fold(s, z, keys, fk, gone_v, gone, fade, features, value_dim, dim, copies, sums_keys):
    """Fold a key that leaves the window into the sums, and into all copies of the normaliser and of the keys' sum."""
    for f in range(features):
        row, x = ahead(s, f * value_dim), fk[f]
        for i in range(value_dim):
            row[i] = row[i] * fade + x * gone_v[i]
    for c in range(copies):
        of_copy = ahead(z, c * features)
        for f in range(features):
            of_copy[f] = of_copy[f] * fade + fk[f]
        if sums_keys:
            sums = ahead(keys, c * dim)
            for i in range(dim):
                sums[i] += gone[i]


@within(inline="always")
def shown(j, near_mask, read, new, old, sinks, window, pool):
    """Tell whether a slot of the ring holds a token that is seen before another comes, but for the one that leaves."""
    if pool:
        # The token that came to a slot last.
        came = read - 1 - (read - 1 - (j - sinks) + (window + 1)) % (window + 1)
        return came >= sinks and came >= read - window and j != new and j != old
    return near_mask[j] != 0 and j != new and j != old


@within
def look(scores, q, near_k, near_mask, read, new, old, sinks, window, slots, dim, scaling, pool):
    """Write the scores of all slots, ``-inf`` where nothing is seen; return how many are seen beside the sinks."""
    held = 0
    for j in range(slots):
        seen = j < read if j < sinks else shown(j, near_mask, read, new, old, sinks, window, pool)
        if j >= sinks and seen:
            held += 1
        scores[j] = inner(q, ahead(near_k, j * dim), dim) * scaling if seen else NOTHING
    return held


@within
def say(
    x, one, b, p, HKV, k, v, k_b, k_h, v_b, v_h, near_k, near_v, nk_p, nv_p, of_mask, angles, now, read, enters,
    new, N, W, R, D, V, many, by_half, at_end, pool, token,
):  # fmt: skip
    """Write what the scores of the key that leaves are made of: ``x [I]``, see :meth:`Learned.inputs`."""
    inputs, slots, share = HKV * (D + V), N + W + 1, np.float32(1.0) / np.float32(many)
    for i in range(2 * inputs):
        x[i] = np.float32(0.0)
    for j in range(many + 1):
        slot = N + (new - N + 1 + j) % (W + 1)
        # Other units may be writing the token that comes: it is read where it comes from.
        comes = slot == new
        if not (enters if comes else j == 0 or shown(slot, of_mask, read, new, new, N, W, pool)):
            continue
        for h in range(HKV):
            place = h * slots + slot
            if comes:
                take(one, ahead(pointer(k, token), b * k_b + h * k_h), D, ONE)
                take(ahead(one, D), ahead(pointer(v, token), b * v_b + h * v_h), V, ONE)
            else:
                take(one, ahead(pointer(near_k, token), p * nk_p + place * D), D, ONE)
                take(ahead(one, D), ahead(pointer(near_v, token), p * nv_p + place * V), V, ONE)
            if R > 0:
                turn_back(one, now if comes else ahead(angles, slot * D), D, R, by_half, at_end)
            to = ahead(x, (0 if j == 0 else inputs) + h * (D + V))
            for i in range(D + V):
                to[i] += one[i] if j == 0 else one[i] * share


@within
def attend(o, scores, near_v, value, own, far_score, far, slots, kept_v, kept, value_dim):
    """Write softmax attention to the slots, to the token itself and, unless its score is -inf, to a far key's value.

    Behind the scores of the slots lie those of the kept keys.
    """
    largest = max(own, far_score)
    for j in range(slots + kept):
        largest = max(largest, scores[j])
    share = exp2(own - largest)
    total = share
    for i in range(value_dim):
        o[i] = share * value[i]
    if far_score != NOTHING:
        share = exp2(far_score - largest)
        total += share
        for i in range(value_dim):
            o[i] += share * far[i]
    for j in range(slots + kept):
        if scores[j] != NOTHING:
            share = exp2(scores[j] - largest)
            total += share
            row = ahead(near_v, j * value_dim) if j < slots else ahead(kept_v, (j - slots) * value_dim)
            for i in range(value_dim):
                o[i] += share * wide(row[i])
    for i in range(value_dim):
        o[i] /= total


@within
def hybrid(first, last, q, k, v, o, key_mask, m_b, turns, length, work, token, learned, numbers):
    """Step the units ``[first, last)``; ``work`` has fp32 to work on, for each unit."""
    (
        q_b, q_h, k_b, k_h, v_b, v_h, o_b, o_h, t_b,
        seen, place, rows, kv, z, far_keys, near_k, near_v, near_mask, near_turns,
        weight_q, power_q, weight_k, power_k, decay_bias, decay_key, decay_value, bias, weight,
        HKV, G, D, V, M, F, C, N, W, R, wq_h, pq_h, wk_h, pk_h, kv_p, z_p, f_p, nk_p, nv_p, nt_p,
        name, mix, of_scores, of_norm, of_map, of_queries, signed, by_half, at_end, size, keeping,
    ) = unpacked(numbers, NUMBERS)  # fmt: skip
    long, flag, kind = np.int64(0), np.uint8(0), np.float32(0)
    slots, pool = N + W + 1, rows != 0
    scaling, eps = np.float32(as_float(of_scores)) * LOG2E, np.float32(as_float(of_norm))
    factor, sharpness = np.float32(as_float(of_map)), np.float32(as_float(of_queries))
    (
        kept_k, kept_v, kept_at, kept_turns, kept_near, kept_scores, points, mean, deviation,
        w_in, in_bias, w_out, out_bias, kk_p, kw_p, ka_p, kt_p, kn_p, ks_p, K, U, many, last_point,
    ) = unpacked(keeping, KEEPING)  # fmt: skip
    for unit in range(first, last):
        b, hk = unit // HKV, unit % HKV
        p = pointer(rows, long)[b] if pool else b
        at = length if place == 0 else pointer(place, long)[b if pool else 0]
        new, old = N + at % (W + 1), N + (at + 1) % (W + 1)
        read = pointer(seen, long)[b]
        real = key_mask == 0 or pointer(key_mask + b * m_b, flag)[0] != 0
        sink, enters = real and read < N, real and read >= N
        x = pointer(work + 4 * size * unit, kind)
        gone, value = ahead(x, D), ahead(x, 2 * D)
        gone_v, y = ahead(value, V), ahead(value, 2 * V)
        fk, scores = ahead(y, M), ahead(y, M + 2 * F)
        far = ahead(scores, slots + K)
        fq = ahead(far, G * V)
        turned = ahead(fq, G * F)
        near = ahead(turned, R)
        said = ahead(near, K)
        net, inputs = ahead(said, AGES), 2 * HKV * (D + V)
        bk = ahead(pointer(near_k, token), p * nk_p + hk * slots * D)
        bv = ahead(pointer(near_v, token), p * nv_p + hk * slots * V)
        nk = ahead(pointer(k, token), b * k_b + hk * k_h)
        nv = ahead(pointer(v, token), b * v_b + hk * v_h)
        of_mask, angles, now = pointer(near_mask + b * slots, flag), ahead(bk, 0), ahead(bk, 0)
        if R > 0:
            angles, now = ahead(pointer(near_turns, token), p * nt_p), ahead(pointer(turns, token), b * t_b)
        fades, leaves, count = np.float32(1.0), False, 0
        sums, norm, keys = pointer(work, kind), pointer(work, kind), pointer(work, kind)
        if mix != WINDOW or K > 0:
            leaves = read >= N + W if pool else of_mask[old] != 0
        if mix != WINDOW:
            sums = ahead(pointer(kv, kind), p * kv_p + hk * F * V)
            norm = ahead(pointer(z, kind), p * z_p + hk * C * F)
            if mix == KEY:
                keys = ahead(pointer(far_keys, kind), p * f_p + hk * C * D)
        if leaves:
            take(gone, ahead(bk, old * D), D, ONE)
            take(gone_v, ahead(bv, old * V), V, ONE)
            if R > 0:
                take(turned, ahead(angles, old * D), R, ONE)
        wk = ahead(pointer(kept_k, token), p * kk_p + hk * K * D)
        wv = ahead(pointer(kept_v, token), p * kw_p + hk * K * V)
        taken = 0
        if K > 0:
            held = 1 if leaves else 0
            for j in range(N, slots):
                if shown(j, of_mask, read, new, old, N, W, pool):
                    held += 1
            taken = read - min(read, N) - held
            if leaves:
                table, compared = ahead(pointer(kept_scores, kind), p * ks_p + hk * K * AGES), kept_scores == 0
                if compared:
                    near = ahead(pointer(kept_near, kind), p * kn_p + hk * K)
                else:
                    say(
                        net, ahead(net, inputs + U), b, p, HKV, k, v, k_b, k_h, v_b, v_h,
                        near_k, near_v, nk_p, nv_p, of_mask, angles, now, read, enters,
                        new, N, W, R, D, V, many, by_half, at_end, pool, token,
                    )  # fmt: skip
                    weights = mean, deviation, w_in, in_bias, w_out, out_bias
                    score_by_net(said, net, ahead(net, inputs), weights, hk, inputs, U, learned)
                keep(
                    gone, gone_v, turned, wk, wv, ahead(pointer(kept_at, long), p * ka_p + hk * K),
                    ahead(pointer(kept_turns, token), p * kt_p + hk * K * D), near, table, said,
                    taken, K, read - held, D, V, R if kept_turns != 0 else 0, pointer(points, kind), last_point,
                )  # fmt: skip
                # Where there was room, none goes.
                leaves = taken >= K
                taken += 1
            taken = min(taken, K)
        if leaves and mix != WINDOW:
            put(x, gone, D)
            if R > 0:
                turn_back(x, turned, D, R, by_half, at_end)
            if decay_bias != 0:
                fades = exp2(
                    log2_fade(
                        x, gone_v, ahead(pointer(decay_bias, learned), hk), ahead(pointer(decay_key, learned), hk * D),
                        ahead(pointer(decay_value, learned), hk * V), D, V,
                    )
                )  # fmt: skip
            power = np.float32(0.0) if power_k == 0 else wide(pointer(power_k, learned)[hk * pk_h])
            w = ahead(pointer(weight_k, learned), hk * wk_h)
            features_of_vector(fk, x, y, w, D, M, name, factor, power, np.float32(0.0))
            fold(sums, norm, keys, fk, gone_v, gone, fades, F, V, D, C, mix == KEY)
        # The token goes to the free slot. Of one that is masked, nothing is read.
        for place_of in range(2 if sink else 1):
            slot = new if place_of == 0 else read
            to_k, to_v = ahead(bk, slot * D), ahead(bv, slot * V)
            for i in range(D):
                to_k[i] = nk[i] if real else narrow(np.float32(0.0), token)
            for i in range(V):
                to_v[i] = nv[i] if real else narrow(np.float32(0.0), token)
        take(gone, ahead(bk, new * D), D, ONE)
        take(value, ahead(bv, new * V), V, ONE)
        if mix != WINDOW:
            for g in range(G):
                h = hk * G + g
                take(x, ahead(pointer(q, token), b * q_b + h * q_h), D, ONE)
                if R > 0:
                    turn_back(x, now, D, R, by_half, at_end)
                power = np.float32(0.0) if power_q == 0 else wide(pointer(power_q, learned)[h * pq_h])
                w = ahead(pointer(weight_q, learned), h * wq_h)
                features_of_vector(ahead(fq, g * F), x, y, w, D, M, name, factor, power, sharpness)
            multiply(far, V, fq, F, sums, V, G, V, F, False)
        for g in range(G):
            h = hk * G + g
            take(x, ahead(pointer(q, token), b * q_b + h * q_h), D, ONE)
            of_head = ahead(far, g * V)
            held = look(scores, x, bk, of_mask, read, new, old, N, W, slots, D, scaling, pool)
            for c in range(taken):
                scores[slots + c] = inner(x, ahead(wk, c * D), D) * scaling
            far_score, gate = NOTHING, np.float32(0.0)
            if mix != WINDOW:
                total = inner(ahead(fq, g * F), norm, F)
                total = total - eps if signed and total < 0 else total + eps
                for i in range(V):
                    of_head[i] /= total
                count = read + (1 if real else 0)
                count = max(count - min(count, N) - held - (1 if enters else 0) - K, 0)
                score = wide(pointer(bias, learned)[h]) + inner(x, ahead(pointer(weight, learned), h * D), D)
                if mix == KEY and count > 0:
                    n = np.float32(count)
                    far_score = score * LOG2E + inner(x, keys, D) * (scaling / n) + np.log2(n)
                elif mix == GATE and count > 0:
                    gate = sigmoid(score)
            own = inner(x, gone, D) * scaling
            attend(gone_v, scores, bv, value, own, far_score, of_head, slots, wv, taken, V)
            out = ahead(pointer(o, token), b * o_b + h * o_h)
            for i in range(V):
                out[i] = narrow(gone_v[i] + gate * (of_head[i] - gone_v[i]) if gate != 0 else gone_v[i], token)
        if hk == 0:
            if not pool:
                of_mask[new] = np.uint8(enters)
                if sink:
                    of_mask[read] = np.uint8(1)
            if R > 0:
                put(ahead(angles, new * D), now, R)


@within
def count_token(seen, rows, key_mask, m_b):
    """Count a token in the rows where it is real."""
    for b in range(rows):
        if key_mask == 0 or pointer(key_mask + b * m_b, np.uint8(0))[0] != 0:
            pointer(seen, np.int64(0))[b] += 1


@within(inline="always")
def hybrid_by_turns(table, token, learned):
    """Step parts of the units as long as there are any, and count the token after all of them; see :func:`in_parts`."""
    head = pointer(table, np.int64(0))
    parts, units = head[1], head[2]
    _, counts, seen, rows, q, k, v, o, key_mask, m_b, turns, length, work, numbers = unpacked(table + 8 * HEAD, 14)
    part = turn(table)
    while part < parts:
        hybrid(
            units * part // parts, units * (part + 1) // parts, q, k, v, o, key_mask, m_b, turns, length, work,
            token, learned, numbers,
        )  # fmt: skip
        # No part may read a number that is already counted up.
        if turn(table + 8 * HEAD) == parts - 1 and counts:
            count_token(seen, rows, key_mask, m_b)
        part = turn(table)


def _fp32(table):
    hybrid_by_turns(table, np.float32(0), np.float32(0))


def _fp32_of_bf16(table):
    hybrid_by_turns(table, np.float32(0), np.uint16(0))


def _bf16_of_fp32(table):
    hybrid_by_turns(table, np.uint16(0), np.float32(0))


def _bf16(table):
    hybrid_by_turns(table, np.uint16(0), np.uint16(0))


TASKS = {
    (torch.float32, torch.float32): _fp32,
    (torch.float32, torch.bfloat16): _fp32_of_bf16,
    (torch.bfloat16, torch.float32): _bf16_of_fp32,
    (torch.bfloat16, torch.bfloat16): _bf16,
}
"""By the dtypes of tokens and of what is learned."""


class Plan(NamedTuple):
    """What is known of a step by its shapes, strides, dtypes and settings.

    Attributes:
        units: Key heads of all rows.
        work: About how many products each of them is.
        room: The fp32 that all of them work on.
        shape: That of the outputs.
        dtype: That of the tokens.
        task: The loop.
        plain: Whether the entries of each token's vectors lie side by side.
        strides: Numbers of a loop's table before addresses.
        sizes: Those behind.
        of_kept: Those behind the addresses of kept keys.
    """

    units: int
    work: int
    room: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    task: Entry
    plain: bool
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    of_kept: tuple[int, ...]


@lru_cache(MOST_PLANS)
def _plan_of(specs: Any) -> Plan:
    """Make the plan of a step with specs in the place of its tensors, and refuse one that does not fit together."""
    step: HybridStep = meta_of(specs, [])
    check_hybrid(step)
    (B, H, _, D), HKV, V, kept = step.q.shape, step.k.shape[1], step.v.shape[3], step.kept
    G, M = H // HKV, D if step.weight_k is None else step.weight_k.shape[2]
    F, slots, z = M if step.weight_k is None else 2 * M, step.near_k.shape[2], step.z
    learned = *step.learned, *(() if kept is None else kept.weights)
    dtype = next((x.dtype for x in learned if x is not None), torch.float32)
    turned = 0 if step.turns is None else step.turns.shape[2]
    tokens = step.q, step.k, step.v
    strides = [number for x in tokens for number in in_rows(x).stride()[:2]]
    size = 2 * D + 2 * V + M + 2 * F + slots + G * (V + F) + turned
    lying = step.kv, z, step.far_keys, step.near_k, step.near_v, step.near_turns
    work, of_kept = F * V * (1 + G), tuple[int, ...]()
    if kept is not None:
        K, (inputs, U) = kept.k.shape[2], kept.weights[2].shape[1:] if kept.weights else (0, 0)
        last = 0 if kept.scores is None else len(points_of(slots - step.sinks - 1)) - 1
        size += 2 * K + AGES + 2 * HKV * (D + V) + U + D + V
        work += K * (D + V) + inputs * U
        of_kept = *(0 if x is None else x.stride(0) for x in kept.changing), K, U, kept.ahead, last
    sizes = (
        HKV, G, D, V, M, F, 1 if z is None or z.ndim == 3 else z.shape[2],
        step.sinks, slots - step.sinks - 1, turned,
        *(0 if x is None or len(x) == 1 else x.numel() // len(x) for x in step.learned[:4]),
        *(0 if x is None else x.stride(0) for x in lying),
        MAPS[step.phi], MIXES[step.mix], *bits(step.scaling, step.eps, step.factor, step.sharpness),
        step.weight_k is None and not elementwise_map(step.phi).non_negative, step.pairs == "half", step.at_end, size,
    )  # fmt: skip
    return Plan(
        units=B * HKV,
        work=work,
        room=B * HKV * size,
        shape=(B, H, 1, V),
        dtype=step.q.dtype,
        task=entry(TASKS[step.q.dtype, dtype]),
        plain=all(x.stride(3) == 1 for x in tokens),
        strides=(*strides, H * V, V, 0 if step.turns is None or len(step.turns) == 1 else turned),
        sizes=sizes,
        of_kept=of_kept,
    )


class LoopedStep:
    """A step of one state, to be taken again and again: all that stays from token to token is looked up once.

    Args:
        step: The first of its steps.

    Raises:
        ArgumentError: If shapes or names do not fit, or a tensor is not contiguous.
        ArgumentTypeError: If sums are not fp32.
    """

    # Without a dictionary, so that what is looked up is not taken for a part of the state.
    __slots__ = ("_changing", "_held", "_numbers", "_plan", "_seen")

    def __init__(self, step: HybridStep) -> None:
        self._plan = plan = _plan_of(specs_of(step._replace(length=Number(0)), [], []))
        kept, near, sums = step.kept, (step.near_k, step.near_v), (step.kv, step.z, step.far_keys)
        changing = step.seen, *sums, *near, step.near_mask, step.near_turns, *(kept.changing if kept else ())
        places, learned, weights = (
            [None if x is None else x.contiguous() for x in of]
            for of in ((step.place, step.rows), step.learned, kept.weights if kept else ())
        )
        keeping = NOTHING_KEPT
        if kept is not None:
            points = None if kept.scores is None else points_of(step.near_k.shape[2] - step.sinks - 1)
            of_kept = addresses(*kept.changing, points, *(weights or [None] * 6))
            keeping = array("q", (*of_kept, *plan.of_kept))
        own = addresses(step.seen, *places, *sums, *near, step.near_mask, step.near_turns, *learned)
        table = array("q", (*plan.strides, *own, *plan.sizes, keeping.buffer_info()[0]))
        self._numbers, self._seen = table.buffer_info()[0], (step.seen.data_ptr(), len(step.seen))
        self._changing = tuple(x for x in changing if x is not None and not x.is_inference())
        # What lies at the addresses is to stay there.
        self._held = changing, places, learned, weights, table, keeping

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        turns: Tensor | None,
        length: int,
        *,
        counts: bool,
    ) -> Tensor:
        """Take a step.

        Args:
            q: As all up to ``length`` that of a :class:`HybridStep`, of the first one's shape, strides and dtype.
            k: The same.
            v: The same.
            key_mask: Of the first one's shape, or None where that has none.
            turns: The same.
            length: Tokens before this one.
            counts: Whether ``seen`` counts the token.
        """
        plan = self._plan
        if not plan.plain:
            q, k, v = map(in_rows, (q, k, v))
        if turns is not None and (turns.dtype != plan.dtype or not turns.is_contiguous()):
            turns = turns.to(plan.dtype).contiguous()
        # Of one token, [B, H, 1, V] lies as [B, 1, H, V] does.
        o = q.new_empty(plan.shape)
        parts = parts_of(plan.units, plan.work)
        work = None if parts == 1 else q.new_empty(plan.room, dtype=torch.float32)
        numbers = (
            *(0, counts, *self._seen, q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()),
            *((0, 0) if key_mask is None else (key_mask.data_ptr(), key_mask.stride(0))),
            *(0 if turns is None else turns.data_ptr(), length),
            *(scratch(plan.room) if work is None else work.data_ptr(), self._numbers),
        )
        held = q, k, v, o, work, key_mask, turns, self._held
        in_parts(plan.task, parts, plan.units, numbers, held)
        increment_version(self._changing)
        return o


def hybrid_step_numba_(step: HybridStep) -> Tensor:
    """Run one step in place; see :func:`hf_linear_attn.ops.hybrid.hybrid_step_`."""
    return LoopedStep(step)(step.q, step.k, step.v, step.key_mask, step.turns, step.length, counts=False)
