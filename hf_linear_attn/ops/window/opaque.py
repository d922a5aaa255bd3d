"""Attention over a window as one node of a graph that has no backward: of an export, or of inference.

PyTorch's form cuts tokens into blocks. What a tracer would have to know of their sizes ties a graph to one length, and
takes it a minute to find out.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.library import operator, refuse_vmap
from hf_linear_attn.ops.state import contiguous_like_values
from hf_linear_attn.ops.window.problem import INPUTS, WindowCall
from hf_linear_attn.ops.window.torch import window_attention_torch, window_sums_torch


def _attend(*inputs: Any) -> Tensor:
    """Return ``o [B, H, T, V]``."""
    return window_attention_torch(WindowCall.of(*inputs)).contiguous()


def _sum(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the numerator ``[B, H, T, V]`` and the denominator ``[B, H, T]``."""
    num, den = window_sums_torch(WindowCall.of(*inputs))
    return num.contiguous(), den.contiguous()


def _allocate_sums(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    dtype = upcast(q[:0]).dtype
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


window_forward = operator("window_forward", _attend, contiguous_like_values, schema=f"({INPUTS}) -> Tensor")
sums_forward = operator("sums_forward", _sum, _allocate_sums, schema=f"({INPUTS}) -> (Tensor, Tensor)")


def _backward(ctx: Any, do: Tensor) -> NoReturn:
    raise BackendError(
        "backend", "be able to run here", "torch", "An exported window has no gradients; train with torch.compile."
    )


for op in (window_forward, sums_forward):
    torch.library.register_autograd(op, _backward)
    refuse_vmap("torch", op)
