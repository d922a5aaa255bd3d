"""Features of learned maps in Triton, as torch.library ops with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.features.triton.kernels import (
    FeatureGradients,
    FeatureProblem,
    allocate_features,
    allocate_features_backward,
    features_backward_launch,
    features_launch,
)
from hf_linear_attn.ops.library import operator, refuse_functional, refuse_transforms
from hf_linear_attn.ops.rotation import Layout, Rotation
from hf_linear_attn.ops.rotation.triton import turn
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import contiguous, directly, execute, target_for

INPUTS = (
    "Tensor x, Tensor? turns, Tensor weight, Tensor? power, str name, float factor, float sharpness, str pairs, "
    "bool at_end"
)
"""What both operators take; see :class:`FeatureProblem`."""


def features_triton(x: Tensor, pair: Pair, rotation: Rotation | None = None) -> Tensor:
    """Compute the features of one side with a Triton kernel; see :func:`hf_linear_attn.ops.features.features_of`."""
    refuse_functional("triton", x, pair.weight, pair.power)
    turns, layout = (None, Layout("half")) if rotation is None else rotation[:2]
    settings = pair.name, pair.factor, pair.sharpness, layout.pairs, layout.at_end
    o: Tensor = compute(x, turns, pair.weight, pair.power, *settings)
    return o


def _feature_problem(*inputs: Any) -> FeatureProblem:
    x, turns, weight, power, *settings = inputs
    weight, power, turns = weight.contiguous(), contiguous(power), contiguous(turns)
    return FeatureProblem(target_for(x.device), readable(x), turns, weight, power, *settings)


def _features(*inputs: Any) -> Tensor:
    """Return the features of a pair of halves."""
    return execute(features_launch, _feature_problem(*inputs))


triton_features = operator(
    "triton_features",
    _features,
    lambda *inputs: allocate_features(_feature_problem(*inputs)),
    schema=f"({INPUTS}) -> Tensor",
)


def _gradients(do: Tensor, *inputs: Any) -> FeatureGradients:
    """Return the gradients that are asked for, but for a library's products."""
    *of_problem, of_x, of_weight = inputs
    return execute(features_backward_launch, _feature_problem(*of_problem), readable(do), of_x, of_weight)


def _allocate_gradients(do: Tensor, *inputs: Any) -> FeatureGradients:
    *of_problem, of_x, of_weight = inputs
    return allocate_features_backward(_feature_problem(*of_problem), of_x, of_weight)


triton_features_backward = operator(
    "triton_features_backward",
    _gradients,
    _allocate_gradients,
    schema=f"(Tensor do, {INPUTS}, bool of_x, bool of_weight) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _save_features(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, turns, weight, power, *ctx.settings = inputs
    ctx.save_for_backward(x, turns, weight, power)


def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of what :func:`compute` takes."""
    x, turns, weight, power = ctx.saved_tensors
    *_, pairs, at_end = ctx.settings
    of_x, _, of_weight, of_power, *_ = ctx.needs_input_grad
    found = _derive(do, x, turns, weight, power, *ctx.settings, of_x, of_weight)
    power = power if of_power else None
    dx, dweight, dpower = finish(FeatureGradients(*found), x, turns, weight, power, pairs, at_end, of_x, of_weight)
    return dx, None, dweight, dpower, None, None, None, None, None


def finish(
    found: FeatureGradients,
    x: Tensor,
    turns: Tensor | None,
    weight: Tensor,
    power: Tensor | None,
    pairs: str,
    at_end: bool,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, of W and of the power, if one is passed, by a library's products.

    They are made of what the kernel has computed.
    """
    dy, turned, parts, dpower = found
    dx = dweight = of_power = None
    # What has no columns, the kernel has not computed.
    if of_x and turned.shape[3]:
        dx = turned
    elif of_x:
        dx = dy @ weight.mT.to(dy.dtype)
        dx = (dx if turns is None else turn(dx, turns, pairs, at_end, derive=True)).to(x.dtype)
    if of_weight and parts.shape[4]:
        # A sum of one is a copy.
        dweight = parts.sum((0, 2)) if len(parts) * parts.shape[2] > 1 else parts[0, :, 0]
    elif of_weight:
        plain = x if turns is None else turn(x, turns, pairs, at_end, derive=False)
        dweight = plain.mT.to(dy.dtype) @ dy
        dweight = dweight.sum(0, dtype=weight.dtype) if len(x) > 1 else dweight[0]
    if dweight is not None:
        dweight = dweight.sum(0, keepdim=True) if len(weight) < len(dweight) else dweight
        dweight = dweight.to(weight.dtype)
    if power is not None:
        of_power = (dpower.sum((0, 2)) if len(power) > 1 else dpower.sum().view(1)).to(power.dtype)
    return dx, dweight, of_power


torch.library.register_autograd(triton_features, backward, setup_context=_save_features)
compute = directly(triton_features, _features, _save_features, backward)
_derive = directly(triton_features_backward, _gradients)
refuse_transforms("triton", triton_features, backward=triton_features_backward)
