"""Linear attention's kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import refuse_functional, refuse_transforms
from hf_linear_attn.ops.linear_attention.problem import FORWARD, INPUTS, LinearCall
from hf_linear_attn.ops.linear_attention.triton.backward import (
    Backward,
    Saved,
    Wanted,
    allocate_backward,
    backward_launches,
    save,
)
from hf_linear_attn.ops.linear_attention.triton.forward import Forward, allocate_forward, forward_launches
from hf_linear_attn.ops.state import LinearAttentionState
from hf_linear_attn.ops.triton.plan import Problem, readable
from hf_linear_attn.ops.triton.run import contiguous, directly, execute, target_for


def linear_attention_triton(call: LinearCall) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention with Triton kernels."""
    refuse_functional("triton", call.q, call.k, call.v, call.kv0, call.z0, call.log_decay)
    o, _, kv, z = _attend(*call.inputs())
    return o, LinearAttentionState(kv, z)


def _problem(call: LinearCall) -> Problem:
    return Problem(
        target_for(call.q.device),
        readable(call.q),
        readable(call.k),
        readable(call.v),
        None if call.key_mask is None else call.key_mask.contiguous().view(torch.uint8),
        None if call.cu_seqlens is None else call.cu_seqlens.to(torch.int64),
        contiguous(call.kv0),
        contiguous(call.z0),
        call.phi,
        call.causal,
        call.delay,
        call.log_decay,
    )


@torch.library.custom_op("hf_linear_attn::triton_forward", mutates_args=(), schema=FORWARD)
def triton_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o, the guarded normaliser, and the final ``kv`` and ``z``."""
    return _forward(*inputs)


def _forward(*inputs: Any) -> Forward:
    call = LinearCall.of(*inputs)
    return execute(forward_launches, _problem(call), call.eps)


@triton_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return allocate_forward(_problem(LinearCall.of(*inputs)))


@torch.library.custom_op(
    "hf_linear_attn::triton_backward",
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dkv, Tensor? dz, Tensor o, Tensor den, Tensor? kv, Tensor? z, {INPUTS}, bool of_q, "
    f"bool of_k, bool of_v, bool of_state, bool of_decay) -> ({', '.join(['Tensor'] * 6)})",
)
def triton_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the initial ``kv`` and ``z``, and log decays; empty if not asked for."""
    return _gradients(*inputs)


def _gradients(do: Tensor, dkv: Tensor | None, dz: Tensor | None, *inputs: Any) -> Backward:
    problem, wanted = _derived(*inputs)
    gradients = readable(do), contiguous(dkv), contiguous(dz)
    # Keys that no query sees, because they lag, are not written.
    zeros = ("dk", "dv", "dlog_decay") if problem.delay else ()
    return execute(backward_launches, problem, Saved(*inputs[:4]), *gradients, wanted, zeros=zeros)


def _derived(*inputs: Any) -> tuple[Problem, Wanted]:
    """Return what the backward is of, and what it is asked for."""
    return _problem(LinearCall.of(*inputs[4:-5])), Wanted(*inputs[-5:])


@triton_backward.register_fake
def _(do: Tensor, dkv: Tensor | None, dz: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    return allocate_backward(*_derived(*inputs))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.phi, ctx.causal, ctx.delay, ctx.eps = inputs
    # The final state is rarely part of a loss: its gradient is not even filled with zeros.
    ctx.set_materialize_grads(False)
    q, k, v, _, cu_seqlens, kv0, z0, _ = tensors
    p = Problem(target_for(q.device), q, k, v, None, cu_seqlens, kv0, z0, ctx.phi, ctx.causal, ctx.delay)
    ctx.save_for_backward(*save(p, Forward(*output)), *tensors)


def _backward(
    ctx: Any,
    do: Tensor | None,
    dden: Tensor | None,
    dkv: Tensor | None,
    dz: Tensor | None,
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    o, v, has_decay, needs = saved[0], saved[6], saved[-1] is not None, ctx.needs_input_grad
    wanted = Wanted(needs[0], needs[1], needs[2], needs[5] or needs[6], has_decay and needs[7])
    if (do is None and dkv is None and dz is None) or not any(wanted):
        return (None,) * 12
    if do is None:
        do = torch.zeros_like(o)
    if dkv is None and dz is not None:
        dkv = dz.new_zeros(*dz.shape, v.shape[3])
    elif dz is None and dkv is not None:
        dz = dkv.new_zeros(dkv.shape[:3])
    found = _derive(do, dkv, dz, *saved, ctx.phi, ctx.causal, ctx.delay, ctx.eps, *wanted)
    asked = (*wanted[:4], wanted.state, wanted.log_decay)
    dq, dk, dv, dkv0, dz0, dlog_decay = (x if wants else None for x, wants in zip(found, asked, strict=True))
    return dq, dk, dv, None, None, dkv0, dz0, dlog_decay, None, None, None, None


torch.library.register_autograd(triton_forward, _backward, setup_context=_save)
_attend = directly(triton_forward, _forward, _save, _backward)
_derive = directly(triton_backward, _gradients)
refuse_transforms("triton", triton_forward, backward=triton_backward)
