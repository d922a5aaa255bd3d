"""What linear attention is asked to compute, as its checks and its backends see it."""

from typing import Any, NamedTuple

from torch import Tensor

from hf_linear_attn.ops.state import LinearAttentionState

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? cu_seqlens, Tensor? kv0, Tensor? z0, Tensor? log_decay, "
    "str phi, bool causal, SymInt delay, float eps"
)
"""The same as torch.library's operators take it, of every backend; see :meth:`LinearCall.inputs`."""

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
        state: State before the first token, ``[B or N, HKV, ...]``; None for zeros.
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
    state: LinearAttentionState | None
    log_decay: Tensor | None
    phi: str
    causal: bool
    delay: int
    eps: float

    @property
    def kv0(self) -> Tensor | None:
        """The sums of the state before the first token."""
        return None if self.state is None else self.state.kv

    @property
    def z0(self) -> Tensor | None:
        """Its normaliser."""
        return None if self.state is None else self.state.z

    @property
    def rows(self) -> int:
        """Number of sequences, and of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def sequence(self, rows: slice, q_tokens: slice, k_tokens: slice) -> "LinearCall":
        """Return the call on one of packed sequences alone, of views."""
        kv0, z0 = (None, None) if self.state is None else (x[rows] for x in self.state)
        return LinearCall.of(
            self.q[:, :, q_tokens],
            self.k[:, :, k_tokens],
            self.v[:, :, k_tokens],
            None if self.key_mask is None else self.key_mask[:, k_tokens],
            None,
            kv0,
            z0,
            None if self.log_decay is None else self.log_decay[:, :, k_tokens],
            *self[7:],
        )

    def inputs(self) -> tuple[Any, ...]:
        """Return what operators take, as :data:`INPUTS` names it."""
        return (*self[:5], self.kv0, self.z0, *self[6:])

    @classmethod
    def of(cls, *inputs: Any) -> "LinearCall":
        """Return the call that an operator's inputs stand for."""
        *tensors, kv0, z0, log_decay, phi, causal, delay, eps = inputs
        state = None if kv0 is None else LinearAttentionState(kv0, z0)
        return cls._make((*tensors, state, log_decay, phi, causal, delay, eps))
