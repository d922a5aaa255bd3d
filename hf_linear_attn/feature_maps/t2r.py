"""T2R: a learned projection and a relu."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import CommonOptions, register_feature_map
from hf_linear_attn.feature_maps.learned import LearnedMap, Side, check_size, identity_like


@register_feature_map
class T2R(LearnedMap):
    """Compute ``relu(xW + b)`` with learned ``W [D, F]`` and ``b [F]``.

    Args:
        head_dim: Size ``D`` of a query or key.
        num_heads: Query heads ``H``.
        num_kv_heads: Key heads ``HKV``; defaults to ``num_heads``.
        num_features: ``F``; defaults to ``head_dim``. From ``2 * head_dim`` on, W starts as ``[I, -I, ...]``,
            which loses no sign.
        **options: As in :class:`FeatureMap`.

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

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        num_features: int | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(head_dim, num_heads, num_kv_heads, **options)
        self.num_features = head_dim if num_features is None else num_features
        check_size("num_features", self.num_features)
        self.add_weight("weight", identity_like(head_dim, self.num_features))
        self.add_weight("bias", torch.zeros(1, self.num_features))

    @override
    @property
    def feature_dim(self) -> int:
        return self.num_features

    @override
    def features(self, x: Tensor, side: Side) -> Tensor:
        return torch.relu(x @ self.weight_of("weight", side, x) + self.weight_of("bias", side, x))
