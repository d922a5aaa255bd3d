"""What a mixing rule is: how the exact and the linear branch become one output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from hf_linear_attn.layers.rules import Sizes
from hf_linear_attn.layers.state import Slot
from hf_linear_attn.ops.window import KeptKeys, OwnKey, window_attention, window_sums


@dataclass(frozen=True)
class Near:
    """The exact branch of some queries: softmax over the window and the sinks, computed when it is asked for.

    Attributes:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, P + T, D]``.
        v: Values ``[B, HKV, P + T, V]``.
        mask: ``[B, P + T]`` bool, True = a key of the window; None where all are.
        sinks: Their keys, values, and which query sees which.
        window: W.
        scaling: Factor on ``q.k``.
        backend: As in :func:`linear_attention`.
        kept: Keys from beyond the window, some of which are in sight; None where none are kept.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: tuple[Tensor, Tensor, Tensor] | None
    window: int
    scaling: float
    backend: str
    kept: KeptKeys | None = None

    def attend(self, own_key: OwnKey | None = None) -> Tensor:
        """Return the branch's output ``[B, H, T, V]``; where given, with one more key in the softmax."""
        return window_attention(
            self.q,
            self.k,
            self.v,
            window=self.window,
            scaling=self.scaling,
            key_mask=self.mask,
            sinks=self.sinks,
            own_key=own_key,
            kept=self.kept,
            backend=self.backend,
        )

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return numerator ``[B, H, T, V]`` and denominator ``[B, H, T]`` relative to each row's largest score."""
        return window_sums(
            self.q,
            self.k,
            self.v,
            window=self.window,
            scaling=self.scaling,
            key_mask=self.mask,
            sinks=self.sinks,
            kept=self.kept,
        )


class Far(NamedTuple):
    """The linear branch of some queries: what it gives, and of how many keys.

    Attributes:
        o: Its normalised output ``[B, H, T, V]``.
        number: Keys beyond each query's window ``[B, T]`` int64.
        counts: Which of :attr:`Near.k` count in it once they have left the window, ``[B, P + T]`` bool.
        mass: Its normaliser ``[B, H, T]``; None where the mix does not need it.
        keys: Sum of the keys beyond the window of the first query but for those in :attr:`Near.k`; None where the mix
            keeps none, or there are none.
        gone: Where keys are kept, the one that is folded at each query ``[B, HKV, T, D]``, 0 where none is; None where
            those are the keys that leave the window.
    """

    o: Tensor
    number: Tensor
    counts: Tensor
    mass: Tensor | None
    keys: Tensor | None
    gone: Tensor | None = None


class LastToken(NamedTuple):
    """One query of each row in a step, with what it sees.

    Attributes:
        q: ``[B, HKV, G, D]``, fp32 (fp64).
        scores: Of the window and the sinks ``[B, HKV, G, P]``, fp32 (fp64), far below 0 where a slot is not seen.
        v: Their values ``[B, HKV, P, V]``.
        o_far: The linear branch's output ``[B, HKV, G, V]``.
        number: Keys beyond the window ``[B, 1, 1, 1]``, in the dtype of the scores; where all rows have as many, and
            some, their number itself.
        keys: Their sum ``[B, HKV, D]``; None where the mix keeps none.
        scaling: Factor on ``q.k``.
        free: A free slot, with a value of 0, whose score may be anything; given to a mix that takes it.
    """

    q: Tensor
    scores: Tensor
    v: Tensor
    o_far: Tensor
    number: Tensor | int
    keys: Tensor | None
    scaling: float
    free: int | None = None


class Mix:
    """A mixing rule; a subclass is found by its :attr:`name`. To normalisers ``eps`` > 0 is added."""

    name: ClassVar[str]
    """The word by which users ask for it."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it asks of the update rule, of what :attr:`Rule.provides` names."""
    has_far: ClassVar[bool] = True
    """Whether there is a linear branch at all; without one the layer's output is the exact branch's."""
    sums_keys: ClassVar[bool] = False
    """Whether it reads the mean of the keys beyond the window."""
    steps: ClassVar[bool] = False
    """Whether it joins in a step, too, by :meth:`join_last`; else a step is read as a call of one token."""
    takes_slot: ClassVar[bool] = False
    """Whether that puts a score of its own into :attr:`LastToken.free`."""

    def __init__(self, sizes: Sizes, eps: float) -> None:
        self.sizes, self.eps = sizes, eps

    def weights(self) -> dict[str, Tensor]:
        """Return what is learned, as it starts; layers hold it as ``mix_bias``, ``mix_weight``, ..."""
        return {}

    def slots(self, copies: int | None = None) -> dict[str, Slot]:
        """Describe the tensors that it needs in a state beside the window's and the rule's; see :meth:`Rule.slots`."""
        keys = Slot((self.sizes.num_kv_heads, self.sizes.head_dim), copies=copies)
        return {"far_keys": keys} if self.sums_keys else {}

    def join(self, near: Near, far: Far, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the layer's output ``[B, H, T, V]``, by what :meth:`weights` began."""
        raise NotImplementedError(f"{type(self).__name__} must define join")

    def join_last(self, last: LastToken, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the layer's output ``[B, HKV, G, V]`` in a step, in the dtype of the values; see :meth:`join`."""
        raise NotImplementedError(f"{type(self).__name__} has no step")
