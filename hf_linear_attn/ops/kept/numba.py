"""The choice of kept keys as a loop on a CPU: one key after the other, a key head of a row by itself."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import math

import numpy as np
import torch

from hf_linear_attn.ops.kept.problem import AGES, ALIKE, Choice, Entering
from hf_linear_attn.ops.numba.compile import entry
from hf_linear_attn.ops.numba.primitives import NOTHING, ahead, pointer, turn, unpacked, within
from hf_linear_attn.ops.numba.run import HEAD, address, in_parts

NUMBERS = 14


@within
def apart(x, y, number):
    """Return the squared distance of two values, 0 where they are alike."""
    total, squares = np.float32(0.0), np.float32(0.0)
    for i in range(number):
        a, b = x[i], y[i]
        total += (a - b) * (a - b)
        squares += a * a + b * b
    return np.float32(0.0) if total < np.float32(ALIKE) * squares else total


@within
def at_age(scores, age, window):
    """Return a score at an age."""
    point = np.float32(min(math.log2(max(age, window) / window), AGES - 1.0))
    before = min(int(point), AGES - 2)
    return scores[before] + (point - np.float32(before)) * (scores[before + 1] - scores[before])


@within(inline="always")
def choose(first, last, numbers):
    """Choose in the units ``[first, last)``."""
    compared, enters, positions, number, nearest, at, held, slot, gone, heads, T, C, V, window = unpacked(
        numbers, NUMBERS
    )
    kind, long, flag = np.float32(0), np.int64(0), np.uint8(0)
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
                if window == 0:
                    near[c] = min(near[c], apart(of_place, new, V))
                else:
                    near[c] = at_age(of_place, where[t] - of_at[c] + window, window)
                if near[c] < near[place] or (near[c] == near[place] and of_at[c] < of_at[place]):
                    place = c
            if count < C:
                place = count
                count += 1
            elif window > 0 and new[0] < near[place]:
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


def choose_numba(call: Entering) -> Choice:
    """Choose with a loop; see :func:`hf_linear_attn.ops.kept.choose_kept`."""
    (B, HKV, C), T, V = call.at.shape, call.enters.shape[1], call.compared.shape[3]
    compared, enters = call.compared.detach().float().contiguous(), call.enters.contiguous()
    # Of scores the loop needs room for those of one moment.
    kept = call.nearest.new_empty(B, HKV, C) if call.window else call.nearest
    nearest, at = (x.clone(memory_format=torch.contiguous_format) for x in (kept, call.at))
    held = torch.arange(C).expand(B, HKV, C).contiguous()
    slot, gone = (held.new_empty(B, HKV, T) for _ in range(2))
    tensors = compared, enters, call.positions.contiguous(), call.number.contiguous(), nearest, at, held, slot, gone
    in_parts(entry(_task), B * HKV, T * C * V, (*map(address, tensors), HKV, T, C, V, call.window), tensors)
    return Choice(slot, gone, held, call.nearest if call.window else nearest, at)
