"""Hedgehog: learned features that keep softmax's spikiness and monotonicity."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import Pair, register_feature_map
from hf_linear_attn.feature_maps.learned import ProjectedMap, Side


@register_feature_map
class Hedgehog(ProjectedMap):
    """Compute ``cat[softmax(yW), softmax(-yW)]`` with a learned ``W [D, F / 2]``.

    ``y`` is x scaled by the square root of the softmax scale.

    Args:
        num_features: ``F``, even; defaults to ``2 * head_dim``.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a size does not fit.

    Example:
        >>> phi = Hedgehog(head_dim=8, num_heads=4, num_kv_heads=2)
        >>> phi.weight_q.shape, phi.weight_k.shape
        (torch.Size([4, 8, 8]), torch.Size([2, 8, 8]))
        >>> phi.phi_q(torch.zeros(1, 4, 3, 8)).shape
        torch.Size([1, 4, 3, 16])
    """

    name: ClassVar[str] = "hedgehog"
    formula: ClassVar[str] = "cat[softmax(yW), softmax(-yW)], y = sqrt(scaling) x"
    paper: ClassVar[str] = "Zhang et al., 2024, arXiv:2402.04347"
    joint: ClassVar[bool] = True

    @override
    def pair(self, side: Side) -> Pair:
        factor = self.scale * math.sqrt(self.scaling)
        return Pair("hedgehog", self.weight_of("weight", side), factor)

    @override
    def features(self, x: Tensor, side: Side) -> Tensor:
        return _halves((x * math.sqrt(self.scaling)) @ self.weight_of("weight", side, x))

    @override
    def phi_step(self, q: Tensor, k: Tensor) -> Tensor:
        return _halves(self.columns_of_step(q, k) * math.sqrt(self.scaling))


def _halves(y: Tensor) -> Tensor:
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)
