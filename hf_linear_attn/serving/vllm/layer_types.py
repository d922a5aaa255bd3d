"""A config's ``layer_types``, in which vLLM looks for layers that keep a state, and a model for what it is to build."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

RECURRENT = ("linear_attention", "mamba", "conv")
"""What other models call layers that keep a state."""

KEPT = "layer_types_before_conversion"


def mark_converted(config: Any, layers: Iterable[int]) -> None:
    """Name converted layers in a folder's config, once, as vLLM names those that keep a state."""
    before = getattr(config, "layer_types", None)
    types = list(before or ["full_attention"] * config.num_hidden_layers)
    # A model that has recurrent layers of its own says where they are, and vLLM builds them by that.
    if any(kind in RECURRENT for kind in types):
        return
    for index in layers:
        types[index] = "linear_attention"
    setattr(config, KEPT, before)
    config.layer_types = types


@contextmanager
def own_layer_types(config: Any) -> Iterator[None]:
    """Give a config the types that its folder names, while a model is built by them."""
    marked = getattr(config, "layer_types", None)
    if hasattr(config, KEPT):
        _set(config, getattr(config, KEPT))
    try:
        yield
    finally:
        _set(config, marked)


def _set(config: Any, types: Any) -> None:
    # Some ask whether there is such an attribute, and not what it holds.
    if types is None:
        vars(config).pop("layer_types", None)
    else:
        config.layer_types = types
