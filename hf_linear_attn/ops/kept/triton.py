"""The choice of kept keys as a kernel: one key after the other, a program for each key head of a row.

A program has where its C keys lie, their numbers and their values in registers: a key waits for the one before it, and
would wait for memory, too. Of scores it reads the two between which an age lies, for the next key while one is chosen.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
import triton
import triton.language as tl

from hf_linear_attn.ops.kept.problem import AGES, ALIKE, Choice, Entering
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded
from hf_linear_attn.ops.triton.run import execute, target_for

ENTRIES = 1024
"""Of what is compared, that a warp holds."""
LAST = 2**31 - 1
"""A number that no key has, of 32 bits; behind all in order."""


@triton.jit
def at_age(scores, rows, age, window, inside, AGES: tl.constexpr):
    """Return the scores of some rows at their ages."""
    point = tl.log2(tl.maximum(age, window).to(tl.float32)) - tl.log2(window.to(tl.float32))
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
def apart(rows, squares, new, square, ALIKE: tl.constexpr):
    """Return the squared distance of each row to another one, 0 where they are alike; both come with their squares."""
    x = rows - new[None, :]
    found = tl.sum(x * x, 1)
    return tl.where(found < ALIKE * (squares + square), 0.0, found)


@triton.jit
def ordered(x):
    """Return integers in the order of numbers of fp32: of 32 bits a warp finds the least in one instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sooner(rank, number, place, held, of_rank, of_number, of_place, of_held):
    """Return the one of two that goes sooner: the least in rank, and of those alike the oldest; no two are as old."""
    other = (of_rank < rank) | ((of_rank == rank) & (of_number < number))
    rank = tl.where(other, of_rank, rank)
    number = tl.where(other, of_number, number)
    return rank, number, tl.where(other, of_place, place), tl.where(other, of_held, held)


@triton.jit
def pick(near, time, held, oc, count, comes, new_score, C: tl.constexpr, COMPARES: tl.constexpr, LAST: tl.constexpr):
    """Return which place a key takes that comes, -1 if none, and what ``held`` says of the key that lay there."""
    known = oc < tl.where(comes, count, 0)
    rank = tl.where(known, ordered(near), LAST)
    number = tl.where(known, time.to(tl.int32), LAST)
    stays = comes
    if COMPARES:
        # Several warps, which wait for each other once.
        _, _, place, goes = tl.reduce((rank, number, oc, held), 0, sooner)
    else:
        least = tl.min(rank, 0)
        number = tl.where(rank == least, number, LAST)
        place = tl.min(tl.where(number == tl.min(number, 0), oc, LAST), 0)
        goes = tl.max(tl.where(oc == place, held, -1), 0)
        stays = comes & ((ordered(new_score) >= least) | (count < C))
    place = tl.where(count < C, count.to(tl.int32), place)
    return tl.where(stays, place, -1), goes


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
    time = tl.load(at + i_bh * C + oc, mask=inside, other=0).to(tl.int32)
    count = tl.minimum(tl.load(number + i_b), C).to(tl.int32)
    # The next key is on its way while one is compared, and the number of the one after it.
    comes = tl.load(enters) != 0
    now = tl.load(positions).to(tl.int32)
    now_after = tl.load(positions + tl.minimum(1, T - 1)).to(tl.int32)
    new = load_compared(compared + C * V, ov, V, COMPARES)
    if COMPARES:
        near = tl.load(nearest + i_bh * C + oc, mask=inside, other=float("inf"))
        # [BC, BV]
        rows = tl.load(compared + oc[:, None] * V + ov[None, :], mask=inside[:, None] & (ov < V)[None, :], other=0.0)
        rows = rows.to(tl.float32)
        squares = tl.sum(rows * rows, 1)
    else:
        near = at_age(compared, oc, now - time + window, window, inside, AGES)
    for t in range(T):
        after = tl.minimum(t + 1, T - 1)
        comes_after = tl.load(enters + after) != 0
        now_then = tl.load(positions + tl.minimum(t + 2, T - 1)).to(tl.int32)
        new_after = load_compared(compared + (C + after).to(tl.int64) * V, ov, V, COMPARES)
        new_score = 0.0
        if COMPARES:
            square = tl.sum(new[None, :] * new[None, :], 1)
            known = oc < tl.where(comes, count, 0)
            near = tl.where(known, tl.minimum(near, apart(rows, squares, new, square, ALIKE)), near)
        else:
            new_score = new
            # For the next key, of those that are there now; and of this one, if it stays.
            near_after = at_age(compared, held, now_after - time + window, window, inside, AGES)
            own_after = at_age(compared, C + t, now_after - now + window, window, comes, AGES)
        place, goes = pick(near, time, held, oc, count, comes, new_score, C, COMPARES, LAST)
        tl.store(slot + t, place.to(tl.int64))
        tl.store(gone + t, tl.where(comes & (count >= C), tl.where(place < 0, C + t, goes), -1).to(tl.int64))
        chosen = oc == place
        held = tl.where(chosen, C + t, held)
        time = tl.where(chosen, now, time)
        if COMPARES:
            near = tl.where(chosen, float("inf"), near)
            rows = tl.where(chosen[:, None], new[None, :], rows)
            squares = tl.where(chosen, square, squares)
        else:
            near = tl.where(chosen, own_after, near_after)
        count = tl.minimum(count + comes.to(tl.int32), C)
        comes = comes_after
        now = now_after
        now_after = now_then
        new = new_after
    tl.store(held_out + i_bh * C + oc, held.to(tl.int64), mask=inside)
    tl.store(at_out + i_bh * C + oc, time.to(tl.int64), mask=inside)
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
