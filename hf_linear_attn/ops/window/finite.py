"""The rule of :mod:`hf_linear_attn.ops.finite` for a window and its sinks."""

import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.ops.finite import broken_keys, without

Sinks = tuple[Tensor, Tensor, Tensor]
"""Keys ``[B, HKV, N, D]``, values ``[B, HKV, N, V]``, and which query sees which, ``[B, T, N]`` bool."""


def take_out(
    k: Tensor, v: Tensor, sinks: Sinks | None, queries: int, window: int, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Sinks | None, Tensor | None]:
    """Return keys, values and sinks without those that are not finite, and which queries saw one.

    Args:
        k: Keys ``[B, HKV, P + T, D]``.
        v: Values ``[B, HKV, P + T, V]``.
        sinks: The sinks, if there are any.
        queries: T.
        window: Keys in sight.
        key_mask: ``[B, P + T]`` bool.

    Returns:
        What is left, zeros in the place of the others; and ``[B, HKV, T]`` bool, None where there is nothing to tell.
    """
    broken, seen = broken_keys(k, v), None
    if broken is not None:
        k, v, seen = without(k, broken), without(v, broken), _seen(broken, queries, window, key_mask)
    odd = None if sinks is None else broken_keys(*sinks[:2])
    if sinks is not None and odd is not None:
        shown = (odd[:, :, None] & sinks[2][:, None]).any(-1)
        seen = shown if seen is None else seen | shown
        sinks = without(sinks[0], odd), without(sinks[1], odd), sinks[2]
    return k, v, sinks, seen


def _seen(broken: Tensor, queries: int, window: int, key_mask: Tensor | None) -> Tensor:
    """Tell which queries see one of the broken keys ``[B, HKV, P + T]``, ``[B, HKV, T]``."""
    real = broken if key_mask is None else broken & key_mask[:, None]
    number = F.pad(real.long().cumsum(2), (window, 0))
    within = number[:, :, window:] > number[:, :, :-window]
    # A query sees its own key, whatever a mask says.
    return (within | broken)[:, :, -queries:]
