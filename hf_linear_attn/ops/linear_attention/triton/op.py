"""Linear attention's kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import refuse_functional, refuse_transforms
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
from hf_linear_attn.ops.triton.plan import Launch, Problem, readable
from hf_linear_attn.ops.triton.run import as_int64, contiguous, directly, planned, target_for


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
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState]:
    """Compute linear attention with Triton kernels; see :func:`linear_attention_reference`."""
    kv0, z0 = (None, None) if state is None else state
    refuse_functional("triton", q, k, v, kv0, z0, log_decay)
    o, _, kv, z = _attend(q, k, v, key_mask, cu_seqlens, kv0, z0, phi, causal, delay, eps, log_decay)
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
    log_decay: Tensor | None = None,
) -> Problem:
    return Problem(
        target_for(q.device),
        readable(q),
        readable(k),
        readable(v),
        None if key_mask is None else key_mask.contiguous().view(torch.uint8),
        None if cu_seqlens is None else as_int64(cu_seqlens),
        contiguous(kv0),
        contiguous(z0),
        phi,
        causal,
        delay,
        log_decay,
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
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return o, the guarded normaliser, and the final ``kv`` and ``z``."""
    return _forward(q, k, v, key_mask, cu_seqlens, kv0, z0, phi, causal, delay, eps, log_decay)


@planned
def _forward(q: Tensor, *inputs: Any) -> tuple[Forward, list[Launch]]:
    *before, eps, log_decay = inputs
    of_problem = [*before, log_decay]
    return forward_launches(_problem(q, *of_problem), eps)


@triton_forward.register_fake
def _(q: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return allocate_forward(_problem(q, *inputs[:9]))


@torch.library.custom_op("hf_linear_attn::triton_backward", mutates_args=())
def triton_backward(
    do: Tensor,
    dkv: Tensor | None,
    dz: Tensor | None,
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
    phi: str,
    causal: bool,
    delay: int,
    of_q: bool,
    of_k: bool,
    of_v: bool,
    of_state: bool,
    of_decay: bool,
    log_decay: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the initial ``kv`` and ``z``, and log decays; empty if not asked for."""
    inputs = q, k, v, key_mask, cu_seqlens, kv0, z0, o, den, kv, z
    return _gradients(do, dkv, dz, *inputs, phi, causal, delay, of_q, of_k, of_v, of_state, of_decay, log_decay)


@planned
def _gradients(do: Tensor, dkv: Tensor | None, dz: Tensor | None, *inputs: Any) -> tuple[Backward, list[Launch]]:
    problem, saved, wanted = _derived(*inputs)
    return backward_launches(problem, saved, readable(do), contiguous(dkv), contiguous(dz), wanted)


def _derived(*inputs: Any) -> tuple[Problem, Saved, Wanted]:
    """Sort what the backward is given."""
    of_problem = [*inputs[:7], *inputs[11:14], inputs[19]]
    return _problem(*of_problem), Saved(*inputs[7:11]), Wanted(*inputs[14:19])


@triton_backward.register_fake
def _(do: Tensor, dkv: Tensor | None, dz: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
    problem, _, wanted = _derived(*inputs)
    return allocate_backward(problem, wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.phi, ctx.causal, ctx.delay, _, log_decay = inputs
    # The final state is rarely part of a loss: its gradient is not even filled with zeros.
    ctx.set_materialize_grads(False)
    q, k, v, _, cu_seqlens, kv0, z0 = tensors
    p = Problem(target_for(q.device), q, k, v, None, cu_seqlens, kv0, z0, ctx.phi, ctx.causal, ctx.delay)
    ctx.save_for_backward(*tensors, *save(p, Forward(*output)), log_decay)


def _backward(
    ctx: Any,
    do: Tensor | None,
    dden: Tensor | None,
    dkv: Tensor | None,
    dz: Tensor | None,
) -> tuple[Tensor | None, ...]:
    q, k, v, key_mask, cu_seqlens, kv0, z0, *saved, log_decay = ctx.saved_tensors
    needs = ctx.needs_input_grad
    # The dispatcher passes on no argument that has its default.
    of_decay = log_decay is not None and needs[11]
    wanted = Wanted(needs[0], needs[1], needs[2], needs[5] or needs[6], of_decay)
    if (do is None and dkv is None and dz is None) or not any(wanted):
        return (None,) * 12
    if do is None:
        do = torch.zeros_like(saved[0])
    if dkv is None and dz is not None:
        dkv = dz.new_zeros(*dz.shape, v.shape[3])
    elif dz is None and dkv is not None:
        dz = dkv.new_zeros(dkv.shape[:3])
    settings = ctx.phi, ctx.causal, ctx.delay, *wanted, log_decay
    found = _derive(do, dkv, dz, q, k, v, key_mask, cu_seqlens, kv0, z0, *saved, *settings)
    asked = (*wanted[:4], wanted.state, wanted.log_decay)
    dq, dk, dv, dkv0, dz0, dlog_decay = (x if wants else None for x, wants in zip(found, asked, strict=True))
    return dq, dk, dv, None, None, dkv0, dz0, None, None, None, None, dlog_decay


torch.library.register_autograd(triton_forward, _backward, setup_context=_save)
_attend = directly(triton_forward, _forward, _save, _backward)
_derive = directly(triton_backward, _gradients)
refuse_transforms("triton", triton_forward, backward=triton_backward)
