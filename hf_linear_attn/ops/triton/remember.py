"""Plans that are made once: what a plan allocates, computes and launches, written down and repeated.

To plan a call takes the host longer than to launch its kernels, and a plan depends on nothing but shapes, strides,
dtypes and settings. :func:`remembered` therefore records the operations of a planning function the first time, tensors
as numbers, and repeats them with the tensors of the next call that is like it. A plan that reads numbers from memory
is not repeated but made anew each time.

Nothing here knows what is planned, and nothing is remembered of fake tensors: under ``torch.compile`` ops are recorded
when they run, with real ones.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from hf_linear_attn.ops.triton.start import ALIGNMENT, PLAIN, Number, Repeated, Start, told_apart

MOST_PLANS = 1024
"""Plans that are remembered per planning function; a run that meets more shapes forgets the oldest."""

MOST_SHARED = 64
"""Results of :func:`shared_by_layers` that are remembered, a few per step."""

P = ParamSpec("P")
R = TypeVar("R")


class Operation(NamedTuple):
    """An operation of torch.

    Attributes:
        function: What is called.
        arguments: By position; None in place of tensors and of lists of them.
        settings: Arguments by name, likewise.
        tensors: Places in ``arguments`` or names in ``settings``, and the numbers of tensors there.
        groups: Places in ``arguments`` of lists of tensors, and their numbers; None for None.
        results: Numbers of what it returns; None for what has a number already.
    """

    function: Callable[..., Any]
    arguments: list[Any]
    settings: dict[str, Any]
    tensors: list[tuple[int | str, int]]
    groups: list[tuple[int, list[int | None]]]
    results: list[int | None]

    def run(self, tensors: list[Any]) -> None:
        """Run it on numbered tensors, and number its results."""
        arguments, settings = self.arguments.copy(), self.settings
        for place, number in self.tensors:
            if isinstance(place, int):
                arguments[place] = tensors[number]
            else:
                settings = settings | {place: tensors[number]}
        for place, numbers in self.groups:
            arguments[place] = [None if number is None else tensors[number] for number in numbers]
        found = self.function(*arguments, **settings)
        for result, x in zip(self.results, found if isinstance(found, tuple | list) else (found,), strict=True):
            if result is not None:
                tensors[result] = x

    def inputs(self) -> Iterator[int]:
        """Yield the numbers of tensors that it reads."""
        yield from (number for _, number in self.tensors)
        yield from (number for _, numbers in self.groups for number in numbers if number is not None)


class Allocation(NamedTuple):
    """Memory that a tensor takes: which tensor, and how it is had."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def _allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return what allocates on a device, where it is the current one.

    Code that torch.compile generates allocates by the first; it takes half the time of the second, which reads its
    arguments and asks who else wants to know.
    """
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    return found or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))


class Plan(NamedTuple):
    """What a planning function did, with numbers for tensors: those given come first.

    Attributes:
        numbers: How many there are.
        device: Of the launches.
        allocations: Tensors that are allocated.
        operations: What is computed besides, in order.
        starts: Launches.
        results: Numbers of what is returned; None for what is none.
        form: Makes of a list of tensors what is returned.
    """

    numbers: int
    device: torch.device
    allocations: list[Allocation]
    operations: list[Operation]
    starts: list[Repeated]
    results: list[int | None]
    form: Callable[[list[Any]], Any]

    def run(self, given: Sequence[Tensor | Number]) -> Any:
        """Repeat it with other tensors."""
        tensors: list[Any] = [int(x) if type(x) is Number else x for x in given]
        tensors += [None] * (self.numbers - len(given))
        with _on(self.device):
            for number, size, stride, dtype, allocate in self.allocations:
                tensors[number] = allocate(size, stride, dtype)
            for operation in self.operations:
                operation.run(tensors)
            for start in self.starts:
                start.run(tensors)
        return self.form([None if number is None else tensors[number] for number in self.results])


class _Stay:
    """A context that changes nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


_STAY = _Stay()


def _on(device: torch.device) -> Any:
    """Return a context in which launches go to a device; most are on it already, and torch's takes long to enter."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(device)


Where = tuple[int, int | torch.SymInt, torch.Size, tuple[int, ...], torch.dtype]


def _where(x: Tensor | Number) -> Where | int:
    """Return what tells a tensor from others: one tensor may come as several objects."""
    if isinstance(x, Number):
        return id(x)
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what runs while a plan is made.

    Args:
        given: The tensors of the call, and the numbers that its plan does not depend on.
    """

    def __init__(self, given: Sequence[Tensor | Number]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[Where | int, int] = {_where(x): number for number, x in enumerate(given)}
        # Where one tensor is given twice, the next call like this may give two.
        self.repeatable = len(self.known) == len(given)
        # Memory of what is freed would be given to others, that were then taken for it.
        self.alive: list[Any] = list(given)
        self.operations: list[Operation] = []
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

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
        """Write down what has run."""
        outputs = found if isinstance(found, tuple | list) else (found,)
        if not all(x is None or isinstance(x, Tensor) for x in outputs):
            self.repeatable = False
            return
        if _views(function) and all(x is None or _where(x) in self.known for x in outputs):
            # The same tensor as another object, as `detach` gives.
            return
        named = {name: self.number(x) for name, x in kwargs.items() if isinstance(x, Tensor)}
        placed = {place: self.number(x) for place, x in enumerate(args) if isinstance(x, Tensor)}
        groups = {
            place: [None if y is None else self.number(y) for y in x]
            for place, x in enumerate(args)
            if isinstance(x, tuple | list) and any(isinstance(y, Tensor) for y in x)
        }
        arguments = [None if place in placed or place in groups else x for place, x in enumerate(args)]
        settings = {name: x for name, x in kwargs.items() if name not in named}
        tensors: list[tuple[int | str, int]] = [*placed.items(), *named.items()]
        results = [self._new(x) for x in outputs]
        function = _METHODS.get(function, function)
        self.operations.append(Operation(function, arguments, settings, tensors, [*groups.items()], results))

    def _new(self, x: Tensor | None) -> int | None:
        """Number a result, if there is one that has no number yet."""
        if x is None or _where(x) in self.known:
            return None
        self.alive.append(x)
        self.known[_where(x)] = len(self.alive) - 1
        return len(self.alive) - 1

    def number(self, x: Tensor | Number) -> int:
        """Return a tensor's number; one that comes from elsewhere may be another next time."""
        number = self.known.get(_where(x))
        if number is None:
            self.repeatable = False
            return 0
        return number

    def plan(self, starts: Sequence[Start], result: Any) -> Plan | None:
        """Return the plan, or None where it cannot be repeated."""
        numbered = []
        for start in starts:
            names = [(name, self.number(x)) for name, x in start.arguments.items() if isinstance(x, Tensor | Number)]
            fixed = {name: None if isinstance(x, Tensor | Number) else x for name, x in start.arguments.items()}
            numbered.append(Repeated(start._replace(arguments=fixed), names))
        whole = [result] if isinstance(result, Tensor) else list(result)
        results = [None if x is None else self.number(x) for x in whole]
        if not self.repeatable:
            return None
        needed = {number for start in numbered for _, number in start.tensors} | {x for x in results if x is not None}
        allocations, operations = self._simplified(needed)
        form: Callable[[list[Any]], Any] = tuple
        if isinstance(result, Tensor):
            form = _only
        elif hasattr(result, "_make"):
            form = type(result)._make
        device = self.alive[0].device
        return Plan(len(self.alive), device, allocations, operations, numbered, results, form)

    def _simplified(self, needed: set[int]) -> tuple[list[Allocation], list[Operation]]:
        """Return allocations apart from other operations, without what nobody needs and views that allocations can be.

        Args:
            needed: Numbers that launches and results have.
        """
        allocated = {op.results[0] for op in self.operations if _allocates(op.function)}
        users = Counter(number for op in self.operations for number in op.inputs())
        allocations, operations = [], []
        for op in reversed(self.operations):
            result = op.results[0]
            if result is not None and (_allocates(op.function) or _views(op.function)):
                if result not in needed:
                    continue
                if _allocates(op.function) or self._is_whole(result, op.tensors[0][1], allocated - needed, users):
                    allocations.append(self._allocation(result))
                    continue
            needed |= set(op.inputs())
            operations.append(op)
        return allocations[::-1], operations[::-1]

    def _allocation(self, number: int) -> Allocation:
        x = self.alive[number]
        return Allocation(number, tuple(x.shape), x.stride(), x.dtype, _allocator(x.device))

    def _is_whole(self, number: int, base: int, allocated: set[int | None], users: Counter[int]) -> bool:
        """Tell whether a view is all of what is allocated for it alone, in another order of dimensions."""
        view, whole = self.alive[number], self.alive[base]
        same = view.dtype == whole.dtype and view.numel() == whole.numel() and whole.is_contiguous()
        return same and base in allocated and users[base] == 1


def _only(results: list[Any]) -> Any:
    return results[0]


_ALLOCATING = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


_METHODS: dict[Any, Callable[..., Any]] = {torch.ops.aten.view.dtype: Tensor.view}
"""Methods that do the same in a quarter of the time, of what most plans with a mask repeat."""


def _allocates(function: Any) -> bool:
    return function in _ALLOCATING


def _views(function: Any) -> bool:
    return getattr(function, "is_view", False)


_lock = threading.Lock()
_caches: list[dict[Any, Any]] = []


def _keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put something into a cache, in place of the oldest where it is full."""
    with _lock:
        while len(cache) >= most:
            del cache[next(iter(cache))]
        cache[key] = value


def forget() -> None:
    """Forget all plans: they know nothing of settings that have changed since."""
    with _lock:
        for cache in _caches:
            cache.clear()


def remembered(plan: Callable[P, tuple[R, Sequence[Start]]]) -> Callable[P, R]:
    """Run what a planning function plans, and plan calls that are alike only once.

    Args:
        plan: Takes tensors, all on the device of the launches, settings that hash, and a
            :class:`Number` where an integer only goes on to the launches; returns the results, a tensor or a tuple of
            them, allocated, and the launches that compute them, in order. Apart from its arguments it may depend on
            the precision of fp32 products alone.

    Returns:
        A function of the same arguments that launches the kernels and returns the results.
    """
    plans: dict[Any, Plan | None] = {}
    _caches.append(plans)

    @functools.wraps(plan)
    def run(*arguments: P.args, **settings: P.kwargs) -> R:
        given: list[Any] = []
        key: list[Any] = [torch.get_float32_matmul_precision()]
        for x in arguments:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                given.append(x)
                # Triton compiles for addresses, too; see Repeated.
                key += (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)  # type: ignore[attr-defined]
            elif kind is Number:
                given.append(x)
                key += told_apart(x)  # type: ignore[arg-type]
            elif kind not in PLAIN and isinstance(x, Tensor):
                return _run(*plan(*arguments, **settings), x.device)
            else:
                key.append(x)
        key.append(given[0].device)
        named = tuple(key)
        known = plans.get(named)
        if known is not None:
            result: R = known.run(given)
            return result
        if named in plans:
            return _run(*plan(*arguments, **settings), given[0].device)
        with Recorder(given) as recorder:
            result, starts = plan(*arguments, **settings)
        _keep(plans, named, recorder.plan(starts, result), MOST_PLANS)
        return _run(result, starts, given[0].device)

    return run


def _run(result: R, starts: Sequence[Start], device: torch.device) -> R:
    if starts:
        with _on(device):
            for start in starts:
                start.with_plain_numbers().run()
    return result


def shared_by_layers(compute: Callable[..., R]) -> Callable[..., R]:
    """Compute something of a tensor once for all layers of a step, which pass the same tensor.

    Args:
        compute: Takes a tensor and settings that hash; returns a tensor, or a tuple of tensors and Nones.

    Returns:
        The same function. It computes anew where the tensor is another or has changed, on another stream, and while a
        graph is captured, whose replays have to compute it themselves.
    """
    results: dict[Any, tuple[Any, int, R]] = {}
    _caches.append(results)

    def found(x: Tensor, *settings: Any) -> R:
        # Versions of inference tensors are not counted.
        if type(x) is not Tensor or x.is_inference():
            return compute(x, *settings)
        stream = 0
        if x.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return compute(x, *settings)
            stream = torch.cuda.current_stream(x.device).cuda_stream
        key = id(x), stream, settings
        known = results.get(key)
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        value = compute(x, *settings)
        _keep(results, key, (weakref.ref(x), x._version, value), MOST_SHARED)
        return value

    @functools.wraps(compute)
    def shared(x: Tensor, *settings: Any) -> R:
        recorder = _get_current_dispatch_mode()
        if not isinstance(recorder, Recorder):
            return found(x, *settings)
        # A plan repeats the whole, which may be known by then.
        with recorder.paused():
            value = found(x, *settings)
        recorder.note(found, (x, *settings), {}, value)
        return value

    return shared
