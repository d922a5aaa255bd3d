"""What is asked of the choice of kept keys, and what it answers."""

from typing import NamedTuple

from torch import Tensor

ALIKE = 2.0**-10
"""Two values whose squared distance is less than this share of the sum of their squares are at a distance of 0.

So nothing hangs on rounding where a text says the same again and again: of keys that are alike the oldest goes.
"""

AGES = 6
"""Points of a score over a key's age, at W, 2 W, 4 W, ... tokens of a window of W; between them it is linear in the
logarithm of the age, and constant from the last one on."""


class Entering(NamedTuple):
    """Keys that leave a window one by one, and those that are kept before the first of them.

    Attributes:
        compared: Of the C places, and of the key that leaves the window at each query: values ``[B, HKV, C + T, V]``,
            or scores ``[B, HKV, C + T, 6]`` at :data:`AGES`.
        enters: Whether there is one at a query ``[B, T]`` bool.
        positions: Numbers of those keys in their texts ``[B, T]`` int64.
        number: Keys that have left the window before ``[B]`` int64; as many of the places are taken, from the first on.
        nearest: Where values are compared, the least squared distance of the value in a place to that of any key which
            has left the window later, infinite where none has ``[B, HKV, C]`` fp32; else ``[B, HKV, 0]``.
        at: Numbers of the keys in the places ``[B, HKV, C]`` int64.
        window: W where there are scores, 0 where values are compared.
    """

    compared: Tensor
    enters: Tensor
    positions: Tensor
    number: Tensor
    nearest: Tensor
    at: Tensor
    window: int = 0


class Choice(NamedTuple):
    """Which keys are kept.

    Attributes:
        slot: The place that the key takes which enters at a query ``[B, HKV, T]`` int64; -1 where none takes one.
        gone: Which of the C + T keys goes there and then ``[B, HKV, T]`` int64; -1 where none does.
        held: Which of them lie in the places afterwards ``[B, HKV, C]`` int64.
        nearest: As of :class:`Entering`, afterwards.
        at: Likewise.
    """

    slot: Tensor
    gone: Tensor
    held: Tensor
    nearest: Tensor
    at: Tensor
