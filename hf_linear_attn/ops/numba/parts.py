"""What loops compute of a layer: features of a vector, what a key leaves of the sums, the names of maps and mixes."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

import numpy as np

from hf_linear_attn.feature_maps import norm_preserving
from hf_linear_attn.feature_maps.elementwise import EXP_CLAMP
from hf_linear_attn.ops.numba.primitives import LOG2E, ahead, exp2, inner, log2, wide, within

TINY = np.float32(norm_preserving.TINY)
TINIEST = np.float32(norm_preserving.TINY**2)
CLAMP = np.float32(EXP_CLAMP)
ELU, RELU, SQUARED_RELU, EXP, SIGMOID, IDENTITY, HEDGEHOG, NORM_PRESERVING = range(8)
MAPS = {
    "elu": ELU,
    "relu": RELU,
    "squared_relu": SQUARED_RELU,
    "exp": EXP,
    "sigmoid": SIGMOID,
    "identity": IDENTITY,
    "hedgehog": HEDGEHOG,
    "norm_preserving": NORM_PRESERVING,
}
"""The maps that loops compute, by name."""
KEY, GATE, WINDOW = range(3)
MIXES = {"key": KEY, "gate": GATE, "window": WINDOW}
"""The mixing rules that loops compute, by name."""


@within
def bend(features, y, number, power, sharpness):
    """Write the norm-preserving map's features ``[2 M]`` of ``y [M]``, which is lost; see :class:`NormPreserving`."""
    square = np.float32(0.0)
    largest = np.float32(-np.inf)
    logs = features
    for i in range(number):
        x = y[i] * y[i]
        square += x
        logs[i] = log2(x + TINIEST)
    for i in range(number):
        largest = max(largest, logs[i])
    length = np.sqrt(square + TINY)
    if sharpness > 0:
        # 1/2 + tanh, of a number >= 0.
        t = exp2(np.float32(-2.0) * LOG2E * sharpness * length)
        power *= np.float32(0.5) + (np.float32(1.0) - t) / (np.float32(1.0) + t)
    exponent = (power - np.float32(1.0)) * np.float32(0.5)
    # Relative to the largest, so that powers stay finite and the largest is not lost.
    total = np.float32(0.0)
    for i in range(number):
        x = exp2((logs[i] - largest) * exponent) * y[i]
        y[i] = x
        total += x * x
    scale = length / max(np.sqrt(total), TINIEST)
    below = ahead(features, number)
    for i in range(number):
        x = y[i] * scale
        up = max(x, np.float32(0.0))
        features[i] = up
        below[i] = up - x


@within
def two_softmaxes(features, y, number):
    """Write hedgehog's features ``[2 M]`` of ``y [M]``: the softmax of it, and that of its negative."""
    highest, lowest = y[0], y[0]
    for i in range(number):
        highest, lowest = max(highest, y[i]), min(lowest, y[i])
    above, below = np.float32(0.0), np.float32(0.0)
    other = ahead(features, number)
    for i in range(number):
        p = exp2((y[i] - highest) * LOG2E)
        r = exp2((lowest - y[i]) * LOG2E)
        features[i], other[i] = p, r
        above += p
        below += r
    for i in range(number):
        features[i] /= above
        other[i] /= below


@within(inline="always")
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``."""
    return np.float32(1.0) / (np.float32(1.0) + exp2(-x * LOG2E))


@within
def log2_fade(gone, gone_v, bias, of_key, of_value, dim, value_dim):
    """Return the logarithm of what a key leaves of the sums, ``-softplus(score)`` to the base 2."""
    score = wide(bias[0]) + inner(gone, of_key, dim) + inner(gone_v, of_value, value_dim)
    # The form that no score overflows.
    return -LOG2E * (max(score, np.float32(0.0)) + np.log1p(np.exp(-abs(score))))


@within
def elementwise(features, x, number, name):
    """Write the features of a vector by an elementwise map."""
    if name == ELU:
        for i in range(number):
            features[i] = max(x[i], np.float32(0.0)) + exp2(min(x[i], np.float32(0.0)) * LOG2E)
    elif name == RELU:
        for i in range(number):
            features[i] = max(x[i], np.float32(0.0))
    elif name == SQUARED_RELU:
        for i in range(number):
            up = max(x[i], np.float32(0.0))
            features[i] = up * up
    elif name == EXP:
        for i in range(number):
            features[i] = exp2(min(x[i], CLAMP) * LOG2E)
    elif name == SIGMOID:
        for i in range(number):
            features[i] = sigmoid(x[i])
    else:
        for i in range(number):
            features[i] = x[i]


@within
def project(y, x, weight, dim, columns, factor):
    """Write ``factor x W`` of ``x [D]`` and ``W [D, M]``, whatever W is made of."""
    for i in range(columns):
        y[i] = np.float32(0.0)
    for d in range(0, dim - dim % 4, 4):
        a, b, c, e = x[d] * factor, x[d + 1] * factor, x[d + 2] * factor, x[d + 3] * factor
        first = ahead(weight, d * columns)
        second, third, fourth = ahead(first, columns), ahead(first, 2 * columns), ahead(first, 3 * columns)
        for i in range(columns):
            y[i] += (a * wide(first[i]) + b * wide(second[i])) + (c * wide(third[i]) + e * wide(fourth[i]))
    for d in range(dim - dim % 4, dim):
        a, row = x[d] * factor, ahead(weight, d * columns)
        for i in range(columns):
            y[i] += a * wide(row[i])


@within
def features_of_vector(features, x, y, weight, dim, columns, name, factor, power, sharpness):
    """Write the features of ``x [D]``: of a paired map by its weights ``[D, M]``, which need ``y [M]`` to work on."""
    if name in (NORM_PRESERVING, HEDGEHOG):
        project(y, x, weight, dim, columns, factor)
        if name == NORM_PRESERVING:
            bend(features, y, columns, power, sharpness)
        else:
            two_softmaxes(features, y, columns)
    else:
        elementwise(features, x, dim, name)
