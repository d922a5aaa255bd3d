"""Records of one call of a layer, and what of a layer those that read it for it ask."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter

from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.layers.kept import Beyond, Kept
from hf_linear_attn.layers.mixes import Mix
from hf_linear_attn.layers.numbers import first_in_sight, sinks_in_sight
from hf_linear_attn.layers.rules import Gates, Rule
from hf_linear_attn.layers.state import State
from hf_linear_attn.layers.window import Tokens, Window
from hf_linear_attn.ops.rotation import Rotation

Branch = Literal["window", "sinks", "kept", "linear"]
Part = Literal["mix", "rule", "retention"]
"""What of a layer learns beside its feature map."""


class Call(NamedTuple):
    """Everything that belongs to one call of a layer, and to no other.

    Attributes:
        key_mask: ``[B, T]`` bool, True = a real token; None where all are.
        cu_seqlens: Boundaries of packed sequences, ``[N + 1]``, B = 1; without a state only.
        causal: Whether a query sees only earlier keys and its own.
        scaling: Factor on ``q.k`` in the exact branch; None for the layer's.
        state: What was read before, updated by the call; None where nothing is kept.
        in_place: Whether the state's tensors from before the call are not needed any more.
        rotation: By which the model has turned queries and keys; None where it has not.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    causal: bool = True
    scaling: float | None = None
    state: State | None = None
    in_place: bool = True
    rotation: Rotation | None = None


class Piece(NamedTuple):
    """Queries that are read at once, with all that they see.

    Attributes:
        q: Queries ``[B, H, T, D]``.
        k: Their own keys ``[B, HKV, T, D]``.
        v: Their own values ``[B, HKV, T, V]``.
        mask: ``[B, T]`` bool, True = a real token; None where all are.
        positions: Numbers of the real tokens in their text ``[B, T]``.
        tokens: With a window, the keys that queries see exactly and those that leave.
        number: Keys beyond each query's window ``[B, T]``; None without a linear branch beside a window.
        scaling: Factor on ``q.k`` in the exact branch.
        causal: Whether a query sees only earlier keys and its own.
        cu_seqlens: Boundaries of packed sequences that are read together.
        key_positions: Positions of the keys in ``tokens``.
        start: Number of the first query in its call.
        rotation: By which the queries are turned, where they are to be turned back for the linear branch.
        beyond: The keys beyond the windows, where some of them are kept.
        carries: Whether what the linear branch carries on is asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    positions: Tensor
    tokens: Tokens | None
    number: Tensor | None
    scaling: float
    causal: bool = True
    cu_seqlens: Tensor | None = None
    key_positions: Tensor | None = None
    start: int = 0
    rotation: Rotation | None = None
    beyond: Beyond | None = None
    carries: bool = True

    def sinks(self, window: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the sinks' keys and values, and which query sees which, ``[B, T, N]``.

        A sink of the past is shown here alone; a new one is shown by the window until it has left that.
        """
        if self.tokens is None:
            return None
        k, v, place = self.tokens.sink_k, self.tokens.sink_v, self.tokens.sink_place
        if k is None or v is None or place is None:
            return None
        queries = self.start, self.start + self.q.shape[2]
        if self.tokens.first:
            return k, v, first_in_sight(place.device, len(place), *queries, window, k.shape[2])
        return k, v, sinks_in_sight(place, *queries, window)

    def cut(self, a: int, b: int, window: int) -> "Piece":
        """Return the queries ``[a, b)`` with what they see."""
        low, high = self.reach(a, b, window)
        piece = self._replace(
            q=self.q[:, :, a:b],
            k=self.k[..., a:b, :],
            v=self.v[..., a:b, :],
            mask=None if self.mask is None else self.mask[:, a:b],
            positions=self.positions[:, a:b],
            number=None if self.number is None else self.number[:, a:b],
            start=self.start + a,
            rotation=None if self.rotation is None else self.rotation.cut(a, b),
        )
        if self.tokens is None or self.key_positions is None:
            return piece
        return piece._replace(tokens=self.tokens.cut(low, high), key_positions=self.key_positions[:, low:high])

    def reach(self, a: int, b: int, window: int) -> tuple[int, int]:
        """Return which keys the queries ``[a, b)`` and the linear branch need."""
        if self.tokens is None:
            return a, b
        past = self.tokens.k.shape[2] - self.q.shape[2]
        return max(past + a - window, 0), past + b


class Layer(Protocol):
    """A converted layer, as its steps and walks know it; see :class:`LinearAttention`."""

    settings: LinearAttentionConfig
    feature_map: FeatureMap
    rule: Rule
    mix: Mix
    window: Window | None
    kept: Kept | None
    disabled: frozenset[Branch]

    @property
    def reach(self) -> int:
        """How far back a query's keys begin."""

    @property
    def elementwise(self) -> str | None:
        """Name of the map that the rule applies by itself."""

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield what is learned."""

    def scaling(self, call: Call) -> float:
        """Return the factor on ``q.k``."""

    def weights(self, owner: Part) -> dict[str, Tensor]:
        """Return what a part of the layer has learned."""

    def gates(self, k: Tensor, v: Tensor) -> Gates | None:
        """Return the rule's gates."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Attend in texts that are rows."""

    def read(self, piece: Piece, carried: Mapping[str, Tensor] | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from the queries of a piece."""

    def look_for_sinks(self, state: State, tokens: int) -> None:
        """Note when every row has read its sinks."""
