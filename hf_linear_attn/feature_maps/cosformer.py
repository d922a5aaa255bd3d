"""cosFormer: relu features re-weighted by distance."""

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps.base import CommonOptions, FeatureMap, register_feature_map
from hf_linear_attn.feature_maps.learned import check_size

LONGEST = 2**31 - 1
"""Largest ``max_length``."""


@register_feature_map
class CosFormer(FeatureMap):
    """Compute ``relu(x)`` times ``[cos(a), sin(a)]``, ``a = pi/2 position / M``.

    The product of two features is then ``relu(q).relu(k) cos(pi/2 (i - j) / M)``: near tokens count more, and
    a shift of all positions (as left padding brings) changes nothing.

    Args:
        max_length: ``M``, more than the largest position; cos would change sign beyond it.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If ``max_length`` is not positive.

    Example:
        >>> phi, one = CosFormer(head_dim=1, max_length=3), torch.ones(1, 1, 3, 1)
        >>> (phi.phi_q(one) @ phi.phi_k(one).mT)[0, 0, 0]
        tensor([1.0000, 0.8660, 0.5000])
    """

    name: ClassVar[str] = "cosformer"
    formula: ClassVar[str] = "max(x, 0) [cos(a), sin(a)], a = pi/2 position / M"
    paper: ClassVar[str] = "Qin et al., 2022, arXiv:2202.08791"

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        max_length: int = 8192,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(head_dim, num_heads, num_kv_heads, **options)
        check_size("max_length", max_length, at_most=LONGEST)
        self.max_length = max_length

    @override
    @property
    def feature_dim(self) -> int:
        return 2 * self.head_dim

    def _reweighted(self, x: Tensor, positions: Tensor | None) -> Tensor:
        x = torch.relu(self.scaled(x))
        if positions is None:
            positions = torch.arange(x.shape[2], device=x.device)[None]
        # Reading the largest position waits for the device; a compiled or captured call cannot, and goes
        # unchecked.
        if not (torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())):
            last = int(positions.max())
            if last >= self.max_length:
                remedy = "Set it to the longest context you will use."
                raise ArgumentError("max_length", f"exceed the largest position, {last}", self.max_length, remedy)
        # Of keys that leave a window and are kept for a while, every head reads others.
        positions = positions if positions.ndim == 3 else positions[:, None]
        angle = positions[..., None].to(x.dtype) * (math.pi / 2 / self.max_length)
        return torch.cat([x * angle.cos(), x * angle.sin()], dim=-1)

    @override
    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._reweighted(q, positions)

    @override
    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._reweighted(k, positions)
