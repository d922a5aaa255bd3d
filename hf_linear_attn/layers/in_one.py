"""What a layer with a window reads in one call of a kernel or of a loop: a step, and text without gradients."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.layers.ready import Ready
from hf_linear_attn.layers.state import State
from hf_linear_attn.layers.window import Tokens, Window
from hf_linear_attn.ops.dispatch import wants_kernels, wants_loops
from hf_linear_attn.ops.library import is_transformed
from hf_linear_attn.ops.prefill import SERVED, Prefill, prefill, prefill_obstacle
from hf_linear_attn.ops.step import HYBRID_MIXES, HybridStep, hybrid_obstacle, hybrid_step_

if TYPE_CHECKING:
    from hf_linear_attn.layers.attention import Call, LinearAttention
    from hf_linear_attn.layers.spans import Piece


InOne = Literal["triton", "numba"]
"""What reads in one call: kernels on a GPU, loops on a CPU."""


def step_in_one_(
    layer: "LinearAttention", window: Window, q: Tensor, k: Tensor, v: Tensor, call: "Call", state: State
) -> Tensor | None:
    """Take a step in one call of a kernel or a loop, and count its token; None where neither serves it."""
    chosen = chosen_in_one(layer.settings.backend, q.device)
    if chosen is None:
        return None
    whole = for_kernel(chosen, layer, window, q, k, v, call, state.tensors, state.tensors["seen"], state.length)
    if whole is None:
        return None
    if chosen == "numba":
        state.ready = Ready.of(layer, state, call, whole)
        if state.ready is not None:
            return state.ready.step_(q, k, v, call, state)
    if call.rotation is not None:
        state.check_common("near_turns", steps=True)
    o = hybrid_step_(whole, backend=layer.settings.backend)
    count_(whole.seen, call.key_mask)
    # It tells sinks by the number of tokens seen.
    state.advance(1, q.device)
    state.padded |= call.key_mask is not None
    return o


def count_(seen: Tensor, real: Tensor | None) -> None:
    """Count a new token ``[B]``, where it is real ``[B, 1]``."""
    seen.add_(1 if real is None else real[:, 0])


def for_kernel(
    chosen: InOne,
    layer: "LinearAttention",
    window: Window,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: "Call",
    tensors: Mapping[str, Tensor],
    seen: Tensor,
    length: Tensor | int,
    rows: Tensor | None = None,
) -> HybridStep | None:
    """Return the step as kernels and loops take it; None where those chosen do not; see :class:`HybridStep`."""
    mix = layer.mix.name
    if layer.rule.name not in ("additive", "decay") or mix not in HYBRID_MIXES:
        return None
    computed = _map_of(layer)
    if computed is None:
        return None
    phi, of_q, of_k = computed
    weights, of_rule, rotation = layer.weights(), layer.rule_weights(), call.rotation
    whole = HybridStep(
        q,
        k,
        v,
        call.key_mask,
        seen,
        length if isinstance(length, Tensor) else None,
        0 if isinstance(length, Tensor) else length,
        rows,
        tensors.get("kv"),
        tensors.get("z"),
        tensors.get("far_keys"),
        tensors["near_k"],
        tensors["near_v"],
        tensors.get("near_mask"),
        None if rotation is None else tensors["near_turns"],
        None if rotation is None else rotation.turns,
        None if of_q is None else of_q.weight,
        None if of_q is None else of_q.power,
        None if of_k is None else of_k.weight,
        None if of_k is None else of_k.power,
        of_rule.get("decay_bias"),
        of_rule.get("decay_key"),
        of_rule.get("decay_value"),
        weights.get("bias"),
        weights.get("weight"),
        phi,
        1.0 if of_q is None else of_q.factor,
        0.0 if of_q is None else of_q.sharpness,
        mix,
        window.sinks,
        layer.scaling(call),
        layer.rule.eps,
        "half" if rotation is None else rotation.layout.pairs,
        rotation is not None and rotation.layout.at_end,
    )
    return whole if hybrid_obstacle(whole, chosen) is None else None


def chosen_in_one(backend: str, device: torch.device) -> InOne | None:
    """Return what computes a whole step, or a whole text, in one call, if anything does."""
    if wants_kernels(backend, device):
        return "triton"
    # What traces, transforms or counts operations is to see them.
    return "numba" if wants_loops(backend, device) and not is_transformed() else None


def _map_of(layer: "LinearAttention") -> tuple[str, Pair | None, Pair | None] | None:
    """Return the name of a layer's map and, of a paired one, what is learned for queries and for keys.

    None where PyTorch alone computes it.
    """
    feature_map = layer.feature_map
    if not layer.mix.has_far:
        return "identity", None, None
    if feature_map.hooked:
        return None
    if feature_map.kernel is not None:
        return feature_map.kernel, None, None
    of_q, of_k = feature_map.pair("q"), feature_map.pair("k")
    return None if of_q is None or of_k is None else (of_q.name, of_q, of_k)


def read_in_one(
    layer: "LinearAttention", piece: "Piece", carried: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Attend as :meth:`LinearAttention.read` does; None where that has to do it."""
    chosen, tokens, window = chosen_in_one(layer.settings.backend, piece.q.device), piece.tokens, layer.window
    if chosen is None or torch.is_grad_enabled() or layer.disabled:
        return None
    if (layer.rule.name, layer.mix.name) not in SERVED[chosen]:
        return None
    computed = _map_of(layer)
    if computed is None or tokens is None or window is None:
        return None
    name, of_q, of_k = computed
    if prefill_obstacle(piece.q, tokens.k, tokens.v, of_q, of_k, window.size, chosen) is not None:
        return None
    of_value = layer.rule_weights().get("decay_value")
    if of_value is not None and of_value.shape[1] != tokens.v.shape[3]:
        # The rule says what is wrong.
        return None
    of_keys = None if tokens.rotation is None else tokens.rotation.cut(0, piece.q.shape[2])
    found = prefill(_prefill_of(layer, piece, tokens, window, name, of_q, carried or {}), of_k, of_keys, chosen)
    sums = {"kv": found.kv, "z": found.z} if layer.mix.has_far else {}
    return found.o, sums | {"far_keys": found.far_keys} if layer.mix.sums_keys else sums


def _prefill_of(
    layer: "LinearAttention",
    piece: "Piece",
    tokens: Tokens,
    window: Window,
    name: str,
    of_q: Pair | None,
    carried: Mapping[str, Tensor],
) -> Prefill:
    """Return a piece as kernels and loops take it."""
    sink_k, sink_v, seen = piece.sinks(window.size) or (None, None, None)
    if sink_k is not None and sink_v is not None:
        # A cache holds them in the dtype in which they were read.
        sink_k, sink_v = sink_k.to(piece.q.dtype), sink_v.to(piece.q.dtype)
    weights, of_rule, rotation = layer.weights(), layer.rule_weights(), piece.rotation
    return Prefill(
        piece.q,
        tokens.k,
        tokens.v,
        None,
        tokens.mask,
        tokens.counts,
        sink_k,
        sink_v,
        seen,
        piece.number,
        carried.get("far_keys"),
        carried.get("kv"),
        carried.get("z"),
        None if rotation is None else rotation.turns,
        None if of_q is None else of_q.weight,
        None if of_q is None else of_q.power,
        weights.get("bias"),
        weights.get("weight"),
        name,
        1.0 if of_q is None else of_q.factor,
        0.0 if of_q is None else of_q.sharpness,
        "half" if rotation is None else rotation.layout.pairs,
        rotation is not None and rotation.layout.at_end,
        window.size,
        piece.scaling,
        layer.rule.eps,
        layer.mix.name,
        of_rule.get("decay_bias"),
        of_rule.get("decay_key"),
        of_rule.get("decay_value"),
    )
