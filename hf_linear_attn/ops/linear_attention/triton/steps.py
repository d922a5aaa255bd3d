"""The steps that all walks share.

Every walk, forwards or in reverse, with a state in registers or in memory, does the same with one tile of its rows and
one of the tokens that they see: ``acc += tril(a b^T - less) c``, and where it carries a state ``S += b^T c``.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import triton
import triton.language as tl

from hf_linear_attn.ops.triton.primitives import dot, load_tile, operand, phi, product, rounded


@triton.jit
def attend(a, b, c, less, visible, acc, PRECISION: tl.constexpr):
    """Return ``acc + p c`` and ``p = a b^T - less`` where visible, else 0."""
    p = tl.where(visible, product(a, tl.trans(b), PRECISION) - less, 0.0)
    return dot(operand(p, c.dtype, PRECISION), c, acc, PRECISION), p


@triton.jit
def fold(b, c, state, PRECISION: tl.constexpr):
    """Return ``state + b^T c``."""
    return dot(tl.trans(b), c, state, PRECISION)


@triton.jit
def read(a, state, PRECISION: tl.constexpr):
    """Return ``a S``, with a state rounded to what products take."""
    return product(a, operand(state, a.dtype, PRECISION), PRECISION)


@triton.jit
def guarded(total, eps, SIGNED: tl.constexpr):
    """Move normalisers away from 0 without changing their sign."""
    if SIGNED:
        return tl.where(total < 0, total - eps, total + eps)
    else:
        return total + eps


@triton.jit
def weighted_queries(
    q, offsets, den, rows, columns,
    EXACT: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, PIN: tl.constexpr,
):  # fmt: skip
    """Load ``phi(q) / den``, which is 0 in no row: what these are multiplied with is 0 outside."""
    x = load_tile(q, offsets, rows, columns, EXACT)
    w = 1.0 / tl.load(den, mask=rows, other=1.0)
    return rounded(phi(x, MAP) * w[:, None], x.dtype, PRECISION, PIN)


@triton.jit
def whole_z(parts, od, D: tl.constexpr):
    """Return in fp32 the sum of keys of which a scan wrote three parts."""
    o4 = tl.arange(0, 4)
    return tl.sum(load_tile(parts, od[:, None] * 4 + o4[None, :], od < D, o4 < 3, False).to(tl.float32), 1)
