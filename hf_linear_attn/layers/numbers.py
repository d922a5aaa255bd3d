"""Numbers of tokens and places of keys, which depend on lengths and masks alone.

What depends on lengths alone is made once for all layers and calls, and must not be changed in place. What depends on
a mask is computed in every layer: nothing tells whether a mask's memory has been written in between.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.tracing import is_tracing

MOST_TEXTS = 8
"""Shapes of texts of which each function below keeps what it has computed."""


def shared_by_texts(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute a tensor once for all layers and calls whose texts are of one shape; nothing may change it.

    Args:
        compute: Takes a device, and settings that hash; of a tensor among them it is computed anew.
    """

    @lru_cache(MOST_TEXTS)
    def once(stream: int, device: torch.device, *settings: Any) -> Tensor:
        # Gradients may need it another time.
        with torch.inference_mode(False):
            return compute(device, *settings)

    @wraps(compute)
    def shared(device: torch.device, *settings: Any) -> Tensor:
        if is_tracing() or Tensor in map(type, settings):
            return compute(device, *settings)
        stream = _stream(device) if device.type == "cuda" else 0
        return compute(device, *settings) if stream is None else once(stream, device, *settings)

    return shared


def _stream(device: torch.device) -> int | None:
    """Return where work of a GPU is queued now; None while it is captured, for replays to do it again."""
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def positions_of(q: Tensor, key_mask: Tensor | None, seen: Tensor | None) -> Tensor:
    """Number the real tokens ``[B, T]`` int64 of queries ``[B, H, T, D]``; padding takes its neighbour's number.

    ``key_mask [B, T]`` is None where all are real; ``seen [B]`` counts the real tokens of each text that came before.
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


@shared_by_texts
def first_in_sight(device: torch.device, rows: int, start: int, end: int, window: int, sinks: int) -> Tensor:
    """Return :func:`sinks_in_sight` where the sinks are the first tokens of texts that begin here."""
    return sinks_in_sight(numbered(device, rows, sinks), start, end, window)


@shared_by_texts
def behind(device: torch.device, rows: int, tokens: int, first: int) -> Tensor:
    """Return which tokens of texts without padding come behind the first few, ``[rows, tokens]`` bool."""
    return (numbered(device, rows, tokens) >= first).contiguous()


@shared_by_texts
def number_beyond(device: torch.device, rows: int, tokens: int, window: int, first: int) -> Tensor:
    """Count the tokens behind the first few that lie beyond the window of each, ``[rows, tokens]`` int64."""
    return (numbered(device, rows, tokens) + 1 - window - first).clamp(min=0)


@shared_by_texts
def last_slots(device: torch.device, count: int, end: Tensor | int, slots: int, first: int) -> Tensor:
    """Return the slots of the last ``count`` of ``end`` tokens in a ring that begins at slot ``first``."""
    return first + (torch.arange(count, device=device) - count + end) % slots
