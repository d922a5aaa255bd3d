"""Attention over a window as one node of a graph that has no backward: of an export, or of inference.

PyTorch's form cuts tokens into blocks. What a tracer would have to know of their sizes ties a graph to one length, and
takes it a minute to find out.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.library import refuse_vmap
from hf_linear_attn.ops.window.problem import INPUTS, WindowCall
from hf_linear_attn.ops.window.torch import window_attention_torch, window_sums_torch


def window_attention_opaque(call: WindowCall) -> Tensor:
    """Compute :func:`hf_linear_attn.ops.window.window_attention`."""
    o: Tensor = window_forward(*call.inputs())
    return o


@torch.library.custom_op("hf_linear_attn::window_forward", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def window_forward(*inputs: Any) -> Tensor:
    """Return ``o [B, H, T, V]``."""
    return window_attention_torch(WindowCall.of(*inputs)).contiguous()


@window_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


def window_sums_opaque(call: WindowCall) -> tuple[Tensor, Tensor]:
    """Compute :func:`hf_linear_attn.ops.window.window_sums`."""
    num, den = sums_forward(*call.inputs())
    return num, den


@torch.library.custom_op("hf_linear_attn::sums_forward", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)")
def sums_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the numerator ``[B, H, T, V]`` and the denominator ``[B, H, T]``."""
    num, den = window_sums_torch(WindowCall.of(*inputs))
    return num.contiguous(), den.contiguous()


@sums_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    dtype = upcast(q[:0]).dtype
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


def _backward(ctx: Any, do: Tensor) -> NoReturn:
    raise BackendError(
        "backend", "be able to run here", "torch", "An exported window has no gradients; train with torch.compile."
    )


for op in (window_forward, sums_forward):
    torch.library.register_autograd(op, _backward)
    refuse_vmap("torch", op)
