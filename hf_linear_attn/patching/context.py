"""A long document, read once and kept as a file: linear attention's state has the same size whatever its length."""

import copy
import hashlib
import inspect
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_linear_attn.checks import check_type
from hf_linear_attn.errors import ArgumentError, CheckpointError, UnsupportedError, first_line
from hf_linear_attn.layers import LinearAttention, State
from hf_linear_attn.patching.cache import HybridCacheLayer, LinearAttentionCacheLayer
from hf_linear_attn.patching.call_cache import cache_argument
from hf_linear_attn.patching.context_file import in_ring_buffers, read_context_file, write_context_file
from hf_linear_attn.patching.hook import convert_cache
from hf_linear_attn.patching.inputs import check_ids, check_tensor, left_padded
from hf_linear_attn.patching.scope import is_patched, part_of

SAMPLES = 64
"""Values of each weight that enter a model's fingerprint."""


class ContextCache(DynamicCache):  # type: ignore[no-untyped-call]
    """A cache that has read a context; `generate` takes the tokens after it, and needs no token of it.

    Attributes:
        context_mask: ``[B, T]`` int64, 1 = a real token of the context.
    """

    context_mask: Tensor

    @property
    def forgets_tokens(self) -> bool:
        """Whether no layer needs a token of the past again: neither softmax layers, nor a crop."""
        return all(isinstance(x, LinearAttentionCacheLayer) and not x.record_past for x in self.layers)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        self.context_mask = self.context_mask.repeat_interleave(repeats, 0)


def mask_after(cache: ContextCache, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of a context and of the tokens after it, ``[B, past + T]``.

    Given are a fresh copy of the context, the ids of those tokens ``[B, T]``, and their mask, or that of all; None
    where they are all real.

    Raises:
        ArgumentError: If the copy was used before, or rows or mask do not fit.
    """
    if cache.get_seq_length() != cache.context_mask.shape[1]:
        rule = f"be a fresh copy of a context of {cache.context_mask.shape[1]} tokens"
        remedy = "Call context.copy() for each answer."
        raise ArgumentError("cache", rule, f"a cache of {cache.get_seq_length()}", remedy)
    if (rows := cache.context_mask.shape[0]) != ids.shape[0]:
        raise ArgumentError(
            "cache",
            f"hold a context for each of the {ids.shape[0]} inputs",
            rows,
            "Call context.copy(repeats) for several inputs after one text; generate repeats rows for beams by itself.",
        )
    mask = torch.ones_like(ids) if mask is None else check_tensor("attention_mask", mask)
    past = cache.context_mask.to(mask)
    if mask.shape == ids.shape:
        return torch.cat([past, mask], dim=1)
    whole = (ids.shape[0], past.shape[1] + ids.shape[1])
    if mask.shape != whole or not torch.equal(mask[:, : past.shape[1]], past):
        rule = f"cover the {ids.shape[1]} new tokens, or begin with the context's mask of {past.shape[1]}"
        remedy = "Leave it out where the new tokens are not padded."
        raise ArgumentError("attention_mask", rule, tuple(mask.shape), remedy)
    return mask


class Context:
    """What a patched model remembers of a text; made by :func:`encode_context` and :func:`load_context`.

    Attributes:
        fingerprint: Of the model that read it.
    """

    def __init__(self, cache: ContextCache, fingerprint: str) -> None:
        self._cache, self.fingerprint = cache, fingerprint

    def get_seq_length(self, *args: Any) -> int:
        """Refuse to stand for a cache, of which models ask this first."""
        raise ArgumentError("cache", "be a cache", "a Context", "Pass context.copy(), a fresh one for each answer.")

    def __len__(self) -> int:
        """Return the number of tokens read, padding included."""
        return int(self._cache.context_mask.shape[1])

    @property
    def batch_size(self) -> int:
        """The number of texts."""
        return int(self._cache.context_mask.shape[0])

    @property
    def nbytes(self) -> int:
        """The size of all tensors, each counted once."""
        tensors = _tensors(self._cache)
        return sum(tensors[name].nbytes for name in tensors.keys() - _same(tensors).keys())

    def copy(self, repeats: int = 1) -> ContextCache:
        """Return a cache for one call of ``generate(new_ids, cache=...)``, which goes on writing to it.

        Args:
            repeats: How often each text is repeated, for several questions about one; >= 1.

        Returns:
            The cache, of ``batch_size * repeats`` rows.

        Raises:
            ArgumentTypeError: If ``repeats`` is no whole number.
            ArgumentError: If it is below 1.
        """
        if check_type("repeats", repeats, int) < 1:
            raise ArgumentError("repeats", "be at least 1", repeats, "Leave it out for one answer about each text.")
        cache = copy.deepcopy(self._cache)
        if repeats != 1:
            cache.batch_repeat_interleave(repeats)
        return cache

    def release(self) -> ContextCache:
        """Return the cache itself, which the context then must not be asked for again."""
        return self._cache

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, with the model's fingerprint and a checksum of all that is in it.

        A file that is there is replaced when the new one is whole.

        Raises:
            ArgumentTypeError: If ``path`` is no path.
            CheckpointError: If it is a folder, or cannot be written.
        """
        tensors = _tensors(self._cache)
        same = _same(tensors)
        # They step another way, to other last bits.
        padded = [name for name, state in _states(self._cache).items() if state.padded]
        write_context_file(
            path,
            {name: x.detach().cpu().contiguous() for name, x in tensors.items() if name not in same},
            {"fingerprint": self.fingerprint, "length": len(self), "same": same, "padded": padded},
        )

    @classmethod
    def of_tensors(
        cls,
        model: PreTrainedModel,
        tensors: dict[str, Tensor],
        length: int,
        fingerprint: str,
        padded: Sequence[str] | None,
    ) -> Self:
        """Put tensors that :meth:`save` wrote into a cache of ``model``."""
        cache, held = empty_cache(model), defaultdict[str, dict[str, Tensor]](dict)
        for name, x in tensors.items():
            owner, _, of_owner = name.rpartition(".")
            held[owner][of_owner] = x
        numbered = [
            module
            for module in model.modules()
            if isinstance(getattr(module, "layer_idx", None), int) and any(True for _ in module.parameters())
        ]
        # Routers and cross-attention have the number of their layer, too: the patched module of it comes last.
        modules: dict[Any, nn.Module] = {m.layer_idx: m for m in sorted(numbered, key=lambda m: part_of(m) is not None)}
        seen = held.pop("")["seen"]
        for owner, own in held.items():
            number, *call = map(int, owner.split(".")[1:])
            layer: Any = cache.layers[number]
            if call:
                state = layer.of_call(*call).state
                _fill(state, modules[number], own, length)
                if padded is not None:
                    state.padded = f"{number}.{call[0]}" in padded
            else:
                _fill_softmax(layer, modules.get(number), own, length)
        # Texts are padded on the left.
        cache.context_mask = (torch.arange(length) >= length - seen[:, None]).long().to(model.device)
        return cls(cache, fingerprint)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of a patched model's settings and of values of each of its weights.

    Raises:
        ArgumentError: If the model is not patched.
    """
    settings = getattr(getattr(model, "config", None), "linear_attention", None)
    if settings is None or not is_patched(model):
        raise ArgumentError("model", "be patched", type(model).__name__, "Call patch_model first; softmax states grow.")
    text = hashlib.sha256(json.dumps([type(model).__name__, settings], sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].double().cpu()
        text.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.numpy().tobytes())
    return text.hexdigest()


@torch.no_grad()
def encode_context(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chunk_size: int | None = 4096,
) -> Context:
    """Read texts once, to answer about them any number of times.

    Args:
        model: A patched causal model.
        input_ids: ``[B, T]``, padded on the left.
        attention_mask: ``[B, T]``, 1 = a real token; None where all are.
        chunk_size: Tokens per forward pass, which bounds the memory that reading takes, >= 1; None for one pass.

    Returns:
        The state. Softmax layers that remain in the model keep their keys and values in it.

    Raises:
        ArgumentTypeError: If ids or mask are no tensors, ids are neither int64 nor int32, or ``chunk_size`` is no
            whole number.
        ArgumentError: If the model is not patched, ids are not ``[B, T]`` or empty, ``chunk_size`` is below 1, or the
            mask has another shape, other values than 0 and 1, or padding elsewhere than on the left.
        UnsupportedError: If the model is no decoder-only one.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linear_attn import patch_model
        >>> from hf_linear_attn.patching import encode_context
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2)
        >>> model = patch_model(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)))
        >>> context = encode_context(model, torch.arange(3, 30)[None])
        >>> question = torch.tensor([[5, 6, 7]])
        >>> model.generate(question, cache=context.copy(), max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 7])
    """
    fingerprint = model_fingerprint(model)
    if model.config.is_encoder_decoder:
        remedy = "An encoder's states belong to its source text; keep encoder_outputs instead."
        raise UnsupportedError("model", "be a decoder-only model", type(model).__name__, remedy)
    check_type("chunk_size", chunk_size, int | None)
    if chunk_size is not None and chunk_size < 1:
        raise ArgumentError("chunk_size", "be at least 1, or None", chunk_size, "The default is 4096.")
    if check_ids("input_ids", input_ids).ndim != 2 or not input_ids.numel():
        raise ArgumentError(
            "input_ids", "be texts [B, T] of at least 1 token", tuple(input_ids.shape), "Pass one text as ids[None]."
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else left_padded(attention_mask, input_ids)
    cache = empty_cache(model)
    step = chunk_size or input_ids.shape[1]
    for start in range(0, input_ids.shape[1], step):
        read_piece(model, cache, input_ids, mask, start, start + step)
    cache.context_mask = mask
    return Context(cache, fingerprint)


def read_piece(model: PreTrainedModel, cache: ContextCache, ids: Tensor, mask: Tensor, start: int, end: int) -> None:
    """Read the tokens ``[start, end)`` of texts ``[B, T]`` behind those that a cache has read."""
    takes = inspect.signature(model.forward).parameters
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    if "position_ids" in takes:
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
    more |= cache_argument(model, cache)
    model(input_ids=ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **more)


def load_context(path: str | Path, model: PreTrainedModel) -> Context:
    """Load a context that :meth:`Context.save` wrote.

    Args:
        path: The file.
        model: The model that read the text: the same weights and the same conversion.

    Returns:
        The state, on the model's devices.

    Raises:
        CheckpointError: If the file is missing, a folder, truncated, changed, of a newer format, or another model's.
        ArgumentTypeError: If ``path`` is no path.
        ArgumentError: If the model is not patched.
    """
    return read_context(path, model, model_fingerprint(model))


def read_context(path: str | Path, model: PreTrainedModel, fingerprint: str) -> Context:
    """Load a context for a model of a known fingerprint; see :func:`load_context`."""
    tensors, about = read_context_file(path)
    if about.get("fingerprint") != fingerprint:
        rule = f"be the one that read this text, {str(about.get('fingerprint'))[:12]}"
        remedy = "A state means nothing to other weights or another conversion; encode the text with this model."
        raise CheckpointError("model", rule, fingerprint[:12], remedy, where=type(model).__name__)
    try:
        length = about["length"]
        tensors = tensors if about["format_version"] > 1 else in_ring_buffers(tensors, length)
        tensors |= {name: tensors[first] for name, first in about.get("same", {}).items()}
        return Context.of_tensors(model, tensors, length, fingerprint, about.get("padded"))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever tensors of other names and shapes bring
        remedy = f"Encode the text again; reading them failed, {type(error).__name__}: {first_line(error)}"
        raise CheckpointError("path", "hold the states of this model's layers", str(path), remedy) from error


def empty_cache(model: PreTrainedModel) -> ContextCache:
    """Return a cache with our layers in it, which has read nothing."""
    cache = ContextCache(config=model.config.get_text_config(decoder=True))
    convert_cache(model, cache)
    return cache


def _states(cache: ContextCache) -> dict[str, State]:
    """Return the state of each attention call of each converted layer, by numbers of layer and call."""
    layers = ((n, x) for n, x in enumerate(cache.layers) if isinstance(x, LinearAttentionCacheLayer))
    return {f"{n}.{call}": part.state for n, layer in layers for call, part in enumerate((layer, *layer.others))}


def _tensors(cache: ContextCache) -> dict[str, Tensor]:
    """Name every tensor of a cache."""
    tensors = {"seen": cache.context_mask.sum(1)}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, HybridCacheLayer) or not isinstance(layer, (LinearAttentionCacheLayer, DynamicLayer)):
            rule, remedy = "have attention layers only, to keep a context as a file", "Keep the context in memory."
            raise UnsupportedError("model", rule, type(layer).__name__, remedy, where=f"cache layer {index}")
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            tensors |= {f"layers.{index}.keys": layer.keys, f"layers.{index}.values": layer.values}
    for owner, state in _states(cache).items():
        tensors |= {f"layers.{owner}.{name}": x for name, x in state.read().items()}
    return tensors


def _same(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Name, for a tensor that layers hold together, the first of its names by each of the others."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(x), name) for name, x in tensors.items()}
    return {name: other for name, other in names.items() if name != other}


def _fill(state: State, module: nn.Module, tensors: dict[str, Tensor], length: int) -> None:
    """Put tensors that were saved into the state of a patched module."""
    part, device = cast(LinearAttention, part_of(module)), next(module.parameters()).device
    values = (tensors["near_v"] if "near_v" in tensors else tensors["kv"]).to(device)
    state.allocate(part.slots(values.shape[-1], device), len(values), values)
    # A file's tensors lie anywhere. Copies begin where fresh ones do: sums have the same order, to the bit.
    copies = {name: partial(x.to, device, copy=True) for name, x in tensors.items()}
    state.write(
        {
            name: state.once((name, tensors[name].shape[1]), (tensors[name], device), copy)
            if state.slots[name].common
            else copy()
            for name, copy in copies.items()
        }
    )
    state.length = length
    state.padded = not bool((tensors["seen"] == length).all())
    # A step takes another way once it knows that every sink was read, as it does after the text itself.
    part.look_for_sinks(state, length)


def _fill_softmax(layer: Any, module: nn.Module | None, tensors: dict[str, Tensor], length: int) -> None:
    device = torch.device("cpu") if module is None else next(module.parameters()).device
    keys, values = (tensors[name].to(device, copy=True) for name in ("keys", "values"))
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length
