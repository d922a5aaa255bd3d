"""The recurrent state of linear attention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError


class LinearAttentionState(NamedTuple):
    """Everything linear attention remembers of the tokens it has read; its size does not grow with their number.

    Attributes:
        kv: ``sum_j phi(k_j) v_j^T``, ``[B, HKV, F, V]``, fp32 (fp64 where q is fp64).
        z: ``sum_j phi(k_j)``, ``[B, HKV, F]``, same dtype.
    """

    kv: Tensor
    z: Tensor


def check_rows(rows: Tensor, batch: int) -> None:
    """Check where in a pool the states of a batch lie; whether the places are there, and differ, is not looked at.

    Raises:
        ArgumentError: If they are not int64 ``[B]``.
    """
    if rows.dtype != torch.int64 or rows.shape != (batch,):
        wrong = rows.dtype, tuple(rows.shape)
        raise ArgumentError("rows", f"be int64 of shape ({batch},)", wrong, "Pass a place for each row.")


def empty_like_tokens(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate ``[B, heads, T, dim]`` laid out as ``[B, T, heads, dim]``, as output projections read it."""
    b, h, t, _ = x.shape
    return torch.empty(b, t, h, dim, dtype=dtype or x.dtype, device=x.device).transpose(1, 2)


def contiguous_like_values(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> Tensor:
    """Allocate what queries read of values, ``[B, H, T, V]``."""
    return q.new_empty(*q.shape[:3], v.shape[3])


def like_values(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> Tensor:
    """Allocate what queries read of values, laid out as :func:`empty_like_tokens` does."""
    return empty_like_tokens(q, v.shape[3])
