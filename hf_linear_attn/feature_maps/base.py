"""The feature-map interface and its registry."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from inspect import Parameter, signature
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, TypeVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from hf_linear_attn.checks import check_type
from hf_linear_attn.errors import ArgumentError, ArgumentTypeError
from hf_linear_attn.files import run_file

logger = getLogger(__name__)


class CommonOptions(TypedDict, total=False):
    """Settings that every map takes; see :class:`FeatureMap`."""

    scaling: float | None
    scale: float
    separate: bool
    per_head: bool


class Pair(NamedTuple):
    """What a kernel needs to know of a map whose features are one half of ``y = factor x W`` and one of ``-y``.

    Attributes:
        name: The kernel's word for the halves.
        weight: ``W [heads or 1, D, F / 2]``.
        factor: On ``x W``.
        power: ``[heads or 1]``, of the norm-preserving map.
        sharpness: By which a query's power grows with its length, likewise; 0 for keys.
    """

    name: str
    weight: Tensor
    factor: float
    power: Tensor | None = None
    sharpness: float = 0.0


class FeatureMap(nn.Module, ABC):
    """Map queries and keys to features whose inner product stands in for ``exp(scaling * q.k)``.

    A subclass sets the class variables, computes features in :meth:`phi_q` and :meth:`phi_k` (or only in
    :meth:`phi` where both sides are alike), and declares their size in :attr:`feature_dim`. Features are
    computed in fp32, or in fp64 for fp64 inputs: :meth:`phi` gets what :meth:`scaled` returns, and a subclass
    with its own ``phi_q`` and ``phi_k`` begins with that call.

    Args:
        head_dim: Size ``D`` of a query or key.
        num_heads: Query heads ``H``; only maps with parameters per head use it.
        num_kv_heads: Key heads ``HKV``; defaults to ``num_heads``.
        scaling: The softmax scale that the map stands in for; defaults to ``head_dim ** -0.5``. Maps that do
            not approximate softmax ignore it.
        scale: Factor on q and k before the map, > 0: ``phi(scale * x)``. With a scale other than 1, features
            are computed before the kernels, not inside them.
        separate: Whether q and k have weights of their own; a map without weights has nothing to separate.
        per_head: Whether every head has weights of its own; a map without weights is the same for all.

    Raises:
        ArgumentError: If a size or scale is not positive or ``num_heads`` is no multiple of ``num_kv_heads``.
    """

    name: ClassVar[str]
    """The word by which users ask for the map."""
    formula: ClassVar[str]
    """phi(x) in one line."""
    paper: ClassVar[str]
    """Where it comes from."""
    learned: ClassVar[bool] = False
    """Whether the map has parameters that distillation trains."""
    non_negative: bool = True
    """Whether ``phi(q)^T phi(k) >= 0`` for all q and k, so that the normaliser cannot change sign."""
    caution: ClassVar[str] = ""
    """What users should know before they choose the map; logged when it is built, and shown in the docs."""
    positional: ClassVar[bool] = True
    """Whether :meth:`phi_q` or :meth:`phi_k` read positions; maps that define only :meth:`phi` cannot."""
    joint: ClassVar[bool] = False
    """Whether there is a :meth:`phi_step`."""
    kernel: str | None = None
    """Name of the elementwise map inside the kernels, or None where features are computed first."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Leave a subclass that computes other features than its parent without the parent's shortcuts to them."""
        super().__init_subclass__(**options)
        own = vars(cls).keys()
        if own & {"scaled", "phi", "phi_q", "phi_k", "features"}:
            shortcuts = {"kernel": None, "joint": False, "pair": FeatureMap.pair}
            for name in shortcuts.keys() - own:
                setattr(cls, name, shortcuts[name])

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        scaling: float | None = None,
        scale: float = 1.0,
        separate: bool = True,
        per_head: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"head_dim": head_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for argument, value in sizes.items():
            if check_type(argument, value, int) < 1:
                raise ArgumentError(argument, "be at least 1", value, "Pass the attention layer's own size.")
        if num_heads % num_kv_heads:
            rule = f"divide num_heads={num_heads}"
            raise ArgumentError("num_kv_heads", rule, num_kv_heads, "Check the model's config.")
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, num_heads, num_kv_heads
        self.scaling = head_dim**-0.5 if scaling is None else scaling
        for argument, factor in (("scaling", self.scaling), ("scale", scale)):
            if not 0 < check_type(argument, factor, float) < float("inf"):
                raise ArgumentError(argument, "be positive and finite", factor, "Leave it out for the default.")
        self.scale, self.separate, self.per_head = scale, separate, per_head
        if scale != 1:
            # The kernels read q and k as they are.
            self.kernel = None

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """Number ``F`` of features."""

    def forward(
        self, x: Tensor, side: Literal["q", "k"], positions: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Map queries or keys to features, by :meth:`phi_q` or :meth:`phi_k`, or with ``key`` by :meth:`phi_step`.

        A map is called so that what keeps weights elsewhere, as Accelerate's offloading does, can fetch them.
        """
        if key is not None:
            return self.phi_step(x, key)
        return self.phi_q(x, positions) if side == "q" else self.phi_k(x, positions)

    @property
    def hooked(self) -> bool:
        """Whether hooks listen to the map's calls, its own or global ones; kernels call no map."""
        own = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return bool(own or _has_any_global_hook())  # type: ignore[no-untyped-call]

    def pair(self, side: Literal["q", "k"]) -> Pair | None:
        """Return what a kernel needs to compute the features of one side; None where there is none."""
        return None

    def scaled(self, x: Tensor) -> Tensor:
        """Return ``scale * x`` in the dtype in which features are computed."""
        x = upcast(x)
        return x if self.scale == 1 else x * self.scale

    def phi(self, x: Tensor) -> Tensor:
        """Map ``x`` of shape ``[..., D]``, scaled, to features ``[..., F]``, the same for both sides."""
        raise NotImplementedError(f"{type(self).__name__} must define phi, or phi_q and phi_k")

    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map queries to features.

        Args:
            q: Queries ``[B, H, T, D]``.
            positions: Token positions ``[B, T]``, int64; only position-dependent maps read them.

        Returns:
            Features ``[B, H, T, F]``, fp32 (fp64 for fp64 input).
        """
        return saturated(self.phi(self.scaled(q)), q.dtype)

    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map keys ``[B, HKV, S, D]`` to features ``[B, HKV, S, F]``; see :meth:`phi_q`."""
        return saturated(self.phi(self.scaled(k)), k.dtype)

    def phi_step(self, q: Tensor, k: Tensor) -> Tensor:
        """Map the queries and the key of a step in fewer operations than one after the other.

        Args:
            q: Queries ``[B, HKV, G, D]``.
            k: Keys ``[B, HKV, 1, D]``.

        Returns:
            Features of the key and of the queries after it, ``[B, HKV, 1 + G, F]``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no phi_step")


def upcast(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype in which features are computed: fp32, or fp64 for fp64 input."""
    return x if x.dtype == torch.float64 else x.float()


def second_gradients(ctx: Any, function: Callable[..., Tensor], inputs: Sequence[Any], *do: Tensor) -> tuple[Any, ...]:
    """Return gradients that can be differentiated again, by way of the plain form of an autograd function.

    Args:
        ctx: The function's.
        function: Its plain form.
        inputs: The arguments that it takes, in order.
        *do: Gradients of its results.
    """
    wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(function(*inputs), wanted, do, create_graph=True))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def saturated(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Return features that stay finite in ``dtype``, that of the model, in which the kernels read them."""
    if dtype != torch.float16:
        return features
    largest = torch.finfo(dtype).max
    return features.clamp(-largest, largest)


_MapT = TypeVar("_MapT", bound=type[FeatureMap])
_REGISTRY: dict[str, type[FeatureMap]] = {}


def register_feature_map(cls: _MapT) -> _MapT:
    """Register a :class:`FeatureMap` subclass under its ``name``; usable as a decorator.

    Args:
        cls: The class. Its constructor takes ``(head_dim, num_heads, num_kv_heads, *, scaling, **options)``.

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
        raise ArgumentTypeError("cls", "be a subclass of FeatureMap", cls, "Derive your class from FeatureMap.")
    for attribute in ("name", "formula", "paper"):
        if not getattr(cls, attribute, ""):
            remedy = f"Set {attribute}."
            raise ArgumentError(attribute, "be a non-empty class variable", getattr(cls, attribute, None), remedy)
    holder = _REGISTRY.get(cls.name)
    # Re-running a notebook cell or reloading a module defines the same class anew, which is no clash.
    if holder is not None and (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ArgumentError("name", f"not be taken, and {holder.__qualname__} has it", cls.name, "Choose another name.")
    _REGISTRY[cls.name] = cls
    return cls


def load_feature_maps(file: str | Path) -> tuple[str, ...]:
    """Run a Python file that registers feature maps of your own, so that their names work everywhere.

    Args:
        file: The file. It runs with your rights: load only what you trust.

    Returns:
        The names it registered, sorted.

    Raises:
        ArgumentError: If there is no such Python file, or it registers nothing.
    """
    module_name = run_file(file, "file", "feature_maps_of_")
    names = tuple(sorted(name for name, cls in _REGISTRY.items() if cls.__module__ == module_name))
    if not names:
        remedy = "Decorate your class with register_feature_map."
        raise ArgumentError("file", "register a feature map", str(file), remedy)
    return names


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
    if not isinstance(name, str) or name not in _REGISTRY:
        remedy = "Import what registers it first, or call load_feature_maps (--feature-map-file), or use one of those"
        raise ArgumentError("feature_map", "be a registered name", name, remedy, available=available_feature_maps())
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
        **options: Settings common to all maps (``scale``, ``separate``, ``per_head``) and the map's own.

    Raises:
        ArgumentError: If the name is unknown, the map has no such option, or a value is out of its range.
        ArgumentTypeError: If an option has another type than the map declares.

    Example:
        >>> get_feature_map("hedgehog", head_dim=8, separate=False).feature_dim
        16
    """
    cls = feature_map_class(name)
    known = map_options(cls)
    for option in options:
        if option not in known:
            rule = f"be settings of the map {name!r}"
            raise ArgumentError("feature_map_options", rule, option, "Use some of those", available=known)
    if options:
        kinds = _option_types(cls)
        options = {option: check_type(option, value, kinds[option], where=name) for option, value in options.items()}
    if cls.caution:
        _caution(name, cls.caution)
    return cls(head_dim, num_heads, num_kv_heads, scaling=scaling, **options)  # type: ignore[arg-type]


def map_options(cls: type[FeatureMap]) -> dict[str, object]:
    """Return the settings that a map's constructor takes besides sizes and ``scaling``, with their defaults.

    The map's own settings come first, then those common to all maps, as far as the constructor passes them on.

    Example:
        >>> map_options(feature_map_class("dpfp"))
        {'nu': 1, 'scale': 1.0, 'separate': True, 'per_head': True}
    """
    return {option: parameter.default for option, (parameter, _) in _options(cls).items()}


def _options(cls: type[FeatureMap]) -> dict[str, tuple[Parameter, type[FeatureMap]]]:
    """Return the settings that a map's constructor takes, each with the class whose constructor declares it."""
    options: dict[str, tuple[Parameter, type[FeatureMap]]] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not issubclass(base, FeatureMap):
            continue
        parameters = signature(base.__init__).parameters.values()
        options |= {p.name: (p, base) for p in parameters if p.kind is Parameter.KEYWORD_ONLY} | options
        if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
            break
    options.pop("scaling", None)
    return options


def _option_types(cls: type[FeatureMap]) -> dict[str, Any]:
    """Return the types of a map's settings; Any where its author named none that can be found."""
    kinds: dict[str, Any] = {}
    for option, (parameter, base) in _options(cls).items():
        try:
            kinds[option] = get_type_hints(base.__init__).get(option, Any)
        except NameError:
            kinds[option] = parameter.annotation if isinstance(parameter.annotation, type) else Any
    return kinds


@cache
def _caution(name: str, text: str) -> None:
    # Cached: a model has many layers, and one line says it.
    logger.warning("feature map %r: %s", name, text)
