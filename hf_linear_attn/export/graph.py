"""A converted model as one graph: tokens and states in, logits and states out, for any number of tokens and rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from hf_linear_attn.errors import HFLinearAttnError, UnsupportedError, first_line
from hf_linear_attn.export.plain import plain_forms
from hf_linear_attn.layers import LinearAttention, State
from hf_linear_attn.patching.cache import LinearAttentionCacheLayer
from hf_linear_attn.patching.call_cache import cache_argument
from hf_linear_attn.patching.hook import convert_cache
from hf_linear_attn.patching.scope import part_of

ROWS, TOKENS = 2, 3
"""Sizes of the example that is traced: a size of 1 would be taken for a constant."""

COMMON = ("length", "seen")
"""States that are the same in all layers: tokens read with padding, and without."""


class Graph(NamedTuple):
    """A traced model.

    Attributes:
        program: Takes ``input_ids [B, T]`` and ``attention_mask [B, T]`` int64 of the new tokens, then the states;
            returns ``logits [B, T, vocabulary]`` and the states after them, in the same order.
        states: What a text begins with, by name, for one row: zeros.
    """

    program: ExportedProgram
    states: dict[str, Tensor]


def trace(model: PreTrainedModel, *, standard: bool = False) -> Graph:
    """Trace a causal language model, on the CPU and in evaluation mode; layers are set to PyTorch's form of operations.

    Args:
        model: The model.
        standard: Read states by ONNX's LinearAttention: the program is then for its exporter alone.

    Raises:
        UnsupportedError: If a layer of it keeps something that grows with the context, or an operation of it cannot be
            traced.
    """
    found = [(getattr(module, "layer_idx", None), part_of(module)) for module in model.modules()]
    parts = {index: part for index, part in found if isinstance(index, int) and part is not None}
    for part in parts.values():
        # Loops and kernels are no operators.
        part.settings = replace(part.settings, backend="torch")
        part.rule.backend = "torch"
    try:
        with torch.no_grad():
            states = _states(model, parts)
            return Graph(_traced(Reader(model, parts, list(states)), states, standard=standard), states)
    except HFLinearAttnError:
        raise
    except Exception as error:  # whatever tracing raises of code that no graph can hold
        settings = next(iter(parts.values())).settings
        raise UnsupportedError(
            "model",
            "be made of operators that torch.export can trace for any length",
            f"{type(model).__name__} with feature_map={settings.feature_map!r}, update_rule={settings.update_rule!r}, "
            f"mix={settings.mix!r}",
            f"Tracing ended with: {first_line(error)}. Write rules, maps and mixes of your own in PyTorch's operators, "
            "without branches on values, or choose those that are built in.",
        ) from error


class Reader(nn.Module):
    """Read tokens as a model does, with states as tensors, ordered by names, that are handed over and handed back."""

    def __init__(self, model: PreTrainedModel, parts: dict[int, LinearAttention], names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.parts, self.names = model, parts, names

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the logits and the states after the tokens."""
        held = dict(zip(self.names, states, strict=True))
        cache, layers = DynamicCache(), [self._layer(index, held) for index in sorted(self.parts)]
        cache.layers = [*layers]
        positions = (held["seen"][:, None] + attention_mask.cumsum(1) - 1).clamp(min=0)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=True,
            **cache_argument(self.model, cache),
        )
        left: dict[str, Tensor] = {}
        for index, layer in zip(sorted(self.parts), layers, strict=True):
            left |= _named(index, layer.state)
        return output.logits, *(left[name] for name in self.names)

    def _layer(self, index: int, held: dict[str, Tensor]) -> LinearAttentionCacheLayer:
        layer, part = LinearAttentionCacheLayer(), self.parts[index]
        state, seen = layer.state, held["seen"]
        state.slots = part.slots(part.sizes.values, seen.device)
        state.tensors = {slot: held[name] for slot, name in _names(index, state.slots).items()}
        # It is counted in place.
        state.length = held["length"].clone()
        return layer


def _names(index: int, slots: Any) -> dict[str, str]:
    """Return the names by which the states of a layer are handed over."""
    return {slot: slot if slot in COMMON else f"layers.{index}.{slot}" for slot in slots}


def _named(index: int, state: State) -> dict[str, Tensor]:
    """Return a layer's states by those names."""
    length = torch.as_tensor(state.length)
    return {"length": length} | {name: state.tensors[slot] for slot, name in _names(index, state.tensors).items()}


def _states(model: PreTrainedModel, parts: dict[int, LinearAttention]) -> dict[str, Tensor]:
    """Return the states before the first token, as reading one shows them; it shows how layers rotate, too."""
    cache = DynamicCache(config=model.config)
    convert_cache(model, cache)
    others = [n for n, layer in enumerate(cache.layers) if type(layer) is not LinearAttentionCacheLayer]
    if others:
        raise UnsupportedError(
            "model",
            "have converted attention in every layer",
            f"a {type(model).__name__} whose layers {others} keep something else",
            "What those keep grows with the context, or is no state of ours: convert them too, with layers='all', and "
            "distil the model again.",
        )
    one = torch.zeros(1, 2, dtype=torch.long)
    model(input_ids=one, use_cache=True, **cache_argument(model, cache))
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayer) or layer.others or index not in parts:
            raise UnsupportedError(
                "model",
                "call attention once in each layer",
                f"a {type(model).__name__} whose layer {index} does otherwise",
                "Keep it as a Transformers model.",
            )
        found |= {name: torch.zeros_like(x[:1] if x.ndim else x) for name, x in _named(index, layer.state).items()}
    return found


def _traced(reader: Reader, states: dict[str, Tensor], *, standard: bool) -> ExportedProgram:
    rows, tokens = Dim("rows", min=1), Dim("tokens", min=1)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    begun = tuple(x.repeat(ROWS, *(1,) * (x.ndim - 1)) if x.ndim else x for x in states.values())
    by_row = tuple({0: rows} if x.ndim else None for x in begun)
    shapes = ({0: rows, 1: tokens}, {0: rows, 1: tokens}, by_row)
    with _PlainForms(standard=standard):
        return torch.export.export(reader, (ids, torch.ones_like(ids), *begun), dynamic_shapes=shapes, strict=False)


class _PlainForms(TorchFunctionMode):
    """Put ordinary operators in the place of the package's own while a graph is traced."""

    def __init__(self, *, standard: bool) -> None:
        super().__init__()
        self.forms = plain_forms(standard=standard)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form = self.forms.get(func)
        return func(*args, **(kwargs or {})) if form is None else form(*args)
