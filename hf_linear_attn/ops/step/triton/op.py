"""The kernels of a step as torch.library ops."""

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.ops.library import refuse_vmap
from hf_linear_attn.ops.state import LinearAttentionState, empty_like_tokens
from hf_linear_attn.ops.step.checks import check_decode, check_hybrid
from hf_linear_attn.ops.step.problem import HybridStep
from hf_linear_attn.ops.step.triton.hybrid import hybrid_launch
from hf_linear_attn.ops.step.triton.kernels import decode_launch
from hf_linear_attn.ops.triton.plan import readable
from hf_linear_attn.ops.triton.run import Number, contiguous, directly, execute, has_changed, target_for


def decode_step_triton_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState,
    *,
    phi: str,
    key_mask: Tensor | None,
    eps: float,
    log_decay: Tensor | None,
    rows: Tensor | None,
) -> Tensor:
    """Run one decode step in place; see :func:`hf_linear_attn.ops.step.decode_step_`."""
    kv, z = state
    o: Tensor = _fold(q, k, v, key_mask, kv, z if z.ndim == 4 else z[:, :, None], phi, eps, log_decay, rows)
    return o


def hybrid_step_triton_(step: HybridStep) -> Tensor:
    """Run one step of a layer with a window in place; see :func:`hf_linear_attn.ops.step.hybrid_step_`."""
    o: Tensor = _advance(*step)
    return o


@torch.library.custom_op("hf_linear_attn::triton_decode_", mutates_args=("kv", "z"))
def triton_decode_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    z: Tensor,
    phi: str,
    eps: float,
    log_decay: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return o of a few tokens and fold them into ``kv`` and ``z [B, HKV, C, D]`` in place."""
    return _step(q, k, v, key_mask, kv, z, phi, eps, log_decay, rows)


def _changing(*inputs: Any) -> Tensor:
    """Run a step and tell autograd, as the op does, that the state has changed."""
    o = _step(*inputs)
    has_changed(*inputs[4:6])
    return o


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    z: Tensor,
    phi: str,
    eps: float,
    log_decay: Tensor | None,
    rows: Tensor | None = None,
) -> Tensor:
    check_decode(q, k, v, kv, z, key_mask, rows)
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    tokens = readable(q), readable(k), readable(v)
    return execute(decode_launch, target_for(q.device), *tokens, kv, z, mask, phi, eps, log_decay, rows)


@triton_decode_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> Tensor:
    return empty_like_tokens(q, v.shape[3])


CHANGING = ("kv", "z", "far_keys", "near_k", "near_v", "near_mask", "near_turns")
"""What a step of a layer with a window updates in place."""

_LENGTH = HybridStep._fields.index("length")
_CHANGING = [HybridStep._fields.index(name) for name in CHANGING]


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
) -> Tensor:
    """Return o of one token per row and update its state in place; see :class:`HybridStep`."""
    state = kv, z, far_keys, near_k, near_v, near_mask, near_turns
    decay = decay_bias, decay_key, decay_value
    weights = turns, weight_q, power_q, weight_k, power_k, *decay, bias, weight
    settings = phi, factor, sharpness, mix, sinks, scaling, eps, pairs, at_end
    return _read(q, k, v, key_mask, seen, place, length, rows, *state, *weights, *settings)


def _read(*inputs: Any) -> Tensor:
    # A plan is the same wherever in the text the token stands.
    length = inputs[_LENGTH]
    length = length if type(length) is Number else Number(length)
    step = HybridStep(*inputs)._replace(length=length)
    check_hybrid(step)
    weights = ("turns", "weight_q", "power_q", "weight_k", "power_k", "bias", "weight")
    decay = ("decay_bias", "decay_key", "decay_value")
    laid_out: dict[str, Any] = {name: readable(getattr(step, name)) for name in ("q", "k", "v")}
    laid_out |= {name: contiguous(getattr(step, name)) for name in (*weights, *decay)}
    return execute(hybrid_launch, target_for(step.q.device), step._replace(**laid_out))


def _writing(*inputs: Any) -> Tensor:
    """Run a step and tell autograd, as the op does, that the state has changed."""
    o = _read(*inputs)
    has_changed(*(inputs[place] for place in _CHANGING))
    return o


@triton_hybrid_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return empty_like_tokens(q, v.shape[3])


refuse_vmap("triton", triton_decode_, triton_hybrid_)

_fold = directly(triton_decode_, _changing)
_advance = directly(triton_hybrid_, _writing)
