"""What the delta rule is asked to compute, as its checks and its backends see it."""

from typing import NamedTuple

from torch import Tensor

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay, Tensor? key_mask, Tensor? cu_seqlens, Tensor? kv0, "
    "SymInt delay, bool l2norm"
)
"""The same as torch.library's operators take it, of every backend."""

FORWARD = f"({INPUTS}) -> (Tensor, Tensor)"
"""What operators take and return: o and the final ``kv``."""

GRADIENTS = f"(Tensor do, Tensor? dkv, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
"""What operators that compute gradients take, and return: of q, k, v, beta, log decay and the initial state."""


class DeltaCall(NamedTuple):
    """One call of the delta rule.

    Attributes:
        q: Queries ``[B, H, T, F]``.
        k: Keys ``[B, HKV, T, F]``.
        v: Values ``[B, HKV, T, V]``.
        beta: How much of what stands at a key is replaced ``[B, HKV, T]``, in 0..2.
        log_decay: Logarithm of what a token leaves of the state ``[B, HKV, T]``, at most 0; None for all of it.
        key_mask: ``[B, T]`` bool, True = a real token; None where all are.
        cu_seqlens: ``[N + 1]`` boundaries of sequences packed along T, with B = 1; None for none.
        kv0: State before the first token, ``[B or N, HKV, F, V]``; None for zeros.
        delay: Tokens by which keys and their gates lag behind.
        l2norm: Whether queries and keys are divided by their lengths.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    kv0: Tensor | None
    delay: int
    l2norm: bool

    @property
    def rows(self) -> int:
        """Number of sequences, and of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
