"""Softmax over the head dimension."""

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import FeatureMap, register_feature_map


@register_feature_map
class Softmax(FeatureMap):
    """Compute ``softmax(x)`` over the head dimension; features lie in [0, 1] and sum to 1.

    Example:
        >>> import torch
        >>> Softmax(head_dim=4).phi_q(torch.zeros(1, 1, 1, 4)).flatten().tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    name: ClassVar[str] = "softmax"
    formula: ClassVar[str] = "softmax(x) over D"
    paper: ClassVar[str] = "Shen et al., 2018, arXiv:1812.01243 (there over tokens for k)"

    @override
    @property
    def feature_dim(self) -> int:
        return self.head_dim

    @override
    def phi(self, x: Tensor) -> Tensor:
        return x.softmax(-1)
