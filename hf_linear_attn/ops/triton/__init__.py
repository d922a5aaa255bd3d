"""The Triton backend; importing this package imports neither Triton nor CUDA."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.state import LinearAttentionState
from hf_linear_attn.ops.triton.plan import target_of, tile

if TYPE_CHECKING:
    from hf_linear_attn.ops.window import OwnKey

OLDEST_TRITON = (3, 6)
LARGEST_HEAD = 256
LARGEST_PAIR = 128
"""Dimensions up to which the weights of paired maps fit into shared memory."""
LARGEST_WINDOW_FP32 = 128
"""Dimensions up to which the window's kernels find enough registers for fp32."""


@cache
def _version_obstacle() -> str | None:
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed (pip install 'triton>=3.6')"
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {found} is older than 3.6, the first version that the kernels are built for"
    return None


# Whatever torch.compile traces, it need not look into this: a device does not change while a program runs.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_obstacle(device: torch.device) -> str | None:
    reason = _version_obstacle()
    if reason is not None:
        return reason
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU, where kernels run only interpreted (TRITON_INTERPRET=1)"
    if target_of(device) is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return f"{name} is not supported; kernels exist for NVIDIA sm_80 and newer and for AMD gfx942"
    return None


def obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why the Triton backend cannot take these tensors here, or None where it can."""
    reason: str | None = _device_obstacle(q.device)
    if reason is not None:
        return reason
    if q.dtype == torch.float64:
        return "the kernels take bf16, fp16 and fp32, not float64"
    for name, size in (("q", q.shape[3]), ("v", v.shape[3])):
        if size > LARGEST_HEAD:
            return f"{name} has head size {size}, and the kernels hold at most {LARGEST_HEAD}"
    return None


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
    from hf_linear_attn.ops.triton.op import triton_forward

    kv0, z0 = (None, None) if state is None else state
    o, _, kv, z, _ = triton_forward(q, k, v, key_mask, cu_seqlens, kv0, z0, phi, causal, delay, eps)
    return o, LinearAttentionState(kv, z)


def window_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why the Triton backend cannot attend to a window of these tensors here, or None where it can."""
    reason = obstacle(q, k, v)
    if reason is None and q.dtype == torch.float32 and max(q.shape[3], v.shape[3]) > LARGEST_WINDOW_FP32:
        reason = f"in fp32 the window's kernels hold at most {LARGEST_WINDOW_FP32} dimensions"
    return reason


def window_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None,
    sinks: tuple[Tensor, Tensor, Tensor] | None,
    own_key: OwnKey | None,
) -> Tensor:
    """Compute attention over a window with Triton kernels; see :func:`hf_linear_attn.ops.window.window_attention`."""
    from hf_linear_attn.ops.triton.op import triton_window

    codes = None if key_mask is None else key_mask.view(torch.uint8)
    of_queries: tuple[Tensor | None, ...] = (None,) * 5
    if own_key is not None:
        counts = own_key.counts.view(torch.uint8)
        codes = torch.add(1 if codes is None else codes, counts, alpha=2)
        of_queries = own_key.value, own_key.number, own_key.before, own_key.bias, own_key.weight
    sink_k, sink_v, seen = (None, None, None) if sinks is None else sinks
    o: Tensor = triton_window(q, k, v, codes, sink_k, sink_v, seen, *of_queries, window, scaling)[0]
    return o


def computes_features(x: Tensor, pair: Pair) -> bool:
    """Tell whether a kernel can compute these features here."""
    largest = max(pair.weight.shape[1:])
    return _device_obstacle(x.device) is None and x.dtype != torch.float64 and largest <= LARGEST_PAIR


def features_triton(x: Tensor, pair: Pair) -> Tensor:
    """Compute the features of one side with a Triton kernel; see :func:`hf_linear_attn.ops.features.features_of`."""
    from hf_linear_attn.ops.triton.op import triton_features

    o: Tensor = triton_features(x, pair.weight, pair.power, pair.name, pair.factor, pair.sharpness)
    return o


def decode_copies(device: torch.device, feature_dim: int, value_dim: int) -> int:
    """Return how many programs share a head in a decode step; each keeps its own copy of z."""
    target = target_of(device)
    if target is None:
        return 1
    return -(-value_dim // tile(target, torch.bfloat16, "decode", feature_dim, value_dim, 0).width)


def decode_step_triton_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    *,
    phi: str,
    key_mask: Tensor | None,
    eps: float,
) -> Tensor:
    """Run one decode step in place; see :func:`hf_linear_attn.ops.decode.decode_step_`."""
    from hf_linear_attn.ops.triton.op import triton_decode_

    kv, z = state
    o: Tensor = triton_decode_(q, k, v, key_mask, kv, z if z.ndim == 4 else z[:, :, None], phi, eps)
    return o
