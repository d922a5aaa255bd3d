"""What linear attention is asked to compute, as its checks and its backends see it."""

from typing import NamedTuple

from torch import Tensor

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? cu_seqlens, Tensor? kv0, Tensor? z0, Tensor? log_decay, "
    "str phi, bool causal, SymInt delay, float eps"
)
"""The same as torch.library's operators take it, of every backend."""

FORWARD = f"({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
"""What operators take and return: o, the guarded normaliser ``[B, H, T]``, and the final ``kv`` and ``z``."""


class LinearCall(NamedTuple):
    """One call of linear attention.

    Attributes:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, S, D]``.
        v: Values ``[B, HKV, S, V]``.
        key_mask: ``[B, S]`` bool, True = a real token; None where all are.
        cu_seqlens: ``[N + 1]`` boundaries of sequences packed along T, with B = 1; None for none.
        kv0: Sums of the state before the first token, ``[B or N, HKV, F, V]``; None for zeros.
        z0: Its normaliser ``[B or N, HKV, F]``, likewise.
        log_decay: ``[B, HKV, S]``, by whose exponential the sums fade before a key is added, 0 for masked keys; None
            where they do not.
        phi: Elementwise map; ``"identity"`` where q and k are features already.
        causal: Whether query i sees only keys ``j <= i - delay``.
        delay: Tokens by which keys lag behind.
        eps: Added to the normaliser, away from 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    kv0: Tensor | None
    z0: Tensor | None
    log_decay: Tensor | None
    phi: str
    causal: bool
    delay: int
    eps: float

    @property
    def rows(self) -> int:
        """Number of sequences, and of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def sequence(self, rows: slice, q_tokens: slice, k_tokens: slice) -> "LinearCall":
        """Return the call on one of packed sequences alone, of views."""
        return LinearCall(
            self.q[:, :, q_tokens],
            self.k[:, :, k_tokens],
            self.v[:, :, k_tokens],
            None if self.key_mask is None else self.key_mask[:, k_tokens],
            None,
            None if self.kv0 is None else self.kv0[rows],
            None if self.z0 is None else self.z0[rows],
            None if self.log_decay is None else self.log_decay[:, :, k_tokens],
            *self[8:],
        )
