"""How the rows of a batch lie over ranks: who has how many tokens, which are real, and where documents begin."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.parallel.ranks import Ranks


@dataclass(frozen=True)
class Part:
    """What a rank knows of its own part of the rows.

    Attributes:
        positions: ``[B, T]`` int64, those that the model reads.
        real: ``[B, T]`` bool; None where all are.
        unshifted: Whether labels are those of the tokens themselves.
    """

    positions: Tensor
    real: Tensor | None
    unshifted: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """What every rank knows of all of them, for one forward.

    A row's documents begin where its positions do not go on. A rank passes on only the last document that it has a
    part of.

    Attributes:
        lengths: Tokens of each rank.
        rank: This one.
        real: ``[B, T]`` bool; None where all are.
        numbers: Number of each real token of this rank in its document, ``[B, T]``; padding takes its neighbour's.
        bounds: Where documents begin in each row, 0 and T among them; None where there is one in each.
        last: ``[B, T]`` bool, True = of the document that goes on at the next rank; None where there is one in each.
        weights: Which earlier ranks have a part of the document that this one begins in, ``[rank, B]`` bool.
        seen: Real tokens of it that they have, ``[B]``.
        tail_real: Which of their last W tokens are real and of it, ``[B, rank W]``.
        tail_numbers: Numbers of those, ``[B, rank W]``.
        tail_order: Places among those of the tokens that there are, in the order of the text.
        sinks_read: Whether every row's first tokens lie before this rank.
        masked: Whether any rank has a mask.
        packed: Whether any rank has several documents in a row.
    """

    lengths: tuple[int, ...]
    rank: int
    real: Tensor | None
    numbers: Tensor
    bounds: tuple[tuple[int, ...], ...] | None
    last: Tensor | None
    weights: Tensor
    seen: Tensor
    tail_real: Tensor
    tail_numbers: Tensor
    tail_order: tuple[int, ...]
    sinks_read: bool
    masked: bool
    packed: bool

    @property
    def start(self) -> int:
        """Tokens of earlier ranks, padding included."""
        return sum(self.lengths[: self.rank])


def lay_out(ranks: Ranks, part: Part, window: int, sinks: int) -> Layout:
    """Tell the other ranks of this one's part, and find how all lie together: two small exchanges for a forward.

    The window is 0 where there is none.

    Raises:
        ArgumentError: On all ranks alike, if the parts are not those of the same rows, or labels are not shifted.
    """
    (batch, tokens), device, rank = part.positions.shape, part.positions.device, ranks.rank
    lengths, masked = _headers(ranks, part, window)
    real = part.positions.new_ones(batch, tokens, dtype=torch.bool) if part.real is None else part.real

    # Where there is a mask, positions are what the caller likes, and a row is one document.
    starts = torch.zeros_like(real)
    if not masked:
        starts[:, 1:] = part.positions.diff(dim=1) != 1
    after = torch.arange(tokens, device=device) * starts
    first = after.cummax(1)[0]
    last = first == first[:, -1:]
    whole = ~starts.any(1)
    tail = (last & real)[:, -window:] if window else real[:, :0]
    tail = torch.nn.functional.pad(tail, (window - tail.shape[1], 0))
    ends = (part.positions[:, 0], part.positions[:, -1], (last & real).sum(1), whole.long())
    rows = ranks.all_gather(torch.cat([torch.stack(ends, 1), tail.long()], 1))

    # [P, B] each.
    begins, closes, own, whole_of = rows[:, :, :4].unbind(2)
    goes_on = torch.ones_like(whole_of, dtype=torch.bool)
    goes_on[0] = False
    if not masked:
        goes_on[1:] = begins[1:] == closes[:-1] + 1
        _check_positions(begins, goes_on)
    seen, ended = _counts(own, whole_of, goes_on, rank)
    weights = torch.zeros_like(goes_on[:rank])
    reach = goes_on[rank]
    for r in reversed(range(rank)):
        weights[r] = reach
        reach = reach & goes_on[r] & whole_of[r].bool()

    tails = rows[:rank, :, 4:].bool()
    later = tails.flip(2).cumsum(2).flip(2)
    tail_numbers = (ended[:, :, None] - later).clamp(min=0)
    order = (r * window + j for r in range(rank) for j in range(window - min(window, lengths[r]), window))
    counted = real.cumsum(1)
    # Of the document that a token is of: what was counted before it began.
    base = torch.where(first > 0, counted.gather(1, (first - 1).clamp(min=0)), -seen[:, None])
    several = not bool(whole.all())
    return Layout(
        lengths=lengths,
        rank=rank,
        real=part.real,
        numbers=(counted - 1 - base).clamp(min=0),
        bounds=tuple((0, *row.nonzero().flatten().tolist(), tokens) for row in starts) if several else None,
        last=last if several else None,
        weights=weights,
        seen=seen,
        tail_real=(tails & weights[:, :, None]).transpose(0, 1).flatten(1),
        tail_numbers=tail_numbers.transpose(0, 1).flatten(1),
        tail_order=tuple(order),
        sinks_read=bool((seen >= sinks).all()),
        masked=masked,
        packed=not bool((whole_of.bool() & (goes_on | (torch.arange(ranks.size, device=device) == 0)[:, None])).all()),
    )


def _headers(ranks: Ranks, part: Part, window: int) -> tuple[tuple[int, ...], bool]:
    """Return the tokens of each rank, and whether any has a mask; refuse parts that do not belong together."""
    (batch, tokens), masked = part.positions.shape, part.real is not None
    unshifted = part.positions.new_zeros(()) if part.unshifted is None else part.unshifted.long()
    header = torch.stack([*(torch.full_like(unshifted, x) for x in (batch, tokens, masked, window)), unshifted])
    headers = ranks.all_gather(header).tolist()
    _check(headers)
    return tuple(row[1] for row in headers), any(row[2] for row in headers)


def _counts(own: Tensor, whole: Tensor, goes_on: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Count the real tokens of the document that a rank begins in ``[B]``, and that earlier ones end in ``[rank, B]``.

    Each rank has its ``own [P, B]`` tokens of the document it ends in, which may be the ``whole`` of what it has, and
    may begin in the one that the rank before ends in, where that ``goes_on``.
    """
    seen, ended = torch.zeros_like(own[0]), torch.zeros_like(own[:rank])
    for r in range(rank):
        ended[r] = own[r] + whole[r] * seen
        seen = ended[r] * goes_on[r + 1]
    return seen, ended


def _check(headers: list[list[int]]) -> None:
    """Refuse parts that do not belong together; every rank sees the same headers and raises the same error."""
    if len(rows := {row[0] for row in headers}) > 1:
        remedy = "Give all ranks of a group the same rows: split them with the context's split()."
        raise ArgumentError("input_ids", "have as many rows on every rank", sorted(rows), remedy)
    if len({row[3] for row in headers}) > 1:
        raise ArgumentError(
            "model", "be the same on every rank", [row[3] for row in headers], "Windows differ: load the same model."
        )
    if wrong := [rank for rank, row in enumerate(headers) if row[4]]:
        rule = "be shifted before the split"
        remedy = "A rank's last token is followed by the next rank's first: split() shifts labels."
        raise ArgumentError("shift_labels", rule, f"the tokens' own labels on ranks {wrong}", remedy)


def _check_positions(begins: Tensor, goes_on: Tensor) -> None:
    """Refuse a rank that neither goes on nor begins a document."""
    broken = (~goes_on[1:] & (begins[1:] != 0)).any(1).nonzero().flatten() + 1
    if len(broken):
        raise ArgumentError(
            "position_ids",
            "go on where the rank before ended, or begin a document at 0",
            f"others on ranks {broken.tolist()}",
            "Every rank's are those of the whole text, and all ranks split the same text: use the context's split().",
        )
