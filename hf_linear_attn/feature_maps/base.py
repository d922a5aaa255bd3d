"""The feature-map interface and its registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError, explain


class FeatureMap(nn.Module, ABC):
    """Map queries and keys to features whose inner product stands in for ``exp(scaling * q.k)``.

    A subclass sets the class variables, computes features in :meth:`phi_q` and :meth:`phi_k` (or only in :meth:`phi`
    where both sides are alike), and declares their size in :attr:`feature_dim`. Features are computed in fp32, or in
    fp64 for fp64 inputs.

    Args:
        head_dim: Size ``D`` of a query or key.
        num_heads: Query heads ``H``; only maps with parameters per head use it.
        num_kv_heads: Key heads ``HKV``; defaults to ``num_heads``.
        scaling: The softmax scale that the map stands in for; defaults to ``head_dim ** -0.5``. Maps that do not
            approximate softmax ignore it.

    Raises:
        ArgumentError: If a size is not positive or ``num_heads`` is no multiple of ``num_kv_heads``.
    """

    name: ClassVar[str]
    """The word by which users ask for the map."""
    formula: ClassVar[str]
    """phi(x) in one line."""
    paper: ClassVar[str]
    """Where it comes from."""
    learned: ClassVar[bool] = False
    """Whether the map has parameters that distillation trains."""
    non_negative: ClassVar[bool] = True
    """Whether every feature is >= 0, so that the normaliser cannot vanish or change sign."""
    kernel: ClassVar[str | None] = None
    """Name of the elementwise map inside the kernels, or None where features are computed first."""

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        scaling: float | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for argument, value in (
            ("head_dim", head_dim),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
        ):
            if value < 1:
                raise ArgumentError(
                    explain(argument, "be at least 1", value, "Pass the attention layer's own size.")
                )
        if num_heads % num_kv_heads:
            raise ArgumentError(
                explain(
                    "num_kv_heads", f"divide num_heads={num_heads}", num_kv_heads, "Check the model's config."
                )
            )
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads
        self.scaling = head_dim**-0.5 if scaling is None else scaling

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """Number ``F`` of features."""

    def phi(self, x: Tensor) -> Tensor:
        """Map ``x`` of shape ``[..., D]`` to features of shape ``[..., F]``, the same for both sides."""
        raise NotImplementedError(f"{type(self).__name__} must define phi, or phi_q and phi_k")

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map queries to features.

        Args:
            q: Queries ``[B, H, T, D]``.
            positions: Token positions ``[B, T]``, int64; only position-dependent maps read them.

        Returns:
            Features ``[B, H, T, F]``, fp32 (fp64 for fp64 input).
        """
        return self.phi(q)

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map keys ``[B, HKV, S, D]`` to features ``[B, HKV, S, F]``; see :meth:`phi_q`."""
        return self.phi(k)


def upcast(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype in which features are computed: fp32, or fp64 for fp64 input."""
    return x if x.dtype == torch.float64 else x.float()


FeatureMapFactory = Callable[..., FeatureMap]
_MapT = TypeVar("_MapT", bound=type[FeatureMap])
_REGISTRY: dict[str, type[FeatureMap]] = {}


def register_feature_map(cls: _MapT) -> _MapT:
    """Register a :class:`FeatureMap` subclass under its ``name``; usable as a decorator.

    Args:
        cls: The class. Its constructor takes ``(head_dim, num_heads, num_kv_heads, *, scaling, **options)``.

    Returns:
        The class itself.

    Raises:
        ArgumentTypeError: If ``cls`` is no subclass of FeatureMap.
        ArgumentError: If its name is empty, or taken by another class.

    Example:
        >>> import torch
        >>> from hf_linear_attn import register_feature_map
        >>> from hf_linear_attn.feature_maps import FeatureMap, get_feature_map
        >>> @register_feature_map
        ... class Cubed(FeatureMap):
        ...     name, formula, paper = "cubed_relu", "relu(x)^3", "none"
        ...     @property
        ...     def feature_dim(self):
        ...         return self.head_dim
        ...     def phi(self, x):
        ...         return torch.relu(x.float()) ** 3
        >>> get_feature_map("cubed_relu", head_dim=4).feature_dim
        4
    """
    if not (isinstance(cls, type) and issubclass(cls, FeatureMap)):
        raise ArgumentTypeError(
            explain("cls", "be a subclass of FeatureMap", cls, "Derive your class from FeatureMap.")
        )
    for attribute in ("name", "formula", "paper"):
        if not getattr(cls, attribute, ""):
            raise ArgumentError(
                explain(
                    attribute,
                    "be a non-empty class variable",
                    getattr(cls, attribute, None),
                    f"Set {attribute}.",
                )
            )
    holder = _REGISTRY.get(cls.name)
    # Re-running a notebook cell or reloading a module defines the same class anew; only a different one is a clash.
    if holder is not None and (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ArgumentError(
            explain(
                "name", f"not be taken, and {holder.__qualname__} has it", cls.name, "Choose another name."
            )
        )
    _REGISTRY[cls.name] = cls
    return cls


def available_feature_maps() -> tuple[str, ...]:
    """Return the names of all registered feature maps, sorted.

    Example:
        >>> "elu" in available_feature_maps()
        True
    """
    return tuple(sorted(_REGISTRY))


def feature_map_class(name: str) -> type[FeatureMap]:
    """Return the class registered under ``name``.

    Raises:
        ArgumentError: If no map has that name; the message lists those there are.
    """
    if name not in _REGISTRY:
        raise ArgumentError(
            explain(
                "feature_map",
                "be a registered name",
                name,
                "Use one of those",
                available=available_feature_maps(),
            )
        )
    return _REGISTRY[name]


def get_feature_map(
    name: str,
    head_dim: int,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    *,
    scaling: float | None = None,
    **options: object,
) -> FeatureMap:
    """Build a registered feature map.

    Args:
        name: A registered name.
        head_dim: Size ``D`` of a query or key.
        num_heads: Query heads ``H``.
        num_kv_heads: Key heads ``HKV``; defaults to ``num_heads``.
        scaling: Softmax scale; defaults to ``head_dim ** -0.5``.
        **options: The map's own settings.

    Returns:
        The map, a new module.

    Raises:
        ArgumentError: If the name is unknown, or the map has no such option.
    """
    cls = feature_map_class(name)
    try:
        return cls(head_dim, num_heads, num_kv_heads, scaling=scaling, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ArgumentError(
            explain("feature_map_options", f"be settings of the map {name!r}", options, f"{error}.")
        ) from error
