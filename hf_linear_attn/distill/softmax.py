"""The softmax attention that converted layers had before."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.layers import Call, LinearAttention


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, cu_seqlens: Tensor | None, causal: bool, scaling: float
) -> Tensor:
    """Compute what a converted layer's softmax attention computed; arguments as in :class:`LinearAttention`."""
    if cu_seqlens is not None:
        # Packed sequences one by one: together they would cost the square of their sum.
        sizes = cu_seqlens.diff().tolist()
        pieces = zip(*(torch.split(x, sizes, 2) for x in (q, k, v)), strict=True)
        masks = [None] * len(sizes) if key_mask is None else torch.split(key_mask, sizes, 1)
        return torch.cat(
            [
                softmax_attention(*piece, key_mask=mask, cu_seqlens=None, causal=causal, scaling=scaling)
                for piece, mask in zip(pieces, masks, strict=True)
            ],
            2,
        )
    visible = visibility(q, key_mask, None, causal)
    grouped = q.shape[1] != k.shape[1]
    if visible is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=grouped)


def visibility(q: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, causal: bool) -> Tensor | None:
    """Return which query sees which key, ``[B or 1, 1, T, T]`` bool, or None where causality says it all."""
    if key_mask is None and cu_seqlens is None:
        return None
    tokens = q.shape[2]
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    visible = visible.tril()[None, None] if causal else visible[None, None]
    if key_mask is not None:
        # A padded query sees itself, so that its row is finite; its output is not read.
        visible = visible & key_mask[:, None, None, :] | torch.eye(tokens, dtype=torch.bool, device=q.device)
    if cu_seqlens is not None:
        piece = torch.searchsorted(cu_seqlens, torch.arange(tokens, device=q.device), right=True)
        visible = visible & (piece[:, None] == piece[None, :])
    return visible


@contextmanager
def instead_of_forward(parts: Iterable[LinearAttention], compute: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the forward of converted layers within a ``with`` block.

    Args:
        parts: The layers.
        compute: Called as ``compute(part, q, k, v, call)``.
    """
    parts = list(parts)
    for part in parts:
        part.forward = partial(compute, part)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in parts:
            del part.forward


def softmax_output(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Compute what a converted layer's softmax attention computed from the arguments of its forward."""
    scaling = part.scaling(call)
    return softmax_attention(
        q, k, v, key_mask=call.key_mask, cu_seqlens=call.cu_seqlens, causal=call.causal, scaling=scaling
    )


def as_softmax(parts: Iterable[LinearAttention]) -> AbstractContextManager[None]:
    """Make converted layers compute softmax attention within a ``with`` block, as before they were converted."""
    return instead_of_forward(parts, softmax_output)
