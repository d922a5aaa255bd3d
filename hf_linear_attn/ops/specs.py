"""What a plan may know of a call: shapes, strides, dtypes and settings, but nothing that is read from a tensor.

Calls whose specs are equal are planned once: what follows from them is a function of specs, kept in an ``lru_cache``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

MOST_PLANS = 4096
"""Plans that are kept; a process that meets more shapes makes the oldest anew."""

ALIGNMENT = 16
"""Bytes. Triton compiles one kernel for addresses and numbers that this divides, and another for the rest."""

PLAIN = (type(None), str, int, float, bool)
"""Types of settings, known to be no tensors without a look at their bases."""


class Number(int):
    """A number that a launch takes and on which its plan does not depend, as where in a text a token stands."""


class Spec(NamedTuple):
    """What a plan knows of a tensor; Triton compiles for addresses, too."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    misaligned: int


class NumberSpec(NamedTuple):
    """What a plan knows of a :class:`Number`: what Triton compiles a kernel for."""

    is_one: bool
    is_aligned: bool
    is_long: bool


def specs_of(arguments: tuple[Any, ...], given: list[Any], addresses: list[int]) -> Any:
    """Return arguments with specs in the place of tensors and numbers.

    Those are listed in ``given``, and where each tensor begins in ``addresses``, or the number itself.

    Raises:
        TypeError: If a tensor is of a class of its own.
    """
    parts: list[Any] = []
    # At each call the host waits for this: a named tuple's own constructor takes twice as long.
    new = tuple.__new__
    for x in arguments:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            address = x.data_ptr()
            given.append(x)
            addresses.append(address)
            parts.append(new(Spec, (x.shape, x.stride(), x.dtype, address % ALIGNMENT)))
        elif kind in PLAIN:
            parts.append(x)
        elif kind is Number:
            given.append(int(x))
            addresses.append(int(x))
            parts.append(NumberSpec(x == 1, x % ALIGNMENT == 0, x.bit_length() > 31))
        elif isinstance(x, tuple):
            parts.append(specs_of(x, given, addresses))
        elif isinstance(x, Tensor):
            raise TypeError(f"kernels take plain tensors, not a {kind.__name__}")
        else:
            parts.append(x)
    return like(arguments, parts)


def like(x: tuple[Any, ...], parts: list[Any]) -> Any:
    """Return parts as a tuple of the same type, be it a named one."""
    # As above: a named tuple's own way takes twice as long.
    return tuple.__new__(type(x), parts)


def meta_of(x: Any, known: list[Any]) -> Any:
    """Return arguments with tensors on the meta device, and numbers that stand for others, in place of specs."""
    if type(x) is Spec:
        known.append(torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta"))
        return known[-1]
    if type(x) is NumberSpec:
        known.append(Number(-1))
        return known[-1]
    return like(x, [meta_of(y, known) for y in x]) if isinstance(x, tuple) else x
