"""The rule of :mod:`hf_linear_attn.ops.finite` for a window and its sinks."""

import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.ops.finite import broken_keys, without
from hf_linear_attn.ops.window.problem import WindowCall


def take_out(call: WindowCall) -> tuple[WindowCall, Tensor | None]:
    """Return a call without keys, values and sinks that are not finite, and which queries saw one.

    Returns:
        The call with zeros in their place; and ``[B, HKV, T]`` bool, None where there is nothing to tell.
    """
    k, v, sinks = call.k, call.v, call.sinks
    broken, seen = broken_keys(k, v), None
    if broken is not None:
        k, v, seen = without(k, broken), without(v, broken), _seen(broken, call)
    odd = None if sinks is None else broken_keys(*sinks[:2])
    if sinks is not None and odd is not None:
        shown = (odd[:, :, None] & sinks[2][:, None]).any(-1)
        seen = shown if seen is None else seen | shown
        sinks = without(sinks[0], odd), without(sinks[1], odd), sinks[2]
    return call if seen is None else call._replace(k=k, v=v, sinks=sinks), seen


def _seen(broken: Tensor, call: WindowCall) -> Tensor:
    """Tell which queries see one of the broken keys ``[B, HKV, P + T]``, ``[B, HKV, T]``."""
    window = call.window
    real = broken if call.key_mask is None else broken & call.key_mask[:, None]
    number = F.pad(real.long().cumsum(2), (window, 0))
    within = number[:, :, window:] > number[:, :, :-window]
    # A query sees its own key, whatever a mask says.
    return (within | broken)[:, :, -call.q.shape[2] :]
