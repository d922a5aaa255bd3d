"""What learned maps have in common: weights per head or shared, for q and k apart or together."""

import math
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps.base import CommonOptions, FeatureMap, saturated, upcast

Side = Literal["q", "k"]

MAX_FEATURES = 1 << 16
"""Most features that a map agrees to build: at 64 values per head the state then takes 16 MiB per head."""


class LearnedMap(FeatureMap):
    """A feature map with weights; ``separate`` and ``per_head`` decide how many copies of them there are.

    A weight called ``weight`` is held as ``weight_q [H, ...]`` and ``weight_k [HKV, ...]``, or where q and k
    share it as ``weight [HKV, ...]``; the first size is 1 where heads share it.
    """

    learned: ClassVar[bool] = True
    positional: ClassVar[bool] = False

    def add_weight(self, name: str, start: Tensor) -> None:
        """Create the parameters called ``name``, every copy equal to ``start``."""
        heads = {"_q": self.num_heads, "_k": self.num_kv_heads} if self.separate else {"": self.num_kv_heads}
        for suffix, count in heads.items():
            # Orthogonal directions come column by column, and a loop reads rows: it would copy them at every step.
            copies = start.expand(count if self.per_head else 1, *start.shape).clone(
                memory_format=torch.contiguous_format
            )
            self.register_parameter(name + suffix, nn.Parameter(copies))

    def add_weights(self, columns: int) -> None:
        """Create all parameters, the first of which projects to so many columns."""
        self.add_weight("weight", identity_like(self.head_dim, columns))

    def weight_of(self, name: str, side: Side, x: Tensor | None = None) -> Tensor:
        """Return the weight of that name for one side, ``[heads or 1, ...]``, in the dtype of ``x`` if given."""
        found: Tensor = getattr(self, f"{name}_{side}" if self.separate else name)
        if x is not None:
            found = found.to(x.dtype)
        if not self.separate and self.per_head and side == "q":
            return found.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
        return found

    def features(self, x: Tensor, side: Side) -> Tensor:
        """Map ``x [B, heads, T, D]``, scaled, to features ``[B, heads, T, F]`` of that side."""
        raise NotImplementedError(f"{type(self).__name__} must define features, or phi_q and phi_k")

    @override
    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        return saturated(self.features(self.scaled(q), "q"), q.dtype)

    @override
    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return saturated(self.features(self.scaled(k), "k"), k.dtype)


class ProjectedMap(LearnedMap):
    """A learned map of ``xW``, which gives one feature for each column, or two: one of it and one of its negative.

    Args:
        num_features: ``F``; defaults to ``head_dim`` times the features of a column.
        **options: Sizes and others as in :class:`FeatureMap`.

    Raises:
        ArgumentError: If a size does not fit.
    """

    halves: ClassVar[int] = 2
    """Features of a column."""

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
        self.num_features = self.halves * head_dim if num_features is None else num_features
        check_size("num_features", self.num_features, multiple_of=self.halves)
        self.add_weights(self.num_features // self.halves)

    @override
    @property
    def feature_dim(self) -> int:
        return self.num_features

    def columns_of_step(self, q: Tensor, k: Tensor) -> Tensor:
        """Return ``xW`` of a step's key and of its queries after it, ``[B, HKV, 1 + G, M]``; see :meth:`phi_step`."""
        batch, kv_heads, group, dim = q.shape
        x, key = upcast(q), upcast(k)
        of_q, of_k = self.weight_of("weight", "q", x), self.weight_of("weight", "k", x)
        if len(of_q) == 1:
            of_q, of_k = of_q.expand(kv_heads * group, -1, -1), of_k.expand(kv_heads, -1, -1)
        y_q = torch.bmm(x.reshape(batch, -1, dim).transpose(0, 1), of_q).transpose(0, 1)
        y_k = torch.bmm(key.reshape(batch, -1, dim).transpose(0, 1), of_k).transpose(0, 1)
        y = torch.cat([y_k[:, :, None], y_q.view(batch, kv_heads, group, -1)], 2)
        return y if self.scale == 1 else y * self.scale


def identity_like(head_dim: int, features: int) -> Tensor:
    """Return ``[D, M]``, the start of a learned projection: as near to the identity as its shape allows.

    All of D takes part, because half of the dimensions would break the pairs that rotary embeddings turn
    together: ``[I, -I, I, ...]`` where ``M >= D``, else M orthogonal directions, chosen at random with a
    fixed seed and scaled such that inner products keep their mean.

    Example:
        >>> identity_like(2, 4).tolist()
        [[1.0, 0.0, -1.0, -0.0], [0.0, 1.0, -0.0, -1.0]]
    """
    if features >= head_dim:
        eye = torch.eye(head_dim)
        blocks = [eye if n % 2 == 0 else -eye for n in range(-(-features // head_dim))]
        return torch.cat(blocks, dim=1)[:, :features]
    gaussian = torch.randn(head_dim, features, generator=torch.Generator().manual_seed(0), device="cpu")
    directions: Tensor = torch.linalg.qr(gaussian)[0]
    return (directions * math.sqrt(head_dim / features)).to(torch.get_default_device())


def check_size(argument: str, value: int, *, multiple_of: int = 1, at_most: int = MAX_FEATURES) -> None:
    """Raise an ArgumentError unless ``value`` is a positive multiple, and not above a bound."""
    if value < 1 or value % multiple_of or value > at_most:
        rule = "be at least 1" if multiple_of == 1 else f"be a positive multiple of {multiple_of}"
        raise ArgumentError(argument, f"{rule} and at most {at_most}", value, "Leave it out for the default.")
