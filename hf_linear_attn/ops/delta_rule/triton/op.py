"""The delta rule's kernels as torch.library ops, with fake implementations and autograd."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.delta_rule.problem import FORWARD, GRADIENTS, DeltaCall
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.delta_rule.triton.backward import Backward, allocate_backward, backward_launches
from hf_linear_attn.ops.delta_rule.triton.forward import Forward, allocate_forward, forward_launches
from hf_linear_attn.ops.delta_rule.triton.problem import DeltaProblem
from hf_linear_attn.ops.delta_rule.triton.step import step_launch
from hf_linear_attn.ops.library import operator, refuse_functional, refuse_transforms, refuse_vmap
from hf_linear_attn.ops.state import like_values
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import as_bytes, changing, contiguous, directly, execute, target_for


def delta_rule_triton(call: DeltaCall) -> tuple[Tensor, DeltaRuleState]:
    """Compute the delta rule with Triton kernels."""
    refuse_functional("triton", call.q, call.k, call.v, call.beta, call.log_decay, call.kv0)
    o, kv = _attend(*call)
    return o, DeltaRuleState(kv)


def _problem(*inputs: Any) -> DeltaProblem:
    q, k, v, beta, log_decay, key_mask, cu_seqlens, kv0, delay, l2norm = inputs
    tokens, bounds = (readable(q), readable(k), readable(v)), None if cu_seqlens is None else cu_seqlens.long()
    mask, target = as_bytes(key_mask), target_for(q.device)
    return DeltaProblem(target, *tokens, beta, log_decay, mask, bounds, contiguous(kv0), delay, l2norm)


def _forward(*inputs: Any) -> Forward:
    """Return o and the final ``kv``."""
    return execute(forward_launches, _problem(*inputs))


triton_delta_forward = operator(
    "triton_delta_forward", _forward, lambda *inputs: allocate_forward(_problem(*inputs)), schema=FORWARD
)


def _gradients(do: Tensor, dkv: Tensor | None, *inputs: Any) -> Backward:
    """Return the gradients of q, k, v, beta, the log decay and the initial ``kv``."""
    problem = _problem(*inputs)
    # Keys that no query sees, because they lag, are not written.
    zeros = ("dk", "dv", "dbeta", "dg") if problem.delay else ()
    return execute(backward_launches, problem, readable(do), contiguous(dkv), zeros=zeros)


triton_delta_backward = operator(
    "triton_delta_backward",
    _gradients,
    lambda do, dkv, *inputs: allocate_backward(_problem(*inputs)),
    schema=GRADIENTS,
)


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


def _step(
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
    problem = _problem(q, k, v, beta, log_decay, key_mask, None, None, 0, l2norm)
    return execute(step_launch, problem, kv, rows)


triton_delta_step_ = operator("triton_delta_step_", _step, like_values, changes=("kv",))
refuse_vmap("triton", triton_delta_step_)
delta_step_triton_ = directly(triton_delta_step_, changing(_step, 6))
