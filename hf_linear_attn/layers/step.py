"""One new token: what leaves the window is folded into the linear branch, and every tensor is updated where it lies."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.mixes import LastToken
from hf_linear_attn.layers.state import State
from hf_linear_attn.layers.window import Window
from hf_linear_attn.ops.features import features_of

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
    state = call.state
    if state is None:
        raise RuntimeError("there is no state to step")
    if layer.window is None:
        seen = state.tensors["seen"]
        o = _read_far(layer, q, k, v, call.key_mask, seen, seen, state)
        seen.add_(1 if call.key_mask is None else call.key_mask[:, 0])
    else:
        o = _hybrid_(layer, layer.window, q, k, v, call.key_mask, state, layer.scaling(call))
    state.advance(1, q.device)
    layer.look_for_sinks(state, 1)
    return o


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
    tensors, (new, old) = state.tensors, window.places(state)
    near_k, near_v, mask, seen = (tensors[name] for name in ("near_k", "near_v", "near_mask", "seen"))
    far = None
    if layer.mix.has_far:
        # Those that are in the circle came last, and the one that leaves is the first of them.
        position = seen - mask[:, window.sinks :].sum(1) if layer.feature_map.positional else seen
        gone_k, gone_v, counts = _take(near_k, 2, old), _take(near_v, 2, old), _take(mask, 1, old)
        far = _read_far(layer, q, gone_k, gone_v, counts, seen, position, state)
        if layer.mix.sums_keys:
            tensors["far_keys"].addcmul_(gone_k[:, :, 0], counts.to(gone_k.dtype)[:, None])
    _put_(mask, 1, new, _enter_(window, k, v, real, state))
    _put_(mask, 1, old, False)
    _put_(near_k, 2, new, k)
    _put_(near_v, 2, new, v)
    seen.add_(1 if real is None else real[:, 0])
    rows = torch.unflatten(q, 1, (near_k.shape[1], -1)).squeeze(3)
    scores = upcast(rows @ near_k.mT).mul_(scaling)
    scores.masked_fill_(~mask[:, None, None], torch.finfo(scores.dtype).min)
    number = seen - mask.sum(1) if far is not None else None
    last = LastToken(rows, scores, near_v, far, number, tensors.get("far_keys"), scaling)
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
