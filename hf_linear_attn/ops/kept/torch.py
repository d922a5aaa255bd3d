"""The choice of kept keys in PyTorch: one key after the other, for all rows and heads at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.kept.problem import AGES, ALIKE, Choice, Entering


class Places(NamedTuple):
    """The places between one key that leaves the window and the next.

    Attributes:
        compared: Values or scores of the keys in them ``[B, HKV, C, V]`` or ``[B, HKV, C, 6]``.
        held: Which of the C + T keys those are ``[B, HKV, C]`` int64.
        at: As of :class:`Entering`.
        number: Keys that have left the window ``[B]`` int64.
        nearest: As of :class:`Entering`; None where scores are compared.
    """

    compared: Tensor
    held: Tensor
    at: Tensor
    number: Tensor
    nearest: Tensor | None = None


class Leaving(NamedTuple):
    """The key that leaves the window at a query.

    Attributes:
        compared: Its value or scores ``[B, HKV, 1, V]`` or ``[B, HKV, 1, 6]``.
        enters: Whether there is one ``[B]`` bool.
        time: Its number in its text ``[B]`` int64.
        key: Which of the C + T keys it is, int64 without dimensions.
    """

    compared: Tensor
    enters: Tensor
    time: Tensor
    key: Tensor


def choose_torch(call: Entering) -> Choice:
    """Compute :func:`hf_linear_attn.ops.kept.choose_kept`."""
    places, keys = opened(call)
    slots, left = [], []
    for key in zip(*keys, strict=True):
        places, slot, gone = take(places, Leaving(*key), call.window)
        slots.append(slot)
        left.append(gone)
    return closed(call, places, torch.cat(slots, 2), torch.cat(left, 2))


def opened(call: Entering) -> tuple[Places, Leaving]:
    """Return the places before the first key, and all keys that leave the window, with their T as first dimension."""
    compared, places, count = upcast(call.compared), call.at.shape[2], call.enters.shape[1]
    index = torch.arange(places + count, device=compared.device)
    held, nearest = index[:places].expand(call.at.shape), None if call.window else call.nearest
    new = compared[:, :, places:].movedim(2, 0)[..., None, :]
    keys = Leaving(new, call.enters.mT, call.positions.mT, index[places:])
    return Places(compared[:, :, :places], held, call.at, call.number, nearest), keys


def take(places: Places, new: Leaving, window: int) -> tuple[Places, Tensor, Tensor]:
    """Let a key come: return the places then, its ``slot`` and the one ``gone`` ``[B, HKV, 1]``, as of a choice."""
    size = places.at.shape[2]
    place = torch.arange(size, device=places.at.device)
    enters, time, first = (x[:, None, None] for x in (new.enters, new.time, places.number))
    nearest = places.nearest
    if nearest is None:
        scores = at_age(places.compared, time - places.at + window, window)
        stays = new.compared[..., 0] >= scores.amin(-1, keepdim=True)
    else:
        closer = torch.minimum(nearest, distance(places.compared, new.compared).to(nearest.dtype))
        scores = nearest = torch.where(enters & (place < first), closer, nearest)
        stays = enters
    full = first >= size
    slot = torch.where(full, oldest_of_least(scores, places.at), first)
    takes = enters & (stays | ~full)
    gone = torch.where(takes, places.held.gather(2, slot.clamp(max=size - 1)), new.key)
    comes = (place == slot) & takes
    then = Places(
        torch.where(comes[..., None], new.compared, places.compared),
        torch.where(comes, new.key, places.held),
        torch.where(comes, time, places.at),
        places.number + new.enters,
        None if nearest is None else nearest.masked_fill(comes, torch.inf),
    )
    return then, slot.masked_fill(~takes, -1), gone.masked_fill(~(enters & full), -1)


def closed(call: Entering, places: Places, slot: Tensor, gone: Tensor) -> Choice:
    """Return the choice that ends with such places, where keys took the ``slot [B, HKV, T]`` and others were gone."""
    nearest = call.nearest if places.nearest is None else places.nearest
    return Choice(slot, gone, places.held.contiguous(), nearest, places.at)


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Return ``|x - y|^2`` of values ``[..., V]``, 0 where they are alike."""
    found = (x - y).square().sum(-1)
    return found.masked_fill(found < ALIKE * (x.square().sum(-1) + y.square().sum(-1)), 0)


def point_at(age: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """Return where ages lie among those that scores are of, from 0 to 5."""
    return (age.clamp(min=window) / window).to(dtype).log2().clamp(max=AGES - 1)


def at_age(scores: Tensor, age: Tensor, window: int) -> Tensor:
    """Return scores ``[..., 6]`` read at ages ``[...]`` of W tokens or more."""
    point = point_at(age, window, scores.dtype)
    before = point.floor().clamp(max=AGES - 2)
    of_before = scores.gather(-1, before.long()[..., None])[..., 0]
    of_after = scores.gather(-1, before.long()[..., None] + 1)[..., 0]
    return of_before + (point - before) * (of_after - of_before)


def oldest_of_least(scores: Tensor, at: Tensor) -> Tensor:
    """Return the place with the least score, of several the oldest ``[B, HKV, 1]``."""
    least = scores == scores.amin(-1, keepdim=True)
    return at.masked_fill(~least, torch.iinfo(at.dtype).max).argmin(-1, keepdim=True)
