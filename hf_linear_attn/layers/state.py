"""What a converted layer remembers of the tokens it has read: named tensors, described by slots."""

import weakref
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError

Kind = Literal["sum", "token"] | torch.dtype


@dataclass(frozen=True)
class Slot:
    """Describe one tensor of a state.

    Attributes:
        shape: Its shape without the batch.
        kind: Its dtype: ``"sum"`` is fp32 (fp64 for fp64 tokens), ``"token"`` is that of keys and values.
        copies: Copies that lie in a dimension of their own behind the heads, all equal: programs of a kernel that
            share a head each update one. None for a tensor without that dimension.
        common: Whether it may be the same in several layers, and then be held once.
    """

    shape: tuple[int, ...]
    kind: Kind = "sum"
    copies: int | None = None
    common: bool = False

    def zeros(self, batch: int, like: Tensor) -> Tensor:
        """Allocate the tensor for ``batch`` rows, for tokens of the dtype and device of ``like``."""
        shape = self.shape if self.copies is None else (self.shape[0], self.copies, *self.shape[1:])
        return torch.zeros(batch, *shape, dtype=self.dtype(like.dtype), device=like.device)

    def dtype(self, token: torch.dtype) -> torch.dtype:
        """Return the tensor's dtype for tokens of a dtype."""
        if self.kind == "sum":
            return torch.float64 if token == torch.float64 else torch.float32
        return token if self.kind == "token" else self.kind


class Common:
    """What layers of one cache hold together: a tensor that all of them make of the same parts is made once.

    The angles of a window's tokens are the same in every layer of most models. Layers whose states have one object in
    common find here what another one has made. A step changes such a tensor in place: each layer puts the same where
    the next token goes, and none reads there.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[list[Any], weakref.ref[Tensor]]] = {}
        self.stepped: dict[tuple[str, int], tuple[weakref.ref[Tensor], int]] = {}
        """By name and size the tensor that a layer has last changed, and the number of tokens that this had read."""

    def once(self, name: tuple[str, int], parts: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """Return what was made last by that name and size if it was made of the same parts, else make it.

        Parts that are tensors are the same where they are one object, others where they are equal.
        """
        if name in self._made:
            before, held = self._made[name]
            made = held()
            if made is not None and len(before) == len(parts) and all(map(_is_part, before, parts)):
                return made
        made = make()
        kept = [weakref.ref(x) if isinstance(x, Tensor) else x for x in parts]
        self._made[name] = kept, weakref.ref(made)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "Common":
        """Return one that has made nothing: copies of layers have it in common, too."""
        return Common()

    def __reduce__(self) -> tuple[type["Common"], tuple[()]]:
        """Pickle as one that has made nothing."""
        return Common, ()


def _is_part(before: Any, part: Any) -> bool:
    if isinstance(before, weakref.ref):
        return before() is part
    return not isinstance(part, Tensor) and bool(before == part)


def _staying(x: Tensor) -> Tensor:
    """Tell compilers that a tensor stays where it is: a step that changes others in place is not captured."""
    # Not while a graph is traced, where it cannot be told.
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
    return x


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
        common: What the layer holds together with others; None where it holds all for itself, as a static state does.
        ready: How the last step was taken, for the next one; None where none was taken by a loop.
    """

    def __init__(self, *, static: bool = False) -> None:
        self.static = static
        self.length: int | Tensor = _staying(torch.tensor(0)) if static else 0
        self.tensors: dict[str, Tensor] = {}
        self.slots: Mapping[str, Slot] = {}
        self.first_read = self.padded = False
        self.common: Common | None = None
        self.ready: Any = None

    def allocate(self, slots: Mapping[str, Slot], batch: int, like: Tensor, written: Container[str] = ()) -> None:
        """Begin with zeros for tokens ``like`` one; nothing happens where there are tensors already.

        Only a static state needs memory for what is ``written`` at once, by its names.
        """
        if not self.tensors:
            self.slots = slots
            named = slots if self.static else [name for name in slots if name not in written]
            self.tensors = {name: slots[name].zeros(batch, like) for name in named}
            if self.static:
                self.tensors = {name: _staying(x) for name, x in self.tensors.items()}

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

    def advance(self, tokens: int, device: torch.device, *, masked: bool = False) -> None:
        """Count ``tokens`` more tokens, of which some may be ``masked``."""
        self.padded |= masked
        if isinstance(self.length, Tensor):
            if self.length.device != device:
                self.length = _staying(self.length.to(device))
            self.length.add_(tokens)
        else:
            self.length += tokens

    def once(self, name: tuple[str, int], parts: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that layers may have in common; see :meth:`Common.once`."""
        if self.common is None or torch.compiler.is_compiling():
            return make()
        return self.common.once(name, parts, make)

    def check_common(self, name: str, *, steps: bool) -> None:
        """Refuse a layer that lags behind one that has overwritten what it would read in a tensor of both.

        ``steps`` says whether the layer takes the next token in place.

        Raises:
            ArgumentError: If another layer has taken more tokens in place.
        """
        common, length = self.common, self.length
        if common is None or isinstance(length, Tensor) or torch.compiler.is_compiling():
            return
        held = self.tensors[name]
        key = name, held.shape[1]
        if key in common.stepped:
            other, stepped = common.stepped[key]
            if other() is held and length < stepped + (not steps):
                raise ArgumentError(
                    "cache",
                    "be read by all layers of the model, token by token",
                    f"a cache of which one layer has read {length} tokens and another one {stepped + 1}",
                    "Give a model that leaves out layers a cache of its own.",
                )
        if steps:
            common.stepped[key] = weakref.ref(held), length

    def apply(self, function: Callable[[Tensor], Tensor], by: Tensor | int) -> None:
        """Replace every tensor by a function of it, as where rows are selected or repeated ``by`` something."""
        self.tensors = {
            name: self.once((name, x.shape[1]), (x, by), partial(function, x))
            if self.slots[name].common
            else function(x)
            for name, x in self.tensors.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to copies of the tensors; without any, to before the first token."""
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
