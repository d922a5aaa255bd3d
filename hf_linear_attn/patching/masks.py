"""The mask function of patched models: a 2-D padding mask or None, never a T x S one."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain
from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.patching.cache import LinearAttentionCacheLayer
from hf_linear_attn.patching.call_cache import NAME, cache_of, own_cache
from hf_linear_attn.patching.scope import ModelScope, current
from hf_linear_attn.tracing import is_recorded


def enter_model(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Tell from a model's arguments whether its batch can hold packed sequences (a forward pre-hook).

    Only a run shows what a mask holds, and a graph is traced before. Packing is spelt out by position ids where there
    is no mask, or by a 4-D mask; what is not told apart here breaks the graph, as it then depends on values.
    """
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    of_config = getattr(getattr(module, "config", None), "output_attentions", False)
    # Not every model asks its layers for maps: some record what they return, which would be none.
    if of_config or kwargs.get("output_attentions"):
        remedy = "set model.config.output_attentions = False" if of_config else "leave it out"
        raise UnsupportedError(
            "output_attentions",
            "be False",
            True,
            f"Linear attention has no attention weights; {remedy}. `hf-linear-attn inspect` shows what they would be.",
            where=type(module).__name__,
        )
    padded = isinstance(mask, Tensor) and mask.ndim == 2
    outer = current.model
    handed_on = outer is not None and outer.cache is not None and kwargs.get(NAME) is outer.cache
    cache = outer.cache if outer is not None and handed_on else cache_of(kwargs, args)
    # The model around this one has looked at them.
    known = outer is not None and outer.mask is mask and outer.cache is cache
    if not known and not torch.compiler.is_compiling():
        # That of an encoder-decoder is of what its encoder reads; the cache holds what its decoder has read.
        own = kwargs.get("decoder_attention_mask") if _has_two(type(module).forward) else mask
        if isinstance(own, Tensor) and own.ndim in (2, 4):
            # A key that no query sees is padding.
            shown = own if own.ndim == 2 else _shown(own)[:, 0].any(1)
            _refuse_forgetting(shown, cache, type(module).__name__)
    one = len(args) < 2 and (padded or (mask is None and positions is None))
    current.model = ModelScope(mask, cache, outer, one)


@lru_cache(None)
def _has_two(forward: Callable[..., Any]) -> bool:
    """Tell whether a model takes a mask of its decoder's tokens beside that of its encoder's."""
    return "decoder_attention_mask" in inspect.signature(forward).parameters


def _refuse_forgetting(mask: Tensor, cache: Cache | None, where: str) -> None:
    """Raise where a mask hides tokens that were read as real: they are in sums, from which they cannot be removed."""
    if cache is None or mask.is_meta:
        return
    layers = (
        layer for layer in own_cache(cache).layers if isinstance(layer, LinearAttentionCacheLayer) and layer.tensors
    )
    layer = next(layers, None)
    if layer is None or layer.unread:
        return
    past, seen = int(layer.length), layer.tensors["seen"]
    # A step on a GPU would wait for the answer.
    if not 0 < past < mask.shape[1] or len(mask) != len(seen) or (mask.is_cuda and mask.shape[1] == past + 1):
        return
    shown = mask[:, :past].bool().sum(1).to(seen.device)
    if not torch.equal(shown, seen):
        rule = f"show the {seen.tolist()} real tokens that were read before, as it did then"
        remedy = "A sum cannot forget: read the text again without those tokens."
        raise ArgumentError("attention_mask", rule, shown.tolist(), remedy, where=where)


def leave_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Clear that after the forward, however it ended (a forward hook)."""
    current.model = None if current.model is None else current.model.outer


@torch.library.custom_op("hf_linear_attn::checked", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def checked(mask: Tensor, wrong: Tensor, message: str) -> Tensor:
    """Return a copy of ``mask``, or raise if anything is ``wrong``: a check at run time that is one node of a graph."""
    if bool(wrong.any()):
        raise UnsupportedError(message)
    return mask.clone()


@checked.register_fake
def _(mask: Tensor, wrong: Tensor, message: str) -> Tensor:
    return torch.empty_like(mask)


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

    It has the signature of Transformers' mask functions. ``q_length`` is the number T of new tokens, ``q_offset`` that
    of earlier ones, which are in the state; the caller's mask, bool, is over both. Of the model's patterns causal and
    bidirectional ones are built in.

    Returns:
        ``[B, T]`` bool, True = a real token; or ``[B, T]`` int64, the number of the packed sequence that each token
        belongs to; or None where all tokens are real and of one sequence.

    Raises:
        ArgumentError: If the mask does not cover earlier and new tokens.
        UnsupportedError: If the model asks for a pattern that a sum over keys cannot express.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise _no_padding_mask(attention_mask, q_length, type(config).__name__)
    # `generate` may build the mask ahead of the forward, which then asks again with the new tokens' part of it.
    length = q_length if attention_mask is None else attention_mask.shape[-1]
    if length < q_length or (isinstance(q_offset, int) and length not in (q_length, q_offset + q_length)):
        rule = f"cover the {q_offset} earlier and {q_length} new tokens"
        remedy = "Append ones for the new tokens to the mask of the earlier ones."
        raise ArgumentError("attention_mask", rule, (batch_size, length), remedy)
    mask = None if attention_mask is None else attention_mask[:, length - q_length :]
    if mask_function not in (None, causal_mask_function, bidirectional_mask_function) and q_length > 1:
        starts, later = _pattern_of(mask_function, batch_size, q_length, q_offset, device)
        if mask is not None:
            # What hides a token from the next is then the reach of the attention, not a document's end.
            starts = torch.zeros_like(starts)
        approximate = (getattr(config, "linear_attention", None) or {}).get("allow_approximate")
        real = torch.ones(batch_size, q_length, dtype=torch.bool, device=device) if mask is None else mask
        real, segments = _read(real, starts, None if approximate else later, type(config).__name__)
        if segments is not None:
            return segments
        if torch.compiler.is_compiling():
            return real
    if mask is None:
        return None
    # One token: on a GPU, asking whether it is real would cost a synchronisation at every step.
    # A trace would hold the answer for every mask to come.
    watched = torch.compiler.is_compiling() or is_recorded()
    asks = (q_length > 1 or mask.device.type == "cpu") and not (watched or mask.is_meta)
    if asks and bool(mask.all()):
        return None
    # The column of a longer mask has strides that grow with it, and a compiled step would be captured anew each time.
    return mask.clone(memory_format=torch.contiguous_format) if q_length == 1 else mask


def _pattern_of(
    mask_function: Any,
    batch: int,
    tokens: int,
    q_offset: int | Tensor,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor]:
    """Ask a pattern which tokens do not see the one before them, and which see the one after: both ``[B, T - 1]``."""
    rows = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    i = (torch.arange(tokens, device=device) + q_offset)[None]
    before, after = i[:, :-1], i[:, 1:]
    return ~mask_function(rows, head, after, before), mask_function(rows, head, before, after)


def _read(real: Tensor, starts: Tensor, later: Tensor | None, where: str) -> tuple[Tensor, Tensor | None]:
    """Return ``real``, and the numbers ``[B, T]`` of packed sequences; None where each row is one.

    A sequence begins at the token after one of ``starts [B, T - 1]``. Where anything is ``later`` a query sees what it
    must not; None where it may.
    """
    scope = current.model
    if scope is not None and scope.one_sequence and torch.compiler.is_compiling():
        wrong = starts.any() if later is None else starts.any() | later.any()
        return checked(real, wrong, _pattern(where)), None
    if starts.is_meta:
        return real, None
    if later is not None and bool(later.any()):
        raise UnsupportedError(_pattern(where))
    return real, torch.nn.functional.pad(starts, (1, 0)).cumsum(1) if bool(starts.any()) else None


def _pattern(where: str, found: str = "another pattern (a prefix, blocks or images)") -> str:
    return explain(
        "attention_mask",
        "be causal or bidirectional, with padding or packing",
        found,
        "Linear attention sums over all earlier keys; pass allow_approximate=True to patch_model to drop it.",
        where=where,
    )


def padding_of(
    attention_mask: Tensor, query: Tensor, start: int | Tensor, part: LinearAttention, *, causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Read padding and packing of new tokens, ``query [B, H, T, D]``, off the mask that an attention layer was given.

    ``start`` is the number of earlier tokens, a tensor where the cache is static. The mask is ``[B, T]`` from
    :func:`linear_attention_mask`, or 4-D, bool or additive, where softmax layers remain in a model, which they are
    built for, and where a caller brings his own. Some encoders broadcast a padding mask over queries themselves, ``[B,
    1, 1, T]``.

    Returns:
        The key mask ``[B, T]`` bool or None, and ``cu_seqlens [N + 1]`` of the rows laid end to end or None.

    Raises:
        UnsupportedError: If the mask has another form.
    """
    tokens = query.shape[2]
    if attention_mask.ndim == 4 and attention_mask.shape[1:3] == (1, 1) and not causal:
        return _shown(attention_mask)[:, 0, 0], None
    if attention_mask.ndim == 4:
        return _of_every_query(attention_mask, query, start, part, causal=causal)
    if attention_mask.ndim == 2 and attention_mask.dtype == torch.long:
        return None, _boundaries(attention_mask)
    if attention_mask.ndim == 2 and attention_mask.shape[-1] >= tokens:
        return attention_mask[:, -tokens:].bool(), None
    raise _no_padding_mask(attention_mask, tokens, part.name)


def _no_padding_mask(mask: Tensor, tokens: int, where: str) -> UnsupportedError:
    rule = f"be a padding mask [B, T >= {tokens}]"
    remedy = "A mask of its own for each query cannot be expressed by a sum over keys."
    return UnsupportedError("attention_mask", rule, tuple(mask.shape), remedy, where=where)


def _of_every_query(
    attention_mask: Tensor, query: Tensor, start: int | Tensor, part: LinearAttention, *, causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Read a mask ``[B or 1, H or 1, T, S]`` that shows each query its keys; see :func:`padding_of`.

    A real token sees itself, whatever the pattern, and packed sequences begin where a real token is hidden from the
    next one.
    """
    tokens, strict = query.shape[2], not part.settings.allow_approximate
    visible = _shown(attention_mask)[:, 0].expand(len(query), -1, -1)
    i = torch.arange(tokens, device=visible.device)
    # New tokens are the mask's last columns, but for a static cache, which is longer than what was read.
    most = visible.shape[2] - tokens
    new = i + (torch.clamp(start, max=most) if isinstance(start, Tensor) else min(start, most))
    real = visible[:, i, new]
    # Transformers' own are right by themselves but for what reaches too far; a layer that was a window may stay one.
    exact = strict and _is_callers() and not (torch.compiler.is_compiling() or visible.is_meta)
    # A step on a GPU would wait for the answer.
    if exact and not (tokens == 1 and visible.is_cuda):
        _refuse_scores(attention_mask, part.name)
    if tokens == 1:
        return real, None
    segments = torch.zeros_like(real, dtype=torch.long)
    if most == 0:
        before = torch.where(real, i, -1).cummax(1).values.roll(1, 1)
        hidden = ~visible.gather(2, before.clamp(min=0)[:, :, None])[:, :, 0]
        segments = (real & hidden & (before >= 0) & (i > 0)).cumsum(1)
    wrong = None
    if strict:
        beyond = torch.arange(visible.shape[2], device=visible.device) > new[:, None]
        if not causal:
            beyond = torch.zeros_like(beyond)
        if most == 0:
            # A tree, or a prefix that several texts share: one's tokens see another's.
            beyond = beyond | (segments[:, :, None] != segments[:, None])
        wrong = visible & beyond & real[:, :, None]
        if exact:
            known = visible.any(1)
            hidden_keys = known[:, None] & ~visible & ~beyond & real[:, :, None]
            wrong = wrong | hidden_keys | (known[:, new] & ~real)[:, :, None]
    real, found = _read(real, segments.diff(dim=1) != 0, wrong, part.name)
    return (real, None) if found is None else (None, _boundaries(found, real))


def _shown(mask: Tensor) -> Tensor:
    """Return a 4-D mask, bool or additive, as bool: True where a query sees a key."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        # A 2-D mask of ones and zeros says which keys are real; to add such a 4-D one to scores would say nothing.
        rule = "be bool or additive where it has 4 dimensions"
        remedy = "Pass mask.bool() where 1 stands for a key that is seen."
        raise ArgumentTypeError("attention_mask", rule, mask.dtype, remedy)
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _is_callers() -> bool:
    """Tell whether a 4-D mask is what the model was called with; Transformers builds others."""
    given = None if current.model is None else current.model.mask
    return current.model is None or (isinstance(given, Tensor) and given.ndim == 4)


def _refuse_scores(mask: Tensor, name: str) -> None:
    """Raise where a 4-D mask is more than what each query sees: differs by head, or shifts scores."""
    if mask.shape[1] > 1 and bool((mask != mask[:, :1]).any()):
        raise UnsupportedError(_pattern(name, "a pattern of its own for each head"))
    if mask.dtype != torch.bool and bool((mask[_shown(mask)] != 0).any()):
        raise UnsupportedError(_pattern(name, "a bias on scores"))


def _boundaries(segments: Tensor, real: Tensor | None = None) -> Tensor:
    """Return ``cu_seqlens`` of the rows of ``segments [B, T]`` laid end to end; each masked token is alone."""
    new = segments.diff(dim=1) != 0
    if real is not None:
        new = new | ~real[:, 1:] | ~real[:, :-1]
    starts = torch.nn.functional.pad(new, (1, 0), value=True).flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=segments.numel())
