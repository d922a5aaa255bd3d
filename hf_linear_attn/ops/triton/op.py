"""The kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.library import refuse_transforms
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.backward import Saved, allocate_backward, backward_launches, save
from hf_linear_attn.ops.triton.decode import decode_launch
from hf_linear_attn.ops.triton.features import (
    FeatureProblem,
    allocate_features,
    allocate_features_backward,
    features_backward_launch,
    features_launch,
)
from hf_linear_attn.ops.triton.forward import Forward, allocate_forward, forward_launches
from hf_linear_attn.ops.triton.plan import Launch, Problem, Target, readable, target_of
from hf_linear_attn.ops.triton.window import (
    WindowForward,
    WindowProblem,
    allocate_window,
    allocate_window_backward,
    window_backward_launches,
    window_launches,
)


def _target(device: torch.device) -> Target:
    target = target_of(device)
    if target is None:
        raise BackendError(f"`backend` must be able to run here, got 'triton'. No kernels for {device}.")
    return target


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kv0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    causal: bool,
    delay: int,
) -> Problem:
    return Problem(
        _target(q.device),
        readable(q),
        readable(k),
        readable(v),
        None if key_mask is None else key_mask.contiguous().view(torch.uint8),
        None if cu_seqlens is None else cu_seqlens.to(torch.int64),
        _contiguous(kv0),
        _contiguous(z0),
        phi,
        causal,
        delay,
    )


def _run(device: torch.device, launches: list[Launch]) -> None:
    with torch.cuda.device(device if device.type == "cuda" else -1):
        for launch in launches:
            launch.run()


@torch.library.custom_op("hf_linear_attn::triton_forward", mutates_args=())
def triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kv0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    causal: bool,
    delay: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return o, the guarded normaliser, the final ``kv`` and ``z``, and the prefixes of the segments."""
    problem = _problem(q, k, v, key_mask, cu_seqlens, kv0, z0, phi, causal, delay)
    out, launches = forward_launches(problem, eps)
    _run(q.device, launches)
    return out


@triton_forward.register_fake
def _(q: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *of_problem, _ = inputs
    problem = _problem(q, *of_problem)
    return allocate_forward(problem, problem.segments("forward", q.shape[2]))


@torch.library.custom_op("hf_linear_attn::triton_backward", mutates_args=())
def triton_backward(
    do: Tensor,
    dkv: Tensor,
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    kv0: Tensor | None,
    z0: Tensor | None,
    o: Tensor,
    den: Tensor,
    kv: Tensor | None,
    z: Tensor | None,
    prefixes: Tensor | None,
    phi: str,
    causal: bool,
    delay: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the initial ``kv`` and ``z``."""
    problem = _problem(q, k, v, key_mask, cu_seqlens, kv0, z0, phi, causal, delay)
    saved = Saved(o, den, kv, z, prefixes)
    out, launches = backward_launches(problem, saved, readable(do), dkv.contiguous(), dz.contiguous())
    _run(q.device, launches)
    return out


@triton_backward.register_fake
def _(do: Tensor, dkv: Tensor, dz: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return allocate_backward(_problem(*inputs[:7], *inputs[-3:]))


@torch.library.custom_op("hf_linear_attn::triton_decode_", mutates_args=("kv", "z"))
def triton_decode_(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, kv: Tensor, z: Tensor, phi: str, eps: float
) -> Tensor:
    """Return o of a few tokens and fold them into ``kv`` and ``z [B, HKV, C, D]`` in place."""
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    o, launch = decode_launch(_target(q.device), readable(q), readable(k), readable(v), kv, z, mask, phi, eps)
    _run(q.device, [launch])
    return o


@triton_decode_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, kv: Tensor, z: Tensor, phi: str, eps: float) -> Tensor:
    return empty_like_tokens(q, v.shape[3])


def _window_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    seen: Tensor | None,
    f: Tensor | None,
    number: Tensor | None,
    before: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    window: int,
    scaling: float,
) -> WindowProblem:
    return WindowProblem(
        _target(q.device),
        readable(q),
        readable(k),
        readable(v),
        _contiguous(codes),
        _contiguous(sink_k),
        _contiguous(sink_v),
        None if seen is None else seen.contiguous().view(torch.uint8),
        None if f is None else readable(f),
        _contiguous(number),
        _contiguous(before),
        _contiguous(bias),
        _contiguous(weight),
        window,
        scaling,
    )


@torch.library.custom_op("hf_linear_attn::triton_window", mutates_args=())
def triton_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    seen: Tensor | None,
    f: Tensor | None,
    number: Tensor | None,
    before: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    window: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o, the log-sum-exp of all scores, those of own keys, and the sums of keys before tiles."""
    inputs = q, k, v, codes, sink_k, sink_v, seen, f, number, before, bias, weight
    out, launches = window_launches(_window_problem(*inputs, window, scaling))
    _run(q.device, launches)
    return out


@triton_window.register_fake
def _(q: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return allocate_window(_window_problem(q, *inputs))


@torch.library.custom_op("hf_linear_attn::triton_window_backward", mutates_args=())
def triton_window_backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    score: Tensor,
    prefix: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    seen: Tensor | None,
    f: Tensor | None,
    number: Tensor | None,
    before: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    window: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what :class:`WindowBackward` holds."""
    inputs = q, k, v, codes, sink_k, sink_v, seen, f, number, before, bias, weight
    problem = _window_problem(*inputs, window, scaling)
    out, launches = window_backward_launches(problem, WindowForward(o, lse, score, prefix), readable(do))
    _run(q.device, launches)
    return out


@triton_window_backward.register_fake
def _(
    do: Tensor, o: Tensor, lse: Tensor, score: Tensor, prefix: Tensor, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return allocate_window_backward(_window_problem(*inputs))


def _save_window(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.window, ctx.scaling = inputs
    ctx.save_for_backward(*output, *tensors)


def _window_backward(ctx: Any, do: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    _, k, _, _, sink_k, sink_v, _, f, _, before, bias, weight = ctx.saved_tensors[4:]
    found = triton_window_backward(do, *ctx.saved_tensors, ctx.window, ctx.scaling)
    dq, dk, dv, df, dscore, dweight, dbefore, dsink_k, dsink_v = found
    # Tiles of queries, and the query heads that share a key head, are summed in a fixed order.
    sinks = (
        None if x is None else dx.unflatten(1, (k.shape[1], -1)).sum((2, 3)).to(x.dtype)
        for x, dx in ((sink_k, dsink_k), (sink_v, dsink_v))
    )
    own: tuple[Tensor | None, ...] = (None,) * 5
    if f is not None:
        db, dw = dscore.sum((0, 2)).to(bias.dtype), dweight.sum((0, 2)).to(weight.dtype)
        own = df, None, None if before is None else dbefore, db, dw
    return dq, dk, dv, None, *sinks, None, *own, None, None


def _feature_problem(
    x: Tensor, weight: Tensor, power: Tensor | None, name: str, factor: float, sharpness: float
) -> FeatureProblem:
    weight, power = weight.contiguous(), _contiguous(power)
    return FeatureProblem(_target(x.device), readable(x), weight, power, name, factor, sharpness)


@torch.library.custom_op("hf_linear_attn::triton_features", mutates_args=())
def triton_features(
    x: Tensor, weight: Tensor, power: Tensor | None, name: str, factor: float, sharpness: float
) -> Tensor:
    """Return the features of a pair of halves."""
    o, launch = features_launch(_feature_problem(x, weight, power, name, factor, sharpness))
    _run(x.device, [launch])
    return o


@triton_features.register_fake
def _(*inputs: Any) -> Tensor:
    return allocate_features(_feature_problem(*inputs))


@torch.library.custom_op("hf_linear_attn::triton_features_backward", mutates_args=())
def triton_features_backward(
    do: Tensor, x: Tensor, weight: Tensor, power: Tensor | None, name: str, factor: float, sharpness: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x W`` and, by piece, of the power."""
    problem = _feature_problem(x, weight, power, name, factor, sharpness)
    found, launch = features_backward_launch(problem, readable(do))
    _run(x.device, [launch])
    return found


@triton_features_backward.register_fake
def _(do: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return allocate_features_backward(_feature_problem(*inputs))


def _save_features(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, power, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, power)


def _features_backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, power = ctx.saved_tensors
    dy, dpower = triton_features_backward(do, x, weight, power, *ctx.settings)
    dx = (dy @ weight.mT.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
    dweight = (x.mT.to(dy.dtype) @ dy).sum(0, dtype=weight.dtype) if ctx.needs_input_grad[1] else None
    if dweight is not None and len(weight) == 1:
        dweight = dweight.sum(0, keepdim=True)
    if power is None:
        return dx, dweight, None, None, None, None
    of_power = dpower.sum((0, 2)) if len(power) > 1 else dpower.sum().view(1)
    return dx, dweight, of_power.to(power.dtype), None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.phi, ctx.causal, ctx.delay, _ = inputs
    q, k, v, _, cu_seqlens, kv0, z0 = tensors
    # For its shapes and cuts alone: nothing is copied into a layout that kernels read.
    p = Problem(_target(q.device), q, k, v, None, cu_seqlens, kv0, z0, ctx.phi, ctx.causal, ctx.delay)
    ctx.save_for_backward(*tensors, *save(p, Forward(*output)))


def _backward(
    ctx: Any, do: Tensor, dden: Tensor | None, dkv: Tensor, dz: Tensor, dprefixes: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, key_mask, cu_seqlens, kv0, z0, *saved = ctx.saved_tensors
    dq, dk, dv, dkv0, dz0 = triton_backward(
        do, dkv, dz, q, k, v, key_mask, cu_seqlens, kv0, z0, *saved, ctx.phi, ctx.causal, ctx.delay
    )
    of_state = (None, None) if kv0 is None else (dkv0, dz0)
    return dq, dk, dv, None, None, *of_state, None, None, None, None


torch.library.register_autograd(triton_forward, _backward, setup_context=_save)
torch.library.register_autograd(triton_features, _features_backward, setup_context=_save_features)
torch.library.register_autograd(triton_window, _window_backward, setup_context=_save_window)
refuse_transforms("triton", triton_forward, triton_decode_, backward=triton_backward)
refuse_transforms("triton", triton_features, backward=triton_features_backward)
refuse_transforms("triton", triton_window, backward=triton_window_backward)
