"""Where a call's cache is: ``cache`` since Transformers 5.24, ``past_key_values`` or ``cache_params`` before."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache, EncoderDecoderCache

NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the argument and of the output, the newest first; code kept beside weights may know an older one alone."""

NAME = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else NAMES[1]
"""That of this Transformers."""


def cache_of(named: Mapping[str, Any], others: Sequence[Any] = ()) -> Cache | None:
    """Return the cache among the arguments of a call, or of what ``generate`` hands from step to step."""
    for name in NAMES:
        if isinstance(cache := named.get(name), Cache):
            return cache
    return next((x for x in (*named.values(), *others) if isinstance(x, Cache)), None)


def returned_cache(output: Any) -> Any:
    """Return the cache among a model's outputs, of whatever class; None where there is none."""
    # Asked for an attribute by its older name, a newer output warns.
    held = vars(output)
    return next((held[name] for name in NAMES if held.get(name) is not None), None)


def own_cache(cache: Cache) -> Cache:
    """Return the cache of a decoder's own tokens, which an encoder-decoder's holds beside that of the encoder's."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return a cache as the argument by name that a model takes."""
    takes = inspect.signature(model.forward).parameters
    return {next((name for name in NAMES if name in takes), NAME): cache}
