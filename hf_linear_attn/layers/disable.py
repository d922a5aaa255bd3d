"""Branches of converted layers that are switched off, to see what they contribute."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from torch import nn

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers.attention import LinearAttention
from hf_linear_attn.layers.call import Branch


@contextmanager
def disable_branch(model: nn.Module, branch: Branch) -> Iterator[None]:
    """Switch one branch of every patched layer off within a ``with`` block, to see what it contributes.

    Args:
        model: A patched model.
        branch: ``"window"``, ``"sinks"``, ``"kept"`` or ``"linear"``.

    Raises:
        ArgumentError: If there is no such branch, or no layer has a window.
    """
    if branch not in get_args(Branch):
        raise ArgumentError(
            "branch", "be a branch of a patched layer", branch, "Use one of those", available=get_args(Branch)
        )
    layers = [m for m in model.modules() if isinstance(m, LinearAttention) and m.settings.window is not None]
    if not layers:
        raise ArgumentError(
            "model", "be patched with a window", type(model).__name__, "Without one there is a single branch."
        )
    before = [layer.disabled for layer in layers]
    for layer in layers:
        layer.disabled |= {branch}
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer.disabled = disabled
