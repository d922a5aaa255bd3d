"""What the kernels' ops have in common: the target they are planned for, and running a plan."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _increment_version
from torch.nn import Parameter

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.triton.plan import Launch, Target, target_of
from hf_linear_attn.ops.triton.record import recording
from hf_linear_attn.ops.triton.remember import aside, is_seen, launch, remembered
from hf_linear_attn.ops.triton.start import PLAIN, Start

P = ParamSpec("P")
R = TypeVar("R")


def target_for(device: torch.device) -> Target:
    """Return the target that a device stands for.

    Raises:
        BackendError: If there are no kernels for it.
    """
    target = target_of(device)
    if target is None:
        raise BackendError(
            "backend", "be able to run here", "triton", f"There are no kernels for {device}; use backend='torch'."
        )
    return target


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return ``x`` contiguous, where there is one."""
    return None if x is None else x.contiguous()


def has_changed(*tensors: Tensor | None) -> None:
    """Tell autograd that tensors have other values now: it does not see what kernels write."""
    aside(_count_versions, *(x for x in tensors if x is not None))


def _count_versions(*tensors: Tensor) -> None:
    for x in tensors:
        if x.is_inference():
            tensors = tuple(x for x in tensors if not x.is_inference())
            break
    _increment_version(tensors)


def planned(plan: Callable[P, tuple[R, list[Launch]]]) -> Callable[P, R]:
    """Make of a function that plans a call one that runs it; calls that are alike are planned once.

    Args:
        plan: Takes the tensors of a call and its settings, by position; returns the results, allocated, and the
            launches that compute them, in order.
    """

    @functools.wraps(plan)
    def run(*arguments: P.args, **settings: P.kwargs) -> R:
        result, launches = plan(*arguments, **settings)
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        launch([Start(x.kernel, x.programs, x.arguments | x.options) for x in launches], device)
        return result

    return remembered(run)


def directly(
    op: Callable[P, R],
    run: Callable[P, R],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[P, R]:
    """Call an op as what it runs, where nothing but autograd has to see it.

    An op of torch.library costs the host several times what a planned call does. Whatever traces, transforms or watches
    operations gets the op.

    Args:
        op: The op, of tensors, None and settings.
        run: What it runs.
        save: Its ``setup_context`` for autograd; None where it has no gradients.
        backward: Its backward.
    """
    function = None if save is None or backward is None else _function(run, save, backward)

    def call(*inputs: P.args, **settings: P.kwargs) -> R:
        if is_seen() and recording() is None:
            return op(*inputs, **settings)
        needs_gradient = False
        for x in inputs:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                needs_gradient = needs_gradient or x.requires_grad  # type: ignore[attr-defined]
            elif kind not in PLAIN and isinstance(x, Tensor):
                return op(*inputs, **settings)
        if not (needs_gradient and torch.is_grad_enabled()):
            return run(*inputs, **settings)
        if function is None:
            return op(*inputs, **settings)
        result: R = function.apply(*inputs)
        return result

    return call


def _function(run: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            # With a setup_context of its own torch would look at signatures in every call.
            found = run(*inputs)
            save(ctx, inputs, found)
            return found

    Function.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Function
