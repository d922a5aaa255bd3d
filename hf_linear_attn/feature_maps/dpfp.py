"""DPFP: deterministic parameter-free projection."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import CommonOptions, FeatureMap, register_feature_map
from hf_linear_attn.feature_maps.learned import check_size


@register_feature_map
class DPFP(FeatureMap):
    """Compute ``r_i r_(i+j)`` for ``j = 1 ... nu`` with ``r = relu(cat[x, -x])``, indices modulo 2D.

    Args:
        nu: Products per entry, in [1, 2 D - 1].
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a size does not fit.

    Example:
        >>> DPFP(head_dim=2).phi_q(torch.tensor([2.0, 3.0]).view(1, 1, 1, 2)).flatten().tolist()
        [0.0, 6.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "dpfp"
    formula: ClassVar[str] = "r_i r_(i+j), j = 1 ... nu, r = max([x, -x], 0)"
    paper: ClassVar[str] = "Schlag et al., 2021, arXiv:2102.11174"

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        nu: int = 1,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(head_dim, num_heads, num_kv_heads, **options)
        check_size("nu", nu, at_most=2 * head_dim - 1)
        self.nu = nu

    @override
    @property
    def feature_dim(self) -> int:
        return 2 * self.head_dim * self.nu

    @override
    def phi(self, x: Tensor) -> Tensor:
        r = torch.relu(torch.cat([x, -x], dim=-1))
        return torch.cat([r * r.roll(j, -1) for j in range(1, self.nu + 1)], dim=-1)
