"""Our hooks on modules, by a key that is the same in all of them."""

from collections.abc import Callable
from typing import Any

from torch import nn

HOOKS = "hf_linear_attn"
"""The key of our hooks among a module's."""


def hook_tables(module: nn.Module) -> tuple[tuple[dict[Any, Any], dict[Any, Any]], ...]:
    """Return the hooks before and after a module's forward, each with the table that says how ours are called."""
    return (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_always_called),
    )


def add_hooks(module: nn.Module, enter: Callable[..., Any], leave: Callable[..., None]) -> None:
    """Have hooks called before and after a module's forward.

    PyTorch numbers hooks, and a compiler takes the number for part of what it compiles: layers that are compiled one by
    one would each be compiled anew. Under the same key in all of them they share a graph.
    """
    before = module.register_forward_pre_hook(enter, with_kwargs=True)
    after = module.register_forward_hook(leave, always_call=True)
    for handle, tables in zip((before, after), hook_tables(module), strict=True):
        for table in tables:
            table[HOOKS] = table.pop(handle.id)


def remove_hooks(module: nn.Module) -> None:
    """Take our hooks off a module, and leave others' there."""
    for tables in hook_tables(module):
        for table in tables:
            table.pop(HOOKS, None)
