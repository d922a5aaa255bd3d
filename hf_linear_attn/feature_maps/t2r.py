"""T2R: a learned projection and a relu."""

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import register_feature_map
from hf_linear_attn.feature_maps.learned import ProjectedMap, Side


@register_feature_map
class T2R(ProjectedMap):
    """Compute ``relu(xW + b)`` with learned ``W [D, F]`` and ``b [F]``.

    Args:
        num_features: ``F``; defaults to ``head_dim``. From ``2 * head_dim`` on, W starts as ``[I, -I, ...]``,
            which loses no sign.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a size does not fit.

    Example:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> T2R(head_dim=2, num_features=4).phi_q(x.view(1, 1, 1, 2)).flatten().tolist()
        [0.0, 2.0, 1.0, 0.0]
    """

    name: ClassVar[str] = "t2r"
    formula: ClassVar[str] = "max(xW + b, 0)"
    paper: ClassVar[str] = "Kasai et al., 2021, arXiv:2103.13076"
    halves: ClassVar[int] = 1

    @override
    def add_weights(self, columns: int) -> None:
        super().add_weights(columns)
        self.add_weight("bias", torch.zeros(1, columns))

    @override
    def features(self, x: Tensor, side: Side) -> Tensor:
        return torch.relu(x @ self.weight_of("weight", side, x) + self.weight_of("bias", side, x))
