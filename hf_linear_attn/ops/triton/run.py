"""What the kernels' ops have in common: the target they are planned for, and running a plan."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.triton.plan import Launch, Target, target_of
from hf_linear_attn.ops.triton.remember import Start, remembered, shared_by_layers

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


@shared_by_layers
def as_int64(x: Tensor) -> Tensor:
    """Return ``x`` as int64."""
    return x.to(torch.int64)


def planned(plan: Callable[P, tuple[R, list[Launch]]]) -> Callable[P, R]:
    """Make of a function that plans a call one that runs it; calls that are alike are planned once.

    Args:
        plan: Takes the tensors of a call and its settings, by position; returns the results, allocated, and the
            launches that compute them, in order.
    """

    @functools.wraps(plan)
    def starts(*arguments: P.args, **settings: P.kwargs) -> tuple[R, list[Start]]:
        result, launches = plan(*arguments, **settings)
        return result, [Start(x.kernel, x.programs, x.arguments | x.options) for x in launches]

    return remembered(starts)
