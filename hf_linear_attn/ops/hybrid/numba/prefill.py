"""Text that a layer with a window reads without gradients, as one loop on a CPU; see :class:`Prefill`.

A unit is some query heads of a key head of a row. It walks the text in blocks of 16 queries, with all that it needs in
a core's cache: keys ``[D, C + N + K]`` and values ``[C + N + K, V]`` of the window, the sinks and the kept, where a
key's slot is its place modulo C, and the linear branch's sums ``[F, V]``, ``[F]`` and ``[D]``. Of a block of tokens,
those that leave the window are folded after its queries have read the sums before them and, by the products of
features, those within. Places of kept keys that none has taken yet are not multiplied.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import numpy as np
import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.hybrid.records import KeptPrefill, Prefill, Prefilled
from hf_linear_attn.ops.numba.compile import entry
from hf_linear_attn.ops.numba.parts import (
    IDENTITY,
    KEY,
    MAPS,
    MIXES,
    NORM_PRESERVING,
    WINDOW,
    bend,
    elementwise,
    log2_fade,
    sigmoid,
    two_softmaxes,
)
from hf_linear_attn.ops.numba.primitives import (
    LOG2E,
    NOTHING,
    ONE,
    ahead,
    as_float,
    clear,
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
from hf_linear_attn.ops.numba.run import HEAD, addresses, bits, in_fp32, in_parts, in_rows, parts_of
from hf_linear_attn.ops.state import empty_like_tokens

BLOCK = 16
"""Queries of a block: fewer would leave products small, more would compute more that is masked."""
MOST_HEADS = 8
"""Query heads that are read together."""
FAR_OFF = np.int32(2**30)


@within
def hold(keys, values, columns, slot, k, v, dim, value_dim, visible):
    """Put a key and its value into the window; zeros where no query is to see them, since 0 times a NaN is one."""
    row = ahead(values, slot * value_dim)
    for i in range(dim):
        keys[i * columns + slot] = wide(k[i]) if visible else np.float32(0.0)
    if visible:
        take(row, v, value_dim, ONE)
    else:
        clear(row, value_dim)


@within(inline="always")
def features_by(columns, dim):
    """Return the number of features: two of each column of a paired map, or as many as there are dimensions."""
    return 2 * columns if columns > 0 else dim


@within
def features_of_rows(features, y, x, weight, rows, dim, columns, name, factor, power, sharpness):
    """Write the features of ``x [rows, D]``: of a paired map by its weights, for which ``y [rows, M]`` is lost."""
    if columns == 0:
        elementwise(features, x, rows * dim, name)
        return
    multiply(y, columns, x, dim, weight, columns, rows, columns, dim, False)
    for r in range(rows):
        row = ahead(y, r * columns)
        for i in range(columns):
            row[i] *= factor
        if name == NORM_PRESERVING:
            bend(ahead(features, 2 * r * columns), row, columns, power, sharpness)
        else:
            two_softmaxes(ahead(features, 2 * r * columns), row, columns)


@within
def shares_of(row, begins, ends, own, far_score, i, columns):
    """Turn a query's scores into ``2^(score - largest)`` where it sees, else 0; return their sum and the far key's."""
    of_own, largest = row[own], far_score
    for c in range(columns):
        row[c] = row[c] if begins[c] <= i and i < ends[c] else NOTHING
    row[own] = of_own
    for c in range(columns):
        largest = max(largest, row[c])
    total = np.float32(0.0)
    for c in range(columns):
        x = exp2(row[c] - largest)
        row[c] = x
        total += x
    share = exp2(far_score - largest) if far_score != NOTHING else np.float32(0.0)
    return total + share, share


@within
def is_at(mask, place):
    """Tell whether a mask of a row, which may be none, shows a place."""
    return mask == 0 or pointer(mask, np.uint8(0))[place] != 0


@within
def is_seen(seen, stride, queries):
    """Tell whether any of the queries sees a sink."""
    found = np.uint8(0)
    for t in range(queries):
        found |= seen[t * stride]
    return found != 0


@within
def row_of(mask, b, stride):
    """Return where a row of a mask begins; 0 where there is no mask."""
    return mask + b * stride if mask != 0 else mask


@within
def take_leaving(
    raw, gone, gone_v, k, k_t, v, v_t, counts, turns, first, count, dim, value_dim, turned, by_half, at_end
):
    """Copy the keys that leave the window with a block's queries, raw and turned back, and their values.

    Of those that do not count, or are none, zeros. Return whether any does.
    """
    leaves = False
    for i in range(BLOCK):
        at, of_key, of_value = first + i, ahead(gone, i * dim), ahead(gone_v, i * value_dim)
        if i < count and at >= 0 and is_at(counts, at):
            leaves = True
            take(ahead(raw, i * dim), ahead(k, at * k_t), dim, ONE)
            take(of_key, ahead(k, at * k_t), dim, ONE)
            take(of_value, ahead(v, at * v_t), value_dim, ONE)
            if turned > 0:
                turn_back(of_key, ahead(turns, at * turned), dim, turned, by_half, at_end)
        else:
            clear(ahead(raw, i * dim), dim)
            clear(of_key, dim)
            clear(of_value, value_dim)
    return leaves


@within
def keep_block(ends, held, holder, slot, a, count, ring, window, first, columns):
    """Tell which query of a block is the first that does not see a key, where keys are kept, and who holds each place.

    The key that leaves the window at a query stays where it lies in the ring until the block ends.

    In ``ends`` the places stand behind the ring's slots and the sinks, from the ``first`` on. ``held`` says whether a
    place was taken before, ``holder`` which query's leaving key has come to it, -1 where none has, and ``slot [16]``
    which place such a key takes, -1 where it takes none.
    """
    for c in range(columns):
        holder[c] = -1
    for i in range(count):
        place = slot[i]
        if place < 0:
            continue
        before = holder[place]
        if before >= 0:
            ends[(a + before - window) % ring] = np.int32(i)
        elif held[place] != 0:
            ends[first + place] = np.int32(i)
        ends[(a + i - window) % ring] = FAR_OFF
        holder[place] = np.int32(i)


@within
def settle_block(keys, values, held, holder, leaving, k, k_t, v, v_t, first, places, columns, dim, value_dim):
    """Put the keys that a block has kept into their places, and return the number of those in use.

    ``leaving`` is which of the keys left the window at the block's first query.
    """
    used = 0
    for c in range(places):
        if holder[c] >= 0:
            held[c], at = np.uint8(1), leaving + holder[c]
            hold(keys, values, columns, first + c, ahead(k, at * k_t), ahead(v, at * v_t), dim, value_dim, True)
        if held[c] != 0:
            used = c + 1
    return used


@within
def lay_across(across, features, counts, first, count, number):
    """Write the features of a block's leaving keys as ``[F, 16]``, too, and zeros for those that do not count."""
    for i in range(BLOCK):
        row = ahead(features, i * number)
        if i >= count or first + i < 0 or not is_at(counts, first + i):
            clear(row, number)
        for f in range(number):
            across[f * BLOCK + i] = row[f]


@within
def fade_block(fades, gone, gone_v, counts, first, count, bias, of_key, of_value, dim, value_dim):
    """Write what each of a block's leaving keys leaves of the sums."""
    for i in range(BLOCK):
        fades[i] = ONE
        if i < count and first + i >= 0 and is_at(counts, first + i):
            of_token = ahead(gone, i * dim), ahead(gone_v, i * value_dim)
            fades[i] = exp2(log2_fade(*of_token, bias, of_key, of_value, dim, value_dim))


@within
def fade_reads(far, within_block, fades, rows, value_dim):
    """Let what a block's queries read fade: of the sums before the block, and of its own keys."""
    for r in range(rows):
        # A product of what each key leaves: one that leaves nothing is a factor of 0, and no term of a sum.
        left = ONE
        for j in range(r % BLOCK, -1, -1):
            within_block[r * BLOCK + j] *= left
            left *= fades[j]
        for j in range(value_dim):
            far[r * value_dim + j] *= left


@within
def fade_sums(sums, norm, features, across, fades, number, value_dim):
    """Let the sums before a block fade until its end, and its own keys' features, which lie twice."""
    left = ONE
    for i in range(BLOCK - 1, -1, -1):
        row = ahead(features, i * number)
        for f in range(number):
            row[f] *= left
            across[f * BLOCK + i] *= left
        left *= fades[i]
    for i in range(number * value_dim):
        sums[i] *= left
    for f in range(number):
        norm[f] *= left


@within
def take_queries(scaled, plain, q, q_t, count, dim, scaling):
    """Copy a block of one head's queries, scaled and as they are, and zeros behind the text's end."""
    for i in range(BLOCK):
        if i < count:
            take(ahead(scaled, i * dim), ahead(q, i * q_t), dim, scaling)
            take(ahead(plain, i * dim), ahead(q, i * q_t), dim, ONE)
        else:
            clear(ahead(scaled, i * dim), dim)
            clear(ahead(plain, i * dim), dim)


@within
def write_block(o, o_t, near, far, of_near, of_far, first, count, value_dim, token):
    """Write a block of one head's outputs, whose rows begin at ``first``: both branches, times what each weighs."""
    for i in range(count):
        r, out = first + i, ahead(o, i * o_t)
        row, other, x, y = ahead(near, r * value_dim), ahead(far, r * value_dim), of_near[r], of_far[r]
        if y != 0:
            for j in range(value_dim):
                out[j] = narrow(row[j] * x + other[j] * y, token)
        else:
            for j in range(value_dim):
                out[j] = narrow(row[j] * x, token)


NUMBERS = 83
"""Addresses, sizes, strides and factors of a call."""


@within(inline="always")
def read(first, last, token, numbers):
    """Read the units ``[first, last)``, each of G query heads, S of them per key head."""
    (
        q, k, v, key_mask, counts, sink_k, sink_v, seen, number, far_keys, kv, z, turns_q, turns_k,
        weight_q, power_q, weight_k, power_k, bias, direction, decay_bias, decay_key, decay_value,
        kept_k, kept_v, kept_slot, kept_number, gone_k, gone_w, gone_mask, gone_turns,
        o, kv_out, z_out, keys_out, work,
        HKV, S, G, T, P, D, V, M, N, W, R, C, K, E, size,
        q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, m_b, c_b, s_b, s_t, n_b, n_t, tq_b, tk_b,
        wq_h, pq_h, wk_h, pk_h, name, mix, of_scores, of_norm, of_map, of_queries, by_half, at_end,
    ) = unpacked(numbers, NUMBERS)  # fmt: skip
    flag, kind, long, short = np.uint8(0), np.float32(0), np.int64(0), np.int32(0)
    scaling, eps = np.float32(as_float(of_scores)) * LOG2E, np.float32(as_float(of_norm))
    factor, sharpness = np.float32(as_float(of_map)), np.float32(as_float(of_queries))
    F, rows = features_by(M, D), BLOCK * G
    zero = np.float32(0.0)
    keys = pointer(work + 4 * size * first, kind)
    values = ahead(keys, D * E)
    sums = ahead(values, E * V)
    norm = ahead(sums, F * V)
    keys_sum = ahead(norm, F)
    queries = ahead(keys_sum, D)
    plain = ahead(queries, rows * D)
    scores = ahead(plain, rows * D)
    near = ahead(scores, rows * E)
    far = ahead(near, rows * V)
    y = ahead(far, rows * V)
    phi_q = ahead(y, rows * M)
    within_block = ahead(phi_q, rows * F)
    phi_k = ahead(within_block, rows * BLOCK)
    phi_t = ahead(phi_k, BLOCK * F)
    gone = ahead(phi_t, BLOCK * F)
    gone_v = ahead(gone, BLOCK * D)
    raw = ahead(gone_v, BLOCK * V)
    of_near = ahead(raw, BLOCK * D)
    of_far = ahead(of_near, rows)
    fades = ahead(of_far, rows)
    slot_at = pointer(work + 4 * (size * first + size - 2 * E), long)
    begins = pointer(work + 4 * (size * first + size - 3 * E), short)
    ends, holder = ahead(begins, -E), ahead(begins, -2 * E)
    held = pointer(work + 4 * (size * first + size - 6 * E), flag)
    for unit in range(first, last):
        b, hk, part = unit // (HKV * S), unit // S % HKV, unit % S
        head, of_sums = (hk * S + part) * G, b * HKV + hk
        of_q = ahead(pointer(q, token), b * q_b + head * q_h)
        of_k, of_v = ahead(pointer(k, token), b * k_b + hk * k_h), ahead(pointer(v, token), b * v_b + hk * v_h)
        of_turns_q, of_turns_k = ahead(pointer(turns_q, kind), b * tq_b), ahead(pointer(turns_k, kind), b * tk_b)
        real, counted = row_of(key_mask, b, m_b), row_of(counts, b, c_b)
        clear(keys, D * E + E * V + F * V + F + D)
        for c in range(C):
            slot_at[c] = -FAR_OFF
        if kv != 0:
            take(sums, ahead(pointer(kv, kind), of_sums * F * V), F * V, ONE)
            take(norm, ahead(pointer(z, kind), of_sums * F), F, ONE)
        if far_keys != 0:
            take(keys_sum, ahead(pointer(far_keys, kind), of_sums * D), D, ONE)
        used = 0
        for c in range(K):
            at, held[c] = of_sums * K + c, c < pointer(kept_number, long)[b]
            used += held[c]
            of_place = ahead(pointer(kept_k, token), at * D), ahead(pointer(kept_v, token), at * V)
            hold(keys, values, E, C + N + c, *of_place, D, V, held[c] != 0)
        for n in range(N):
            at = of_sums * N + n
            of_sink = ahead(pointer(sink_k, token), at * D), ahead(pointer(sink_v, token), at * V)
            hold(keys, values, E, C + n, *of_sink, D, V, is_seen(ahead(pointer(seen, flag), b * s_b + n), s_t, T))
        for at in range(P):
            slot = (at - P) % C
            visible = is_at(real, at)
            slot_at[slot] = at - P if visible else -FAR_OFF
            hold(keys, values, E, slot, ahead(of_k, at * k_t), ahead(of_v, at * v_t), D, V, visible)
        started = kv != 0
        of_gone, of_gone_v, of_gone_turns, g_t, gw_t = of_k, of_v, of_turns_k, k_t, v_t
        if K > 0:
            of_gone, g_t = ahead(pointer(gone_k, token), of_sums * T * D), D
            of_gone_v, gw_t = ahead(pointer(gone_w, token), of_sums * T * V), V
            of_gone_turns, counted = ahead(pointer(gone_turns, kind), of_sums * T * R), row_of(gone_mask, b, T)
        for a in range(0, T, BLOCK):
            count, leaving = min(BLOCK, T - a), P + a - W
            for i in range(BLOCK):
                at, slot = P + a + i, (a + i) % C
                visible = i < count and is_at(real, at)
                slot_at[slot] = a + i if visible else -FAR_OFF
                if i < count:
                    hold(keys, values, E, slot, ahead(of_k, at * k_t), ahead(of_v, at * v_t), D, V, visible)
            for c in range(C):
                begins[c] = np.int32(max(slot_at[c] - a, -FAR_OFF))
                ends[c] = begins[c] + np.int32(W)
            # As many columns as anything lies in.
            columns = C + -(-(N + used) // 8) * 8
            for c in range(C, columns):
                begins[c] = np.int32(-FAR_OFF) if N <= c - C < N + K and held[c - C - N] != 0 else FAR_OFF
                ends[c] = FAR_OFF
            if K > 0:
                leaving, to = a, ahead(pointer(kept_slot, long), of_sums * T + a)
                keep_block(ends, held, holder, to, a, count, C, W, C + N, K)
            for g in range(G):
                r = g * BLOCK * D
                take_queries(ahead(queries, r), ahead(plain, r), ahead(of_q, g * q_h + a * q_t), q_t, count, D, scaling)
            multiply(scores, E, queries, D, keys, E, rows, columns, D, False)
            leaves = mix != WINDOW and take_leaving(
                raw, gone, gone_v, of_gone, g_t, of_gone_v, gw_t, counted, of_gone_turns, leaving, count, D, V, R,
                by_half, at_end,
            )  # fmt: skip
            if leaves:
                power = zero if power_k == 0 else pointer(power_k, kind)[hk * pk_h]
                w = ahead(pointer(weight_k, kind), hk * wk_h)
                features_of_rows(phi_k, y, gone, w, BLOCK, D, M, name, factor, power, zero)
                lay_across(phi_t, phi_k, counted, leaving, count, F)
                if decay_bias != 0:
                    of_gate = (
                        ahead(pointer(decay_bias, kind), hk), ahead(pointer(decay_key, kind), hk * D),
                        ahead(pointer(decay_value, kind), hk * V),
                    )  # fmt: skip
                    fade_block(fades, gone, gone_v, counted, leaving, count, *of_gate, D, V)
            started = started or leaves
            if started:
                for g in range(G):
                    x = ahead(plain, g * BLOCK * D)
                    if R > 0:
                        for i in range(count):
                            turn_back(ahead(x, i * D), ahead(of_turns_q, (a + i) * R), D, R, by_half, at_end)
                    h = head + g
                    power = zero if power_q == 0 else pointer(power_q, kind)[h * pq_h]
                    w, of_head = ahead(pointer(weight_q, kind), h * wq_h), ahead(phi_q, g * BLOCK * F)
                    features_of_rows(of_head, y, x, w, BLOCK, D, M, name, factor, power, sharpness)
                multiply(far, V, phi_q, F, sums, V, rows, V, F, False)
            if leaves:
                multiply(within_block, BLOCK, phi_q, F, phi_t, BLOCK, rows, BLOCK, F, False)
                for r in range(rows):
                    for j in range(r % BLOCK + 1, BLOCK):
                        within_block[r * BLOCK + j] = zero
                if decay_bias != 0:
                    fade_reads(far, within_block, fades, rows, V)
                multiply(far, V, within_block, BLOCK, gone_v, V, rows, V, BLOCK, True)
            left = ONE
            for i in range(count):
                if leaves:
                    for d in range(D):
                        keys_sum[d] += raw[i * D + d]
                    if decay_bias != 0:
                        left *= fades[i]
                beyond = zero if mix == WINDOW else np.float32(pointer(number, long)[b * n_b + (a + i) * n_t])
                log_number = np.log2(beyond) if beyond > 0 else zero
                of_sinks = ahead(pointer(seen, flag), b * s_b + (a + i) * s_t)
                for n in range(N):
                    begins[C + n] = np.int32(-FAR_OFF) if of_sinks[n] != 0 else FAR_OFF
                for g in range(G):
                    r, h = g * BLOCK + i, head + g
                    far_score, gate, x = NOTHING, zero, ahead(of_q, g * q_h + (a + i) * q_t)
                    if beyond > 0:
                        learned = inner(x, ahead(pointer(direction, kind), h * D), D) + pointer(bias, kind)[h]
                        if mix == KEY:
                            of_mean = inner(ahead(queries, r * D), keys_sum, D) / beyond
                            far_score = learned * LOG2E + of_mean + log_number
                        else:
                            gate = sigmoid(learned)
                    own = (a + i) % C
                    total, share = shares_of(ahead(scores, r * E), begins, ends, own, far_score, i, columns)
                    mass = zero
                    if started:
                        mass += inner(ahead(phi_q, r * F), norm, F) * left
                    if leaves:
                        for j in range(i + 1):
                            mass += within_block[r * BLOCK + j]
                    mass = mass - eps if name == IDENTITY and mass < 0 else mass + eps
                    if mix == KEY:
                        of_near[r], of_far[r] = ONE / total, share / (total * mass)
                    else:
                        of_near[r], of_far[r] = (ONE - gate) / total, gate / mass
            multiply(near, V, scores, E, values, V, rows, V, columns, False)
            for g in range(G):
                out = ahead(pointer(o, token), b * o_b + (head + g) * o_h + a * o_t)
                write_block(out, o_t, near, far, of_near, of_far, g * BLOCK, count, V, token)
            if K > 0:
                used = settle_block(keys, values, held, holder, P + a - W, of_k, k_t, of_v, v_t, C + N, K, E, D, V)
            if leaves:
                if decay_bias != 0:
                    fade_sums(sums, norm, phi_k, phi_t, fades, F, V)
                multiply(sums, V, phi_t, BLOCK, gone_v, V, F, V, BLOCK, True)
                for i in range(BLOCK):
                    for f in range(F):
                        norm[f] += phi_k[i * F + f]
        if part == 0:
            take(ahead(pointer(kv_out, kind), of_sums * F * V), sums, F * V, ONE)
            take(ahead(pointer(z_out, kind), of_sums * F), norm, F, ONE)
            take(ahead(pointer(keys_out, kind), of_sums * D), keys_sum, D, ONE)


@within(inline="always")
def read_by_turns(table, token):
    """Read parts of the units as long as there are any; see :func:`in_parts`."""
    head = pointer(table, np.int64(0))
    parts, units = head[1], head[2]
    part = turn(table)
    while part < parts:
        read(units * part // parts, units * (part + 1) // parts, token, table + 8 * HEAD)
        part = turn(table)


def _fp32(table):
    read_by_turns(table, np.float32(0))


def _bf16(table):
    read_by_turns(table, np.uint16(0))


TASKS = {torch.float32: _fp32, torch.bfloat16: _bf16}


def prefill_numba(call: Prefill, of_k: Pair | None, turns_k: Tensor | None) -> Prefilled:
    """Attend with a loop; see :func:`hf_linear_attn.ops.hybrid.hybrid_prefill`."""
    (B, H, T, D), HKV, V, W = call.q.shape, call.k.shape[1], call.v.shape[3], call.window
    M = 0 if call.weight_q is None else call.weight_q.shape[2]
    group, N = H // HKV, 0 if call.sink_k is None else call.sink_k.shape[2]
    # Heads that share keys are read apart where there are threads for it, and where they are so many that a block of
    # their queries does not fit into a cache: each part folds the keys by itself.
    least = max(-(-torch.get_num_threads() // max(B * HKV, 1)), -(-group // MOST_HEADS))
    S = next((n for n in range(least, group) if group % n == 0), group)
    # No slot is needed for keys that there are not.
    G, C = group // S, -(-(min(W, call.k.shape[2]) + BLOCK) // 8) * 8
    kept = call.kept
    K = 0 if kept is None else kept.k.shape[2]
    E, rows, F = C + -(-(N + K) // 8) * 8, BLOCK * (group // S), 2 * M or D
    vectors = E * (D + V) + F * (V + 1) + D + rows * (2 * D + E + 2 * V + M + F + BLOCK + 2)
    # What is int64, int32 and fp32 there, in the order of the loop, and a flag of each column.
    size = -(-(vectors + BLOCK * (2 * F + 2 * D + V + 1) + 6 * E) // 16) * 16
    q, k, v = map(in_rows, (call.q, call.k, call.v))
    sinks = [None if x is None else x.contiguous() for x in (call.sink_k, call.sink_v)]
    masks, seen = [in_rows(call.key_mask), in_rows(call.counts)], in_rows(call.seen)
    plain, turns = in_fp32(call.far_keys, call.kv, call.z), in_fp32(call.turns, turns_k)
    learned = in_fp32(
        *(call.weight_q, call.power_q, *((None, None) if of_k is None else (of_k.weight, of_k.power))),
        *(call.bias, call.weight, call.decay_bias, call.decay_key, call.decay_value),
    )
    o, work = empty_like_tokens(q, V), q.new_empty(B * HKV * S * size, dtype=torch.float32)
    kv, z, keys = (work.new_empty(B, HKV, *shape) for shape in ((F, V), (F,), (D,)))
    of_kept = [None] * 8 if kept is None else _kept(kept)
    tensors = q, k, v, *masks, *sinks, seen, call.number, *plain, *turns, *learned, *of_kept, o, kv, z, keys, work
    numbers = (
        *addresses(*tensors),
        HKV, S, G, T, k.shape[2] - T, D, V, M, N, W, 0 if call.turns is None else call.turns.shape[2], C, K, E, size,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
        *[0 if x is None else x.stride(0) for x in masks],
        *((0, 0) if seen is None else seen.stride()[:2]), *((0, 0) if call.number is None else call.number.stride()),
        *[0 if x is None or len(x) == 1 else x.stride(0) for x in (*turns, *learned[:4])],
        MAPS[call.phi], MIXES[call.mix], *bits(call.scaling, call.eps, call.factor, call.sharpness),
        call.pairs == "half", call.at_end,
    )  # fmt: skip
    units, work_of_unit = B * HKV * S, T * G * (D * M + 2 * F * V + 2 * E * D)
    in_parts(entry(TASKS[q.dtype]), parts_of(units, work_of_unit), units, numbers, tensors)
    return Prefilled(o, kv, z, keys)


def _kept(kept: KeptPrefill) -> list[Tensor | None]:
    """Return kept keys as the loop reads them."""
    *found, turns = kept
    return [None if x is None else x.contiguous() for x in (*found, *in_fp32(turns))]
