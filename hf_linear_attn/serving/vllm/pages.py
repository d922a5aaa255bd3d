"""How a layer's state lies in a page of bytes."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from hf_linear_attn.layers import Slot

ALIGNMENT = 8
"""Bytes that a page is a multiple of: every tensor of every page then begins at a multiple of its items' size."""

PADDING = "padding"


class Part(NamedTuple):
    """One tensor of a page: its name in the state, its shape of one request, and the dtype of its items."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def page_of(slots: Mapping[str, Slot], dtype: torch.dtype) -> tuple[Part, ...]:
    """Lay out a page, the largest items first.

    Args:
        slots: The state's tensors.
        dtype: Of keys and values.

    Returns:
        The parts, end to end; the last fills the page up where it has to be.

    Example:
        >>> page = page_of({"mask": Slot((3,), torch.bool), "kv": Slot((2, 2))}, torch.bfloat16)
        >>> [(part.name, part.nbytes) for part in page]
        [('kv', 16), ('mask', 3), ('padding', 5)]
    """
    parts = [Part(name, slot.shape, slot.dtype(dtype)) for name, slot in slots.items()]
    parts.sort(key=lambda part: -part.dtype.itemsize)
    missing = -sum(part.nbytes for part in parts) % ALIGNMENT
    return (*parts, Part(PADDING, (missing,), torch.int8)) if missing else tuple(parts)
