"""Kernels of learned maps that turn y = x W into a pair of halves, one of y and one of -y.

A program takes one head and walks tiles of BT tokens: x ``[BT, BD]``, W ``[BD, BM]`` in fast memory throughout, the
features ``[BT, BM]`` twice. A W that is too large for that is read BD rows at a time by each tile. Where sizes allow it
(:func:`in_halves`) x comes as its first half and its second, which rotations turn against each other, and so does W.
bf16 x meets W as a sum of two rounded parts, so that y is as exact as from fp32; the rest is fp32. The backward
computes y anew from x and writes its gradient; of x in halves it goes on to those of x and of W, a sum over its tokens.
Of others these products are a library's.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment,var-annotated"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_linear_attn.feature_maps.norm_preserving import TINY as _TINY
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import HELD_WARPS, Launch, Target, Tile, padded, planned, precision, tile
from hf_linear_attn.ops.triton.primitives import (
    ALL,
    LOG2E,
    dot,
    load_plain,
    load_tile,
    log2,
    max_rows,
    operand,
    product,
    rounded,
    store_parts,
    store_tile,
    sum_rows,
)

TINY = tl.constexpr(_TINY)
LEAST_NORMAL = tl.constexpr(1.1754943508222875e-38)
LARGEST_FP16 = tl.constexpr(65504.0)

WEIGHTS = 1 << 14
"""Entries of W that a program holds at a time."""

LONGER = 8
"""How many times as many tokens as a tile says a program walks at most."""


@triton.jit
def add_product(x, weight, rest, y, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Return ``y + x W``."""
    y = dot(x, weight, y, PRECISION)
    if SPLIT:
        y = dot(x, rest, y, PRECISION)
    return y


@triton.jit
def project(x, weight, rest, factor, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Return ``factor x W``."""
    return factor * add_product(x, weight, rest, tl.zeros([x.shape[0], weight.shape[1]], tl.float32), PRECISION, SPLIT)


@triton.jit
def load_angles(turns, ot, rows, R: tl.constexpr):
    """Load the cosines and sines ``[BT, R / 2]`` that turn tokens back, over the rotation's factor."""
    at = ot[:, None] * R + tl.arange(0, R // 2)[None, :]
    cos = tl.load(turns + at, mask=rows[:, None], other=1.0).to(tl.float32)
    sin = tl.load(turns + R // 2 + at, mask=rows[:, None], other=0.0).to(tl.float32)
    # Of a slot that holds no token, the angles are 0.
    square = 1.0 / tl.maximum(cos * cos + sin * sin, LEAST_NORMAL)
    return cos * square, sin * square


@triton.jit
def load_halves(x, x_t, turns, ot, rows, D: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr):
    """Load a tile of tokens as two halves, which are turned back against each other, or as they are.

    So no entry is loaded twice. ``PIN``: where warps share rows, each would else turn all that it multiplies.
    """
    HALF: tl.constexpr = D // 2
    oh = tl.arange(0, HALF)
    # [BT, HALF] twice
    a = load_tile(x, ot[:, None] * x_t + oh[None, :], rows, oh < HALF, True)
    b = load_tile(x + HALF, ot[:, None] * x_t + oh[None, :], rows, oh < HALF, True)
    if R > 0:
        cos, sin = load_angles(turns, ot, rows, R)
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a, b = (wide_a * cos + wide_b * sin).to(a.dtype), (wide_b * cos - wide_a * sin).to(a.dtype)
    PINNED: tl.constexpr = PIN or PRECISION == "tf32"
    return rounded(a, a.dtype, PRECISION, PINNED), rounded(b, b.dtype, PRECISION, PINNED)


@triton.jit
def project_halves(a, b, w_a, rest_a, w_b, rest_b, factor, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """Return ``factor x W`` of both in halves."""
    y = tl.zeros([a.shape[0], w_a.shape[1]], tl.float32)
    y = add_product(a, w_a, rest_a, y, PRECISION, SPLIT)
    return factor * add_product(b, w_b, rest_b, y, PRECISION, SPLIT)


@triton.jit
def project_rows(
    x, x_t, turns, weight, w_d, w, rest, ot, od, om, rows, factor,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    kind: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Load a tile of tokens, turned back, and return ``factor x W``, where W is either loaded already or too large."""
    if BD >= D:
        xx = load_plain(x, x_t, turns, ot, od, rows, D, R, PAIRS, AT_END, D == BD, PRECISION)
        y = project(xx, w, rest, factor, PRECISION, SPLIT)
    else:
        y = tl.zeros([ot.shape[0], BM], tl.float32)
        for d in range(0, D, BD):
            # [BD, BM] and [BT, BD]
            high, low = load_weight(weight, w_d, d + od, om, D, M, kind, PRECISION, SPLIT)
            xx = load_plain(x, x_t, turns, ot, d + od, rows, D, R, PAIRS, AT_END, D % BD == 0, PRECISION)
            y = add_product(xx, high, low, y, PRECISION, SPLIT)
        y *= factor
    return y


@triton.jit
def load_weight(
    weight, w_d, od, om,
    D: tl.constexpr, M: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Load W in the dtype of its products, and where asked what that leaves of it."""
    w = tl.load(weight + od[:, None] * w_d + om[None, :], mask=(od < D)[:, None] & (om < M)[None, :], other=0.0)
    w = w.to(tl.float32)
    high = operand(w, dtype, PRECISION)
    rest = high
    if SPLIT:
        rest = (w - high.to(tl.float32)).to(dtype)
    return high, rest


@triton.jit
def load_weight_halves(
    weight, w_d, om,
    D: tl.constexpr, M: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Load W as two halves of its rows, ``[D / 2, .]``, each followed by what :func:`load_weight` leaves of it."""
    HALF: tl.constexpr = D // 2
    oh = tl.arange(0, HALF)
    a, rest_a = load_weight(weight, w_d, oh, om, HALF, M, dtype, PRECISION, SPLIT)
    b, rest_b = load_weight(weight + HALF * w_d, w_d, oh, om, HALF, M, dtype, PRECISION, SPLIT)
    return a, rest_a, b, rest_b


@triton.jit
def add_projected(
    x, weight, w_d, od, om, y,
    D: tl.constexpr, M: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return ``y + x W``; x is in parts of columns ``od``, y of ``om``, and W is loaded part by part."""
    for i in tl.static_range(len(od)):
        z = ()
        for j in tl.static_range(len(om)):
            w, rest = load_weight(weight, w_d, od[i], om[j], D, M, dtype, PRECISION, SPLIT)
            z += (add_product(x[i], w, rest, y[j], PRECISION, SPLIT),)
        y = z
    return y


@triton.jit
def load_transposed(weight, w_d, od, om, M: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Load W^T in the dtype of its products, of as many rows of W as there are."""
    w = tl.load(weight + od[None, :] * w_d + om[:, None], mask=(om < M)[:, None], other=0.0)
    return operand(w.to(tl.float32), dtype, PRECISION)


@triton.jit
def powers(y, factor, om, M: tl.constexpr):
    """Return ``2^(factor y)`` over the largest of each row, of M columns ``om``, in parts; 0 outside."""
    z = ()
    for i in tl.static_range(len(om)):
        z += (tl.where((om[i] < M)[None, :], factor * y[i], float("-inf")),)
    largest = max_rows(z)
    return [tl.exp2(part - largest[:, None]) for part in z]


@triton.jit
def softmax(y, om, M: tl.constexpr):
    """Return the softmax of each row, of M columns ``om``, in parts."""
    e = powers(y, LOG2E, om, M)
    over = 1.0 / sum_rows(e)
    return [part * over[:, None] for part in e]


@triton.jit
def roots(y, power, sharpness, om, M: tl.constexpr, QUERY: tl.constexpr, PIN: tl.constexpr):
    """Return ``|y|``, the row's power, ``|y_i|^p / ||y|^p|`` and ``log2 |y_i|``, of M columns ``om``, in parts."""
    length = tl.sqrt(sum_rows([part * part for part in y]) + TINY)
    p = power
    if QUERY:
        # tanh, of a number >= 0
        t = tl.exp2(sharpness * length * (-2 * LOG2E))
        p = power * (0.5 + (1 - t) / (1 + t))
    else:
        p = power + 0 * length
    logs = [log2(tl.abs(part) + TINY, PIN) for part in y]
    e = powers(logs, p[:, None], om, M)
    over = 1.0 / tl.sqrt(sum_rows([part * part for part in e]))
    return length, p, [part * over[:, None] for part in e], logs


@triton.jit
def halves(
    y, power, sharpness, om,
    M: tl.constexpr, MAP: tl.constexpr, QUERY: tl.constexpr, dtype: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Return both halves of the features of each row, of M columns ``om``, in parts, as large as ``dtype`` can hold."""
    if MAP == "hedgehog":
        above = softmax(y, om, M)
        below = softmax([-part for part in y], om, M)
    else:
        length, _, r, _ = roots(y, power, sharpness, om, M, QUERY, PIN)
        above, below = (), ()
        for i in tl.static_range(len(om)):
            bent = length[:, None] * r[i]
            if dtype == tl.float16:
                bent = tl.minimum(bent, LARGEST_FP16, propagate_nan=ALL)
            # Of a NaN, neither half is 0.
            above += (tl.where(y[i] <= 0, 0.0, bent),)
            below += (tl.where(y[i] >= 0, 0.0, bent),)
    return above, below


@triton.jit(do_not_specialize=["T", "L", "factor", "sharpness"])
def features_kernel(
    x, turns, weight, power, o,
    T, L, heads, factor, sharpness,
    x_b, x_h, x_t, o_b, o_h, o_t, t_b, w_h, w_d, p_h,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    MAP: tl.constexpr, QUERY: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, HALVES: tl.constexpr,
    PIN: tl.constexpr,
):  # fmt: skip
    """Write the features of L tokens of one head."""
    pid = tl.program_id(0)
    i_h = pid % heads
    i_l = (pid // heads) % tl.cdiv(T, L)
    i_b = (pid // heads // tl.cdiv(T, L)).to(tl.int64)
    od = tl.arange(0, BD)
    om = tl.arange(0, BM)
    ot = tl.arange(0, BT)
    x += i_b * x_b + i_h.to(tl.int64) * x_h
    if R > 0:
        turns += i_b * t_b
    o += i_b * o_b + i_h.to(tl.int64) * o_h
    kind: tl.constexpr = tl.float32 if x.dtype.element_ty == tl.float16 else x.dtype.element_ty
    weight += i_h.to(tl.int64) * w_h
    w, rest, w_b, rest_b = 0.0, 0.0, 0.0, 0.0
    if HALVES:
        w, rest, w_b, rest_b = load_weight_halves(weight, w_d, om, D, M, kind, PRECISION, SPLIT)
    elif BD >= D:
        # [BD, BM]
        w, rest = load_weight(weight, w_d, od, om, D, M, kind, PRECISION, SPLIT)
    a = 0.0
    if MAP == "norm_preserving":
        a = tl.load(power + i_h.to(tl.int64) * p_h).to(tl.float32)
    start = i_l.to(tl.int64) * L
    for c in range(start, tl.minimum(start + L, T), BT):
        rows = ot < (T - c).to(tl.int32)
        of_tokens = turns
        if R > 0:
            of_tokens = turns + c * R
        # [BT, BM]
        if HALVES:
            first, second = load_halves(x + c * x_t, x_t, of_tokens, ot, rows, D, R, PRECISION, PIN)
            y = project_halves(first, second, w, rest, w_b, rest_b, factor, PRECISION, SPLIT)
        else:
            y = project_rows(
                x + c * x_t, x_t, of_tokens, weight, w_d, w, rest, ot, od, om, rows, factor,
                D, M, BD, BM, R, PAIRS, AT_END, kind, PRECISION, SPLIT,
            )  # fmt: skip
        above, below = halves((y,), a, sharpness, (om,), M, MAP, QUERY, o.dtype.element_ty, PIN)
        store_parts(o + c * o_t, ot[:, None] * o_t, (om,), above, rows, M, M == BM)
        store_parts(o + c * o_t + M, ot[:, None] * o_t, (om,), below, rows, M, M == BM)


@triton.jit
def derive(
    y, above, below, power, sharpness, om,
    M: tl.constexpr, MAP: tl.constexpr, QUERY: tl.constexpr, dtype: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Return the gradient of y from those of both halves of its features, and each row's part of the power's."""
    if MAP == "hedgehog":
        p = softmax((y,), (om,), M)[0]
        g = p * (above - tl.sum(p * above, 1)[:, None])
        p = softmax((-y,), (om,), M)[0]
        g -= p * (below - tl.sum(p * below, 1)[:, None])
        dp = tl.zeros([y.shape[0]], tl.float32)
    else:
        length, p, r, logs = roots((y,), power, sharpness, (om,), M, QUERY, PIN)
        r, logs = r[0], logs[0]
        # Of the magnitudes length r; those that fp16 cuts off have none.
        dm = tl.where(y > 0, above, tl.where(y < 0, below, 0.0))
        if dtype == tl.float16:
            dm = tl.where(length[:, None] * r > LARGEST_FP16, 0.0, dm)
        dlength = tl.sum(dm * r, 1)
        half = 0.5 * length[:, None] * dm * r
        du = half - r * r * tl.sum(half, 1)[:, None]
        dp = tl.sum(tl.where((om < M)[None, :], du * logs, 0.0), 1) * (2 / LOG2E)
        if QUERY:
            t = tl.exp2(sharpness * length * (-2 * LOG2E))
            tanh = (1 - t) / (1 + t)
            dlength += dp * power * sharpness * (1 - tanh * tanh)
            dp *= 0.5 + tanh
        sign = tl.where(y > 0, 1.0, tl.where(y < 0, -1.0, 0.0))
        g = (2 * p)[:, None] * du * tl.exp2(-logs) * sign + (dlength / length)[:, None] * y
    return g, dp


@triton.jit
def write_products(
    x, turns, weight, dy, dx, dweight, w, w_b, w_d, start, stop, later, T, x_t, dy_t, dx_t, om, ot,
    D: tl.constexpr, M: tl.constexpr, R: tl.constexpr, kind: tl.constexpr, PRECISION: tl.constexpr,
    OF_X: tl.constexpr, OF_WEIGHT: tl.constexpr, ADD: tl.constexpr, HELD: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x from ``dy``, that of ``x W``, of a block of tokens as two halves, and add to W's.

    Once more through the tokens: registers hold no more above, and what goes from one product into another Triton lays
    out so that half of the warps repeat what the others do. ``later``: whether ``dweight`` has sums of blocks before.
    """
    BT: tl.constexpr = ot.shape[0]
    HALF: tl.constexpr = D // 2
    oh = tl.arange(0, HALF)
    tl.debug_barrier()
    # [BM, HALF] twice
    if OF_X:
        if HELD:
            w, w_b = tl.trans(w), tl.trans(w_b)
        else:
            w = load_transposed(weight, w_d, oh, om, M, kind, PRECISION)
            w_b = load_transposed(weight + HALF * w_d, w_d, oh, om, M, kind, PRECISION)
    if OF_WEIGHT:
        # [HALF, BM] twice
        before = oh < tl.where(later, HALF, 0)
        sum_a = load_tile(dweight, oh[:, None] * M + om[None, :], before, om < M, om.shape[0] == M)
        sum_b = load_tile(dweight + HALF * M, oh[:, None] * M + om[None, :], before, om < M, om.shape[0] == M)
    for c in range(start, stop, BT):
        rows = ot < (T - c).to(tl.int32)
        of_tokens = turns
        if R > 0:
            of_tokens = turns + c * R
        # [BT, BM]
        g = load_tile(dy + (c - start) * dy_t, ot[:, None] * dy_t + om[None, :], rows, om < M, om.shape[0] == M)
        g = operand(g, kind, PRECISION)
        if OF_WEIGHT:
            # [BT, HALF] twice
            first, second = load_halves(x + c * x_t, x_t, of_tokens, ot, rows, D, R, PRECISION, PIN)
            sum_a = dot(tl.trans(first), g, sum_a, PRECISION)
            sum_b = dot(tl.trans(second), g, sum_b, PRECISION)
        if OF_X:
            # [BT, HALF] twice
            da = product(g, w, PRECISION)
            db = product(g, w_b, PRECISION)
            if R > 0:
                cos, sin = load_angles(of_tokens, ot, rows, R)
                da, db = da * cos - db * sin, db * cos + da * sin
            if ADD:
                da += load_tile(dx + c * dx_t, ot[:, None] * dx_t + oh[None, :], rows, oh < HALF, True)
                db += load_tile(dx + c * dx_t, ot[:, None] * dx_t + HALF + oh[None, :], rows, oh < HALF, True)
            store_tile(dx + c * dx_t, ot[:, None] * dx_t + oh[None, :], da, rows, oh < HALF, True)
            store_tile(dx + c * dx_t, ot[:, None] * dx_t + HALF + oh[None, :], db, rows, oh < HALF, True)
    if OF_WEIGHT:
        store_tile(dweight, oh[:, None] * M + om[None, :], sum_a, oh < HALF, om < M, om.shape[0] == M)
        store_tile(dweight + HALF * M, oh[:, None] * M + om[None, :], sum_b, oh < HALF, om < M, om.shape[0] == M)


@triton.jit(do_not_specialize=["T", "N", "L", "factor", "sharpness"])
def features_backward_kernel(
    x, turns, weight, power, do, dy, dx, dweight, dpower,
    T, N, L, heads, factor, sharpness,
    x_b, x_h, x_t, do_b, do_h, do_t, dy_b, dy_h, dy_t, dx_b, dx_h, dx_t, t_b, w_h, w_d, p_h,
    D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
    R: tl.constexpr, PAIRS: tl.constexpr, AT_END: tl.constexpr,
    MAP: tl.constexpr, QUERY: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, HALVES: tl.constexpr,
    BLOCK: tl.constexpr, OF_X: tl.constexpr, OF_WEIGHT: tl.constexpr, ADD: tl.constexpr, HELD: tl.constexpr,
    PIN: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ``x W`` and of x of L tokens of one head, and their parts of W's and of the power's.

    Only the first N of all tokens have a ``do`` that is not 0. Tokens come in blocks, so that what is read again still
    lies in the cache; where this writes x's and W's gradients, dy is that of a program's last block.
    """
    pid = tl.program_id(0)
    i_h = pid % heads
    i_l = (pid // heads) % tl.cdiv(T, L)
    i_b = (pid // heads // tl.cdiv(T, L)).to(tl.int64)
    od = tl.arange(0, BD)
    om = tl.arange(0, BM)
    ot = tl.arange(0, BT)
    x += i_b * x_b + i_h.to(tl.int64) * x_h
    if R > 0:
        turns += i_b * t_b
    do += i_b * do_b + i_h.to(tl.int64) * do_h
    dy += i_b * dy_b + i_h.to(tl.int64) * dy_h
    kind: tl.constexpr = tl.float32 if x.dtype.element_ty == tl.float16 else x.dtype.element_ty
    weight += i_h.to(tl.int64) * w_h
    w, rest = 0.0, 0.0
    halved = (w, rest, w, rest)
    if HALVES and HELD:
        halved = load_weight_halves(weight, w_d, om, D, M, kind, PRECISION, SPLIT)
    elif not HALVES and BD >= D:
        # [BD, BM]
        w, rest = load_weight(weight, w_d, od, om, D, M, kind, PRECISION, SPLIT)
    a = 0.0
    if MAP == "norm_preserving":
        a = tl.load(power + i_h.to(tl.int64) * p_h).to(tl.float32)
    sum_p = tl.zeros([BT], tl.float32)
    begin = i_l.to(tl.int64) * L
    stop = tl.minimum(begin + L, T)
    dy += i_l.to(tl.int64) * BLOCK * dy_t
    dx += i_b * dx_b + i_h.to(tl.int64) * dx_h
    dweight += ((i_b * heads + i_h) * tl.cdiv(T, L) + i_l) * (D * M)
    for start in tl.range(begin, stop, BLOCK, disable_licm=True):
        last = tl.minimum(start + BLOCK, stop)
        # Memory for dy is that of the block before.
        tl.debug_barrier()
        of_block = halved
        if HALVES and not HELD:
            # In shared memory, W^T takes its place.
            of_block = load_weight_halves(weight, w_d, om, D, M, kind, PRECISION, SPLIT)
        w_a, rest_a, w_b, rest_b = of_block
        for c in range(start, last, BT):
            rows = ot < (T - c).to(tl.int32)
            of_tokens = turns
            if R > 0:
                of_tokens = turns + c * R
            # [BT, BM]
            given = ot < (N - c).to(tl.int32)
            above = load_tile(do + c * do_t, ot[:, None] * do_t + om[None, :], given, om < M, M == BM).to(tl.float32)
            below = load_tile(do + c * do_t, ot[:, None] * do_t + M + om[None, :], given, om < M, M == BM)
            below = below.to(tl.float32)
            if HALVES:
                first, second = load_halves(x + c * x_t, x_t, of_tokens, ot, rows, D, R, PRECISION, PIN)
                y = project_halves(first, second, w_a, rest_a, w_b, rest_b, factor, PRECISION, SPLIT)
            else:
                y = project_rows(
                    x + c * x_t, x_t, of_tokens, weight, w_d, w, rest, ot, od, om, rows, factor,
                    D, M, BD, BM, R, PAIRS, AT_END, kind, PRECISION, SPLIT,
                )  # fmt: skip
            g, dp = derive(y, above, below, a, sharpness, om, M, MAP, QUERY, do.dtype.element_ty, PIN)
            sum_p += dp
            store_tile(dy + (c - start) * dy_t, ot[:, None] * dy_t + om[None, :], g * factor, rows, om < M, M == BM)
        # Of fp32, operands and sums of both fill registers: one follows the other, and finds dy in the cache.
        APART: tl.constexpr = OF_X and OF_WEIGHT and kind == tl.float32
        if OF_X or OF_WEIGHT:
            write_products(
                x, turns, weight, dy, dx, dweight, w_a, w_b, w_d, start, last, start > begin, T, x_t, dy_t, dx_t,
                om, ot, D, M, R, kind, PRECISION, OF_X, OF_WEIGHT and not APART, ADD, HELD, PIN,
            )  # fmt: skip
        if APART:
            write_products(
                x, turns, weight, dy, dx, dweight, w_a, w_b, w_d, start, last, start > begin, T, x_t, dy_t, dx_t,
                om, ot, D, M, R, kind, PRECISION, False, True, ADD, HELD, PIN,
            )  # fmt: skip
    if MAP == "norm_preserving":
        tl.store(dpower + (i_b * heads + i_h) * tl.cdiv(T, L) + i_l, tl.sum(sum_p, 0))


def in_halves(D: int, BD: int, R: int, pairs: str) -> bool:
    """Tell whether a program takes tokens and W as two halves; arguments as of the kernels."""
    return D == BD and D >= 32 and (R == 0 or (R == D and pairs == "half"))


class FeatureProblem(NamedTuple):
    """One call of the op, with inputs in the layout that kernels read.

    Attributes:
        target: The device.
        x: Queries or keys ``[B, heads, T, D]``.
        turns: Cosines and then sines by which they are turned ``[B or 1, T, R]``, contiguous, or None; see
            :class:`Rotation`. The features are of what they were before.
        weight: ``W [heads or 1, D, M]``, contiguous; this and what follows is of a :class:`Pair`.
        pairs: Of the rotation's :class:`Layout`.
        at_end: Likewise.
    """

    target: Target
    x: Tensor
    turns: Tensor | None
    weight: Tensor
    power: Tensor | None
    name: str
    factor: float
    sharpness: float
    pairs: str
    at_end: bool

    @property
    def rows(self) -> int:
        """Rows of W that a program holds at a time, BD."""
        return min(padded(self.weight.shape[1]), WEIGHTS // padded(self.weight.shape[2]))

    @property
    def turned(self) -> int:
        """Entries of a token that are turned, R."""
        return 0 if self.turns is None else self.turns.shape[2]

    @property
    def in_halves(self) -> bool:
        """Whether a program takes tokens as two halves; nothing pins them for AMD, see :func:`load_halves`."""
        fits = in_halves(self.weight.shape[1], self.rows, self.turned, self.pairs)
        return fits and not self.target.arch.startswith("gfx")

    def launch(
        self, role: str, kernel: Any, reads: dict[str, Tensor], writes: dict[str, Tensor], **others: Any
    ) -> Launch:
        """Plan a kernel, with its tensors over tokens and whatever else is its own."""
        B, heads, T, _ = self.x.shape
        chosen = self.tile(role)
        known = self.known() | reads | writes | others
        known |= {"T": T, "L": self.walk(role), "heads": heads, "BT": chosen.tokens, "HELD": self.held(chosen)}
        known["BLOCK"] = chosen.width
        programs = B * heads * self.pieces(role)
        read = (*reads.values(), *(() if self.turns is None else (self.turns,)))
        return planned(role, kernel, programs, known, chosen, read, tuple(writes.values()))

    def known(self) -> dict[str, Any]:
        """Return what kernels are told of the map."""
        copies, D, M = self.weight.shape
        return {
            **{"turns": self.turns, "weight": self.weight, "power": self.power},
            **{"factor": self.factor, "sharpness": self.sharpness},
            **{"w_h": 0 if copies == 1 else D * M, "w_d": M},
            "p_h": 0 if self.power is None or len(self.power) == 1 else 1,
            **{"D": D, "M": M, "BD": self.rows, "BM": padded(M)},
            "t_b": 0 if self.turns is None or len(self.turns) == 1 else self.turns.stride(0),
            **{"R": self.turned, "PAIRS": self.pairs, "AT_END": self.at_end, "HALVES": self.in_halves},
            **{"MAP": self.name, "QUERY": self.sharpness > 0},
            # Three products of 128 columns and more would need both parts of W in shared memory.
            "PRECISION": precision(self.target, self.x.dtype, 2 * max(D, M)),
            "SPLIT": self.x.dtype == torch.bfloat16,
            "PIN": self.target.arch.startswith("sm_"),
        }

    def held(self, chosen: Tile) -> bool:
        """Tell whether products with W^T read W; else it is loaded anew, transposed.

        Warp groups, of 64 rows, read W from shared memory either way around; others take registers meanwhile.
        """
        return self.target.arch == "sm_90" and self.x.dtype == torch.bfloat16 and chosen.tokens >= 64

    def tile(self, role: str) -> Tile:
        """Return the tile with which a kernel is launched; its width is the number of tokens that a program walks."""
        return tile(self.target, self.x.dtype, role, self.weight.shape[1], self.weight.shape[2], 0)

    def walk(self, role: str) -> int:
        """Return the number of tokens that a program walks.

        A program's sum for W is as large as what some hundred tokens hold, and crosses memory twice. So it is over up
        to :data:`LONGER` times as many tokens as the tile says, the most with which programs take no longer: that is
        rounds of as many as processors hold side by side, times tokens. Whatever kernel sums W's gradient has the walk
        of ``"features_backward"``.
        """
        (B, heads, T, _), (_, width, warps, _) = self.x.shape, self.tile(role)
        if role != "features_backward" or not self.in_halves:
            return width
        at_once = self.target.processors * max(1, HELD_WARPS // warps)

        def lasts(tokens: int) -> tuple[int, int]:
            programs = B * heads * -(-T // tokens)
            return -(-programs // at_once) * tokens, -tokens

        return min((width << i for i in range(LONGER.bit_length())), key=lasts)

    def pieces(self, role: str) -> int:
        """Return the number of programs that share a head's tokens."""
        return -(-self.x.shape[2] // self.walk(role))


def allocate_features(p: FeatureProblem) -> Tensor:
    """Allocate the features ``[B, heads, T, 2 M]``."""
    return empty_like_tokens(p.x, 2 * p.weight.shape[2])


def features_launch(p: FeatureProblem) -> tuple[Tensor, Launch]:
    """Plan the forward; return the features, allocated, and the launch."""
    o = allocate_features(p)
    return o, p.launch("features", features_kernel, {"x": p.x}, {"o": o})


class FeatureGradients(NamedTuple):
    """What the backward computes; what is not asked for, or the kernel leaves to a library, has no columns.

    Attributes:
        dy: Gradient of ``x W [B, heads, T, M]``. It goes through one more product, which fp16 need not hold. Where the
            kernel computes that product, only memory for as many tokens as programs have in a block.
        dx: That of x ``[B, heads, T, D]``.
        dweight: That of W, by piece of the tokens ``[B, heads, pieces, D, M]``, fp32.
        dpower: That of the power, likewise ``[B, heads, pieces]``.
    """

    dy: Tensor
    dx: Tensor
    dweight: Tensor
    dpower: Tensor


def allocate_features_backward(p: FeatureProblem, of_x: bool = True, of_weight: bool = True) -> FeatureGradients:
    """Allocate the gradients that are asked for."""
    (B, heads), (_, D, M), halves = p.x.shape[:2], p.weight.shape, p.in_halves
    pieces, width = p.pieces("features_backward"), p.tile("features_backward").width
    dtype = torch.float32 if p.x.dtype == torch.float16 else p.x.dtype
    held = p.x[:, :, : pieces * width]
    return FeatureGradients(
        empty_like_tokens(held, M, dtype),
        empty_like_tokens(p.x, D if of_x and halves else 0),
        torch.empty(B, heads, pieces, D, M if of_weight and halves else 0, dtype=torch.float32, device=p.x.device),
        torch.empty(B, heads, 0 if p.power is None else pieces, dtype=torch.float32, device=p.x.device),
    )


def features_backward_launch(
    p: FeatureProblem,
    do: Tensor,
    of_x: bool = True,
    of_weight: bool = True,
    into: Tensor | None = None,
    given: int | None = None,
) -> tuple[FeatureGradients, Launch]:
    """Plan the backward; return the gradients that are asked for, allocated, and the launch.

    Where tokens come in halves, that of x can be added to another, ``into [B, heads, T, D]``. Only the first ``given``
    tokens, or all, have a ``do``; that of others is 0, and is not read.
    """
    found = allocate_features_backward(p, of_x and into is None, of_weight)
    dy, dx, dweight, dpower = found
    dx = dx if into is None else into
    wanted = {
        "N": p.x.shape[2] if given is None else given,
        "OF_X": dx.shape[3] > 0,
        "ADD": into is not None,
        "OF_WEIGHT": dweight.shape[4] > 0,
    }
    writes = {"dy": dy, "dx": dx, "dweight": dweight}
    reads = {"x": p.x, "do": do} if into is None else {"x": p.x, "do": do, "dx": dx}
    return found, p.launch("features_backward", features_backward_kernel, reads, writes, dpower=dpower, **wanted)
