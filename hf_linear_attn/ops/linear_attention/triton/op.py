"""Linear attention's kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import operator, refuse_functional, refuse_transforms
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
from hf_linear_attn.ops.triton.run import as_bytes, contiguous, directly, execute, target_for


def linear_attention_triton(call: LinearCall) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention with Triton kernels."""
    refuse_functional("triton", call.q, call.k, call.v, call.kv0, call.z0, call.log_decay)
    o, _, kv, z = attend(*call)
    return o, LinearAttentionState(kv, z)


def _problem(*inputs: Any) -> Problem:
    q, k, v, key_mask, cu_seqlens, kv0, z0, log_decay, phi, causal, delay, _ = inputs
    tokens, bounds = (readable(q), readable(k), readable(v)), None if cu_seqlens is None else cu_seqlens.long()
    state = contiguous(kv0), contiguous(z0)
    return Problem(target_for(q.device), *tokens, as_bytes(key_mask), bounds, *state, phi, causal, delay, log_decay)


def _forward(*inputs: Any) -> Forward:
    """Return o, the guarded normaliser, and the final ``kv`` and ``z``."""
    return execute(forward_launches, _problem(*inputs), inputs[-1])


triton_forward = operator(
    "triton_forward", _forward, lambda *inputs: allocate_forward(_problem(*inputs)), schema=FORWARD
)


def _gradients(do: Tensor, dkv: Tensor | None, dz: Tensor | None, *inputs: Any) -> Backward:
    """Return the gradients of q, k, v, the initial ``kv`` and ``z``, and log decays; empty if not asked for."""
    problem, wanted = _derived(*inputs)
    gradients = readable(do), contiguous(dkv), contiguous(dz)
    # Keys that no query sees, because they lag, are not written.
    zeros = ("dk", "dv", "dlog_decay") if problem.delay else ()
    return execute(backward_launches, problem, Saved(*inputs[:4]), *gradients, wanted, zeros=zeros)


def _derived(*inputs: Any) -> tuple[Problem, Wanted]:
    """Return what the backward is of, and what it is asked for."""
    return _problem(*inputs[4:-5]), Wanted(*inputs[-5:])


triton_backward = operator(
    "triton_backward",
    _gradients,
    lambda do, dkv, dz, *inputs: allocate_backward(*_derived(*inputs)),
    schema=f"(Tensor do, Tensor? dkv, Tensor? dz, Tensor o, Tensor den, Tensor? kv, Tensor? z, {INPUTS}, bool of_q, "
    f"bool of_k, bool of_v, bool of_state, bool of_decay) -> ({', '.join(['Tensor'] * 6)})",
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.phi, ctx.causal, ctx.delay, ctx.eps = inputs
    # The final state is rarely part of a loss: its gradient is not even filled with zeros.
    ctx.set_materialize_grads(False)
    q, k, v, _, cu_seqlens, kv0, z0, _ = tensors
    p = Problem(target_for(q.device), q, k, v, None, cu_seqlens, kv0, z0, ctx.phi, ctx.causal, ctx.delay)
    ctx.save_for_backward(*save(p, Forward(*output)), *tensors)


def backward(
    ctx: Any, do: Tensor | None, dden: Tensor | None, dkv: Tensor | None, dz: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of what :func:`attend` takes."""
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


torch.library.register_autograd(triton_forward, backward, setup_context=_save)
attend = directly(triton_forward, _forward, _save, backward)
_derive = directly(triton_backward, _gradients)
refuse_transforms("triton", triton_forward, backward=triton_backward)
