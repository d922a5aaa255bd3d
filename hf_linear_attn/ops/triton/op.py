"""The kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.library import refuse_transforms
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.backward import Saved, allocate_backward, backward_launches, save
from hf_linear_attn.ops.triton.decode import decode_launch
from hf_linear_attn.ops.triton.forward import Forward, allocate_forward, forward_launches
from hf_linear_attn.ops.triton.plan import Launch, Problem, Target, readable, target_of


def _target(device: torch.device) -> Target:
    target = target_of(device)
    if target is None:
        raise BackendError(f"`backend` must be able to run here, got 'triton'. No kernels for {device}.")
    return target


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
        None if kv0 is None else kv0.contiguous(),
        None if z0 is None else z0.contiguous(),
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
refuse_transforms("triton", triton_forward, triton_decode_, backward=triton_backward)
