"""What the delta rule asks of its arguments beyond what linear attention does."""

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.ops.delta_rule.state import DeltaRuleState
from hf_linear_attn.ops.linear_attention.checks import FLOATING
from hf_linear_attn.ops.state import LinearAttentionState

LARGEST_BETA = 2
"""Beyond it a state grows by being written to: a key is erased more than once over."""


def check_types(
    q: object,
    k: object,
    v: object,
    beta: object,
    log_decay: object,
    key_mask: object,
    cu_seqlens: object,
    state: object,
) -> None:
    """Check types."""
    for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(name, "be a tensor", type(x).__name__, "Use torch.as_tensor.")
    for name, x in (("log_decay", log_decay), ("key_mask", key_mask), ("cu_seqlens", cu_seqlens)):
        if not isinstance(x, Tensor | None):
            raise ArgumentTypeError(name, "be a tensor or None", type(x).__name__, "Use torch.as_tensor.")
    if not isinstance(state, DeltaRuleState | LinearAttentionState | None):
        raise ArgumentTypeError("state", "be a DeltaRuleState or None", type(state).__name__, "Use DeltaRuleState(kv).")


def check_gates(k: Tensor, beta: Tensor, log_decay: Tensor | None, key_mask: Tensor | None) -> None:
    """Check what says how much is written and kept."""
    for name, x in (("beta", beta), ("log_decay", log_decay)):
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
    _check_range("beta", beta, 0, LARGEST_BETA, key_mask, "Use a sigmoid, or twice that.")
    if log_decay is not None:
        _check_range("log_decay", log_decay, None, 0, key_mask, "It is a logarithm: use -softplus(x).")


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


def check_state(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, state: DeltaRuleState | LinearAttentionState | None
) -> None:
    """Check a state against keys and values."""
    if state is None:
        return
    if state.z is not None:
        raise ArgumentError("state.z", "be None", tuple(state.z.shape), "The delta rule has no normaliser.")
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape, kv = (rows, k.shape[1], k.shape[3], v.shape[3]), state.kv
    if kv.shape != shape:
        raise ArgumentError("state.kv", f"have shape {shape}", tuple(kv.shape), "Pass this layer's state.")
    if kv.dtype != dtype:
        raise ArgumentTypeError("state.kv", f"be {dtype}", kv.dtype, "States are never kept in less.")
    if kv.device != q.device:
        raise ArgumentError("state.kv", f"be on q's device {q.device}", str(kv.device), "Move it.")
