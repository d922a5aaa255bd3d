"""What a converted layer remembers of the tokens it has read: named tensors, described by slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["sum", "token"] | torch.dtype


@dataclass(frozen=True)
class Slot:
    """Describe one tensor of a state.

    Attributes:
        shape: Its shape without the batch.
        kind: Its dtype: ``"sum"`` is fp32 (fp64 for fp64 tokens), ``"token"`` is that of keys and values.
        copies: Copies that lie in a dimension of their own behind the heads, all equal: programs of a kernel that
            share a head each update one. None for a tensor without that dimension.
    """

    shape: tuple[int, ...]
    kind: Kind = "sum"
    copies: int | None = None

    def zeros(self, batch: int, like: Tensor) -> Tensor:
        """Allocate the tensor for ``batch`` rows, for tokens of the dtype and device of ``like``."""
        shape = self.shape if self.copies is None else (self.shape[0], self.copies, *self.shape[1:])
        return torch.zeros(batch, *shape, dtype=self.dtype(like.dtype), device=like.device)

    def dtype(self, token: torch.dtype) -> torch.dtype:
        """Return the tensor's dtype for tokens of a dtype."""
        if self.kind == "sum":
            return torch.float64 if token == torch.float64 else torch.float32
        return token if self.kind == "token" else self.kind


class State:
    """The state of one layer for a batch of texts, from the first token on.

    Args:
        static: Whether tensors stay at fixed addresses, as compiled and captured steps need.

    Attributes:
        length: Tokens read, padding included; a tensor where the state is static.
        tensors: The tensors by name, batch first; none before the first token.
        slots: What each of them is.
        first_read: Whether the first tokens of every row, which are kept for ever, have all been read.
        padded: Whether some of the tokens read may have been masked.
    """

    def __init__(self, *, static: bool = False) -> None:
        self.static = static
        self.length: int | Tensor = torch.tensor(0) if static else 0
        self.tensors: dict[str, Tensor] = {}
        self.slots: Mapping[str, Slot] = {}
        self.first_read = self.padded = False

    def allocate(self, slots: Mapping[str, Slot], batch: int, like: Tensor) -> None:
        """Begin with zeros; nothing happens where there are tensors already."""
        if not self.tensors:
            self.slots = slots
            self.tensors = {name: slot.zeros(batch, like) for name, slot in slots.items()}

    def read(self) -> dict[str, Tensor]:
        """Return the tensors, of several copies one."""
        return {name: x if self.slots[name].copies is None else x[:, :, 0] for name, x in self.tensors.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors after more tokens; where the state is static they are copied, else they are owned."""
        for name, x in tensors.items():
            copies = self.slots[name].copies
            x = x if copies is None else x[:, :, None]
            if self.static:
                self.tensors[name].copy_(x)
            else:
                self.tensors[name] = x if copies in (None, 1) else x.repeat_interleave(copies, 2)

    def advance(self, tokens: int, device: torch.device) -> None:
        """Count ``tokens`` more tokens."""
        if isinstance(self.length, Tensor):
            if self.length.device != device:
                self.length = self.length.to(device)
            self.length.add_(tokens)
        else:
            self.length += tokens

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor, as where rows are selected or repeated."""
        self.tensors = {name: function(x) for name, x in self.tensors.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """Return what :meth:`restore` needs to come back to this moment, if nothing is changed in place until then."""
        return {name: x.clone() if self.static else x for name, x in self.tensors.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to a snapshot; without tensors, to before the first token."""
        if self.static:
            for name, x in self.tensors.items():
                x.copy_(tensors[name]) if name in tensors else x.zero_()
        else:
            self.tensors = dict(tensors)
        self.first_read = False

    def reset(self) -> None:
        """Forget every token."""
        self.restore({})
        self.padded = False
        if isinstance(self.length, Tensor):
            self.length.zero_()
        else:
            self.length = 0
