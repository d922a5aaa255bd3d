"""What kernels and loops take of a layer with a window, and what they give: built by name."""

from typing import NamedTuple

from torch import Tensor


class KeptStep(NamedTuple):
    """What a step of a layer with a window is told of the keys that it keeps beyond.

    Attributes:
        k: The C keys ``[B, HKV, C, D]``; of a pool, as all but the weights, of its P rows, of any stride.
        v: Their values ``[B, HKV, C, V]``.
        at: Their numbers in their texts ``[B, HKV, C]`` int64.
        turns: Cosines and then sines by which they are turned ``[B, HKV, C, D]``, R of them read; None where features
            are those of keys as they are, or there is no linear branch.
        nearest: As of :class:`hf_linear_attn.ops.kept.Entering` ``[B, HKV, C]`` fp32; None where keys have scores.
        scores: Those ``[B, HKV, C, 6]`` fp32; None where values are compared.
        weights: What the rule has learned, see :class:`Learned`: mean, deviation, in, in_bias, out, bias; else nothing.
        ahead: Tokens behind a key that its scores are made of, too.
    """

    k: Tensor
    v: Tensor
    at: Tensor
    turns: Tensor | None
    nearest: Tensor | None
    scores: Tensor | None
    weights: tuple[Tensor, ...]
    ahead: int

    @property
    def changing(self) -> tuple[Tensor | None, ...]:
        """What a step updates."""
        return self.k, self.v, self.at, self.turns, self.nearest, self.scores


class HybridStep(NamedTuple):
    """One step of a layer with a window.

    Attributes:
        q: Queries ``[B, H, 1, D]``.
        k: Keys of the new tokens ``[B, HKV, 1, D]``.
        v: Their values ``[B, HKV, 1, V]``.
        key_mask: ``[B, 1]`` bool, True = a real token; None where all are.
        seen: Real tokens read before ``[B]`` int64.
        place: Tokens read before, padding included, 0-d int64; None where ``length`` says it; ``[B]`` in a pool.
        length: The same, where it is known to the host.
        rows: Where in a pool of P states those of the texts lie ``[B]`` int64, all different; None where row b's is the
            b-th. A pool's tensors have P rows, of any stride, and no copies.
        kv: State ``[B, HKV, F, V]`` fp32, as all of the linear branch None where there is no such branch.
        z: Its normaliser, ``[B, HKV, F]`` or ``[B, HKV, C, F]`` fp32.
        far_keys: Sum of the keys beyond the window, ``[B, HKV, D]`` or ``[B, HKV, C, D]`` fp32; of the mix "key".
        near_k: Keys of the sinks and the ring ``[B, HKV, N + W + 1, D]``.
        near_v: Their values.
        near_mask: Which slots hold a token that counts ``[B, N + W + 1]`` bool; None in a pool, where texts have no
            padding, and their lengths tell.
        near_turns: Cosines and then sines by which the slots' keys are turned ``[B, N + W + 1, D]``, R of them read;
            None where features are those of keys as they are.
        turns: Those of the new tokens ``[B or 1, 1, R]``.
        weight_q: W of a paired map for queries ``[H or 1, D, F / 2]``; None for an elementwise map.
        power_q: Power of the norm-preserving map ``[H or 1]``.
        weight_k: Those for keys.
        power_k: Likewise.
        decay_bias: The decay gate's ``[HKV]``; None where sums do not fade.
        decay_key: By which a key enters it, as features see it ``[HKV, D]``.
        decay_value: By which its value does ``[HKV, V]``.
        bias: The mix's ``[H]``; None where it has none.
        weight: The mix's ``[H, D]``.
        phi: Name of the map.
        factor: On ``x W``.
        sharpness: By which a query's power grows with its length.
        mix: ``"key"``, ``"gate"`` or ``"window"``.
        sinks: N.
        scaling: Factor on ``q.k``.
        eps: Added to the normaliser, away from 0.
        pairs: Which entries are turned together, ``"half"`` or ``"next"``, see :class:`Layout`.
        at_end: Whether the last R entries are turned, rather than the first.
        kept: Keys that are kept beyond the window, and who chooses them; None where there are none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    seen: Tensor
    place: Tensor | None
    length: int
    rows: Tensor | None
    kv: Tensor | None
    z: Tensor | None
    far_keys: Tensor | None
    near_k: Tensor
    near_v: Tensor
    near_mask: Tensor | None
    near_turns: Tensor | None
    turns: Tensor | None
    weight_q: Tensor | None
    power_q: Tensor | None
    weight_k: Tensor | None
    power_k: Tensor | None
    decay_bias: Tensor | None
    decay_key: Tensor | None
    decay_value: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    phi: str
    factor: float
    sharpness: float
    mix: str
    sinks: int
    scaling: float
    eps: float
    pairs: str
    at_end: bool
    kept: KeptStep | None = None

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What a layer has learned: the map's, the rule's, the mix's."""
        maps = self.weight_q, self.power_q, self.weight_k, self.power_k
        return *maps, self.decay_bias, self.decay_key, self.decay_value, self.bias, self.weight


class KeptPrefill(NamedTuple):
    """The keys beyond the window of some tokens, where some are kept; see :class:`hf_linear_attn.layers.kept.Beyond`.

    Attributes:
        k: Those in the C places before the first query ``[B, HKV, C, D]``.
        v: Their values ``[B, HKV, C, V]``.
        slot: The place that the key takes which leaves the window at a query ``[B, HKV, T]`` int64; -1 where it takes
            none, or none leaves.
        number: Keys that had left the window before ``[B]`` int64; as many of the places are taken, from the first on.
        gone: Keys that go from what is kept at each query, as the model made them ``[B, HKV, T, D]``; None where there
            is no linear branch, as of all that follows.
        gone_v: Their values ``[B, HKV, T, V]``.
        gone_mask: Whether there is one ``[B, T]`` bool.
        gone_turns: By which they are turned ``[B, HKV, T, R]``; None where features are those of keys as they are.
    """

    k: Tensor
    v: Tensor
    slot: Tensor
    number: Tensor
    gone: Tensor | None = None
    gone_v: Tensor | None = None
    gone_mask: Tensor | None = None
    gone_turns: Tensor | None = None


class Prefill(NamedTuple):
    """Some tokens of a layer with a window.

    Attributes:
        q: Queries ``[B, H, T, D]``, as the model made them.
        k: Keys ``[B, HKV, P + T, D]``: P keys from before the first query, at most W, then its own.
        v: Values ``[B, HKV, P + T, V]``.
        phi_k: Features of the first T keys ``[B, HKV, T, F]``; None before :func:`prefill`, which computes them.
        key_mask: ``[B, P + T]`` bool, True = a key that the window shows; None where all are, then also ``counts``.
        counts: ``[B, P + T]`` bool, True = a key that counts in the linear branch once it has left the window.
        sink_k: Keys of the sinks ``[B, HKV, N, D]``; None without sinks.
        sink_v: Their values ``[B, HKV, N, V]``.
        seen: Which query sees which ``[B, T, N]`` bool.
        number: Keys beyond each query's window ``[B, T]`` int64; None where there is no linear branch.
        far_keys: Sum of those that ``k`` does not hold ``[B, HKV, D]`` fp32; None where there are none.
        kv: The linear branch's state before these tokens ``[B, HKV, F, V]`` fp32; None where there is none.
        z: Its normaliser ``[B, HKV, F]`` fp32.
        turns: By which queries are turned, cosines and then sines ``[B or 1, T, R]``, where their features are those of
            what they were before; None where they are not.
        weight_q: W of the map for queries ``[H or 1, D, F / 2]``; None for an elementwise map, whose F is D.
        power_q: Its power ``[H or 1]``; None where it has none.
        bias: The mix's ``[H]``; None without a linear branch.
        weight: The mix's ``[H, D]``.
        phi: Name of the map.
        factor: On ``x W``.
        sharpness: By which a query's power grows with its length.
        pairs: Which entries are turned together, ``"half"`` or ``"next"``.
        at_end: Whether the last R entries are turned, rather than the first.
        window: W.
        scaling: Factor on ``q.k``.
        eps: Added to the normaliser, away from 0.
        mix: How the branches are joined, ``"key"`` or ``"gate"``, or that there is but the ``"window"``.
        decay_bias: What a key's score of the decay begins with ``[HKV]``; None where nothing fades.
        decay_key: By which a key enters it, as features see it ``[HKV, D]``.
        decay_value: By which its value does ``[HKV, V]``.
        kept: The keys beyond the window, where some are kept; None where none are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    phi_k: Tensor | None
    key_mask: Tensor | None
    counts: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    seen: Tensor | None
    number: Tensor | None
    far_keys: Tensor | None
    kv: Tensor | None
    z: Tensor | None
    turns: Tensor | None
    weight_q: Tensor | None
    power_q: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    phi: str
    factor: float
    sharpness: float
    pairs: str
    at_end: bool
    window: int
    scaling: float
    eps: float
    mix: str = "key"
    decay_bias: Tensor | None = None
    decay_key: Tensor | None = None
    decay_value: Tensor | None = None
    kept: KeptPrefill | None = None

    @property
    def features(self) -> Tensor:
        """Those of the keys."""
        if self.phi_k is None:
            raise RuntimeError("the keys' features are not computed")
        return self.phi_k

    @property
    def learned(self) -> Tensor:
        """W of the map."""
        if self.weight_q is None:
            raise RuntimeError("an elementwise map has no weights")
        return self.weight_q


class Prefilled(NamedTuple):
    """What such tokens give.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        kv: The linear branch's state after them ``[B, HKV, F, V]``, fp32.
        z: Its normaliser ``[B, HKV, F]``, fp32.
        far_keys: Sum of the keys that count and have left the window ``[B, HKV, D]``, fp32.
    """

    o: Tensor
    kv: Tensor
    z: Tensor
    far_keys: Tensor
