"""States of many texts side by side, as a server keeps them: a call reads and updates some places of a pool."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.layers.attention import Call, LinearAttention
from hf_linear_attn.layers.state import Slot, State
from hf_linear_attn.layers.step import can_step
from hf_linear_attn.ops.rotation import Rotation

__all__ = ["Pool", "can_step", "pool_slots", "read_", "step_rows_"]

SEEN = {"seen": Slot((), torch.int64)}
"""What a state holds and a pool does not: its owner knows it."""


class Pool(NamedTuple):
    """States of one layer; whoever owns the pool says which place is whose, and how many tokens it has read.

    Attributes:
        slots: What the tensors are.
        tensors: ``[P, ...]`` by name, of any stride from place to place. What is not in use may hold anything.
    """

    slots: Mapping[str, Slot]
    tensors: Mapping[str, Tensor]

    def copy_(self, source: int, target: int) -> None:
        """Make one place like another."""
        for x in self.tensors.values():
            x[target].copy_(x[source])


def pool_slots(layer: LinearAttention, value_dim: int) -> dict[str, Slot]:
    """Describe the tensors of a layer in a pool: those of its state, but for the number of tokens read.

    Args:
        layer: The layer.
        value_dim: Size ``V`` of a value.
    """
    # A kernel's copies are equal: one is kept.
    slots = layer.slots(value_dim, torch.device("cpu"))
    return {name: slot for name, slot in slots.items() if name not in SEEN}


def read_(
    layer: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Pool,
    place: int,
    length: int,
    rotation: Rotation | None = None,
) -> Tensor:
    """Read the next tokens of one text.

    Args:
        layer: The layer.
        q: Queries ``[1, H, T, D]``.
        k: Keys ``[1, HKV, T, D]``.
        v: Values ``[1, HKV, T, V]``.
        pool: Where its state lies; updated.
        place: Its place.
        length: Tokens read before; where 0, whatever the place holds is forgotten.
        rotation: As of :class:`Call`.

    Returns:
        ``o [1, H, T, V]``.
    """
    state = State()
    if length:
        state.slots, state.length = {**pool.slots, **SEEN}, length
        state.tensors = {name: x[place : place + 1] for name, x in pool.tensors.items()}
        state.tensors["seen"] = torch.full((1,), length, device=v.device)
        state.first_read = layer.window is None or length >= layer.window.sinks
    o: Tensor = layer(q, k, v, Call(state=state, rotation=rotation))
    found = state.read()
    for name, x in pool.tensors.items():
        # A step has updated the place itself.
        if found[name].data_ptr() != x[place].data_ptr():
            x[place].copy_(found[name][0])
    return o


def step_rows_(
    layer: LinearAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Pool,
    places: Tensor,
    lengths: Tensor,
    *,
    first_read: bool = False,
    rotation: Rotation | None = None,
) -> Tensor:
    """Read one more token of each of several texts; :func:`can_step` says of which layers.

    Nothing is asked of the device: places and lengths stay where they are. Rows are gathered to be read; of the window,
    only the new token is written back.

    Args:
        layer: The layer.
        q: Queries ``[B, H, 1, D]``.
        k: Keys ``[B, HKV, 1, D]``.
        v: Values ``[B, HKV, 1, V]``.
        pool: Where their states lie; updated.
        places: Their places ``[B]`` int64, all different.
        lengths: Tokens read before ``[B]`` int64, each >= 1.
        first_read: Whether every text is known to have read as many tokens as there are sinks.
        rotation: As of :class:`Call`.

    Returns:
        ``o [B, H, 1, V]``.
    """
    state = State(static=True)
    # The step counts in place, in tensors of its own.
    state.length, state.first_read = lengths.clone(), first_read
    state.slots = {**pool.slots, **SEEN}
    state.tensors = {name: x.index_select(0, places) for name, x in pool.tensors.items()}
    state.tensors["seen"] = lengths.clone()
    o: Tensor = layer(q, k, v, Call(state=state, rotation=rotation))
    window = layer.window
    for name, x in pool.tensors.items():
        held = state.tensors[name]
        if window is None or name not in ("near_k", "near_v") or (window.sinks and not first_read):
            x.index_copy_(0, places, held)
        else:
            new = window.sinks + lengths % (window.size + 1)
            x[places, :, new] = held[torch.arange(len(places), device=places.device), :, new]
    return o
