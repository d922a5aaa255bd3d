"""The choice of kept keys as a kernel: one key after the other, a program for each key head of a row.

A program has where its C keys lie, their numbers and what is compared of them in registers. Values are read again for
each key that comes, from the processor's caches; of scores, the two between which an age lies.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
import triton
import triton.language as tl

from hf_linear_attn.ops.kept.problem import AGES, ALIKE, Choice, Entering
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded
from hf_linear_attn.ops.triton.run import execute, target_for

ENTRIES = 2048
"""Of what is compared, that a warp holds."""
LAST = 2**31 - 1
"""A number that no key has, of 32 bits; behind all in order."""


@triton.jit
def at_age(scores, rows, age, window, inside, AGES: tl.constexpr):
    """Return the scores of some rows at their ages."""
    point = tl.log2(tl.maximum(age, window).to(tl.float32) / window)
    point = tl.minimum(point, AGES - 1.0)
    low = tl.minimum(point.to(tl.int32), AGES - 2)
    before = tl.load(scores + rows * AGES + low, mask=inside, other=0.0).to(tl.float32)
    after = tl.load(scores + rows * AGES + low + 1, mask=inside, other=0.0).to(tl.float32)
    return before + (point - low.to(tl.float32)) * (after - before)


@triton.jit
def load_compared(row, ov, V: tl.constexpr, COMPARES: tl.constexpr):
    """Return what is compared of a key that comes: its value, or the score that it has then."""
    x = tl.load(row + ov, mask=ov < V, other=0.0) if COMPARES else tl.load(row)
    return x.to(tl.float32)


@triton.jit
def apart(rows, new, ALIKE: tl.constexpr):
    """Return the squared distance of each row to another one, 0 where they are alike."""
    x = rows - new[None, :]
    found = tl.sum(x * x, 1)
    return tl.where(found < ALIKE * (tl.sum(rows * rows, 1) + tl.sum(new * new, 0)), 0.0, found)


@triton.jit
def ordered(x):
    """Return integers in the order of numbers of fp32: of 32 bits a warp finds the least in one instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pick(near, time, oc, count, comes, new_score, C: tl.constexpr, COMPARES: tl.constexpr, LAST: tl.constexpr):
    """Return which place a key takes that comes, if it does, and whether it stays: that of the oldest of the least."""
    known = oc < tl.where(comes, count, 0)
    rank = tl.where(known, ordered(near), LAST)
    least = tl.min(rank, 0)
    # No two have the same number.
    number = tl.where(known & (rank == least), time.to(tl.int32), LAST)
    oldest = tl.min(number, 0)
    full = count >= C
    stays = comes
    if not COMPARES:
        stays = comes & ((ordered(new_score) >= least) | (count < C))
    # What lies in no place has the number -1 in neither way.
    chosen = tl.where(full, number, oc) == tl.where(stays, tl.where(full, oldest, count.to(tl.int32)), -1)
    return chosen, stays


@triton.jit(do_not_specialize=["T", "window"])
def choose_kernel(
    compared, enters, positions, number, nearest, at, slot, gone, held_out, nearest_out, at_out,
    T, window, HKV,
    C: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, COMPARES: tl.constexpr,
    AGES: tl.constexpr, ALIKE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Choose in one key head of a row."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // HKV
    oc = tl.arange(0, BC)
    ov = tl.arange(0, BV)
    inside = oc < C
    compared += i_bh * (C + T) * V
    enters += i_b * T
    positions += i_b * T
    slot += i_bh * T
    gone += i_bh * T
    # [BC]
    held = oc
    time = tl.load(at + i_bh * C + oc, mask=inside, other=0)
    near = tl.full([BC], float("inf"), tl.float32)
    if COMPARES:
        near = tl.load(nearest + i_bh * C + oc, mask=inside, other=float("inf"))
    count = tl.minimum(tl.load(number + i_b), C).to(tl.int32)
    # The next key is on its way while one is compared.
    comes = tl.load(enters) != 0
    now = tl.load(positions)
    new = load_compared(compared + C * V, ov, V, COMPARES)
    for t in range(T):
        after = tl.minimum(t + 1, T - 1)
        comes_after = tl.load(enters + after) != 0
        now_after = tl.load(positions + after)
        new_after = load_compared(compared + (C + after).to(tl.int64) * V, ov, V, COMPARES)
        known = oc < tl.where(comes, count, 0)
        new_score = 0.0
        if COMPARES:
            rows = compared + held.to(tl.int64)[:, None] * V + ov[None, :]
            rows = tl.load(rows, mask=known[:, None] & (ov < V)[None, :], other=0.0).to(tl.float32)
            near = tl.where(known, tl.minimum(near, apart(rows, new, ALIKE)), near)
        else:
            near = at_age(compared, held.to(tl.int64), now - time + window, window, known, AGES)
            new_score = new
        chosen, stays = pick(near, time, oc, count, comes, new_score, C, COMPARES, LAST)
        full = count >= C
        tl.store(slot + t, tl.max(tl.where(chosen, oc, -1), 0).to(tl.int64))
        goes = tl.max(tl.where(chosen, held, tl.where(stays, -1, C + t)), 0)
        tl.store(gone + t, tl.where(comes & full, goes, -1).to(tl.int64))
        held = tl.where(chosen, C + t, held)
        time = tl.where(chosen, now, time)
        near = tl.where(chosen, float("inf"), near)
        count = tl.minimum(count + comes.to(tl.int32), C)
        comes = comes_after
        now = now_after
        new = new_after
    tl.store(held_out + i_bh * C + oc, held.to(tl.int64), mask=inside)
    tl.store(at_out + i_bh * C + oc, time, mask=inside)
    if COMPARES:
        tl.store(nearest_out + i_bh * C + oc, near, mask=inside)


def choose_launch(target: Target, call: Entering) -> tuple[Choice, Launch]:
    """Plan the choice.

    Args:
        target: The device.
        call: The keys, all contiguous.

    Returns:
        The choice, allocated, and the launch.
    """
    (B, HKV, C), T, V = call.at.shape, call.enters.shape[1], call.compared.shape[3]
    slot = call.at.new_empty(B, HKV, T)
    found = Choice(slot, torch.empty_like(slot), *(torch.empty_like(x) for x in (call.at, call.nearest, call.at)))
    places, width = padded(C), padded(V)
    # Where scores are compared, two numbers a place are read for each key.
    entries = places * (width if call.window == 0 else 2)
    chosen = Tile(places, width, min(max(entries // ENTRIES, 1), 16), 1)
    arguments = {
        **{"compared": call.compared, "enters": call.enters, "positions": call.positions, "number": call.number},
        **{"nearest": call.nearest, "at": call.at, "slot": found.slot, "gone": found.gone, "held_out": found.held},
        **{"nearest_out": found.nearest, "at_out": found.at, "T": T, "window": call.window, "HKV": HKV},
        **{"C": C, "V": V, "BC": chosen.tokens, "BV": chosen.width, "COMPARES": call.window == 0},
        **{"AGES": AGES, "ALIKE": ALIKE, "LAST": LAST},
    }
    role = "keep_scored" if call.window else "keep"
    return found, Launch(role, choose_kernel, B * HKV, arguments, chosen, tuple(call[:6]), tuple(found))


def choose_triton(call: Entering) -> Choice:
    """Choose with a kernel; see :func:`hf_linear_attn.ops.kept.choose_kept`."""
    given = [getattr(call, name).contiguous() for name in Entering._fields[:6]]
    return execute(choose_launch, target_for(call.at.device), Entering(*given, window=call.window))
