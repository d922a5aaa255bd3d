"""What looks at operations while they run, and so decides whether something else may stand in their place."""

from collections.abc import Callable

import torch
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

is_recorded: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]  # public, and without types
"""Tell whether torch.jit.trace notes the operations: what is asked of a tensor's values is answered for good."""


def needs_operations() -> bool:
    """Tell whether a compiler or a transform has to see single operations, which a function of our own hides."""
    return is_compiling() or forward_ad._current_level >= 0 or _are_functorch_transforms_active()


def is_transformed() -> bool:
    """Tell whether something may do other than an operation says.

    Modes that have ``watches_only`` look on: what runs beside PyTorch's operations does no harm to them.
    """
    if needs_operations() or _get_tracing_state():
        return True
    if not _len_torch_dispatch_stack():
        return False
    return not all(getattr(mode, "watches_only", False) for mode in _get_current_dispatch_mode_stack())


def is_tracing() -> bool:
    """Tell whether something traces, transforms or watches operations."""
    return bool(needs_operations() or _get_tracing_state() or _len_torch_dispatch_stack())


def is_symbol(size: int) -> bool:
    """Tell whether a size is a symbol: the graph that is traced serves every length, and has no branch on this one."""
    if not is_compiling():
        return False
    # Imported here since it brings SymPy. The compiler answers isinstance(size, torch.SymInt) with False.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)
