"""How a call's tokens are read: without gradients by kernels or a loop that do all of it in one, where they can."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_linear_attn.layers.in_one import chosen_in_one
from hf_linear_attn.layers.spans import Piece, walk, walks
from hf_linear_attn.ops.prefill import Prefill, prefill, prefill_obstacle

if TYPE_CHECKING:
    from hf_linear_attn.layers.attention import LinearAttention


def read_whole(
    layer: "LinearAttention", whole: Piece, carried: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Attend from all queries of a call, in the way that serves it best; see :meth:`LinearAttention.read`."""
    in_one = _read_in_one(layer, whole, carried)
    if in_one is not None:
        return in_one
    return walk(layer, whole, carried) if walks(layer, whole) else layer.read(whole, carried)


def _read_in_one(
    layer: "LinearAttention", piece: Piece, carried: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Attend as :meth:`LinearAttention.read` does; None where that has to do it."""
    chosen, tokens, window = chosen_in_one(layer.settings.backend, piece.q.device), piece.tokens, layer.window
    if chosen is None or torch.is_grad_enabled() or layer.disabled:
        return None
    if layer.rule.name != "additive" or layer.mix.name != "key":
        return None
    of_q, of_k = layer.feature_map.pair("q"), layer.feature_map.pair("k")
    if of_q is None or of_k is None or tokens is None or window is None or piece.number is None:
        return None
    if prefill_obstacle(piece.q, tokens.k, tokens.v, of_q, of_k, window.size, chosen) is not None:
        return None
    count, turned, state = piece.q.shape[2], piece.rotation, carried or {}
    of_keys = None if tokens.rotation is None else tokens.rotation.cut(0, count)
    sink_k, sink_v, seen = piece.sinks(window.size) or (None, None, None)
    weights = layer.weights()
    found = prefill(
        Prefill(
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
            state.get("far_keys"),
            state.get("kv"),
            state.get("z"),
            None if turned is None else turned.turns,
            of_q.weight,
            of_q.power,
            weights["bias"],
            weights["weight"],
            of_q.name,
            of_q.factor,
            of_q.sharpness,
            "half" if turned is None else turned.layout.pairs,
            turned is not None and turned.layout.at_end,
            window.size,
            piece.scaling,
            layer.rule.eps,
        ),
        of_k,
        of_keys,
        chosen,
    )
    if found is None:
        return None
    return found.o, {"kv": found.kv, "z": found.z, "far_keys": found.far_keys}
