"""How a kernel is started: by name the first time, and as what Triton compiled when a plan repeats it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

ALIGNMENT = 16
"""Bytes. Triton compiles one kernel for addresses and numbers that this divides, and another for the rest."""

PLAIN = (type(None), str, int, float, bool)
"""Types of settings, known to be no tensors without a look at their bases."""


class Number(int):
    """A number that a launch takes and on which its plan does not depend, as where in a text a token stands."""


class Start(NamedTuple):
    """A launch: the jitted function, the size of its grid, and its arguments by name."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Launch the kernel; returns what Triton compiled for it, None where it is interpreted."""
        return self.kernel[(self.programs,)](**self.arguments)

    def with_plain_numbers(self) -> "Start":
        """Return the launch as Triton takes it."""
        plain = {name: int(x) if isinstance(x, Number) else x for name, x in self.arguments.items()}
        return self._replace(arguments=plain)


class Repeated:
    """A launch that is repeated with other tensors.

    Before each launch Triton looks at every argument to find what it compiled for such a one: with some fifty of them
    that takes the host longer than all else of a call. What a plan launches is alike in all that Triton looks at:
    dtypes, where in a row of 16 bytes tensors begin, and which numbers are 1, multiples of 16 or long. So the first run
    keeps the compiled kernel, and later ones hand it their arguments, as Triton's own tutorial of a fused softmax does.

    Args:
        start: The launch, with None in place of tensors.
        tensors: Names of the arguments that are tensors, or numbers that a plan does not depend on, and which ones.
    """

    def __init__(self, start: Start, tensors: Sequence[tuple[str, int]]) -> None:
        self.start, self.tensors = start, tensors
        self.compiled: tuple[Callable[..., None], list[Any], list[tuple[int, int]]] | None = None

    def run(self, tensors: Sequence[Any]) -> None:
        """Launch it with numbered tensors."""
        if self.compiled is None:
            arguments = self.start.arguments | {name: tensors[number] for name, number in self.tensors}
            self.compiled = self._compiled(self.start._replace(arguments=arguments).run())
            return
        run, values, places = self.compiled
        values = values.copy()
        for place, number in places:
            values[place] = tensors[number]
        run(*values)

    def _compiled(self, kernel: Any) -> tuple[Callable[..., None], list[Any], list[tuple[int, int]]] | None:
        """Return how to run what Triton compiled: a function of all arguments in order, those known, places of others.

        For AMD's processors Triton also asks how much memory lies behind a tensor, which no plan knows.
        """
        if kernel is None or torch.version.hip:
            return None
        named = inspect.signature(self.start.kernel.fn).parameters
        values = [self.start.arguments.get(name, parameter.default) for name, parameter in named.items()]
        order = {name: place for place, name in enumerate(named)}
        return kernel[(self.start.programs, 1, 1)], values, [(order[name], number) for name, number in self.tensors]


def told_apart(x: Number) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for, of a number that no plan depends on."""
    return Number, x == 1, x % ALIGNMENT == 0, x.bit_length() > 31
