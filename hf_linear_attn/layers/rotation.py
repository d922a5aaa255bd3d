"""The rotation by which queries and keys know their positions, and how it is undone (RoPE, arXiv:2104.09864)."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast


class Layout(NamedTuple):
    """Which entries of a query or key a model turns, and which angle turns which.

    Attributes:
        pairs: What is turned together: ``"half"``, an entry of the first half with that of the second; ``"next"``, an
            entry with its neighbour; ``"none"``, nothing.
        angles: What the cosines and sines of a token stand for: ``"entry"``, one for each entry that is turned;
            ``"pair"``, one for each pair; ``"first"``, as for a pair, and those of the second half are not read.
        at_end: Whether the last entries are turned, where not all are, rather than the first.
    """

    pairs: Literal["half", "next", "none"]
    angles: Literal["entry", "pair", "first"] = "entry"
    at_end: bool = False

    def by_entry(self, x: Tensor) -> Tensor:
        """Spread cosines or sines over the entries that they are for."""
        if self.angles == "entry":
            return x
        x = x[..., : x.shape[-1] // 2] if self.angles == "first" else x
        return torch.cat([x, x], -1) if self.pairs == "half" else x.repeat_interleave(2, -1)

    def crossed(self, x: Tensor) -> Tensor:
        """Make ``(-b, a)`` of every pair ``(a, b)``."""
        if self.pairs == "half":
            a, b = x.chunk(2, -1)
            return torch.cat([-b, a], -1)
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


STILL = Layout("none")
"""The layout of a layer that turns nothing, though it is told angles."""

LAYOUTS = tuple(
    Layout(pairs, angles, at_end)
    for at_end in (False, True)
    for pairs in ("half", "next")
    for angles in ("entry", "pair", "first")
)
"""All that is known."""


class Rotation(NamedTuple):
    """The rotation of some tokens' queries and keys, with the factor that it may have.

    Attributes:
        cos: Cosines ``[B or 1, T, *]``, times the factor.
        sin: Sines of the same shape, times the factor.
        layout: What they are for.
    """

    cos: Tensor
    sin: Tensor
    layout: Layout

    def fits(self, x: Tensor) -> bool:
        """Tell whether there are angles for the tokens, and entries for the angles, of queries or keys."""
        batch, tokens, _ = self.cos.shape
        width = self.layout.by_entry(self.cos[:1, :1]).shape[-1]
        return batch in (1, x.shape[0]) and tokens == x.shape[2] and width <= x.shape[3] and width % 2 == 0

    def do(self, x: Tensor) -> Tensor:
        """Turn queries or keys ``[B, H, T, D]``."""
        return self._turned(x, undo=False)

    def undo(self, x: Tensor) -> Tensor:
        """Turn queries or keys ``[B, H, T, D]`` back: by the negative sine, over the square of the factor."""
        return self._turned(x, undo=True)

    def flat(self, batch: int) -> "Rotation":
        """Return the rotation of rows that are laid end to end."""
        cos, sin = (x.expand(batch, -1, -1).flatten(0, 1)[None] for x in (self.cos, self.sin))
        return self._replace(cos=cos, sin=sin)

    def _turned(self, x: Tensor, *, undo: bool) -> Tensor:
        cos, sin = (upcast(self.layout.by_entry(y))[:, None] for y in (self.cos, self.sin))
        width = cos.shape[-1]
        still = x.shape[-1] - width
        whole, at_end = x, self.layout.at_end
        x = upcast(x[..., still:] if at_end else x[..., :width])
        crossed = self.layout.crossed(x)
        x = (x * cos - crossed * sin) / (cos.square() + sin.square()) if undo else x * cos + crossed * sin
        x = x.to(whole.dtype)
        if not still:
            return x
        return torch.cat([whole[..., :still], x] if at_end else [x, whole[..., width:]], -1)
