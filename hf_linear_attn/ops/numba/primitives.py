"""What loops on a CPU are made of: typed addresses, products of small matrices, powers of 2, rotations.

Loops take addresses and strides, as kernels on a GPU do. Sums are fp32. No pass may assume that numbers are finite: a
NaN stays one.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ONE = np.float32(1.0)
LOG2E = np.float32(math.log2(math.e))
NOTHING = np.float32(-np.inf)
TINIEST_NORMAL = np.finfo(np.float32).tiny

within: Callable[..., Any] = partial(
    njit, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"}
)
"""Compile what loops call. Sums may be taken in another order; neither NaN nor infinity is assumed away."""


WIDTH = 8
"""Entries of a vector; processors with other widths get several, or a part."""
_FLOAT, _INT, _INDEX, _REAL = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.DoubleType()
_VECTOR = ir.VectorType(_FLOAT, WIDTH)


@intrinsic
def pointer(typing, address, like):
    """Return an int64 address as a pointer to what ``like`` is: float32, or uint16 that stand for bf16."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


@intrinsic(prefer_literal=True)
def unpacked(typing, address, number):
    """Return so many int64 that lie at an address, as a tuple: one by one they take long to come from Python."""
    count = number.literal_value
    result = types.UniTuple(types.int64, count)

    def generate(context, builder, signature, args):
        numbers = builder.inttoptr(args[0], _INDEX.as_pointer())
        taken = [builder.load(builder.gep(numbers, [_INDEX(n)])) for n in range(count)]
        return context.make_tuple(builder, result, taken)

    return result(types.int64, number), generate


@intrinsic
def as_float(typing, x):
    """Return the float64 whose bits an int64 has: one table holds both."""
    return types.float64(types.int64), lambda context, builder, signature, args: builder.bitcast(args[0], _REAL)


@intrinsic
def turn(typing, address):
    """Return the number that lies at an address and count it up; of threads that ask at once each gets another.

    Who gets a number sees what was written by those who got one before.
    """

    def generate(context, builder, signature, args):
        number = builder.inttoptr(args[0], _INDEX.as_pointer())
        return builder.atomic_rmw("add", number, _INDEX(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def ahead(typing, x, number):
    """Return a pointer so many entries further."""

    def generate(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return x(x, types.int64), generate


@intrinsic
def wide(typing, x):
    """Return a float32, or a bf16 that comes as uint16, as float32."""

    def generate(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _INT), _INT(16)), _FLOAT)

    return types.float32(x), generate


@intrinsic
def narrow(typing, x, like):
    """Return a float32 as what ``like`` is, rounded to the nearest, of two the even one; a NaN stays one."""

    def generate(context, builder, signature, args):
        if signature.return_type == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _INT)
        even = builder.and_(builder.lshr(bits, _INT(16)), _INT(1))
        rounded = builder.lshr(builder.add(bits, builder.add(even, _INT(0x7FFF))), _INT(16))
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(nan, _INT(0x7FC0), rounded), ir.IntType(16))

    return like(types.float32, like), generate


@intrinsic
def _bits(typing, x):
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _INT)


@intrinsic
def _float(typing, x):
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], _FLOAT)


@within(inline="always")
def exp2(x):
    """Return ``2^x`` to 2e-7 of it: by a polynomial between -1/2 and 1/2, and 0 below the normal numbers."""
    y = min(max(x, np.float32(-127.0)), np.float32(127.0))
    whole = np.floor(y + np.float32(0.5))
    part = y - whole
    p = np.float32(1.5403530e-4)
    p = p * part + np.float32(1.3333558e-3)
    p = p * part + np.float32(9.6181291e-3)
    p = p * part + np.float32(5.5504109e-2)
    p = p * part + np.float32(2.4022651e-1)
    p = p * part + np.float32(6.9314718e-1)
    p = p * part + np.float32(1.0)
    # The bits of an exponent of 0 are those of 0.
    return p * _float((np.int32(whole) + np.int32(127)) << np.int32(23))


@within(inline="always")
def log2(x):
    """Return the logarithm of a normal number to an ulp of it: by a series of ``(m - 1) / (m + 1)``."""
    bits = _bits(x)
    power = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    m = _float(bits - (power << np.int32(23)))
    s = (m - np.float32(1.0)) / (m + np.float32(1.0))
    square = s * s
    p = np.float32(0.3205989)
    p = p * square + np.float32(0.4121985)
    p = p * square + np.float32(0.5770780)
    p = p * square + np.float32(0.9617967)
    p = p * square + np.float32(2.8853900)
    return p * s + np.float32(power)


@intrinsic(prefer_literal=True)
def _tile(typing, c, c_row, a, a_row, b, b_row, depth, add, rows, vectors):
    """Compute ``c (+)= a b`` of so many rows and vectors, which are literal, in registers."""
    number, width = rows.literal_value, vectors.literal_value
    size = types.int64

    def generate(context, builder, signature, args):
        c, c_row, a, a_row, b, b_row, depth, add = args[:8]

        def load(place):
            found = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
            found.align = 4
            return found

        def rows_of(x, row):
            return [builder.gep(x, [builder.mul(row, _INDEX(r))]) for r in range(number)]

        def vectors_of(x):
            return [builder.gep(x, [_INDEX(WIDTH * n)]) for n in range(width)]

        places = [vectors_of(row) for row in rows_of(c, c_row)]
        sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in row] for row in places]
        with builder.if_else(add) as (more, first):
            with more:
                for of_row, row in zip(sums, places, strict=True):
                    for total, place in zip(of_row, row, strict=True):
                        builder.store(load(place), total)
            with first:
                for of_row in sums:
                    for total in of_row:
                        builder.store(ir.Constant(_VECTOR, None), total)
        firsts = rows_of(a, a_row)
        undefined, zeros = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.VectorType(_INT, WIDTH), None)
        with cgutils.for_range(builder, depth) as step:
            seconds = [load(place) for place in vectors_of(builder.gep(b, [builder.mul(step.index, b_row)]))]
            for of_row, row in zip(sums, firsts, strict=True):
                x = builder.load(builder.gep(row, [step.index]))
                x = builder.shuffle_vector(builder.insert_element(undefined, x, _INT(0)), undefined, zeros)
                for total, second in zip(of_row, seconds, strict=True):
                    product = builder.fmul(x, second, flags=["contract"])
                    builder.store(builder.fadd(product, builder.load(total), flags=["contract"]), total)
        for of_row, row in zip(sums, places, strict=True):
            for total, place in zip(of_row, row, strict=True):
                store = builder.store(builder.load(total), builder.bitcast(place, _VECTOR.as_pointer()))
                store.align = 4
        return context.get_dummy_value()

    of = (c, size, a, size, b, size, size, types.boolean, rows, vectors)
    return types.void(*of), generate


def _strip(vectors: int) -> Any:
    """Return the product of a strip of so many vectors' columns: tiles take literal sizes."""

    def strip(c, c_row, a, a_row, b, b_row, rows, depth, add):
        i = 0
        while i + 4 <= rows:
            _tile(ahead(c, i * c_row), c_row, ahead(a, i * a_row), a_row, b, b_row, depth, add, 4, vectors)
            i += 4
        while i < rows:
            _tile(ahead(c, i * c_row), c_row, ahead(a, i * a_row), a_row, b, b_row, depth, add, 1, vectors)
            i += 1

    # What is compiled is linked by its name, also to what other processes compiled and kept.
    strip.__qualname__ = f"strip_of_{vectors}"
    return within(strip)


_one_vector, _two_vectors = _strip(1), _strip(2)


@within
def multiply(c, c_row, a, a_row, b, b_row, rows, columns, depth, add):
    """Compute ``c [rows, columns] (+)= a [rows, depth] b [depth, columns]``, fp32, by rows that lie so far apart."""
    n = 0
    while n + 2 * WIDTH <= columns:
        _two_vectors(ahead(c, n), c_row, a, a_row, ahead(b, n), b_row, rows, depth, add)
        n += 2 * WIDTH
    if n + WIDTH <= columns:
        _one_vector(ahead(c, n), c_row, a, a_row, ahead(b, n), b_row, rows, depth, add)
        n += WIDTH
    for j in range(n, columns):
        for i in range(rows):
            total = c[i * c_row + j] if add else np.float32(0.0)
            for d in range(depth):
                total += a[i * a_row + d] * b[d * b_row + j]
            c[i * c_row + j] = total


@within
def clear(x, number):
    """Write zeros."""
    for i in range(number):
        x[i] = np.float32(0.0)


@within
def take(to, x, number, factor):
    """Copy a vector as fp32, times a factor."""
    for i in range(number):
        to[i] = wide(x[i]) * factor


@within
def inner(a, b, number):
    """Return the inner product of two vectors, in fp32."""
    total = np.float32(0.0)
    for i in range(number):
        total += wide(a[i]) * wide(b[i])
    return total


@within
def turn_back(x, turns, dim, turned, by_half, at_end):
    """Undo the rotation of a vector in place: of R entries, by R / 2 cosines and then as many sines."""
    half = turned // 2
    if at_end:
        x = ahead(x, dim - turned)
    sines, second = ahead(turns, half), ahead(x, half)
    if by_half:
        for i in range(half):
            cos, sin = wide(turns[i]), wide(sines[i])
            scale = np.float32(1.0) / max(cos * cos + sin * sin, TINIEST_NORMAL)
            a, b = x[i], second[i]
            x[i] = (a * cos + b * sin) * scale
            second[i] = (b * cos - a * sin) * scale
        return
    for i in range(half):
        cos, sin = wide(turns[i]), wide(sines[i])
        scale = np.float32(1.0) / max(cos * cos + sin * sin, TINIEST_NORMAL)
        a, b = x[2 * i], x[2 * i + 1]
        x[2 * i] = (a * cos + b * sin) * scale
        x[2 * i + 1] = (b * cos - a * sin) * scale
