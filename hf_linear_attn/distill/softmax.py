"""The softmax attention that converted layers had before."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.layers import Call, LinearAttention


def softmax_output(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Compute what a converted layer's softmax attention computed from the arguments of its forward."""
    # Packed sequences one by one: together they would cost the square of their sum.
    sizes = [q.shape[2]] if call.cu_seqlens is None else call.cu_seqlens.diff().tolist()
    masks = [None] * len(sizes) if call.key_mask is None else torch.split(call.key_mask, sizes, 1)
    options: dict[str, Any] = {"scale": part.scaling(call), "enable_gqa": q.shape[1] != k.shape[1]}
    outputs = []
    pieces = zip(*(torch.split(x, sizes, 2) for x in (q, k, v)), strict=True)
    for (own_q, own_k, own_v), mask in zip(pieces, masks, strict=True):
        visible = None if mask is None else visibility(own_q, mask, None, call.causal)
        options["is_causal"] = call.causal and mask is None
        outputs.append(F.scaled_dot_product_attention(own_q, own_k, own_v, visible, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def visibility(q: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, causal: bool) -> Tensor:
    """Return which query sees which key, ``[B or 1, 1, T, T]`` bool."""
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
    """Replace the forward of converted layers by ``compute(part, q, k, v, call)`` within a ``with`` block."""
    parts = list(parts)
    for part in parts:
        part.forward = partial(compute, part)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in parts:
            del part.forward
