"""The choice of kept keys over ranks.

Which keys are kept beyond the window hangs on all that were kept before. So ranks choose theirs one after the other,
each from what the one before hands on; then they hand round the sums of what went into the linear branch instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_linear_attn.layers import Call, LinearAttention, State
from hf_linear_attn.layers.kept import Beyond, Kept
from hf_linear_attn.parallel.layout import Layout
from hf_linear_attn.parallel.ranks import Ranks
from hf_linear_attn.parallel.sums import Message, Sums, key_sums, sums_before, sums_of

Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v of a part."""


def choose(
    ranks: Ranks, layout: Layout, layer: LinearAttention, kept: Kept, heads: Heads, call: Call, after: Tensor
) -> Sums:
    """Return what is kept before this rank, and the sums of what has gone into the linear branch instead.

    The state of ``call`` is that before this rank, and lacks what is returned. Gradients of exchanges are due on all
    ranks in the same order, last first: each waits for the one behind it. The last one was that of ``after``.
    """
    _, k, v = heads
    held = {name: slot.zeros(len(k), k) for name, slot in kept.slots(v.shape[3]).items()}
    gone: Sums = {}
    for sender in range(ranks.size - 1):
        given = held
        if sender == ranks.rank:
            given, gone = _end(layout, layer, heads, call, held)
        after = ranks.hand_on(_behind(torch.cat([given["kept_k"], given["kept_v"]], 3), after), sender)
        # In the same order on all.
        names = sorted(held.keys() - {"kept_k", "kept_v"})
        others = {name: ranks.send(given[name].detach(), sender, sender + 1) for name in names}
        if sender + 1 == ranks.rank:
            held = {"kept_k": after[..., : k.shape[3]], "kept_v": after[..., k.shape[3] :]} | others
    found = held | {name: _behind(held[name], after) for name in ("kept_k", "kept_v")}
    if layer.mix.has_far:
        # What the last rank sends does not matter.
        message = Message(gone or _end(layout, layer, heads, call, held)[1], {})
        sums = message.unpacked(ranks.gather(_behind(message.packed(), after))[: ranks.rank]).sums
        found |= sums_before(layer, sums, {}, layout.weights)
    return found


def _end(layout: Layout, layer: LinearAttention, heads: Heads, call: Call, held: Sums) -> tuple[Sums, Sums]:
    """Return what is kept behind the part's last document, and what went into the linear branch in it."""
    if call.state is None:
        raise RuntimeError("there is no state before the part")
    call.state.write(held)
    pieces = []
    for row, bounds in enumerate(layout.bounds or [()]):
        if not bounds:
            pieces.append(layer.split(*heads, call))
            continue
        start = bounds[-2]
        turned = call.rotation and call.rotation.row(row).cut(start, bounds[-1])
        state = None if start else row_of(call.state, row)
        q, k, v = (x[row : row + 1, :, start:] for x in heads)
        pieces.append(layer.split(q, k, v, call._replace(key_mask=None, rotation=turned, state=state)))
    kept, gone = [], []
    for piece in pieces:
        if piece.beyond is None:
            raise RuntimeError("no key is kept")
        kept.append(piece.beyond.close(layer.sizes.head_dim))
        gone.append(_gone(layer, piece.beyond) if layer.mix.has_far else {})
    return _of_rows(kept), _of_rows(gone)


def row_of(state: State, row: int) -> State:
    """Return the state of one row."""
    found = State()
    found.slots, found.length, found.first_read = state.slots, state.length, state.first_read
    found.tensors = {name: x[row : row + 1] for name, x in state.tensors.items()}
    return found


def _of_rows(parts: Sequence[Sums]) -> Sums:
    """Put tensors of some rows after one another."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _behind(x: Tensor, after: Tensor) -> Tensor:
    """Return ``x``, whose gradient is due before that of ``after``."""
    return x + after.flatten()[:0].sum().to(x.dtype)


def _gone(layer: LinearAttention, beyond: Beyond) -> Sums:
    """Return what the linear branch carries of the keys that are not kept any longer."""
    folded = beyond.folded(layer.settings.backend)
    found = sums_of(layer, folded.k, folded.v, folded.positions, folded.mask)
    return found | key_sums(layer, folded.raw, folded.mask)
