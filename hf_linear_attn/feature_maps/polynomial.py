"""Polynomial kernels of q.k, exact by their symmetric expansion, and the learned maps built on them."""

import math
from itertools import combinations_with_replacement
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps.base import CommonOptions, FeatureMap, register_feature_map
from hf_linear_attn.feature_maps.learned import MAX_FEATURES, LearnedMap, Side, check_size

MAX_CONSTANT = 1e30
"""Largest constant of the polynomial map: fp32 and bf16 hold it, and its root."""
MAX_POWER = 64
"""Largest power of the polynomial map: weights of monomials are ratios of factorials, in float64."""


class Monomials:
    """All monomials of one degree, weighted such that ``<f(x), f(y)> = (x.y)^degree``.

    Symmetric: ``x_1 x_2`` and ``x_2 x_1`` are one feature with weight ``sqrt(2)``, which leaves
    ``binomial(dim + degree - 1, degree)`` of the ``dim^degree`` products.

    Args:
        dim: Size of x.
        degree: Degree, >= 1.

    Example:
        >>> Monomials(2, 2)(torch.tensor([3.0, 1.0]))
        tensor([9.0000, 4.2426, 1.0000])
    """

    def __init__(self, dim: int, degree: int) -> None:
        rows = list(combinations_with_replacement(range(dim), degree))
        weights = [
            math.sqrt(math.factorial(degree) / math.prod(math.factorial(row.count(i)) for i in set(row)))
            for row in rows
        ]
        # No buffers: they follow from the sizes, and models built on the meta device would lose unsaved ones.
        self._indices = torch.tensor(rows, device="cpu").T.contiguous()
        self._weights = torch.tensor(weights, dtype=torch.float64, device="cpu")

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``x [..., dim]`` to its monomials, in its dtype."""
        if self._indices.device != x.device:
            self._indices, self._weights = self._indices.to(x.device), self._weights.to(x.device)
        y = x[..., self._indices[0]] * self._weights.to(x.dtype)
        for index in self._indices[1:]:
            y = y * x[..., index]
        return y


@register_feature_map
class Polynomial(FeatureMap):
    """Expand ``(scaling q.k + c)^p`` exactly.

    ``F = binomial(D + p, p)`` features (``binomial(D + p - 1, p)`` where c = 0): the monomials of degree p of
    ``[sqrt(scaling) x, sqrt(c)]``. With an even power the kernel is never negative, though features are.

    Args:
        power: ``p``, >= 1.
        constant: ``c``, from 0 to 1e30.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a setting is out of range, or there would be more than 65536 features.

    Example:
        >>> phi = Polynomial(head_dim=3, power=2, constant=1.0, scaling=0.5)
        >>> q, k = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 1, 3), torch.ones(1, 1, 1, 3)
        >>> round((phi.phi_q(q) @ phi.phi_k(k).mT).item(), 4)
        16.0
    """

    name: ClassVar[str] = "polynomial"
    formula: ClassVar[str] = "phi(q).phi(k) = (scaling q.k + c)^p"
    paper: ClassVar[str] = "Kacham et al., 2023, arXiv:2310.01655 (there sketched; here exact)"

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        power: int = 2,
        constant: float = 1.0,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(head_dim, num_heads, num_kv_heads, **options)
        check_size("power", power, at_most=MAX_POWER)
        if not 0 <= constant <= MAX_CONSTANT:
            raise ArgumentError(
                "constant", f"be at least 0 and at most {MAX_CONSTANT:.0e}", constant, "The default is 1."
            )
        self.power, self.constant = power, constant
        self.non_negative = power % 2 == 0
        self._dim = head_dim + (constant > 0)
        if self.feature_dim > MAX_FEATURES:
            remedy = f"It would give {self.feature_dim}; lower it."
            raise ArgumentError("power", f"give at most {MAX_FEATURES} features at head_dim={head_dim}", power, remedy)
        self._monomials = Monomials(self._dim, power)

    @override
    @property
    def feature_dim(self) -> int:
        return math.comb(self._dim + self.power - 1, self.power)

    @override
    def phi(self, x: Tensor) -> Tensor:
        x = x * math.sqrt(self.scaling)
        if self.constant > 0:
            x = nn.functional.pad(x, (0, 1), value=math.sqrt(self.constant))
        return self._monomials(x)


class ReducedMap(LearnedMap):
    """A learned projection of the head dimension to ``d``, for maps whose size grows with its square.

    Args:
        reduced_dim: ``d``, at most D.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a size does not fit.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        reduced_dim: int | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(head_dim, num_heads, num_kv_heads, **options)
        self.reduced_dim = min(16, head_dim) if reduced_dim is None else reduced_dim
        check_size("reduced_dim", self.reduced_dim, at_most=head_dim)
        self.add_weights(self.reduced_dim)
        self._squares = Monomials(self.reduced_dim, 2)

    def reduced(self, x: Tensor, side: Side) -> Tensor:
        """Project ``x [B, heads, T, D]`` to ``[B, heads, T, d]``."""
        return x @ self.weight_of("weight", side, x)


@register_feature_map
class Taylor(ReducedMap):
    """Expand ``1 + s + s^2 / 2``, ``s = scaling (qW).(kW)``: softmax's kernel to second order, at least 1/2.

    ``F = 1 + d + d (d + 1) / 2`` features, 153 at d = 16. With ``reduced_dim = D``, W starts as the identity,
    and s as softmax's own score.

    Args:
        reduced_dim: ``d``, at most D; defaults to 16, or D where that is less.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a size does not fit.

    Example:
        >>> phi = Taylor(head_dim=2, reduced_dim=2, scaling=0.5)
        >>> q, k = torch.tensor([0.5, 1.0]).view(1, 1, 1, 2), torch.tensor([2.0, 1.0]).view(1, 1, 1, 2)
        >>> round((phi.phi_q(q) @ phi.phi_k(k).mT).item(), 4)
        2.5
    """

    name: ClassVar[str] = "taylor"
    formula: ClassVar[str] = "phi(q).phi(k) = 1 + s + s^2 / 2, s = scaling (qW).(kW)"
    paper: ClassVar[str] = "Arora et al., 2024, arXiv:2402.18668"

    @override
    @property
    def feature_dim(self) -> int:
        return 1 + self.reduced_dim + self.reduced_dim * (self.reduced_dim + 1) // 2

    @override
    def features(self, x: Tensor, side: Side) -> Tensor:
        y = self.reduced(x, side) * math.sqrt(self.scaling)
        return torch.cat([torch.ones_like(y[..., :1]), y, self._squares(y) / math.sqrt(2)], dim=-1)


@register_feature_map
class ReBased(ReducedMap):
    """Expand ``(q'.k')^2 / d`` with ``x' = gamma norm(xW) + beta``: a quadratic kernel that learns its zeros.

    ``F = d (d + 1) / 2`` features, 136 at d = 16. ``norm`` is a layer norm, ``gamma`` starts at 1 and
    ``beta`` at 0.

    Args:
        reduced_dim: ``d``, at most D; defaults to 16, or D where that is less.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a size does not fit.

    Example:
        >>> phi = ReBased(head_dim=4, reduced_dim=4)
        >>> x = torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, 1, 1, 4)
        >>> round((phi.phi_q(x) @ phi.phi_k(x).mT).item(), 3)
        4.0
    """

    name: ClassVar[str] = "rebased"
    formula: ClassVar[str] = "phi(q).phi(k) = (q'.k')^2 / d, x' = gamma norm(xW) + beta"
    paper: ClassVar[str] = "Aksenov et al., 2024, arXiv:2402.10644"

    @override
    def add_weights(self, columns: int) -> None:
        super().add_weights(columns)
        self.add_weight("gamma", torch.ones(1, columns))
        self.add_weight("beta", torch.zeros(1, columns))

    @override
    @property
    def feature_dim(self) -> int:
        return self.reduced_dim * (self.reduced_dim + 1) // 2

    @override
    def features(self, x: Tensor, side: Side) -> Tensor:
        y = nn.functional.layer_norm(self.reduced(x, side), (self.reduced_dim,))
        y = y * self.weight_of("gamma", side, x) + self.weight_of("beta", side, x)
        return self._squares(y) / math.sqrt(self.reduced_dim)
