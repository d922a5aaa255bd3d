"""What a step of a layer with a window is made of."""

from typing import NamedTuple

from torch import Tensor


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
        near_k: Keys of the sinks and the circle ``[B, HKV, N + W + 1, D]``.
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

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What a layer has learned: the map's, the rule's, the mix's."""
        maps = self.weight_q, self.power_q, self.weight_k, self.power_k
        return *maps, self.decay_bias, self.decay_key, self.decay_value, self.bias, self.weight
