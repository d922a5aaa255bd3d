"""One new token: what leaves the window is folded into the linear branch, and every tensor is updated where it lies."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.mixes import LastToken
from hf_linear_attn.layers.state import State
from hf_linear_attn.layers.window import Window
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.step import HYBRID_MIXES, HybridStep, hybrid_obstacle, hybrid_step_

if TYPE_CHECKING:
    from hf_linear_attn.layers.attention import Call, LinearAttention


def steps(layer: "LinearAttention", q: Tensor, call: "Call") -> bool:
    """Tell whether a call is one token, and nobody can need the state from before it: not autograd, nor a rollback."""
    state = call.state
    if state is None or q.shape[2] != 1 or not state.tensors or not call.in_place or torch.is_grad_enabled():
        return False
    if layer.settings.backend == "reference" or layer.disabled or not layer.rule.steps:
        return False
    if layer.window is not None and not layer.mix.steps:
        return False
    # What was made under inference_mode can be changed in place only there.
    return (
        torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not state.tensors["seen"].is_inference()
    )


def step_(layer: "LinearAttention", q: Tensor, k: Tensor, v: Tensor, call: "Call") -> Tensor:
    """Read one token and fold it into the call's state in place; arguments as of :meth:`LinearAttention.forward`."""
    state, window, real = call.state, layer.window, call.key_mask
    if state is None:
        raise RuntimeError("there is no state to step")
    seen = state.tensors["seen"]
    if window is None:
        o = _read_far(layer, q, k, v, real, seen, seen, state)
    elif (whole := _for_kernel(layer, window, q, k, v, call, state)) is not None:
        o = hybrid_step_(whole)
    else:
        o = _hybrid_(layer, window, q, k, v, real, state, layer.scaling(call))
        layer.look_for_sinks(state, 1)
    seen.add_(1 if real is None else real[:, 0])
    state.advance(1, q.device)
    return o


def _for_kernel(
    layer: "LinearAttention", window: Window, q: Tensor, k: Tensor, v: Tensor, call: "Call", state: State
) -> HybridStep | None:
    """Return the step as its kernel takes it; None where the kernel does not serve it."""
    backend, feature_map, mix = layer.settings.backend, layer.feature_map, layer.mix.name
    if not (backend == "triton" or (backend == "auto" and q.is_cuda)):
        return None
    if layer.rule.name != "additive" or mix not in HYBRID_MIXES:
        return None
    features = _features_for_kernel(layer.feature_map) if layer.mix.has_far else ("identity", *(None,) * 4, 1.0, 0.0)
    if features is None:
        return None
    phi, weight_q, power_q, weight_k, power_k, factor, sharpness = features
    tensors, weights, length = state.tensors, layer.weights(), state.length
    whole = HybridStep(
        q,
        k,
        v,
        call.key_mask,
        tensors["seen"],
        length if isinstance(length, Tensor) else None,
        0 if isinstance(length, Tensor) else length,
        *(tensors.get(name) for name in ("kv", "z", "far_keys")),
        *(tensors[name] for name in ("near_k", "near_v", "near_mask")),
        weight_q,
        power_q,
        weight_k,
        power_k,
        weights.get("bias"),
        weights.get("weight"),
        phi,
        factor,
        sharpness,
        mix,
        window.sinks,
        layer.scaling(call),
        layer.rule.eps,
    )
    return whole if hybrid_obstacle(whole) is None else None


def _features_for_kernel(
    feature_map: FeatureMap,
) -> tuple[str, Tensor | None, Tensor | None, Tensor | None, Tensor | None, float, float] | None:
    """Return a map's name, its weights for both sides, factor and sharpness; None where no kernel computes it."""
    if feature_map.kernel is not None:
        return feature_map.kernel, None, None, None, None, 1.0, 0.0
    of_q, of_k = feature_map.pair("q"), feature_map.pair("k")
    if of_q is None or of_k is None:
        return None
    return of_q.name, of_q.weight, of_q.power, of_k.weight, of_k.power, of_q.factor, of_q.sharpness


def _read_far(
    layer: "LinearAttention",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor | None,
    position_q: Tensor,
    position_k: Tensor,
    state: State,
) -> Tensor:
    """Fold a key into the linear branch and read it: ``o [B, H, 1, V]``."""
    phi, backend = layer.feature_map.kernel, layer.settings.backend
    if phi is None:
        q = features_of(layer.feature_map, q, "q", position_q[:, None], backend)
        k = features_of(layer.feature_map, k, "k", position_k[:, None], backend)
    return layer.rule.step_(q, k, v, state.tensors, kernel=phi, key_mask=counts)


def _hybrid_(
    layer: "LinearAttention",
    window: Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    state: State,
    scaling: float,
) -> Tensor:
    """Step a layer with a window; ``real`` is the key mask ``[B, 1]``."""
    if real is not None:
        # What is masked must not matter, whatever it holds.
        hidden = ~real[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    tensors, (new, old) = state.tensors, window.places(state)
    near_k, near_v, mask, seen = (tensors[name] for name in ("near_k", "near_v", "near_mask", "seen"))
    far = None
    if layer.mix.has_far:
        # Those that are in the circle came last, and the one that leaves is the first of them.
        position = seen - mask[:, window.sinks :].sum(1) if layer.feature_map.positional else seen
        gone_k, gone_v, counts = _take(near_k, 2, old), _take(near_v, 2, old), _take(mask, 1, old)
        far = _read_far(layer, q, gone_k, gone_v, counts, seen, position, state)
        if layer.mix.sums_keys:
            keys = tensors["far_keys"]
            keys.addcmul_(
                gone_k[:, :, 0] if keys.ndim == 3 else gone_k, counts.to(gone_k.dtype).view(-1, *(1,) * (keys.ndim - 1))
            )
    _put_(mask, 1, new, _enter_(window, k, v, real, state))
    _put_(mask, 1, old, False)
    _put_(near_k, 2, new, k)
    _put_(near_v, 2, new, v)
    rows = torch.unflatten(q, 1, (near_k.shape[1], -1)).squeeze(3)
    scores = upcast(rows @ near_k.mT).mul_(scaling)
    scores.masked_fill_(~mask[:, None, None], torch.finfo(scores.dtype).min)
    number = None
    if far is not None:
        number = (seen + 1 if real is None else seen + real[:, 0]) - mask.sum(1)
    keys = tensors.get("far_keys")
    last = LastToken(
        rows, scores, near_v, far, number, keys[:, :, 0] if keys is not None and keys.ndim == 4 else keys, scaling
    )
    return layer.mix.join_last(last, layer.weights()).flatten(1, 2)[:, :, None]


def _enter_(window: Window, k: Tensor, v: Tensor, real: Tensor | None, state: State) -> Any:
    """Keep a new token for ever where it is a sink; return whether it counts in the circle."""
    if state.first_read or not window.sinks:
        return True if real is None else real
    sinks, tensors = window.sinks, state.tensors
    slot = torch.arange(sinks, device=k.device) == tensors["seen"][:, None]
    if real is not None:
        slot = slot & real
    for name, x in (("near_k", k), ("near_v", v)):
        held = tensors[name][:, :, :sinks]
        held.copy_(torch.where(slot[:, None, :, None], x, held))
    tensors["near_mask"][:, :sinks].logical_or_(slot)
    counts = ~slot.any(1, keepdim=True)
    return counts if real is None else counts & real


def _take(x: Tensor, dim: int, place: int | Tensor) -> Tensor:
    """Return one slot; a copy where its place is a tensor, as in a static state."""
    return x.index_select(dim, place[None]) if isinstance(place, Tensor) else x.narrow(dim, place, 1)


def _put_(x: Tensor, dim: int, place: int | Tensor, value: Tensor | bool) -> None:
    """Overwrite one slot."""
    if isinstance(place, Tensor):
        shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        value = value.expand(shape) if isinstance(value, Tensor) else x.new_full(shape, value)
        x.index_copy_(dim, place[None], value)
    elif isinstance(value, Tensor):
        x.narrow(dim, place, 1).copy_(value)
    else:
        x.narrow(dim, place, 1).fill_(value)
