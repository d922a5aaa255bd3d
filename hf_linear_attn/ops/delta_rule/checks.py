"""What the delta rule asks of its arguments beyond what linear attention does."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.delta_rule.problem import DeltaCall
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.linear_attention.checks import FLOATING, check_masks, check_qkv
from hf_linear_attn.ops.state import LinearAttentionState

LARGEST_BETA = 2
"""Beyond it a state grows by being written to: a key is erased more than once over."""


def check_call(call: DeltaCall) -> None:
    """Check everything that a call is made of.

    Raises:
        ArgumentError: If a shape, device or number does not fit.
        ArgumentTypeError: If a type does not.
    """
    _check_types(call)
    check_qkv(call.q, call.k, call.v, True)
    check_masks(call.q, call.k, True, call.key_mask, call.cu_seqlens, call.delay)
    _check_gates(call)
    _check_state(call)


def _check_types(call: DeltaCall) -> None:
    for name in ("q", "k", "v", "beta"):
        if not isinstance(x := getattr(call, name), Tensor):
            raise ArgumentTypeError(name, "be a tensor", type(x).__name__, "Use torch.as_tensor.")
    for name in ("log_decay", "key_mask", "cu_seqlens"):
        if not isinstance(x := getattr(call, name), Tensor | None):
            raise ArgumentTypeError(name, "be a tensor or None", type(x).__name__, "Use torch.as_tensor.")
    state: Any = call.state
    if not isinstance(state, DeltaRuleState | LinearAttentionState | None):
        raise ArgumentTypeError("state", "be a DeltaRuleState or None", type(state).__name__, "Use DeltaRuleState(kv).")


def _check_gates(call: DeltaCall) -> None:
    """Check what says how much is written and kept."""
    k = call.k
    for name, x in (("beta", call.beta), ("log_decay", call.log_decay)):
        if x is None:
            continue
        if x.shape != k.shape[:3]:
            raise ArgumentError(
                name, f"have k's [B, HKV, S] = {tuple(k.shape[:3])}", tuple(x.shape), "A gate is a number per key."
            )
        if x.dtype not in FLOATING:
            raise ArgumentTypeError(name, "be bf16, fp16, fp32 or fp64", x.dtype, "Cast it.")
        if x.device != k.device:
            raise ArgumentError(name, f"be on k's device {k.device}", str(x.device), f"Move {name}.")
    _check_range("beta", call.beta, 0, LARGEST_BETA, call.key_mask, "Use a sigmoid, or twice that.")
    if call.log_decay is not None:
        _check_range("log_decay", call.log_decay, None, 0, call.key_mask, "It is a logarithm: use -softplus(x).")


def _check_range(name: str, x: Tensor, low: float | None, high: float, key_mask: Tensor | None, remedy: str) -> None:
    """Check a gate's numbers where keys count; on a GPU without waiting for it, and not while a graph is built."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    x = x.detach()
    # NaN is not outside: whatever a model computed of NaN is to be seen, not refused.
    wrong = x > high if low is None else (x > high) | (x < low)
    if key_mask is not None:
        wrong &= key_mask[:, None]
    rule = f"be at most {high}" if low is None else f"lie in {low}..{high}"
    if x.device.type == "cpu":
        # Asked this way round, a tensor without numbers is right.
        if not (~wrong).all():
            raise ArgumentError(name, rule, float(x[wrong][0]), remedy)
    elif x.is_cuda:
        torch._assert_async(~wrong.any(), f"`{name}` must {rule}. {remedy}")


def _check_state(call: DeltaCall) -> None:
    """Check a state against keys and values."""
    # Of linear attention, it may have a normaliser.
    state: DeltaRuleState | LinearAttentionState | None = call.state
    if state is None:
        return
    if state.z is not None:
        raise ArgumentError("state.z", "be None", tuple(state.z.shape), "The delta rule has no normaliser.")
    q, k, v, kv = call.q, call.k, call.v, state.kv
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = (call.rows, k.shape[1], k.shape[3], v.shape[3])
    if kv.shape != shape:
        raise ArgumentError("state.kv", f"have shape {shape}", tuple(kv.shape), "Pass this layer's state.")
    if kv.dtype != dtype:
        raise ArgumentTypeError("state.kv", f"be {dtype}", kv.dtype, "States are never kept in less.")
    if kv.device != q.device:
        raise ArgumentError("state.kv", f"be on q's device {q.device}", str(kv.device), "Move it.")
