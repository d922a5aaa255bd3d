"""Numbers of tokens and places of keys, which depend on lengths and masks alone.

What depends on lengths alone is made once for all layers and calls, and nobody may change it in place. What depends on
a mask is computed in every layer: nothing tells whether a mask's memory has been written in between.
"""

import torch
from torch import Tensor

from hf_linear_attn.ops.triton.remember import shared_by_texts
from hf_linear_attn.ops.window.api import running_sum


def positions_of(q: Tensor, key_mask: Tensor | None, seen: Tensor | None) -> Tensor:
    """Number the real tokens, ``[B, T]`` int64; padding takes its neighbour's number.

    Args:
        q: Queries ``[B, H, T, D]``.
        key_mask: ``[B, T]`` bool, True = a real token; None where all are.
        seen: Real tokens of each text that came before ``[B]``; None where none did.
    """
    if key_mask is None:
        positions = numbered(q.device, q.shape[0], q.shape[2])
    else:
        positions = (key_mask.cumsum(1) - 1).clamp(min=0)
    return positions if seen is None else positions + seen[:, None]


@shared_by_texts
def numbered(device: torch.device, rows: int, tokens: int) -> Tensor:
    """Return the numbers of the tokens of texts without padding, ``[rows, tokens]`` int64."""
    return torch.arange(tokens, device=device).expand(rows, -1)


@shared_by_texts
def _queries(device: torch.device, start: int, end: int) -> Tensor:
    return torch.arange(start, end, device=device)


def sinks_in_sight(place: Tensor, start: int, end: int, window: int) -> Tensor:
    """Return which query of ``[start, end)`` sees which sink beside its window ``[B, T, N]``, by their places."""
    queries, place = _queries(place.device, start, end), place[:, None]
    return (place < 0) | (place <= queries[None, :, None] - window)


def gone_before(counts: Tensor, left: int, lag: int, before: Tensor | None) -> Tensor:
    """Count for each query the keys that have left its window ``[B, left + lag]`` int64.

    Args:
        counts: Which keys count ``[B, P + T]`` bool.
        left: How many of them leave it.
        lag: Queries before the first leaves.
        before: Keys that left before those ``[B]``; None where none did.
    """
    return running_sum(counts[:, :left].long(), lag, before)


@shared_by_texts
def last_slots(device: torch.device, count: int, end: Tensor | int, slots: int, first: int) -> Tensor:
    """Return the slots of the last ``count`` of ``end`` tokens in a circle that begins at slot ``first``."""
    return first + (torch.arange(count, device=device) - count + end) % slots
