"""The mask function of patched models: a 2-D padding mask or None, never a T x S one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from hf_linear_attn.errors import ArgumentError, UnsupportedError, explain


def linear_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return what is known of the new tokens: padding, or packed sequences.

    Args:
        batch_size: B.
        q_length: Number T of new tokens.
        kv_length: Not used: earlier tokens are in the state.
        q_offset: Number of earlier tokens.
        kv_offset: Not used.
        mask_function: The model's mask pattern; causal and bidirectional ones are built in.
        attention_mask: The caller's mask over earlier and new tokens, bool.
        config: The model's config.
        device: Where the mask belongs.
        **kwargs: What other implementations read.

    Returns:
        ``[B, T]`` bool, True = a real token; or ``[B, T]`` int64, the number of the packed sequence that each token
        belongs to; or None where all tokens are real and of one sequence.

    Raises:
        ArgumentError: If the mask does not cover earlier and new tokens.
        UnsupportedError: If the model asks for a pattern that a sum over keys cannot express.
    """
    segments = None
    if mask_function is not None and mask_function not in (causal_mask_function, bidirectional_mask_function):
        segments = _segments(mask_function, batch_size, q_length, q_offset, device, config)
    if attention_mask is None:
        return segments
    # `generate` may build the mask ahead of the forward, which then asks again with the new tokens' part of it.
    length = attention_mask.shape[-1]
    if length < q_length or (isinstance(q_offset, int) and length not in (q_length, q_offset + q_length)):
        raise ArgumentError(
            explain(
                "attention_mask",
                f"cover the {q_offset} earlier and {q_length} new tokens",
                tuple(attention_mask.shape),
                "Append ones for the new tokens to the mask of the earlier ones.",
            )
        )
    attention_mask = attention_mask[:, attention_mask.shape[-1] - q_length :]
    # One token: asking whether it is real would cost a synchronisation at every step.
    if q_length > 1 and not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return None
    return attention_mask


def _segments(
    mask_function: Callable[..., Any],
    batch: int,
    tokens: int,
    q_offset: int | Tensor,
    device: torch.device | str | None,
    config: Any,
) -> Tensor | None:
    """Read packed sequences off a pattern, by asking which tokens do not see the one before them."""
    if tokens == 1:
        return None
    rows = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    i = (torch.arange(tokens, device=device) + q_offset)[None]
    settings = getattr(config, "linear_attention", None) or {}
    if not settings.get("allow_approximate") and bool(mask_function(rows, head, i[:, :-1], i[:, 1:]).any()):
        raise _pattern(type(config).__name__)
    starts = ~mask_function(rows, head, i[:, 1:], i[:, :-1])
    return torch.nn.functional.pad(starts, (1, 0)).cumsum(1) if bool(starts.any()) else None


def _pattern(where: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "attention_mask",
            "be causal or bidirectional, with padding or packing",
            "another pattern (a prefix, blocks or images)",
            "Linear attention sums over all earlier keys; pass allow_approximate=True to patch_model to drop it.",
            where=where,
        )
    )


def padding_of(
    attention_mask: Tensor | None,
    batch: int,
    tokens: int,
    *,
    start: int | Tensor,
    causal: bool,
    mixed: bool,
    strict: bool,
    name: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Read padding and packing of the new tokens off the mask that an attention layer was given.

    Where softmax layers remain in a model, masks are built for them: 4-D, bool or additive. A real token sees itself,
    whatever the pattern, and packed sequences begin where a real token is hidden from the next one. Some encoders
    broadcast a padding mask over queries themselves, ``[B, 1, 1, T]``.

    Args:
        attention_mask: ``[B, T]`` from :func:`linear_attention_mask`, a 4-D mask, or None.
        batch: B.
        tokens: T.
        start: Number of earlier tokens, a tensor where the cache is static.
        causal: Whether the layer attends causally.
        mixed: Whether softmax layers share the mask.
        strict: Whether a causal layer refuses a mask that shows it later tokens, instead of attending causally.
        name: The attention layer's name, for messages.

    Returns:
        The key mask ``[B, T]`` bool or None, and ``cu_seqlens [N + 1]`` of the rows laid end to end or None.

    Raises:
        UnsupportedError: If the mask has another form.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.ndim == 4 and mixed:
        visible = attention_mask[:, 0]
        visible = visible if visible.dtype == torch.bool else visible > torch.finfo(visible.dtype).min / 2
        i = torch.arange(tokens, device=visible.device)
        # New tokens are the mask's last columns, but for a static cache, which is longer than what was read.
        most = visible.shape[2] - tokens
        past = torch.clamp(start, max=most) if isinstance(start, Tensor) else min(start, most)
        real = visible[:, i, past + i].expand(batch, -1)
        if strict and causal and tokens > 1 and not torch.compiler.is_compiling():
            later = torch.arange(visible.shape[2], device=visible.device) > (past + i)[:, None]
            if bool((visible & later).any()):
                raise _pattern(name)
        if tokens > 1 and visible.shape[2] == tokens:
            starts = real[:, :-1] & ~visible[:, i[1:], i[:-1]]
            if bool(starts.any()):
                return None, _boundaries(torch.nn.functional.pad(starts, (1, 0)).cumsum(1))
        return real, None
    if attention_mask.ndim == 4 and attention_mask.shape[1:3] == (1, 1) and not causal:
        row = attention_mask[:, 0, 0]
        return (row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2), None
    if attention_mask.ndim == 2 and attention_mask.dtype == torch.long:
        return None, _boundaries(attention_mask)
    if attention_mask.ndim == 2 and attention_mask.shape[-1] >= tokens:
        return attention_mask[:, -tokens:].bool(), None
    raise UnsupportedError(
        explain(
            "attention_mask",
            f"be a padding mask [B, T >= {tokens}]",
            tuple(attention_mask.shape),
            "A mask of its own for each query cannot be expressed by a sum over keys.",
            where=name,
        )
    )


def _boundaries(segments: Tensor) -> Tensor:
    """Return ``cu_seqlens`` of the rows of ``segments [B, T]`` laid end to end."""
    new = torch.nn.functional.pad(segments.diff(dim=1) != 0, (1, 0), value=True)
    starts = new.flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=new.numel())
