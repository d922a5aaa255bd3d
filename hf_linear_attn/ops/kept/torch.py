"""The choice of kept keys in PyTorch: one key after the other, for all rows and heads at once."""

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.kept.problem import ALIKE, Choice, Entering


def choose_torch(call: Entering) -> Choice:
    """Compute :func:`hf_linear_attn.ops.kept.choose_kept`."""
    values, places = upcast(call.v), call.at.shape[2]
    place, number = torch.arange(places, device=values.device), call.number
    table, held = values[:, :, :places], place.expand(call.at.shape)
    nearest, at, chosen = call.nearest, call.at, []
    for t in range(call.enters.shape[1]):
        new, enters = values[:, :, places + t : places + t + 1], call.enters[:, t, None, None]
        taken = place < number[:, None, None]
        closer = torch.minimum(nearest, distance(table, new).to(nearest.dtype))
        nearest = torch.where(enters & taken, closer, nearest)
        first = number[:, None, None]
        slot = torch.where(first < places, first, oldest_of_nearest(nearest, at))
        gone = held.gather(2, slot.clamp(max=places - 1)).masked_fill(~enters | (first < places), -1)
        comes = (place == slot) & enters
        table = torch.where(comes[..., None], new, table)
        held = held.masked_fill(comes, places + t)
        nearest = nearest.masked_fill(comes, torch.inf)
        at = torch.where(comes, call.positions[:, t, None, None], at)
        number = number + call.enters[:, t]
        chosen.append((slot.masked_fill(~enters, -1), gone))
    slots, left = (torch.cat(x, 2) for x in zip(*chosen, strict=True))
    return Choice(slots, left, held.contiguous(), nearest, at)


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Return ``|x - y|^2`` of values ``[..., V]``, 0 where they are alike."""
    found = (x - y).square().sum(-1)
    return found.masked_fill(found < ALIKE * (x.square().sum(-1) + y.square().sum(-1)), 0)


def oldest_of_nearest(nearest: Tensor, at: Tensor) -> Tensor:
    """Return the place whose value a later one has come closest to, of several the oldest ``[B, HKV, 1]``."""
    least = nearest == nearest.amin(-1, keepdim=True)
    return at.masked_fill(~least, torch.iinfo(at.dtype).max).argmin(-1, keepdim=True)
