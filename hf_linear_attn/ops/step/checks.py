"""What steps ask of their arguments: all of it is told by shapes, strides, dtypes and settings.

Kernels write where the arguments say. What is asked of them is asked when a step is planned, not at every token.
"""

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.linear_attention.checks import check_groups


def check_decode(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, rows: Tensor | None) -> None:
    """Refuse tokens and a state that do not fit together; arguments as of :func:`decode_step_`."""
    batch, heads, tokens, dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[3]
    held = batch if rows is None else len(kv)
    shapes = (
        ("k", k, (batch, kv_heads, tokens, dim)),
        ("v", v, (batch, kv_heads, tokens, value_dim)),
        ("state.kv", kv, (held, kv_heads, dim, value_dim)),
        ("state.z", z, (held, kv_heads, dim) if z.ndim == 3 else (held, kv_heads, *z.shape[2:3], dim)),
    )
    for name, x, shape in shapes:
        if x.shape != shape:
            raise ArgumentError(name, f"have shape {shape}", tuple(x.shape), "Pass this layer's own.")
    if z.ndim == 4 and not 1 <= z.shape[2] <= value_dim:
        raise ArgumentError(
            "state.z", f"have 1 to V = {value_dim} copies", z.shape[2], "Allocate it with decode_state()."
        )
    check_groups(heads, kv_heads)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, x in (("state.kv", kv), ("state.z", z)):
        if x.dtype != dtype:
            raise ArgumentTypeError(name, f"be {dtype}", x.dtype, "States are never kept in less.")
        if not (x if rows is None else x[:1]).is_contiguous():
            raise ArgumentError(name, "be contiguous, to be updated in place", x.stride(), "See decode_state().")


def check_step_mask(key_mask: Tensor | None, q: Tensor) -> None:
    """Refuse a mask that does not fit the new tokens, or is not one."""
    shape = len(q), q.shape[2]
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != shape):
        raise ArgumentError(
            "key_mask",
            f"be bool of shape [B, T] = {shape}",
            (key_mask.dtype, tuple(key_mask.shape)),
            "Slice the mask to the new tokens.",
        )
