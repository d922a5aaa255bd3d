"""Text read without gradients, as a torch.library op with a fake implementation."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import refuse_functional, refuse_vmap
from hf_linear_attn.ops.prefill import Prefill, Prefilled
from hf_linear_attn.ops.prefill.triton.kernels import allocate_prefill, prefill_launches
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import contiguous, directly, execute, target_for

OTHERS = (
    *("key_mask", "counts", "sink_k", "sink_v", "number", "far_keys", "kv", "z", "turns"),
    *("weight", "power", "bias", "direction", "decay_bias", "decay_key", "decay_value"),
)
"""Tensors that kernels read contiguous."""


def prefill_triton(call: Prefill) -> Prefilled:
    """Attend with Triton kernels; see :func:`hf_linear_attn.ops.prefill.prefill`."""
    refuse_functional("triton", call.q, call.k, call.v, call.phi_k)
    codes = counts = None
    if call.counts is not None:
        counts = call.counts.view(torch.uint8)
        codes = torch.add(1 if call.key_mask is None else call.key_mask.view(torch.uint8), counts, alpha=2)
    found: tuple[Tensor, ...] = _read(*call._replace(key_mask=codes, counts=counts))
    return Prefilled(*found)


def _laid_out(*inputs: Any) -> Prefill:
    call = Prefill(*inputs)
    laid_out: dict[str, Any] = {name: readable(getattr(call, name)) for name in ("q", "k", "v", "phi_k")}
    laid_out |= {name: contiguous(getattr(call, name)) for name in OTHERS}
    seen = None if call.seen is None else call.seen.contiguous().view(torch.uint8)
    return call._replace(**laid_out, seen=seen)


@torch.library.custom_op("hf_linear_attn::triton_prefill", mutates_args=())
def triton_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_k: Tensor,
    codes: Tensor | None,
    counts: Tensor | None,
    sink_k: Tensor | None,
    sink_v: Tensor | None,
    seen: Tensor | None,
    number: Tensor,
    far_keys: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    turns: Tensor | None,
    weight: Tensor,
    power: Tensor | None,
    bias: Tensor,
    direction: Tensor,
    name: str,
    factor: float,
    sharpness: float,
    pairs: str,
    at_end: bool,
    window: int,
    scaling: float,
    eps: float,
    mix: str,
    decay_bias: Tensor | None,
    decay_key: Tensor | None,
    decay_value: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what :class:`Prefilled` holds."""
    tensors = q, k, v, phi_k, codes, counts, sink_k, sink_v, seen, number, far_keys, kv, z, turns
    settings = name, factor, sharpness, pairs, at_end, window, scaling, eps, mix
    return _prefill(*tensors, weight, power, bias, direction, *settings, decay_bias, decay_key, decay_value)


def _prefill(*inputs: Any) -> Prefilled:
    call = _laid_out(*inputs)
    return execute(prefill_launches, target_for(call.q.device), call)


@triton_prefill.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return allocate_prefill(_laid_out(*inputs))


refuse_vmap("triton", triton_prefill)
_read = directly(triton_prefill, _prefill)
