"""The choice of kept keys as a loop on a CPU: one key after the other, a key head of a row by itself."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from functools import cache

import numpy as np
import torch

from hf_linear_attn.ops.kept.problem import AGES, ALIKE, Choice, Entering
from hf_linear_attn.ops.kept.torch import point_at
from hf_linear_attn.ops.numba.compile import entry
from hf_linear_attn.ops.numba.parts import project, sigmoid
from hf_linear_attn.ops.numba.primitives import NOTHING, ONE, ahead, narrow, pointer, turn, unpacked, wide, within
from hf_linear_attn.ops.numba.run import HEAD, addresses, in_parts, parts_of

NUMBERS = 15


@within
def apart(x, y, number):
    """Return the squared distance of two values, 0 where they are alike."""
    total, squares = np.float32(0.0), np.float32(0.0)
    for i in range(number):
        a, b = wide(x[i]), wide(y[i])
        total += (a - b) * (a - b)
        squares += a * a + b * b
    return np.float32(0.0) if total < np.float32(ALIKE) * squares else total


@within
def at_point(scores, point):
    """Return a score between those of two ages."""
    before = min(int(point), AGES - 2)
    return scores[before] + (point - np.float32(before)) * (scores[before + 1] - scores[before])


@within
def score_by_net(scores, x, hidden, weights, hk, inputs, units, learned):
    """Write what the net of a key head says of ``x [I]``, a score for each of the ages, and lose ``x``.

    See :class:`Learned`; ``hidden`` is room to work in, ``weights`` are addresses.
    """
    mean, deviation, of_in, in_bias, of_out, out_bias = weights
    for i in range(inputs):
        x[i] = (x[i] - wide(pointer(mean, learned)[i])) / wide(pointer(deviation, learned)[i])
    project(hidden, x, ahead(pointer(of_in, learned), hk * inputs * units), inputs, units, ONE)
    for a in range(AGES):
        scores[a] = wide(pointer(out_bias, learned)[hk * AGES + a])
    for j in range(units):
        y = hidden[j] + wide(pointer(in_bias, learned)[hk * units + j])
        y *= sigmoid(y)
        row = ahead(pointer(of_out, learned), (hk * units + j) * AGES)
        for a in range(AGES):
            scores[a] += y * wide(row[a])


@within
def trade(kept, held, number, token):
    """Let two vectors change places, the first one of the tokens' dtype."""
    for i in range(number):
        x = wide(kept[i])
        kept[i] = narrow(held[i], token)
        held[i] = x


@within
def keep(gone, gone_v, turned, k, v, at, turns, near, scores, said, number, C, time, D, V, R, points, last_point):
    """Let a key that leaves the window take one of the C places, and put what goes instead where that one lay.

    See :func:`hf_linear_attn.ops.kept.choose_kept`; values are compared where there are no ``points``.
    """
    place, count, compares = 0, min(number, C), last_point == 0
    for c in range(count):
        if compares:
            near[c] = min(near[c], apart(ahead(v, c * V), gone_v, V))
        else:
            near[c] = at_point(ahead(scores, c * AGES), points[min(max(time - at[c], 0), last_point)])
        if near[c] < near[place] or (near[c] == near[place] and at[c] < at[place]):
            place = c
    if count < C:
        place = count
    elif not compares and said[0] < near[place]:
        return
    token = k[0]
    trade(ahead(k, place * D), gone, D, token)
    trade(ahead(v, place * V), gone_v, V, token)
    if R > 0:
        trade(ahead(turns, place * D), turned, R, token)
    at[place] = time
    if compares:
        near[place] = -NOTHING
    else:
        for i in range(AGES):
            scores[place * AGES + i] = said[i]


@within(inline="always")
def choose(first, last, numbers):
    """Choose in the units ``[first, last)``."""
    (
        compared, enters, positions, number, nearest, at, held, slot, gone,
        points, last_point, heads, T, C, V,
    ) = unpacked(numbers, NUMBERS)  # fmt: skip
    kind, long, flag = np.float32(0), np.int64(0), np.uint8(0)
    compares, point = last_point == 0, pointer(points, kind)
    for unit in range(first, last):
        b = unit // heads
        rows, of_text = ahead(pointer(compared, kind), unit * (C + T) * V), ahead(pointer(enters, flag), b * T)
        near, of_at = ahead(pointer(nearest, kind), unit * C), ahead(pointer(at, long), unit * C)
        lies, where = ahead(pointer(held, long), unit * C), ahead(pointer(positions, long), b * T)
        to, goes = ahead(pointer(slot, long), unit * T), ahead(pointer(gone, long), unit * T)
        count = min(pointer(number, long)[b], C)
        for t in range(T):
            to[t] = goes[t] = -1
            if of_text[t] == 0:
                continue
            new, place = ahead(rows, (C + t) * V), 0
            for c in range(count):
                of_place = ahead(rows, lies[c] * V)
                if compares:
                    near[c] = min(near[c], apart(of_place, new, V))
                else:
                    near[c] = at_point(of_place, point[min(max(where[t] - of_at[c], 0), last_point)])
                if near[c] < near[place] or (near[c] == near[place] and of_at[c] < of_at[place]):
                    place = c
            if count < C:
                place = count
                count += 1
            elif not compares and new[0] < near[place]:
                goes[t] = C + t
                continue
            else:
                goes[t] = lies[place]
            to[t], lies[place], of_at[place], near[place] = place, C + t, where[t], -NOTHING


def _task(table):
    head = pointer(table, np.int64(0))
    parts, units = head[1], head[2]
    part = turn(table)
    while part < parts:
        choose(units * part // parts, units * (part + 1) // parts, table + 8 * HEAD)
        part = turn(table)


@cache
def points_of(window: int) -> torch.Tensor:
    """Return where ages lie from W on, up to the one from which scores stay."""
    ages = torch.arange(window, 2 ** (AGES - 1) * window + 1, device="cpu")
    return point_at(ages, window, torch.float32)


def choose_numba(call: Entering) -> Choice:
    """Choose with a loop; see :func:`hf_linear_attn.ops.kept.choose_kept`."""
    (B, HKV, C), T, V = call.at.shape, call.enters.shape[1], call.compared.shape[3]
    compared, enters = call.compared.detach().float().contiguous(), call.enters.contiguous()
    # Of scores the loop needs room for those of one moment.
    kept = call.nearest.new_empty(B, HKV, C) if call.window else call.nearest
    nearest, at = (x.clone(memory_format=torch.contiguous_format) for x in (kept, call.at))
    held = torch.arange(C, device=call.at.device).expand(B, HKV, C).contiguous()
    slot, gone = (held.new_empty(B, HKV, T) for _ in range(2))
    tensors = compared, enters, call.positions.contiguous(), call.number.contiguous(), nearest, at, held, slot, gone
    points = points_of(call.window) if call.window else None
    numbers = *addresses(*tensors, points), 0 if points is None else len(points) - 1, HKV, T, C, V
    in_parts(entry(_task), parts_of(B * HKV, T * C * V), B * HKV, numbers, tensors)
    return Choice(slot, gone, held, call.nearest if call.window else nearest, at)
