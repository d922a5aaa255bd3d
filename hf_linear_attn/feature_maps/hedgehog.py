"""Hedgehog: learned features that keep softmax's spikiness and monotonicity."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_linear_attn.feature_maps.base import FeatureMap, register_feature_map, upcast


@register_feature_map
class Hedgehog(FeatureMap):
    """Compute ``cat[softmax(xW), softmax(-xW)]`` with a learned ``W [D, D]`` per head.

    ``x`` is scaled by the square root of the softmax scale; ``W`` starts as the identity over all of ``D``, because
    half of the dimensions would break the pairs that rotary embeddings turn together.
    """

    name: ClassVar[str] = "hedgehog"
    formula: ClassVar[str] = "cat[softmax(xW), softmax(-xW)], W per head"
    paper: ClassVar[str] = "Zhang et al., 2024, arXiv:2402.04347"
    learned: ClassVar[bool] = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        scaling: float | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads, num_kv_heads, scaling=scaling)
        self.weight_q = nn.Parameter(torch.eye(head_dim).repeat(self.num_heads, 1, 1))
        self.weight_k = nn.Parameter(torch.eye(head_dim).repeat(self.num_kv_heads, 1, 1))

    @property
    def feature_dim(self) -> int:
        return 2 * self.head_dim

    def _features(self, x: Tensor, weight: Tensor) -> Tensor:
        y = torch.einsum("bhtd,hdf->bhtf", upcast(x) * self.scaling**0.5, weight.to(upcast(x).dtype))
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._features(q, self.weight_q)

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._features(k, self.weight_k)
