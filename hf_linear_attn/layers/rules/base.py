"""What an update rule is: how a state takes in keys, and how it answers queries."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor

from hf_linear_attn.layers.rules.gates import Gates
from hf_linear_attn.layers.state import Slot


class Sizes(NamedTuple):
    """Sizes of one attention layer.

    Attributes:
        head_dim: D, of queries and keys.
        num_heads: H.
        num_kv_heads: HKV.
        scaling: Factor on ``q.k`` in softmax.
        value_dim: V, of values; None where it is D.
    """

    head_dim: int
    num_heads: int
    num_kv_heads: int
    scaling: float
    value_dim: int | None = None

    @property
    def values(self) -> int:
        """V."""
        return self.head_dim if self.value_dim is None else self.value_dim


class RuleCall(NamedTuple):
    """What a rule is asked to read.

    Attributes:
        phi_q: Features of queries ``[B, H, T, F]``.
        phi_k: Features of keys ``[B, HKV, S, F]``.
        v: Values ``[B, HKV, S, V]``.
        gates: What :meth:`Rule.gates` gave for the keys; None where nothing is learned.
        kernel: An elementwise map that the rule applies first; None where ``phi_q`` and ``phi_k`` are features.
        key_mask: ``[B, S]`` bool, True = a key that counts; None where all do.
        cu_seqlens: Boundaries of packed sequences, B = 1.
        causal: Whether query i sees keys up to ``i - delay`` only.
        delay: Tokens by which keys lag.
        with_mass: Whether the mass is asked for.
    """

    phi_q: Tensor
    phi_k: Tensor
    v: Tensor
    gates: Gates | None = None
    kernel: str | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    causal: bool = True
    delay: int = 0
    with_mass: bool = False


class RuleStep(NamedTuple):
    """One new key of each row, and the queries that read after it.

    Attributes:
        phi_q: Features of the queries of each group ``[B, HKV, G, F]``.
        phi_k: Features of the key ``[B, HKV, 1, F]``.
        v: Its value ``[B, HKV, 1, V]``.
        gates: Of the key, as in :class:`RuleCall`.
        kernel: As there.
        key_mask: ``[B, 1]`` bool; features and values of a key that does not count are finite.
        signed: Whether features can be negative.
        rows: Where in a pool the states of the rows lie ``[B]`` int64, all different; None where row b's is the b-th.
            Only where :attr:`Rule.steps_rows` says so.
        kernels: Whether kernels compute what they can take.
    """

    phi_q: Tensor
    phi_k: Tensor
    v: Tensor
    gates: Gates | None = None
    kernel: str | None = None
    key_mask: Tensor | None = None
    signed: bool = True
    rows: Tensor | None = None
    kernels: bool = False


class Reading(NamedTuple):
    """What a rule gives for some queries.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        state: The rule's tensors after the last key.
        mass: What o was divided by, ``[B, H, T]``; None where it was not asked for.
    """

    o: Tensor
    state: dict[str, Tensor]
    mass: Tensor | None = None


class Rule(ABC):
    """An update rule; a subclass is found by its :attr:`name`. To normalisers ``eps`` > 0 is added."""

    name: ClassVar[str]
    """The word by which users ask for it."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """What mixes may ask of it: ``"mass"``, the normaliser that a shared denominator needs."""

    steps: ClassVar[bool] = False
    """Whether it has :meth:`step_`; without it a step is read as a call of one token."""

    steps_rows: ClassVar[bool] = False
    """Whether :meth:`step_` takes rows of a pool where kernels run; without it states are gathered, and put back."""

    ordered: ClassVar[bool] = False
    """Whether it matters which key comes first, so that attention has to be causal."""

    maps: ClassVar[bool] = True
    """Whether it applies an elementwise map itself; else it gets features."""

    def __init__(self, eps: float, backend: str) -> None:
        self.eps, self.backend = eps, backend

    def weights(self, sizes: Sizes) -> dict[str, Tensor]:
        """Return what is learned, as it starts; layers hold it as ``rule_decay_bias``, ..."""
        return {}

    def gates(self, k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Gates | None:
        """Return what keys do to a state beside being added to it; asked only of rules that learn something.

        Args:
            k: Keys as the linear branch reads them, before the feature map, ``[B, HKV, S, D]``.
            v: Values ``[B, HKV, S, V]``.
            weights: What :meth:`weights` began.
        """
        return None

    @abstractmethod
    def slots(self, kv_heads: int, feature_dim: int, value_dim: int, copies: int | None = None) -> dict[str, Slot]:
        """Describe the state's tensors; ``copies`` is for those that all programs of a step's kernel need."""

    @abstractmethod
    def read(self, call: RuleCall, state: Mapping[str, Tensor] | None) -> Reading:
        """Answer queries from a state and from keys, and take the keys in; the state is None before the first key."""

    def step_(self, step: RuleStep, state: Mapping[str, Tensor]) -> Tensor:
        """Take in one key and answer one query of each head, in place.

        Returns ``o [B, HKV, G, V]``, in the dtype of the tokens or of the state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")
