"""The kernels of a layer with a window as torch.library ops: a step, and text that is read without gradients."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.hybrid.checks import KEPT
from hf_linear_attn.ops.hybrid.records import HybridStep, KeptStep, Prefill, Prefilled
from hf_linear_attn.ops.hybrid.triton.prefill import allocate_prefill, prefill_launches
from hf_linear_attn.ops.hybrid.triton.trade import NET, hybrid_launches
from hf_linear_attn.ops.library import refuse_functional, refuse_vmap
from hf_linear_attn.ops.specs import Number
from hf_linear_attn.ops.state import empty_like_tokens
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import (
    changing,
    codes_of,
    codes_with,
    contiguous,
    directly,
    execute,
    target_for,
)

CHANGING = ("kv", "z", "far_keys", "near_k", "near_v", "near_mask", "near_turns", *KEPT)
"""What a step of a layer with a window updates in place."""

_LENGTH, _KEPT = (HybridStep._fields.index(name) for name in ("length", "kept"))
_CHANGING = [HybridStep._fields.index(name) for name in CHANGING if name not in KEPT]
_NOTHING_KEPT = (*(None,) * (len(KEPT) + len(NET)), 0)


@torch.library.custom_op("hf_linear_attn::triton_hybrid_", mutates_args=CHANGING)
def triton_hybrid_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    seen: Tensor,
    place: Tensor | None,
    length: int,
    rows: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    far_keys: Tensor | None,
    near_k: Tensor,
    near_v: Tensor,
    near_mask: Tensor | None,
    near_turns: Tensor | None,
    turns: Tensor | None,
    weight_q: Tensor | None,
    power_q: Tensor | None,
    weight_k: Tensor | None,
    power_k: Tensor | None,
    decay_bias: Tensor | None,
    decay_key: Tensor | None,
    decay_value: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    phi: str,
    factor: float,
    sharpness: float,
    mix: str,
    sinks: int,
    scaling: float,
    eps: float,
    pairs: str,
    at_end: bool,
    kept_k: Tensor | None,
    kept_v: Tensor | None,
    kept_at: Tensor | None,
    kept_turns: Tensor | None,
    kept_nearest: Tensor | None,
    kept_scores: Tensor | None,
    mean: Tensor | None,
    deviation: Tensor | None,
    weight_in: Tensor | None,
    bias_in: Tensor | None,
    weight_out: Tensor | None,
    bias_out: Tensor | None,
    ahead: int,
) -> Tensor:
    """Return o of one token per row and update its state in place; see :class:`HybridStep` and :class:`KeptStep`."""
    state = kv, z, far_keys, near_k, near_v, near_mask, near_turns
    decay = decay_bias, decay_key, decay_value
    weights = turns, weight_q, power_q, weight_k, power_k, *decay, bias, weight
    settings = phi, factor, sharpness, mix, sinks, scaling, eps, pairs, at_end
    kept = kept_k, kept_v, kept_at, kept_turns, kept_nearest, kept_scores
    net = mean, deviation, weight_in, bias_in, weight_out, bias_out
    return _read(q, k, v, key_mask, seen, place, length, rows, *state, *weights, *settings, *kept, *net, ahead)


def _read(*inputs: Any) -> Tensor:
    # A plan is the same wherever in the text the token stands.
    length, kept = inputs[_LENGTH], _kept(*inputs[_KEPT:])
    length = length if type(length) is Number else Number(length)
    step = HybridStep(*inputs[:_KEPT])._replace(length=length, kept=kept)
    weights = ("turns", "weight_q", "power_q", "weight_k", "power_k", "bias", "weight")
    decay = ("decay_bias", "decay_key", "decay_value")
    laid_out: dict[str, Any] = {name: readable(getattr(step, name)) for name in ("q", "k", "v")}
    laid_out |= {name: contiguous(getattr(step, name)) for name in (*weights, *decay)}
    return execute(hybrid_launches, target_for(step.q.device), step._replace(**laid_out))


def _kept(*inputs: Any) -> KeptStep | None:
    """Return what a step is told of kept keys, of an op's inputs."""
    if inputs[0] is None:
        return None
    tensors, (*net, ahead) = inputs[: len(KEPT)], inputs[len(KEPT) :]
    return KeptStep._make((*tensors, tuple(x.contiguous() for x in net if x is not None), ahead))


@triton_hybrid_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return empty_like_tokens(q, v.shape[3])


def inputs_of(step: HybridStep) -> tuple[Any, ...]:
    """Return a step as its op takes it."""
    if step.kept is None:
        # None has a default: torch 2.11 fails at ops that change what they are not given.
        return *step[:_KEPT], *_NOTHING_KEPT
    *tensors, weights, ahead = step.kept
    return *step[:_KEPT], *tensors, *(weights or (None,) * len(NET)), ahead


def hybrid_step_triton_(step: HybridStep) -> Tensor:
    """Run one step of a layer with a window in place; see :func:`hf_linear_attn.ops.hybrid.hybrid_step_`."""
    o: Tensor = _advance(*inputs_of(step))
    return o


OTHERS = (
    *("key_mask", "counts", "sink_k", "sink_v", "number", "far_keys", "kv", "z", "turns"),
    *("weight_q", "power_q", "bias", "weight", "decay_bias", "decay_key", "decay_value"),
)
"""Tensors that kernels read contiguous."""


def prefill_triton(call: Prefill) -> Prefilled:
    """Attend with Triton kernels; see :func:`hf_linear_attn.ops.hybrid.hybrid_prefill`."""
    refuse_functional("triton", call.q, call.k, call.v, call.phi_k)
    codes = counts = None
    if call.counts is not None:
        codes, counts = codes_with(call.key_mask, call.counts), codes_of(call.counts)
    found: tuple[Tensor, ...] = _attend(*call._replace(key_mask=codes, counts=counts)[:-1])
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


refuse_vmap("triton", triton_hybrid_, triton_prefill)
_attend = directly(triton_prefill, _prefill)
_advance = directly(triton_hybrid_, changing(_read, *_CHANGING, *range(_KEPT, _KEPT + len(KEPT))))
