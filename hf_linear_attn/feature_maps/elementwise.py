"""Feature maps that act on each element; the kernels compute them while they load q and k."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import FeatureMap, feature_map_class, register_feature_map, upcast

EXP_CLAMP = 10.0
"""Largest exponent of exp-like maps: features then fit fp16 (22026 < 65504), and sums of a million fp32."""


class ElementwiseMap(FeatureMap):
    """A map that acts on each element, with its derivative, as backends with their own backward need it."""

    @override
    @property
    def feature_dim(self) -> int:
        return self.head_dim

    @abstractmethod
    def derivative(self, x: Tensor, features: Tensor) -> Tensor:
        """Return ``phi'(x)``, given ``x`` (upcast) and ``features = phi(x)``, whichever makes it cheaper."""


@register_feature_map
class Elu(ElementwiseMap):
    """Compute ``elu(x) + 1``, the map of Katharopoulos et al., 2020.

    Example:
        >>> Elu(head_dim=3).phi(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0.3679, 1.0000, 3.0000])
    """

    name: ClassVar[str] = "elu"
    formula: ClassVar[str] = "elu(x) + 1"
    paper: ClassVar[str] = "Katharopoulos et al., 2020, arXiv:2006.16236"
    kernel: str | None = "elu"

    @override
    def phi(self, x: Tensor) -> Tensor:
        # Half the time of torch's elu on CPUs, and as precise below 0; at 0 one summand has the gradient, not both.
        x = upcast(x)
        return x.clamp(max=0).exp() + torch.relu(x)

    @override
    def derivative(self, x: Tensor, features: Tensor) -> Tensor:
        # phi = exp(x) below 0 and >= 1 above it.
        return features.clamp(max=1)


@register_feature_map
class Relu(ElementwiseMap):
    """Compute ``relu(x)``; a query that overlaps with no key yields 0.

    Example:
        >>> Relu(head_dim=3).phi(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
    """

    name: ClassVar[str] = "relu"
    formula: ClassVar[str] = "max(x, 0)"
    paper: ClassVar[str] = "Qin et al., 2022, arXiv:2202.08791 (without the re-weighting)"
    kernel: str | None = "relu"

    @override
    def phi(self, x: Tensor) -> Tensor:
        return torch.relu(upcast(x))

    @override
    def derivative(self, x: Tensor, features: Tensor) -> Tensor:
        return (features > 0).to(features.dtype)


@register_feature_map
class SquaredRelu(ElementwiseMap):
    """Compute ``relu(x)^2``.

    Example:
        >>> SquaredRelu(head_dim=3).phi(torch.tensor([-1.0, 0.0, 3.0]))
        tensor([0., 0., 9.])
    """

    name: ClassVar[str] = "squared_relu"
    formula: ClassVar[str] = "max(x, 0)^2"
    paper: ClassVar[str] = "So et al., 2021, arXiv:2109.08668 (as an activation)"
    kernel: str | None = "squared_relu"

    @override
    def phi(self, x: Tensor) -> Tensor:
        return torch.relu(upcast(x)).square()

    @override
    def derivative(self, x: Tensor, features: Tensor) -> Tensor:
        return 2 * torch.relu(x)


@register_feature_map
class Exp(ElementwiseMap):
    """Compute ``exp(min(x, 10))``; the static maximum keeps features and sums finite in every dtype.

    Example:
        >>> Exp(head_dim=3).phi(torch.tensor([-1.0, 0.0, 99.0]))
        tensor([3.6788e-01, 1.0000e+00, 2.2026e+04])
    """

    name: ClassVar[str] = "exp"
    formula: ClassVar[str] = "exp(min(x, 10))"
    paper: ClassVar[str] = "Heinsen, 2024, arXiv:2404.05843"
    kernel: str | None = "exp"

    @override
    def phi(self, x: Tensor) -> Tensor:
        return upcast(x).clamp(max=EXP_CLAMP).exp()

    @override
    def derivative(self, x: Tensor, features: Tensor) -> Tensor:
        return features * (x <= EXP_CLAMP)


@register_feature_map
class Sigmoid(ElementwiseMap):
    """Compute ``sigmoid(x)``.

    Example:
        >>> Sigmoid(head_dim=3).phi(torch.tensor([-99.0, 0.0, 99.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """

    name: ClassVar[str] = "sigmoid"
    formula: ClassVar[str] = "1 / (1 + exp(-x))"
    paper: ClassVar[str] = "Wu et al., 2022, arXiv:2202.06258 (without its flow conservation)"
    kernel: str | None = "sigmoid"

    @override
    def phi(self, x: Tensor) -> Tensor:
        return torch.sigmoid(upcast(x))

    @override
    def derivative(self, x: Tensor, features: Tensor) -> Tensor:
        return features * (1 - features)


@register_feature_map
class Identity(ElementwiseMap):
    """Return ``x``; features change sign, so the normaliser can vanish: use it only where that is understood.

    Example:
        >>> Identity(head_dim=3).phi(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([-1.,  0.,  2.])
    """

    name: ClassVar[str] = "identity"
    formula: ClassVar[str] = "x"
    paper: ClassVar[str] = "Schlag et al., 2021, arXiv:2102.11174 (as a baseline)"
    non_negative: bool = False
    caution: ClassVar[str] = (
        "its features change sign, so the normaliser can come near 0 or change sign, and outputs can grow without bound"
    )
    kernel: str | None = "identity"

    @override
    def phi(self, x: Tensor) -> Tensor:
        return upcast(x)

    @override
    def derivative(self, x: Tensor, features: Tensor) -> Tensor:
        return torch.ones_like(features)


def elementwise_map(kernel: str) -> ElementwiseMap:
    """Return the elementwise map that has that kernel name now, one instance for all callers.

    Example:
        >>> elementwise_map("relu").name
        'relu'
    """
    cls = feature_map_class(kernel)
    if not issubclass(cls, ElementwiseMap):
        raise TypeError(f"{kernel!r} is no elementwise map")
    if cls not in _instances:
        _instances[cls] = cls(head_dim=1)
    return _instances[cls]


_instances: dict[type[ElementwiseMap], ElementwiseMap] = {}
"""No `functools.cache`: of those a compiler warns."""
