"""Attention over a window as one node of a graph that has no backward: of an export, or of inference.

PyTorch's form cuts tokens into blocks. What a tracer would have to know of their sizes ties a graph to one length, and
takes it a minute to find out.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.finite import see
from hf_linear_attn.ops.library import refuse_vmap
from hf_linear_attn.ops.window.finite import take_out
from hf_linear_attn.ops.window.torch import window_attention_torch


def window_attention_opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None,
    sinks: tuple[Tensor, Tensor, Tensor] | None,
    own: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Compute :func:`hf_linear_attn.ops.window.window_attention`; arguments as in its reference."""
    o: Tensor = window_forward(q, k, v, *(sinks or (None,) * 3), *(own or (None,) * 3), key_mask, window, scaling)
    return o


@torch.library.custom_op("hf_linear_attn::window_forward", mutates_args=())
def window_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    sink_seen: Tensor | None,
    own_score: Tensor | None,
    own_seen: Tensor | None,
    own_value: Tensor | None,
    key_mask: Tensor | None,
    window: int,
    scaling: float,
) -> Tensor:
    """Return ``o [B, H, T, V]``."""
    sinks, own = _whole(sink_k, sink_v, sink_seen), _whole(own_score, own_seen, own_value)
    # What traced this node had no numbers to look at.
    k, v, sinks, seen = take_out(k, v, sinks, q.shape[2], window, key_mask)
    o = window_attention_torch(q, k, v, window=window, scaling=scaling, key_mask=key_mask, sinks=sinks, own=own)
    return (o if seen is None else see(o, seen)).contiguous()


@window_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


def _whole(a: Tensor | None, b: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    return None if a is None or b is None or c is None else (a, b, c)


def _backward(ctx: Any, do: Tensor) -> NoReturn:
    raise BackendError(
        "backend", "be able to run here", "torch", "An exported window has no gradients; train with torch.compile."
    )


torch.library.register_autograd(window_forward, _backward)
refuse_vmap("torch", window_forward)
