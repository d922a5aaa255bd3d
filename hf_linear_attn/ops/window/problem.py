"""What attention over a window is asked to compute, as its backends see it."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Sinks = tuple[Tensor, Tensor, Tensor]
"""Keys ``[B, HKV, N, D]``, values ``[B, HKV, N, V]``, and which query sees which, ``[B, T, N]`` bool."""

NOWHERE = 2**62
"""Number of a query that never comes."""


class KeptKeys(NamedTuple):
    """Keys from beyond the window that are in sight of some queries: C at first, and one that may enter at each query.

    Attributes:
        k: ``[B, HKV, C + T, D]``.
        v: ``[B, HKV, C + T, V]``.
        slot: Which of the C places the key takes that enters at a query ``[B, HKV, T]`` int64, from the key that is in
            sight until then; -1 where none enters.
        begins: First query that sees a key ``[B, C + T]`` int64, :data:`NOWHERE` where none does.
        ends: First query that does not see it any more ``[B, HKV, C + T]`` int64.
    """

    k: Tensor
    v: Tensor
    slot: Tensor
    begins: Tensor
    ends: Tensor

    def seen(self, index: Tensor, queries: Tensor) -> Tensor:
        """Return which query of ``[..., n]`` sees which key of ``[B, HKV, ..., M]``, ``[B, HKV, ..., n, M]`` bool."""
        rows = self.begins[:, None].expand(self.ends.shape)
        begins, ends = (x.gather(2, index.flatten(2)).view(index.shape)[..., None, :] for x in (rows, self.ends))
        return (begins <= queries[..., None]) & (queries[..., None] < ends)

    def held(self, block: int, blocks: int) -> Tensor:
        """Return which key lies in which place before each block of queries, ``[B, HKV, n, C]`` int64."""
        batch, heads, tokens = self.slot.shape
        places = self.k.shape[2] - tokens
        index = torch.arange(block * blocks, device=self.slot.device)
        # What takes no place is put behind the last.
        taken = F.pad(self.slot, (0, block * blocks - tokens), value=-1) % (places + 1)
        latest = self.slot.new_full((batch, heads, blocks, places + 1), -1)
        latest = latest.scatter_reduce(
            3,
            torch.unflatten(taken, 2, (blocks, block)),
            (places + index).view(blocks, block).expand(batch, heads, -1, -1),
            "amax",
        )
        latest = F.pad(latest[:, :, :-1, :places].cummax(2).values, (0, 0, 1, 0), value=-1)
        return torch.where(latest < 0, torch.arange(places, device=index.device), latest)


Own = tuple[Tensor, Tensor, Tensor]
"""A key of each query's own: scores ``[B, H, T]``, visibility ``[B, T]`` bool, and values ``[B, H, T, V]``."""

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? sink_k, Tensor? sink_v, Tensor? sink_seen, "
    "Tensor? own_score, Tensor? own_seen, Tensor? own_value, Tensor? kept_k, Tensor? kept_v, Tensor? kept_slot, "
    "Tensor? kept_begins, Tensor? kept_ends, SymInt window, float scaling"
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
        kept: Those kept from beyond the window; None without such keys.
        window: Keys in sight.
        scaling: Factor on ``q.k``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    sinks: Sinks | None
    own: Own | None
    kept: KeptKeys | None
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
        return (
            *(*self[:4], *(self.sinks or (None,) * 3), *(self.own or (None,) * 3), *(self.kept or (None,) * 5)),
            *self[7:],
        )

    @classmethod
    def of(cls, *inputs: Any) -> "WindowCall":
        """Return the call that an operator's inputs stand for."""
        sinks, own = (None if x[0] is None else x for x in (inputs[4:7], inputs[7:10]))
        kept = None if inputs[10] is None else KeptKeys(*inputs[10:15])
        return cls._make((*inputs[:4], sinks, own, kept, *inputs[15:]))
