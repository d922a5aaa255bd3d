"""Features of learned maps in Triton, as torch.library ops with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.features.triton.kernels import (
    FeatureProblem,
    allocate_features,
    allocate_features_backward,
    features_backward_launch,
    features_launch,
)
from hf_linear_attn.ops.library import refuse_functional, refuse_transforms
from hf_linear_attn.ops.triton.plan import Launch, readable
from hf_linear_attn.ops.triton.run import contiguous, directly, planned, target_for


def features_triton(x: Tensor, pair: Pair) -> Tensor:
    """Compute the features of one side with a Triton kernel; see :func:`hf_linear_attn.ops.features.features_of`."""
    refuse_functional("triton", x, pair.weight, pair.power)
    o: Tensor = _compute(x, pair.weight, pair.power, pair.name, pair.factor, pair.sharpness)
    return o


def _feature_problem(
    x: Tensor, weight: Tensor, power: Tensor | None, name: str, factor: float, sharpness: float
) -> FeatureProblem:
    weight, power = weight.contiguous(), contiguous(power)
    return FeatureProblem(target_for(x.device), readable(x), weight, power, name, factor, sharpness)


@torch.library.custom_op("hf_linear_attn::triton_features", mutates_args=())
def triton_features(
    x: Tensor, weight: Tensor, power: Tensor | None, name: str, factor: float, sharpness: float
) -> Tensor:
    """Return the features of a pair of halves."""
    return _features(x, weight, power, name, factor, sharpness)


@planned
def _features(*inputs: Any) -> tuple[Tensor, list[Launch]]:
    o, launch = features_launch(_feature_problem(*inputs))
    return o, [launch]


@triton_features.register_fake
def _(*inputs: Any) -> Tensor:
    return allocate_features(_feature_problem(*inputs))


@torch.library.custom_op("hf_linear_attn::triton_features_backward", mutates_args=())
def triton_features_backward(
    do: Tensor, x: Tensor, weight: Tensor, power: Tensor | None, name: str, factor: float, sharpness: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x W`` and, by piece, of the power."""
    return _gradients(do, x, weight, power, name, factor, sharpness)


@planned
def _gradients(do: Tensor, *inputs: Any) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
    found, launch = features_backward_launch(_feature_problem(*inputs), readable(do))
    return found, [launch]


@triton_features_backward.register_fake
def _(do: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return allocate_features_backward(_feature_problem(*inputs))


def _save_features(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, power, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, power)


def _features_backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, power = ctx.saved_tensors
    dy, dpower = _derive(do, x, weight, power, *ctx.settings)
    dx = (dy @ weight.mT.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
    dweight = (x.mT.to(dy.dtype) @ dy).sum(0, dtype=weight.dtype) if ctx.needs_input_grad[1] else None
    if dweight is not None and len(weight) == 1:
        dweight = dweight.sum(0, keepdim=True)
    if power is None:
        return dx, dweight, None, None, None, None
    of_power = dpower.sum((0, 2)) if len(power) > 1 else dpower.sum().view(1)
    return dx, dweight, of_power.to(power.dtype), None, None, None


torch.library.register_autograd(triton_features, _features_backward, setup_context=_save_features)
_compute = directly(triton_features, _features, _save_features, _features_backward)
_derive = directly(triton_features_backward, _gradients)
refuse_transforms("triton", triton_features, backward=triton_features_backward)
