"""What the delta rule is asked to compute, as its checks and its backends see it."""

from typing import Any, NamedTuple

from torch import Tensor

from hf_linear_attn.ops.delta_rule.state import DeltaRuleState

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay, Tensor? key_mask, Tensor? cu_seqlens, Tensor? kv0, "
    "SymInt delay, bool l2norm"
)
"""The same as torch.library's operators take it, of every backend; see :meth:`DeltaCall.inputs`."""

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
        state: State before the first token, ``[B or N, HKV, F, V]``; None for zeros.
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
    state: DeltaRuleState | None
    delay: int
    l2norm: bool

    @property
    def kv0(self) -> Tensor | None:
        """The tensor of the state before the first token."""
        return None if self.state is None else self.state.kv

    @property
    def rows(self) -> int:
        """Number of sequences, and of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def inputs(self) -> tuple[Any, ...]:
        """Return what operators take, as :data:`INPUTS` names it."""
        return (*self[:7], self.kv0, *self[8:])

    @classmethod
    def of(cls, *inputs: Any) -> "DeltaCall":
        """Return the call that an operator's inputs stand for."""
        *tensors, kv0, delay, l2norm = inputs
        return cls._make((*tensors, None if kv0 is None else DeltaRuleState(kv0), delay, l2norm))
