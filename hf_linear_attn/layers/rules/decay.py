"""Decay: the sums of the additive rule, fading with every key."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.feature_maps.elementwise import elementwise_map
from hf_linear_attn.layers.rules.additive import Additive
from hf_linear_attn.layers.rules.base import Reading, RuleCall, Sizes
from hf_linear_attn.layers.rules.gates import DECAY_START, Gates, gate_weights, log_decays
from hf_linear_attn.ops import LinearAttentionState, linear_attention

HUGE = 1e30
"""An eps beside which a normaliser is nothing, so that outputs are numerators over it."""


class Decay(Additive):
    """Compute ``o = phi(q)^T S / (phi(q)^T z + eps)``, ``S = a S + phi(k) v^T``, ``z = a z + phi(k)``.

    The decay ``a = exp(-softplus(b + u.k + w.v))`` of each key is learned per key head: the scalar gate of Mamba-2
    (Dao and Gu, 2024, arXiv:2405.21060) with a normaliser that fades alike. A mean over keys stays a mean.
    """

    name: ClassVar[str] = "decay"
    provides: ClassVar[frozenset[str]] = frozenset({"mass"})
    ordered: ClassVar[bool] = True

    @override
    def weights(self, sizes: Sizes) -> dict[str, Tensor]:
        return gate_weights("decay", DECAY_START, sizes.num_kv_heads, sizes.head_dim, sizes.values)

    @override
    def gates(self, k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Gates:
        return Gates(log_decay=log_decays(k, v, weights))

    @override
    def read(self, call: RuleCall, state: Mapping[str, Tensor] | None) -> Reading:
        def attend(
            q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, eps: float
        ) -> tuple[Tensor, LinearAttentionState]:
            return linear_attention(
                q,
                k,
                v,
                None if call.kernel is None else elementwise_map(call.kernel),
                causal=call.causal,
                key_mask=call.key_mask,
                cu_seqlens=call.cu_seqlens,
                state=None if state is None or kv is None else LinearAttentionState(kv, state["z"]),
                delay=call.delay,
                eps=eps,
                backend=self.backend,
                log_decay=None if call.gates is None else call.gates.log_decay,
            )

        o, final = attend(call.phi_q, call.phi_k, call.v, None if state is None else state["kv"], self.eps)
        mass = None
        if call.with_mass:
            # What queries read of values of 1, not divided.
            q, k = upcast(call.phi_q), upcast(call.phi_k)
            z = None if state is None else state["z"][..., None]
            mass = attend(q, k, k.new_ones(*k.shape[:3], 1), z, HUGE)[0][..., 0] * HUGE
        return Reading(o, {"kv": final.kv, "z": final.z}, mass)
