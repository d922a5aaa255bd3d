"""The recurrent state of linear attention."""

from typing import NamedTuple

from torch import Tensor


class LinearAttentionState(NamedTuple):
    """Everything linear attention remembers of the tokens it has read; its size does not depend on their number.

    Attributes:
        kv: ``sum_j phi(k_j) v_j^T``, ``[B, HKV, F, V]``, fp32 (fp64 where q is fp64).
        z: ``sum_j phi(k_j)``, ``[B, HKV, F]``, same dtype.
    """

    kv: Tensor
    z: Tensor
