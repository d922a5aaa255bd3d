"""Text that is read without gradients: by kernels that hold queries' features and both branches in one program."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_linear_attn.layers.spans import Piece
from hf_linear_attn.ops.dispatch import wants_kernels
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.prefill import Prefill, prefill, prefill_obstacle

if TYPE_CHECKING:
    from hf_linear_attn.layers.attention import LinearAttention


def read_in_one(
    layer: "LinearAttention", piece: Piece, carried: Mapping[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Attend as :meth:`LinearAttention.read` does; None where that has to do it."""
    backend, tokens, window = layer.settings.backend, piece.tokens, layer.window
    if not wants_kernels(backend, piece.q.device) or torch.is_grad_enabled() or layer.disabled:
        return None
    if layer.rule.name != "additive" or layer.mix.name != "key":
        return None
    of_q = layer.feature_map.pair("q")
    if of_q is None or tokens is None or window is None or piece.number is None or piece.key_positions is None:
        return None
    if prefill_obstacle(piece.q, tokens.k, tokens.v, of_q, window.size) is not None:
        return None
    count, turned, state = piece.q.shape[2], piece.rotation, carried or {}
    of_keys = None if tokens.rotation is None else tokens.rotation.cut(0, count)
    phi_k = features_of(
        layer.feature_map, tokens.k[:, :, :count], "k", piece.key_positions[:, :count], backend, of_keys
    )
    sink_k, sink_v, seen = piece.sinks(window.size) or (None, None, None)
    weights = layer.weights()
    found = prefill(
        Prefill(
            piece.q,
            tokens.k,
            tokens.v,
            phi_k,
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
        )
    )
    return found.o, {"kv": found.kv, "z": found.z, "far_keys": found.far_keys}
