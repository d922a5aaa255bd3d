"""The choice of kept keys in PyTorch: one key after the other, for all rows and heads at once."""

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.kept.problem import AGES, ALIKE, Choice, Entering


def choose_torch(call: Entering) -> Choice:
    """Compute :func:`hf_linear_attn.ops.kept.choose_kept`."""
    compared, places = upcast(call.compared), call.at.shape[2]
    place, number = torch.arange(places, device=compared.device), call.number
    table, held = compared[:, :, :places], place.expand(call.at.shape)
    nearest, at, chosen = call.nearest, call.at, []
    for t in range(call.enters.shape[1]):
        new, enters = compared[:, :, places + t : places + t + 1], call.enters[:, t, None, None]
        time, first = call.positions[:, t, None, None], number[:, None, None]
        if call.window:
            scores = at_age(table, time - at + call.window, call.window)
            stays = new[..., 0] >= scores.amin(-1, keepdim=True)
        else:
            closer = torch.minimum(nearest, distance(table, new).to(nearest.dtype))
            scores = nearest = torch.where(enters & (place < first), closer, nearest)
            stays = enters
        full = first >= places
        slot = torch.where(full, oldest_of_least(scores, at), first)
        takes = enters & (stays | ~full)
        left = torch.where(takes, held.gather(2, slot.clamp(max=places - 1)), places + t)
        comes = (place == slot) & takes
        table = torch.where(comes[..., None], new, table)
        held = held.masked_fill(comes, places + t)
        if not call.window:
            nearest = nearest.masked_fill(comes, torch.inf)
        at = torch.where(comes, time, at)
        number = number + call.enters[:, t]
        chosen.append((slot.masked_fill(~takes, -1), left.masked_fill(~(enters & full), -1)))
    slots, gone = (torch.cat(x, 2) for x in zip(*chosen, strict=True))
    return Choice(slots, gone, held.contiguous(), nearest, at)


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Return ``|x - y|^2`` of values ``[..., V]``, 0 where they are alike."""
    found = (x - y).square().sum(-1)
    return found.masked_fill(found < ALIKE * (x.square().sum(-1) + y.square().sum(-1)), 0)


def at_age(scores: Tensor, age: Tensor, window: int) -> Tensor:
    """Return scores ``[..., 6]`` read at ages ``[...]`` of W tokens or more."""
    point = (age.clamp(min=window) / window).to(scores.dtype).log2().clamp(max=AGES - 1)
    before = point.floor().clamp(max=AGES - 2)
    of_before = scores.gather(-1, before.long()[..., None])[..., 0]
    of_after = scores.gather(-1, before.long()[..., None] + 1)[..., 0]
    return of_before + (point - before) * (of_after - of_before)


def oldest_of_least(scores: Tensor, at: Tensor) -> Tensor:
    """Return the place with the least score, of several the oldest ``[B, HKV, 1]``."""
    least = scores == scores.amin(-1, keepdim=True)
    return at.masked_fill(~least, torch.iinfo(at.dtype).max).argmin(-1, keepdim=True)
