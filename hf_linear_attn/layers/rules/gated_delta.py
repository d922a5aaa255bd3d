"""The gated delta rule: what is not replaced fades."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from hf_linear_attn.layers.rules.base import Sizes
from hf_linear_attn.layers.rules.delta import Delta
from hf_linear_attn.layers.rules.gates import DECAY_START, Gates, gate_weights, log_decays


class GatedDelta(Delta):
    """Compute the delta rule on a state that fades first, ``S = a S``, by the decay of :class:`Decay`.

    Yang et al., 2024, arXiv:2412.06464.
    """

    name: ClassVar[str] = "gated_delta"

    @override
    def weights(self, sizes: Sizes) -> dict[str, Tensor]:
        decay = gate_weights("decay", DECAY_START, sizes.num_kv_heads, sizes.head_dim, sizes.values)
        return super().weights(sizes) | decay

    @override
    def gates(self, k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Gates:
        return super().gates(k, v, weights)._replace(log_decay=log_decays(k, v, weights))
