"""What attention over a window is asked to compute, as its backends see it."""

from typing import Any, NamedTuple

from torch import Tensor

Sinks = tuple[Tensor, Tensor, Tensor]
"""Keys ``[B, HKV, N, D]``, values ``[B, HKV, N, V]``, and which query sees which, ``[B, T, N]`` bool."""

Own = tuple[Tensor, Tensor, Tensor]
"""A key of each query's own: scores ``[B, H, T]``, visibility ``[B, T]`` bool, and values ``[B, H, T, V]``."""

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? sink_k, Tensor? sink_v, Tensor? sink_seen, "
    "Tensor? own_score, Tensor? own_seen, Tensor? own_value, SymInt window, float scaling"
)
"""The same as an operator of torch.library takes it; see :meth:`WindowCall.inputs`."""


class WindowCall(NamedTuple):
    """One call of attention over a window.

    Attributes:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, P + T, D]``: P keys from before the first query, then its own.
        v: Values ``[B, HKV, P + T, V]``.
        key_mask: ``[B, P + T]`` bool, True = a real token; None where all are.
        sinks: Those in sight; None without sinks.
        own: A key of each query's own; None without such keys.
        window: Keys in sight.
        scaling: Factor on ``q.k``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    sinks: Sinks | None
    own: Own | None
    window: int
    scaling: float

    def shown(self) -> "WindowCall":
        """Return the call with zeros for keys, values and sinks that no query is to see: 0 times a NaN is one."""
        k, v, sinks = self.k, self.v, self.sinks
        if self.key_mask is not None:
            hidden = ~self.key_mask[:, None, :, None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        if sinks is not None:
            unseen = ~sinks[2].any(1)[:, None, :, None]
            sinks = sinks[0].masked_fill(unseen, 0), sinks[1].masked_fill(unseen, 0), sinks[2]
        return self._replace(k=k, v=v, sinks=sinks)

    def inputs(self) -> tuple[Any, ...]:
        """Return what an operator takes, as :data:`INPUTS` names it."""
        return (*self[:4], *(self.sinks or (None,) * 3), *(self.own or (None,) * 3), *self[6:])

    @classmethod
    def of(cls, *inputs: Any) -> "WindowCall":
        """Return the call that an operator's inputs stand for."""
        sinks, own = (None if x[0] is None else x for x in (inputs[4:7], inputs[7:10]))
        return cls._make((*inputs[:4], sinks, own, *inputs[10:]))
