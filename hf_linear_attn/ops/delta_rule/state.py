"""The recurrent state of the delta rule."""

from typing import NamedTuple

from torch import Tensor


class DeltaRuleState(NamedTuple):
    """Everything the delta rule remembers of the tokens it has read; its size does not grow with their number.

    Attributes:
        kv: What was written at which key, ``[B, HKV, F, V]``, fp32 (fp64 where q is fp64).
        z: None: there is no normaliser. It stands here so that states of all rules have the same names.
    """

    kv: Tensor
    z: None = None
