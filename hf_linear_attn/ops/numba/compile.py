"""How loops are compiled: when they are first called.

What was compiled is kept on disk beside the package, or where ``NUMBA_CACHE_DIR`` says.
"""
# mypy: disable-error-code="misc,untyped-decorator"

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from numba import cfunc, types
from numba.core.dispatcher import Dispatcher
from numba.core.event import Listener, install_listener

from hf_linear_attn.ops.numba import primitives

logger = getLogger(__name__)

HOW_LONG = "10 to 20 seconds where the processor is idle, some minutes where it is busy"
"""Of one loop, cold: 10 s of a processor's time for steps and 15 s for prompts, in fp32 and in bf16."""


class Entry(NamedTuple):
    """A function of an address, as C calls it; other Python threads run meanwhile.

    Attributes:
        address: Where it begins.
        call: Calls it.
    """

    address: int
    call: Callable[[int], None]


@cache
def entry(function: Callable[[int], None]) -> Entry:
    """Compile a function of an address for threads of any kind to call, and keep what was compiled."""
    function.__qualname__ = kept_as(function)
    compile_ = partial(cfunc, types.void(types.int64), error_model="numpy")
    with install_listener("numba:compile", _Announcement(function.__module__.rpartition(".")[0])):
        try:
            compiled = compile_(cache=True)(function)
        except RuntimeError:
            warnings.warn(
                f"Nothing compiled for the CPU can be kept here, so every process compiles anew: {HOW_LONG}. "
                "Set NUMBA_CACHE_DIR to a folder that can be written.",
                stacklevel=2,
            )
            compiled = compile_()(function)
    return Entry(compiled.address, compiled.ctypes)


class _Announcement(Listener):
    """Says that the caller is going to wait for the compiler, as soon as that begins."""

    def __init__(self, what: str) -> None:
        self._what: str | None = what

    def on_start(self, event: Any) -> None:
        if self._what is not None:
            logger.warning("compiling the loop of %s for this processor, once: %s", self._what, HOW_LONG)
        self._what = None

    def on_end(self, event: Any) -> None:
        """Say nothing."""


def kept_as(function: Callable[[int], None]) -> str:
    """Return the name of what is kept: Numba looks for changes in a function's own file, not in what it calls."""
    own, called = function.__module__, dict[str, Any]()
    ahead = [primitives.__name__, own]
    while ahead:
        name = ahead.pop()
        if name in called:
            continue
        module = sys.modules[name]
        numbers = {key: x for key, x in vars(module).items() if isinstance(x, (int, float, np.number))}
        called[name] = ("" if name == own else inspect.getsource(module)), numbers
        ahead += [x.__module__ for x in vars(module).values() if isinstance(x, Dispatcher)]
    return f"{function.__name__}_{hashlib.sha256(repr(sorted(called.items())).encode()).hexdigest()[:8]}"
