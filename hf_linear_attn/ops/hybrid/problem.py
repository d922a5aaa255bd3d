"""What a layer with a window is asked to compute: named records, built by keyword."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.ops.rotation import Rotation

Sums = dict[str, Tensor]
"""What an update rule keeps for one key head of one text, by name: ``kv [F, V]``, and ``z [F]`` of a normaliser."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one call.

    Attributes:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, T, D]``.
        v: Values ``[B, HKV, T, V]``.
        key_mask: ``[B, T]`` bool, True = a real token; None where all are.
        cu_seqlens: Boundaries of packed sequences, ``[N + 1]``, B = 1; None where rows are texts.
        rotation: By which the model has turned queries and keys, where the linear branch reads them turned back
            (inverse RoPE); None where it reads them as they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    rotation: Rotation | None = None

    def cut(self, start: int, end: int) -> "Tokens":
        """Return the tokens ``[start, end)`` of every row, as texts of their own."""
        q, k, v = (x[:, :, start:end] for x in (self.q, self.k, self.v))
        mask = None if self.key_mask is None else self.key_mask[:, start:end]
        rotation = None if self.rotation is None else self.rotation.cut(start, end)
        return replace(self, q=q, k=k, v=v, key_mask=mask, cu_seqlens=None, rotation=rotation)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Which tokens a query reads exactly, and which through the state.

    Attributes:
        window: W, the last tokens, the query's own included, that are read exactly; None for the linear branch alone.
        sinks: N, the first real tokens, read exactly for ever; 0 without a window.
        kept: C, keys beyond the window that each key head reads exactly; 0 without a window.
        delay: Without a window, tokens by which keys lag before they are folded into the state.
        causal: Whether a query sees only earlier keys and its own; False without a window and a delay only.
    """

    window: int | None = None
    sinks: int = 0
    kept: int = 0
    delay: int = 0
    causal: bool = True

    @property
    def lag(self) -> int:
        """Tokens that a key waits in the ring before it is folded into the state."""
        return self.delay if self.window is None else self.window


@dataclass(frozen=True, kw_only=True)
class HybridParams:
    """What a layer computes, beside its tokens and its state.

    Attributes:
        feature_map: phi.
        geometry: What is read exactly.
        rule: Name of the update rule.
        gate_weights: What the rule's gates have learned, by name: ``decay_bias [HKV]``, ``decay_key [HKV, D]``,
            ``decay_value [HKV, V]``, and likewise of ``beta``.
        rule_weights: What else it has learned, ``[H, ...]`` by name: the ``scale``.
        mix: Name of the mixing rule; it is read where there is a window.
        mix_weights: What it has learned, ``[H, ...]`` by name.
        retention: Name of the rule that chooses kept keys.
        retention_weights: What it has learned, ``[HKV, ...]`` by name: ``in``, ``in_bias``, ``out`` and ``bias``; and
            ``mean`` and ``deviation [I]``.
        scaling: Factor on ``q.k`` in the softmax.
        eps: Added to normalisers, away from 0.
    """

    feature_map: FeatureMap
    geometry: Geometry
    rule: str = "additive"
    gate_weights: Mapping[str, Tensor] = field(default_factory=dict)
    rule_weights: Mapping[str, Tensor] = field(default_factory=dict)
    mix: str = "key"
    mix_weights: Mapping[str, Tensor] = field(default_factory=dict)
    retention: str = "redundancy"
    retention_weights: Mapping[str, Tensor] = field(default_factory=dict)
    scaling: float
    eps: float = 1e-6

    def of_group(self, head: int, heads: slice) -> "HybridParams":
        """Return what a key head and its query heads have learned, in float64."""
        of_rule, of_mix = (
            {name: x[heads].double() for name, x in w.items()} for w in (self.rule_weights, self.mix_weights)
        )
        of_head = {name: (x if x.ndim == 1 else x[head]).double() for name, x in self.retention_weights.items()}
        return replace(self, rule_weights=of_rule, mix_weights=of_mix, retention_weights=of_head)


class Key(NamedTuple):
    """One token, as one key head remembers it.

    Attributes:
        k: Its key ``[D]``, as the model gives it.
        v: Its value ``[V]``.
        phi: Features of the key as the linear branch reads it ``[F]``.
        said: Keys, as the linear branch reads them, and values of all key heads ``[HKV (D + V)]``.
        number: Its number in its text.
        gates: What it does to the state when it is folded, scalars by name: ``decay``, ``beta``.
    """

    k: Tensor
    v: Tensor
    phi: Tensor
    said: Tensor
    number: int
    gates: Mapping[str, Tensor]


class Kept(NamedTuple):
    """A key that is kept beyond the window.

    Attributes:
        key: The key.
        score: What the one that goes has least of.
        scores: What a rule that is learned says of it at 6 ages.
    """

    key: Key
    score: float
    scores: Sequence[float] = ()


@dataclass(kw_only=True)
class HeadState:
    """What one key head remembers of one text.

    Attributes:
        sums: What the update rule keeps.
        key_sum: Sum of the folded keys ``[D]``.
        number: Folded keys.
        sinks: The first real tokens, at most N.
        kept: Keys beyond the window, at most C, oldest first.
        ring: The last W tokens, oldest first; None for padding, and for a sink.
    """

    sums: Sums
    key_sum: Tensor
    number: int = 0
    sinks: list[Key] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    ring: list[Key | None] = field(default_factory=list)


@dataclass(kw_only=True)
class HybridState:
    """What a layer remembers.

    Attributes:
        heads: Of each text, what each key head remembers.
        seen: Of each text, the real tokens read.
    """

    heads: list[list[HeadState]]
    seen: list[int]
