"""Decay: the sums of the additive rule, fading with every key."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.rules.additive import Additive
from hf_linear_attn.layers.rules.base import RuleCall, Sizes
from hf_linear_attn.layers.rules.gates import DECAY_START, Gates, gate_weights, log_decays

HUGE = 1e30
"""An eps beside which a normaliser is nothing, so that outputs are numerators over it."""


class Decay(Additive):
    """Compute ``o = phi(q)^T S / (phi(q)^T z + eps)``, ``S = a S + phi(k) v^T``, ``z = a z + phi(k)``.

    The decay ``a = exp(-softplus(b + u.k + w.v))`` of each key is learned per key head: the scalar gate of Mamba-2
    (Dao and Gu, 2024, arXiv:2405.21060) with a normaliser that fades alike. A mean over keys stays a mean.
    """

    name: ClassVar[str] = "decay"
    ordered: ClassVar[bool] = True

    @override
    def weights(self, sizes: Sizes) -> dict[str, Tensor]:
        return gate_weights("decay", DECAY_START, sizes.num_kv_heads, sizes.head_dim, sizes.values)

    @override
    def gates(self, k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Gates:
        return Gates(log_decay=log_decays(k, v, weights))

    @override
    def mass(self, call: RuleCall, state: Mapping[str, Tensor] | None) -> Tensor:
        # What queries read of values of 1, not divided.
        q, k = upcast(call.phi_q), upcast(call.phi_k)
        ones = call._replace(phi_q=q, phi_k=k, v=k.new_ones(*k.shape[:3], 1), with_mass=False)
        before = None if state is None else {"kv": state["z"][..., None], "z": state["z"]}
        return Decay(HUGE, self.backend).read(ones, before).o[..., 0] * HUGE
