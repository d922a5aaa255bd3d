"""The rotation by which queries and keys know their positions, and how it is undone (RoPE, arXiv:2104.09864)."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.dispatch import tensor_obstacle, wants_kernels
from hf_linear_attn.tracing import needs_operations


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

    def by_pair(self, x: Tensor) -> Tensor:
        """Return the cosines or sines of pairs; those of entries are alike within one."""
        if self.angles == "pair":
            return x
        if self.angles == "entry" and self.pairs == "next":
            return x[..., ::2]
        return x[..., : x.shape[-1] // 2]

    def by_entry(self, x: Tensor) -> Tensor:
        """Spread cosines or sines over the entries that they are for."""
        if self.angles == "entry":
            return x
        x = self.by_pair(x)
        return self.whole(x, x)

    def pairs_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second entries of all pairs."""
        if self.pairs == "half":
            a, b = x.chunk(2, -1)
            return a, b
        return x[..., ::2], x[..., 1::2]

    def whole(self, a: Tensor, b: Tensor) -> Tensor:
        """Put the entries of pairs where they were."""
        return torch.cat([a, b], -1) if self.pairs == "half" else torch.stack([a, b], -1).flatten(-2)


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
        turns: Cosines of the pairs and then their sines, times the factor ``[B or 1, T, R]``, for R entries.
        layout: Which entries those are.
        source: The cosines that all of it was made of, by which layers of a model know that they turn alike.
    """

    turns: Tensor
    layout: Layout
    source: Tensor | None = None

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, layout: Layout, source: Tensor | None = None) -> "Rotation":
        """Take cosines and sines ``[B or 1, T, *]`` as a model hands them to its layers."""
        return cls(torch.cat([layout.by_pair(cos), layout.by_pair(sin)], -1), layout, source)

    def of_others(self, turns: Tensor) -> "Rotation":
        """Return the rotation of other tokens."""
        return Rotation(turns, self.layout)

    def do(self, x: Tensor) -> Tensor:
        """Turn queries or keys ``[B, H, T, D]``."""
        cos, sin = upcast(self.turns).chunk(2, -1)
        return self._turned(x, cos, -sin)

    def undo(self, x: Tensor, backend: str = "auto") -> Tensor:
        """Turn queries or keys ``[B, H, T, D]`` back: by the negative sine, over the square of the factor.

        Args:
            x: What the model has turned.
            backend: As in :func:`linear_attention`.
        """
        if wants_kernels(backend, x.device) and tensor_obstacle(x) is None:
            # Imported here so that the package needs neither Triton nor a GPU.
            from hf_linear_attn.ops.rotation.triton import turn

            return turn(x, self.turns, self.layout.pairs, self.layout.at_end, derive=False)
        return self._turned(x, *self._back())

    def divide(self, x: Tensor) -> Tensor:
        """Undo the rotation of ``x``, all entries of which are turned, in few operations; no pair's angle may be 0."""
        turns = torch.complex(*upcast(self.turns).chunk(2, -1))
        plain = torch.view_as_real(torch.complex(*self.layout.pairs_of(upcast(x))).div_(turns[:, None]))
        return (plain.mT if self.layout.pairs == "half" else plain).flatten(-2).to(x.dtype)

    def cut(self, start: int, end: int) -> "Rotation":
        """Return the rotation of the tokens ``[start, end)``."""
        return self.of_others(self.turns[:, start:end])

    def row(self, row: int) -> "Rotation":
        """Return the rotation of one row."""
        return self if len(self.turns) == 1 else self.of_others(self.turns[row : row + 1])

    def flat(self, batch: int) -> "Rotation":
        """Return the rotation of rows that are laid end to end."""
        return self.of_others(self.turns.expand(batch, -1, -1).flatten(0, 1)[None])

    def _back(self) -> tuple[Tensor, Tensor]:
        turns = upcast(self.turns)
        cos, sin = turns.chunk(2, -1)
        # Of a slot that holds no token, the angles are 0 and so is what they turn.
        square = (sin * sin).addcmul(cos, cos).clamp(min=torch.finfo(turns.dtype).tiny)
        back = turns.reshape(*turns.shape[:-1], 2, -1) / square[..., None, :]
        return back[..., 0, :], back[..., 1, :]

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn every pair ``(a, b)`` into ``(a cos + b sin, b cos - a sin)``."""
        cos, sin, width = cos[:, None], sin[:, None], self.turns.shape[-1]
        still = x.shape[-1] - width
        turned = x if not still else x[..., still:] if self.layout.at_end else x[..., :width]
        if needs_operations() or cos.requires_grad or sin.requires_grad:
            a, b = self.layout.pairs_of(upcast(turned))
            turned = self.layout.whole((a * cos).addcmul(b, sin), (b * cos).addcmul(a, sin, value=-1)).to(x.dtype)
        else:
            turned = _Turn.apply(turned, cos, sin, self.layout)  # type: ignore[no-untyped-call]
        if not still:
            return turned
        return torch.cat([x[..., :still], turned] if self.layout.at_end else [turned, x[..., width:]], -1)


class _Turn(torch.autograd.Function):
    """Turn pairs in few passes over memory, forward and backward; angles have no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """Return ``x [B, heads, T, R]``, all of which is turned by ``[B or 1, 1, T, R / 2]``."""
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        x, dtype = upcast(x), x.dtype
        turned = x * layout.whole(cos, cos)
        (a, b), (to_a, to_b) = layout.pairs_of(x), layout.pairs_of(turned)
        to_a.addcmul_(b, sin)
        to_b.addcmul_(a, sin, value=-1)
        return turned.to(dtype)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        """Turn the gradient the other way, which has a gradient in turn."""
        cos, sin = ctx.saved_tensors
        return _Turn.apply(dx, cos, -sin, ctx.layout), None, None, None  # type: ignore[no-untyped-call]
