"""What the ops registered with torch.library refuse alike."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from hf_linear_attn.errors import BackendError

P = ParamSpec("P")
R = TypeVar("R")


def operator(
    name: str,
    run: Callable[..., Any],
    allocate: Callable[..., Any],
    schema: str | None = None,
    changes: Sequence[str] = (),
) -> Any:
    """Return what computes as an op of torch.library, one node of a graph.

    Args:
        name: The op's.
        run: What it runs.
        allocate: Takes the same; returns results of that shape, dtype and layout, not computed.
        schema: What it takes and returns; None where annotations of ``run`` say so.
        changes: What it changes in place.
    """
    op = torch.library.custom_op(f"hf_linear_attn::{name}", run, mutates_args=changes, schema=schema)
    op.register_fake(allocate)
    return op


def refuse_transforms(backend: str, *ops: Any, backward: Any) -> None:
    """Make second derivatives of a backend's ops, and vmap over them, say what works instead.

    Args:
        backend: The backend's name.
        *ops: Its ops from ``torch.library.custom_op``.
        backward: The one that computes gradients.
    """

    def second_derivative(ctx: Any, *gradients: Any) -> NoReturn:
        _refuse("for second derivatives", backend, "Its backward is not differentiable.")

    torch.library.register_autograd(backward, second_derivative)
    refuse_vmap(backend, *ops, backward)


def refuse_vmap(backend: str, *ops: Any) -> None:
    """Make vmap over a backend's ops say what works instead."""

    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        _refuse("under vmap", backend, "Make the mapped dimension part of the batch.")

    for op in ops:
        torch.library.register_vmap(op, vmap)


def refuse_functional(backend: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that torch.func differentiates, forwards or backwards; torch.library's ops know neither.

    An op would answer a tangent with a derivative of 0, or not at all.

    Raises:
        BackendError: If one is being differentiated so.
    """
    given = [x for x in tensors if x is not None]
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in given
    ):
        _refuse("for forward-mode derivatives", backend, "Its derivatives are computed backwards only.")
    # A compiler cannot trace the question; an op in its graph says itself what it cannot do.
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    if any(torch._C._functorch.is_gradtrackingtensor(x) for x in given):
        _refuse("under torch.func", backend, "Use torch.autograd.grad or backward().")


# Traced, torch 2.11 takes its own answer for a yes, whatever is compiled.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Tell whether torch.export traces this."""
    return torch.compiler.is_exporting()


_NOTHING = nullcontext()


def own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast changes nothing, whatever casts products around it."""
    # To turn off what is off takes time, and so does to ask by a device's name.
    if not is_compiling() and not _is_any_autocast_enabled():
        return _NOTHING
    # Tensors without storage have no autocast.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


def no_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without gradients; to turn off what is off takes as long as a small operation."""

    @functools.wraps(function)
    def call(*arguments: P.args, **settings: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*arguments, **settings)
        with torch.no_grad():
            return function(*arguments, **settings)

    return call


def _refuse(when: str, backend: str, remedy: str) -> NoReturn:
    raise BackendError("backend", f"be 'reference' {when}", backend, remedy)
