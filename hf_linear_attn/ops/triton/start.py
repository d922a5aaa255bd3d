"""How a kernel is started."""

from typing import Any, NamedTuple

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
        plain = {name: int(x) if isinstance(x, Number) else x for name, x in self.arguments.items()}
        return self.kernel[(self.programs,)](**plain)


def told_apart(x: Number) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for, of a number that no plan depends on."""
    return Number, x == 1, x % ALIGNMENT == 0, x.bit_length() > 31
