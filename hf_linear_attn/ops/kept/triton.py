"""The choice of kept keys as a kernel: one key after the other, a program for each key head of a row.

A program has where its C keys lie, their numbers and their values or scores in registers: a key waits for the one
before it, and would wait for memory, too.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import torch
import triton
import triton.language as tl

from hf_linear_attn.ops.kept.problem import AGES, ALIKE, Choice, Entering
from hf_linear_attn.ops.triton.plan import Launch, Target, Tile, padded
from hf_linear_attn.ops.triton.primitives import log2
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
    """Return where a key that comes lies then, as a place (-1 for none) and as a mask; and what was ``held`` there."""
    known = oc < tl.where(comes, count, 0)
    rank = tl.where(known, ordered(near), LAST)
    number = tl.where(known, time.to(tl.int32), LAST)
    stays = comes
    if COMPARES:
        # Several warps, which wait for each other once.
        _, _, place, goes = tl.reduce((rank, number, oc, held), 0, sooner)
        place = tl.where(stays, tl.where(count < C, count.to(tl.int32), place), -1)
        chosen = oc == place
    else:
        least = tl.min(rank, 0)
        number = tl.where(rank == least, number, LAST)
        stays = comes & ((ordered(new_score) >= least) | (count < C))
        # No two are as old. What is found of this one is not waited for.
        chosen = tl.where(stays, tl.where(count < C, oc == count, number == tl.min(number, 0)), False)
        place = tl.max(tl.where(chosen, oc, -1), 0)
        goes = tl.max(tl.where(chosen, held, -1), 0)
    return place, chosen, goes


@triton.jit(do_not_specialize=["T"])
def choose_kernel(
    compared, enters, positions, number, nearest, at, slot, gone, held_out, nearest_out, at_out,
    T, HKV, C: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    ALIKE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Choose in one key head of a row by values."""
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
    near = tl.load(nearest + i_bh * C + oc, mask=inside, other=float("inf"))
    # [BC, BV]
    rows = tl.load(compared + oc[:, None] * V + ov[None, :], mask=inside[:, None] & (ov < V)[None, :], other=0.0)
    rows = rows.to(tl.float32)
    squares = tl.sum(rows * rows, 1)
    # The next key is on its way while one is compared.
    comes = tl.load(enters) != 0
    now = tl.load(positions).to(tl.int32)
    new = tl.load(compared + C * V + ov, mask=ov < V, other=0.0).to(tl.float32)
    for t in range(T):
        after = tl.minimum(t + 1, T - 1)
        comes_after = tl.load(enters + after) != 0
        now_after = tl.load(positions + after).to(tl.int32)
        new_after = tl.load(compared + (C + after).to(tl.int64) * V + ov, mask=ov < V, other=0.0).to(tl.float32)
        square = tl.sum(new[None, :] * new[None, :], 1)
        known = oc < tl.where(comes, count, 0)
        near = tl.where(known, tl.minimum(near, apart(rows, squares, new, square, ALIKE)), near)
        place, chosen, goes = pick(near, time, held, oc, count, comes, 0.0, C, True, LAST)
        tl.store(slot + t, place.to(tl.int64))
        tl.store(gone + t, tl.where(comes & (count >= C), tl.where(place < 0, C + t, goes), -1).to(tl.int64))
        held = tl.where(chosen, C + t, held)
        time = tl.where(chosen, now, time)
        near = tl.where(chosen, float("inf"), near)
        rows = tl.where(chosen[:, None], new[None, :], rows)
        squares = tl.where(chosen, square, squares)
        count = tl.minimum(count + comes.to(tl.int32), C)
        comes = comes_after
        now = now_after
        new = new_after
    tl.store(held_out + i_bh * C + oc, held.to(tl.int64), mask=inside)
    tl.store(at_out + i_bh * C + oc, time.to(tl.int64), mask=inside)
    tl.store(nearest_out + i_bh * C + oc, near, mask=inside)


@triton.jit
def load_piece(scores, inside):
    """Return the score with which a piece between two ages begins, and by what it rises."""
    first = tl.load(scores, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(scores + 1, mask=inside, other=0.0).to(tl.float32) - first


@triton.jit
def load_entering(scores, enters, positions):
    """Return whether a key comes, its number, and its scores' first piece."""
    first, rise = load_piece(scores, True)
    return tl.load(enters) != 0, tl.load(positions).to(tl.int32), first, rise


@triton.jit(do_not_specialize=["T", "window"])
def choose_scored_kernel(
    scores, enters, positions, number, at, slot, gone, held_out, at_out,
    T, window, HKV, C: tl.constexpr, BC: tl.constexpr, AGES: tl.constexpr, LAST: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Choose in one key head of a row by scores.

    Of a key's scores the piece between two ages is at hand within which its age lies. Few keys come to the next piece
    at a time, and those of all are read anew then.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // HKV
    oc = tl.arange(0, BC)
    inside = oc < C
    scores += i_bh * (C + T) * AGES
    enters += i_b * T
    positions += i_b * T
    slot += i_bh * T
    gone += i_bh * T
    entering = scores + C * AGES
    held = oc
    time = tl.load(at + i_bh * C + oc, mask=inside, other=0).to(tl.int32)
    count = tl.minimum(tl.load(number + i_b), C).to(tl.int32)
    youngest = log2(window.to(tl.float32), PIN)
    # The scores of a piece are ``first + (point - piece) * rise``, of the first piece until an age is known.
    piece = tl.zeros([BC], tl.float32)
    first, rise = load_piece(scores + oc * AGES, inside)
    comes, now, new, new_rise = load_entering(entering, enters, positions)
    after = tl.minimum(1, T - 1)
    comes_1, now_1, new_1, new_rise_1 = load_entering(entering + after * AGES, enters + after, positions + after)
    # Two keys are on their way while one is compared: each of three in its own registers.
    for t in tl.range(0, T, loop_unroll_factor=3):
        after = tl.minimum(t + 2, T - 1)
        row = entering + after.to(tl.int64) * AGES
        comes_2, now_2, new_2, new_rise_2 = load_entering(row, enters + after, positions + after)
        known = oc < count
        point = log2(tl.maximum(now - time + window, window).to(tl.float32), PIN) - youngest
        beyond = point - piece
        if tl.max((known & (beyond >= 1.0) & (piece < AGES - 2.0)).to(tl.int32), 0) > 0:
            low = tl.minimum(point.to(tl.int32), AGES - 2)
            first, rise = load_piece(scores + held * AGES + low, known)
            piece = low.to(tl.float32)
            beyond = point - piece
        near = first + tl.minimum(beyond, 1.0) * rise
        place, chosen, goes = pick(near, time, held, oc, count, comes, new, C, False, LAST)
        tl.store(slot + t, place.to(tl.int64))
        tl.store(gone + t, tl.where(comes & (count >= C), tl.where(place < 0, C + t, goes), -1).to(tl.int64))
        held = tl.where(chosen, C + t, held)
        time = tl.where(chosen, now, time)
        first = tl.where(chosen, new, first)
        rise = tl.where(chosen, new_rise, rise)
        piece = tl.where(chosen, 0.0, piece)
        count = tl.minimum(count + comes.to(tl.int32), C)
        comes, now, new, new_rise = comes_1, now_1, new_1, new_rise_1
        comes_1, now_1, new_1, new_rise_1 = comes_2, now_2, new_2, new_rise_2
    tl.store(held_out + i_bh * C + oc, held.to(tl.int64), mask=inside)
    tl.store(at_out + i_bh * C + oc, time.to(tl.int64), mask=inside)


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
    arguments = {
        **{"enters": call.enters, "positions": call.positions, "number": call.number, "at": call.at},
        **{"slot": found.slot, "gone": found.gone, "held_out": found.held, "at_out": found.at},
        **{"T": T, "HKV": HKV, "C": C, "BC": places, "LAST": LAST},
    }
    if call.window:
        kernel, role, warps = choose_scored_kernel, "keep_scored", max(2 * places // ENTRIES, 1)
        arguments |= {"scores": call.compared, "window": call.window, "AGES": AGES}
        # Inline assembly, see primitives.log2.
        arguments["PIN"] = target.arch.startswith("sm_")
    else:
        kernel, role, warps = choose_kernel, "keep", min(max(places * width // ENTRIES, 1), 16)
        arguments |= {"compared": call.compared, "nearest": call.nearest, "nearest_out": found.nearest}
        arguments |= {"V": V, "BV": width, "ALIKE": ALIKE}
    chosen = Tile(places, width, warps, 1)
    return found, Launch(role, kernel, B * HKV, arguments, chosen, tuple(call[:6]), tuple(found))


def choose_triton(call: Entering) -> Choice:
    """Choose with a kernel; see :func:`hf_linear_attn.ops.kept.choose_kept`."""
    given = [getattr(call, name).contiguous() for name in Entering._fields[:6]]
    return execute(choose_launch, target_for(call.at.device), Entering(*given, window=call.window))
