"""Linear attention's kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import refuse_functional, refuse_transforms
from hf_linear_attn.ops.linear_attention.triton.backward import Saved, allocate_backward, backward_launches, save
from hf_linear_attn.ops.linear_attention.triton.forward import Forward, allocate_forward, forward_launches
from hf_linear_attn.ops.state import LinearAttentionState
from hf_linear_attn.ops.triton.plan import Problem, readable
from hf_linear_attn.ops.triton.run import contiguous, run, target_for


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: str,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: LinearAttentionState | None,
    delay: int,
    eps: float,
) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention with Triton kernels; see :func:`linear_attention_reference`."""
    kv0, z0 = (None, None) if state is None else state
    refuse_functional("triton", q, k, v, kv0, z0)
    o, _, kv, z, _ = triton_forward(q, k, v, key_mask, cu_seqlens, kv0, z0, phi, causal, delay, eps)
    return o, LinearAttentionState(kv, z)


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
        target_for(q.device),
        readable(q),
        readable(k),
        readable(v),
        None if key_mask is None else key_mask.contiguous().view(torch.uint8),
        None if cu_seqlens is None else cu_seqlens.to(torch.int64),
        contiguous(kv0),
        contiguous(z0),
        phi,
        causal,
        delay,
    )


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
    run(q.device, launches)
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
    run(q.device, launches)
    return out


@triton_backward.register_fake
def _(do: Tensor, dkv: Tensor, dz: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return allocate_backward(_problem(*inputs[:7], *inputs[-3:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.phi, ctx.causal, ctx.delay, _ = inputs
    q, k, v, _, cu_seqlens, kv0, z0 = tensors
    # For its shapes and cuts alone: nothing is copied into a layout that kernels read.
    p = Problem(target_for(q.device), q, k, v, None, cu_seqlens, kv0, z0, ctx.phi, ctx.causal, ctx.delay)
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
refuse_transforms("triton", triton_forward, backward=triton_backward)
