"""The delta rule's kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.delta_rule.problem import GRADIENTS, INPUTS, DeltaCall
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.delta_rule.triton.backward import Backward, allocate_backward, backward_launches
from hf_linear_attn.ops.delta_rule.triton.forward import Forward, allocate_forward, forward_launches
from hf_linear_attn.ops.delta_rule.triton.problem import DeltaProblem
from hf_linear_attn.ops.delta_rule.triton.step import step_launch
from hf_linear_attn.ops.library import refuse_functional, refuse_transforms, refuse_vmap
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import contiguous, directly, execute, has_changed, target_for


def delta_rule_triton(call: DeltaCall) -> tuple[Tensor, DeltaRuleState]:
    """Compute the delta rule with Triton kernels."""
    refuse_functional("triton", call.q, call.k, call.v, call.beta, call.log_decay, call.kv0)
    o, kv = _attend(*call.inputs())
    return o, DeltaRuleState(kv)


def delta_step_triton_(call: DeltaCall, kv: Tensor, rows: Tensor | None) -> Tensor:
    """Run one step in place; see :func:`hf_linear_attn.ops.delta_rule.step.delta_step_`."""
    tokens = call.q, call.k, call.v, call.beta, call.log_decay, call.key_mask
    o: Tensor = _overwrite(*tokens, kv, call.l2norm, rows)
    return o


def _problem(*inputs: Any) -> DeltaProblem:
    call = DeltaCall.of(*inputs)
    mask, bounds = call.key_mask, call.cu_seqlens
    return DeltaProblem(
        target_for(call.q.device),
        readable(call.q),
        readable(call.k),
        readable(call.v),
        call.beta,
        call.log_decay,
        None if mask is None else mask.contiguous().view(torch.uint8),
        None if bounds is None else bounds.to(torch.int64),
        contiguous(call.kv0),
        call.delay,
        call.l2norm,
    )


@torch.library.custom_op(
    "hf_linear_attn::triton_delta_forward", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)"
)
def triton_delta_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return o and the final ``kv``."""
    return _forward(*inputs)


def _forward(*inputs: Any) -> Forward:
    return execute(forward_launches, _problem(*inputs))


@triton_delta_forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    return allocate_forward(_problem(*inputs))


@torch.library.custom_op("hf_linear_attn::triton_delta_backward", mutates_args=(), schema=GRADIENTS)
def triton_delta_backward(
    do: Tensor, dkv: Tensor | None, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, the log decay and the initial ``kv``."""
    return _gradients(do, dkv, *inputs)


def _gradients(do: Tensor, dkv: Tensor | None, *inputs: Any) -> Backward:
    problem = _problem(*inputs)
    # Keys that no query sees, because they lag, are not written.
    zeros = ("dk", "dv", "dbeta", "dg") if problem.delay else ()
    return execute(backward_launches, problem, readable(do), contiguous(dkv), zeros=zeros)


@triton_delta_backward.register_fake
def _(do: Tensor, dkv: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return allocate_backward(_problem(*inputs))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.delay, ctx.l2norm = inputs
    # The final state is rarely part of a loss: its gradient is not even filled with zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, do: Tensor | None, dkv: Tensor | None) -> tuple[Tensor | None, ...]:
    # Unpacked once: under activation checkpointing every access recomputes the forward, and a second one is refused.
    saved = ctx.saved_tensors
    q, v = saved[0], saved[2]
    if do is None and dkv is None:
        return (None,) * 10
    if do is None:
        do = q.new_zeros(*q.shape[:3], v.shape[3])
    dq, dk, dv, dbeta, dg, dkv0 = _derive(do, dkv, *saved, ctx.delay, ctx.l2norm)
    has_decay, has_state = saved[4] is not None, saved[7] is not None
    return dq, dk, dv, dbeta, dg if has_decay else None, None, None, dkv0 if has_state else None, None, None


torch.library.register_autograd(triton_delta_forward, _backward, setup_context=_save)
_attend = directly(triton_delta_forward, _forward, _save, _backward)
_derive = directly(triton_delta_backward, _gradients)
refuse_transforms("triton", triton_delta_forward, backward=triton_delta_backward)


@torch.library.custom_op("hf_linear_attn::triton_delta_step_", mutates_args=("kv",))
def triton_delta_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    kv: Tensor,
    l2norm: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """Return o of a few tokens and write them into ``kv`` in place."""
    return _step(q, k, v, beta, log_decay, key_mask, kv, l2norm, rows)


def _changing(*inputs: Any) -> Tensor:
    """Run a step and tell autograd, as the op does, that the state has changed."""
    o = _step(*inputs)
    has_changed(inputs[6])
    return o


def _step(*inputs: Any) -> Tensor:
    *tokens, kv, l2norm, rows = inputs
    return execute(step_launch, _problem(*tokens, None, None, 0, l2norm), kv, rows)


@triton_delta_step_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return empty_like_tokens(q, v.shape[3])


refuse_vmap("triton", triton_delta_step_)
_overwrite = directly(triton_delta_step_, _changing)
