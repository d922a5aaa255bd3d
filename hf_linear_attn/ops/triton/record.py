"""What a call of kernels does, written down so that it can be repeated: operations of torch, and launches.

Tensors are numbers in what is written down, those given first. What is repeated is a function of Python, made of what
was written down as :mod:`dataclasses` makes its methods: nothing in it is looked up or decided again.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from hf_linear_attn.ops.triton.start import Number, Start


class Slot(int):
    """The number of a tensor, or of a :class:`Number`, in place of it."""


class Step(NamedTuple):
    """A call that is repeated.

    Attributes:
        function: What is called.
        arguments: By position, slots in place of tensors.
        settings: Arguments by name, likewise.
        results: Slots of what it returns; None for what has one already.
        several: Whether it returns a tuple or a list of tensors.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    settings: dict[str, Any]
    results: Sequence[Slot | None] = ()
    several: bool = False

    def inputs(self) -> Iterator[Slot]:
        """Yield the slots that it reads."""
        for x in (*self.arguments, *self.settings.values()):
            yield from (y for y in (x if isinstance(x, list) else [x]) if isinstance(y, Slot))


def _allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return what allocates on a device, where it is the current one.

    Code that torch.compile generates allocates by the first; it takes half the time of the second, which reads its
    arguments and asks who else wants to know.
    """
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    return found or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))


Where = tuple[int, int | torch.SymInt, torch.Size, tuple[int, ...], torch.dtype]


def _where(x: Tensor | Number) -> Where | int:
    """Return what tells a tensor from others: one tensor may come as several objects."""
    if isinstance(x, Number):
        return id(x)
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what runs.

    Args:
        given: The tensors of the call, and the numbers that only go on to launches.
    """

    def __init__(self, given: Sequence[Tensor | Number]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = given
        self.known: dict[Where | int, Slot] = {_where(x): Slot(number) for number, x in enumerate(given)}
        # Where one tensor is given twice, the next call like this may give two.
        self.repeatable = len(self.known) == len(given)
        # Memory of what is freed would be given to others, that were then taken for it.
        self.alive: list[Any] = list(given)
        self.steps: list[Step] = []
        self.writes = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation and write it down."""
        found = func(*args, **(kwargs or {}))
        if self.writes:
            self.note(func, args, kwargs or {}, found)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs for a while."""
        self.writes = False
        try:
            yield
        finally:
            self.writes = True

    def note(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> None:
        """Write down what has run."""
        if not self.repeatable:
            return
        several = isinstance(found, tuple | list)
        outputs = found if several else (found,)
        if not all(x is None or isinstance(x, Tensor) for x in outputs):
            self.give_up()
            return
        if _views(function) and all(x is None or _where(x) in self.known for x in outputs):
            # The same tensor as another object, as `detach` gives.
            return
        arguments, settings = [self._named(x) for x in args], {name: self._named(x) for name, x in kwargs.items()}
        if not self.repeatable:
            return
        results = [self._new(x) for x in outputs]
        self.steps.append(Step(_METHODS.get(function, function), arguments, settings, results, several))

    def note_launch(self, start: Start, kernel: Any) -> None:
        """Write down a launch.

        Before each launch Triton looks at every argument to find what it compiled for such a one: with some fifty of
        them that takes the host longer than all else of a call. What is repeated is alike in all that Triton looks at:
        dtypes, where in a row of 16 bytes tensors begin, and which numbers are 1, multiples of 16 or long. So what it
        compiled is handed the arguments, as Triton's own tutorial of a fused softmax does. For AMD's processors Triton
        also asks how much memory lies behind a tensor, which nobody here knows.

        Args:
            start: The launch.
            kernel: What Triton compiled for it; None where it is interpreted.
        """
        arguments = {name: self._named(x) for name, x in start.arguments.items()}
        if not self.repeatable:
            return
        if kernel is None or torch.version.hip:
            self.steps.append(Step(start.kernel[(start.programs,)], (), arguments))
            return
        named = inspect.signature(start.kernel.fn).parameters
        values = [arguments.get(name, parameter.default) for name, parameter in named.items()]
        self.steps.append(Step(kernel[(start.programs, 1, 1)], values, {}))

    def _named(self, x: Any) -> Any:
        """Return an argument with slots in place of tensors."""
        if isinstance(x, Tensor | Number):
            return self._slot(x)
        if isinstance(x, tuple | list) and any(isinstance(y, Tensor) for y in x):
            return [self._named(y) for y in x]
        return x

    def _new(self, x: Tensor | None) -> Slot | None:
        """Number a result, if there is one that has no number yet."""
        if x is None or _where(x) in self.known:
            return None
        self.alive.append(x)
        self.known[_where(x)] = slot = Slot(len(self.alive) - 1)
        return slot

    def _slot(self, x: Tensor | Number) -> Slot:
        """Return a tensor's number; one that comes from elsewhere may be another next time."""
        slot = self.known.get(_where(x))
        if slot is None:
            self.give_up()
            return Slot(0)
        return slot

    def give_up(self) -> None:
        """Write down nothing more, and keep nothing: this call cannot be repeated."""
        self.repeatable = False
        self.alive.clear()
        self.steps.clear()

    def plan(self, result: Any) -> Callable[..., Any] | None:
        """Return what repeats it with other tensors, or None where it cannot be repeated.

        Args:
            result: What the call has returned: a tensor, None, or a tuple of such.
        """
        source = _Source(self.given)
        returned = source.result(result, self._slot) if self.repeatable else ""
        if not self.repeatable:
            return None
        for step in self._simplified(source.slots):
            source.add(step)
        return source.function(returned)

    def _simplified(self, needed: set[Slot]) -> list[Step]:
        """Return the steps without what nobody needs, and with views made at once that allocations can be.

        Args:
            needed: What the result is made of.
        """
        allocated = {step.results[0] for step in self.steps if step.function in _ALLOCATING}
        users = Counter(slot for step in self.steps for slot in step.inputs())
        # What nothing but views of it needs: a launch takes the views.
        bases = allocated - needed
        steps, needed = [], {*needed}
        for step in reversed(self.steps):
            result = step.results[0] if step.results else None
            allocates = step.function in _ALLOCATING
            if result is not None and (allocates or _views(step.function)):
                if result not in needed:
                    continue
                if allocates or self._is_whole(result, next(step.inputs()), bases, users):
                    steps.append(self._allocation(result))
                    continue
            needed |= {*step.inputs()}
            steps.append(step)
        return steps[::-1]

    def _allocation(self, slot: Slot) -> Step:
        x = self.alive[slot]
        return Step(_allocator(x.device), (tuple(x.shape), x.stride(), x.dtype), {}, (slot,))

    def _is_whole(self, slot: Slot, base: Slot, allocated: set[Slot | None], users: Counter[Slot]) -> bool:
        """Tell whether a view is all of what is allocated for it alone, in another order of dimensions."""
        view, whole = self.alive[slot], self.alive[base]
        same = view.dtype == whole.dtype and view.numel() == whole.numel() and whole.is_contiguous()
        return same and base in allocated and users[base] == 1


class _Source:
    """The source of a function that takes what was given, and does what was written down.

    Args:
        given: The tensors and numbers of the call.
    """

    def __init__(self, given: Sequence[Tensor | Number]) -> None:
        self.given = given
        self.slots: set[Slot] = set()
        self.values: dict[str, Any] = {}
        self.lines = [f"t{n} = int(t{n})" for n, x in enumerate(given) if isinstance(x, Number)]

    def name(self, x: Any) -> str:
        """Return what stands for a value."""
        if isinstance(x, Slot):
            return f"t{int(x)}"
        if isinstance(x, list) and any(isinstance(y, Slot) for y in x):
            return f"[{', '.join(map(self.name, x))}]"
        if x is None or type(x) in (bool, int):
            return repr(x)
        name = f"c{len(self.values)}"
        self.values[name] = x
        return name

    def add(self, step: Step) -> None:
        """Add a call."""
        arguments = [self.name(x) for x in step.arguments]
        arguments += [f"{name}={self.name(x)}" for name, x in step.settings.items()]
        targets = ["_" if slot is None else self.name(slot) for slot in step.results]
        target = f"{', '.join(targets)}{',' * step.several} = " if any(x is not None for x in step.results) else ""
        self.lines.append(f"{target}{self.name(step.function)}({', '.join(arguments)})")

    def result(self, x: Any, slot: Callable[[Tensor], Slot]) -> str:
        """Return what makes a result, and keep the slots that it needs."""
        if isinstance(x, tuple):
            parts = "".join(f"{self.result(y, slot)}, " for y in x)
            return f"{self.name(type(x))}({parts})" if hasattr(x, "_make") else f"({parts})"
        if isinstance(x, Tensor):
            self.slots.add(slot(x))
            return self.name(slot(x))
        return self.name(x)

    def function(self, returned: str) -> Callable[..., Any]:
        """Return the function."""
        names = ", ".join(f"t{number}" for number in range(len(self.given)))
        body = "".join(f"    {line}\n" for line in [*self.lines, f"return {returned}"])
        exec(f"def repeat({names}):\n{body}", self.values)
        found: Callable[..., Any] = self.values["repeat"]
        return found


def recording() -> Recorder | None:
    """Return what writes down the operations that run, if anything does."""
    mode = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) else None


def give_up() -> None:
    """Write down nothing of the call that runs now: it is not repeated."""
    recorder = recording()
    if recorder is not None:
        recorder.give_up()


_ALLOCATING = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


_METHODS: dict[Any, Callable[..., Any]] = {torch.ops.aten.view.dtype: Tensor.view}
"""Methods that do the same in a quarter of the time, of what most plans with a mask repeat."""


def _views(function: Any) -> bool:
    return getattr(function, "is_view", False)
