"""How ops run kernels: plans that are pure functions of what a call is like, and launches that follow them.

To choose tiles and to plan launches takes the host longer than to launch kernels. All of it depends on nothing but
shapes, strides, dtypes and settings: a plan is made of tensors on the meta device, kept in an ``lru_cache``, and says
what is allocated and which kernels are launched with what.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _increment_version
from torch.nn import Parameter

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.specs import MOST_PLANS, PLAIN, Number, Spec, like, meta_of, specs_of
from hf_linear_attn.ops.triton.plan import Launch, Target, takes_tf32, target_of
from hf_linear_attn.tracing import is_tracing

P = ParamSpec("P")
R = TypeVar("R")

APART = 512
"""Bytes. What lies side by side begins at multiples of this, as what the caching allocator gives does."""


class Slot(int):
    """The number of a call's tensor or :class:`Number`, given ones first, then those that are allocated."""


class Step(NamedTuple):
    """A launch of a plan.

    Attributes:
        launch: What is launched, with meta tensors among its arguments.
        named: Slots of its arguments that are tensors or numbers, by name.
        values: Its arguments in the order of the kernel's parameters, but for those.
        places: Their places among the values, with their slots.
    """

    launch: Launch
    named: Mapping[str, int]
    values: list[Any]
    places: Sequence[tuple[int, int]]


class Plan(NamedTuple):
    """What is allocated, and the launches in order.

    Attributes:
        results: Tensors that outlive the call.
        scratch: Tensors that only launches know, and where in one piece of memory they begin, in bytes.
        room: Bytes of that.
        steps: The launches.
        result: What is returned, slots in the place of tensors.
        compiled: What starts each launch on a device, once Triton has compiled all of them for it.
    """

    results: Sequence[Spec]
    scratch: Sequence[tuple[int, Spec]]
    room: int
    steps: Sequence[Step]
    result: Any
    compiled: dict[torch.device, list[Callable[..., None]]]


def target_for(device: torch.device) -> Target:
    """Return the target that a device stands for.

    Raises:
        BackendError: If there are no kernels for it.
    """
    target = target_of(device)
    if target is None:
        raise BackendError(
            "backend", "be able to run here", "triton", f"There are no kernels for {device}; use backend='torch'."
        )
    return target


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return ``x`` contiguous, where there is one."""
    return None if x is None else x.contiguous()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """Return a mask as kernels read it, contiguous and uint8, where there is one."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def codes_of(mask: Tensor) -> Tensor:
    """Return a mask as uint8 outside of operators: a view, or a copy in a graph, since torch 2.11's views no bool."""
    return mask.to(torch.uint8) if torch.compiler.is_compiling() else mask.view(torch.uint8)


def codes_with(key_mask: Tensor | None, counts: Tensor) -> Tensor:
    """Return masks as bits of uint8: 0 for keys that are real, all where there is no mask, 1 for those that count."""
    return torch.add(1 if key_mask is None else codes_of(key_mask), codes_of(counts), alpha=2)


def has_changed(*tensors: Tensor | None) -> None:
    """Tell autograd that tensors have other values now: it does not see what kernels write."""
    _increment_version([x for x in tensors if x is not None and not x.is_inference()])


def changing(run: Callable[..., R], *places: int) -> Callable[..., R]:
    """Return what runs and tells autograd, as an op does, that the inputs at some places have changed."""

    def call(*inputs: Any) -> R:
        result = run(*inputs)
        has_changed(*[inputs[place] for place in places])
        return result

    return call


def execute(
    plan: Callable[..., tuple[R, Sequence[Launch] | Launch]], *arguments: Any, zeros: tuple[str, ...] = ()
) -> R:
    """Run the launches that a function plans, and return its result; calls that are alike are planned once.

    Args:
        plan: Takes the arguments; returns the results, allocated by ``torch.empty``, and the launch that computes
            them, or several in order. It depends on nothing but shapes, strides, dtypes and settings, and on
            :func:`takes_tf32`; only where texts are packed it computes with tensors, namely their boundaries.
        *arguments: Tensors in the layout that kernels read, tuples of them, and settings that hash. Boundaries of
            packed texts are ``cu_seqlens`` of the first; a tensor comes before every number.
        zeros: Fields of the result that begin as zeros, since the launches do not write all of them.
    """
    if is_tracing() or getattr(arguments[0], "cu_seqlens", None) is not None:
        # What watches sees what is allocated; boundaries are cut into tables on the device.
        result, launches = plan(*arguments)
        launches = [launches] if isinstance(launches, Launch) else launches
        for name in zeros:
            getattr(result, name).zero_()
        with _on(next(x.device for x in launches[0].arguments.values() if isinstance(x, Tensor))):
            for launch in launches:
                launch.run()
        return result
    given: list[Any] = []
    addresses: list[int] = []
    key = specs_of(arguments, given, addresses)
    first = given[0]
    device = first.device
    # Products of nothing else are taken in it by choice, and to ask takes as long as an allocation.
    made = plan_of(plan, key, first.dtype == torch.float32 and takes_tf32())
    # At each call the host waits for this: what launches alone know is one allocation.
    results = [torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=device) for x in made.results]
    scratch = torch.empty(made.room, dtype=torch.uint8, device=device) if made.scratch else None
    slots = given + results
    for name in zeros:
        slots[getattr(made.result, name)].zero_()
    with _on(device):
        compiled = made.compiled.get(device)
        if compiled is None:
            _launch(made, slots, scratch, device)
        else:
            addresses += [x.data_ptr() for x in results]
            if scratch is not None:
                begin = scratch.data_ptr()
                addresses += [begin + offset for offset, _ in made.scratch]
            for step, start in zip(made.steps, compiled, strict=True):
                values = step.values.copy()
                for place, slot in step.places:
                    values[place] = addresses[slot]
                start(*values)
    return _filled(made.result, slots)  # type: ignore[no-any-return]


@functools.lru_cache(MOST_PLANS)
def plan_of(plan: Callable[..., tuple[Any, Sequence[Launch] | Launch]], arguments: Any, tf32: bool) -> Plan:
    """Make a plan.

    Args:
        plan: As of :func:`execute`.
        arguments: Its arguments, with :class:`Spec` and :class:`NumberSpec` in the place of tensors and numbers.
        tf32: What :func:`takes_tf32` says.
    """
    known: list[Any] = []
    result, launches = plan(*meta_of(arguments, known))
    inputs = len(known)

    def number_of(x: Any, *, as_address: bool = True) -> int:
        for number, y in enumerate(known):
            if x is y:
                return number
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x.untyped_storage() is y.untyped_storage():
                if as_address and x.dtype == y.dtype and not x.storage_offset():
                    # A kernel gets an address, which is that of what the view begins with.
                    return number
                raise RuntimeError(f"{plan.__name__} plans with a view that begins elsewhere, or returns one")
        if not isinstance(x, Tensor):
            raise RuntimeError(f"{plan.__name__} plans with a number that it was not given")
        known.append(x)
        return len(known) - 1

    launches = [launches] if isinstance(launches, Launch) else launches
    taken = [
        {name: number_of(x) for name, x in launch.arguments.items() if isinstance(x, Tensor | Number)}
        for launch in launches
    ]
    returned: list[int] = []

    def numbered(x: Any) -> Any:
        if isinstance(x, Tensor):
            returned.append(number_of(x, as_address=False))
            return Slot(returned[-1])
        return like(x, [numbered(y) for y in x]) if isinstance(x, tuple) else x

    shaped = numbered(result)
    # Slots are numbered as tensors come to be: what is given, results, what launches alone know.
    outlives = sorted({number for number in returned if number >= inputs})
    alone = [number for number in range(inputs, len(known)) if number not in outlives]
    slots = {number: Slot(slot) for slot, number in enumerate((*range(inputs), *outlives, *alone))}
    scratch, room = [], 0
    for number in alone:
        x = known[number]
        scratch.append((room, _spec(x)))
        room += -(-x.untyped_storage().nbytes() // APART) * APART
    return Plan(
        results=[_spec(known[number]) for number in outlives],
        scratch=scratch,
        room=room,
        steps=[
            _step(launch, {name: slots[number] for name, number in numbers.items()})
            for launch, numbers in zip(launches, taken, strict=True)
        ],
        result=_filled(shaped, slots),
        compiled={},
    )


def _filled(x: Any, slots: Any) -> Any:
    """Return a result with what is in slots in the place of their numbers."""
    if type(x) is Slot:
        return slots[x]
    return like(x, [slots[y] if type(y) is Slot else _filled(y, slots) for y in x]) if isinstance(x, tuple) else x


def _spec(x: Tensor) -> Spec:
    return Spec(x.shape, x.stride(), x.dtype, 0)


def _step(launch: Launch, named: Mapping[str, int]) -> Step:
    parameters = inspect.signature(launch.kernel.fn).parameters
    given = launch.arguments | launch.options
    values = [None if name in named else given.get(name, x.default) for name, x in parameters.items()]
    return Step(launch, named, values, [(place, named[name]) for place, name in enumerate(parameters) if name in named])


def clear_caches() -> None:
    """Drop all plans: they know nothing of tile tables that have changed since."""
    plan_of.cache_clear()


def _launch(made: Plan, slots: list[Any], scratch: Tensor | None, device: torch.device) -> None:
    """Launch a plan's kernels, and keep for later calls what Triton compiled.

    Before a launch Triton looks at every argument to find what it compiled for such a one: with some fifty of them that
    takes the host longer than all else of a call. Calls of one plan are alike in all that Triton looks at: dtypes,
    where in a row of 16 bytes tensors begin, and which numbers are 1, multiples of 16 or long. So what it compiled is
    handed the arguments, as Triton's own tutorial of a fused softmax does, tensors as their addresses, which saves a
    question to the driver for each. It belongs to one device. For AMD's processors Triton also asks how much memory
    lies behind a tensor, which no plan knows.
    """
    if scratch is not None:
        ends = [offset for offset, _ in made.scratch[1:]] + [made.room]
        for (start, x), end in zip(made.scratch, ends, strict=True):
            slots = [*slots, scratch[start:end].view(x.dtype).as_strided(x.shape, x.stride)]
    found = []
    for step in made.steps:
        given = {name: slots[slot] for name, slot in step.named.items()}
        compiled = step.launch.run(step.launch.arguments | step.launch.options | given)
        if compiled is not None and not torch.version.hip:
            found.append(compiled[(step.launch.programs, 1, 1)])
    if len(found) == len(made.steps):
        made.compiled[device] = found


_NOTHING = nullcontext()


def _on(device: torch.device) -> Any:
    """Return a context in which launches go to a device; most are on it already, and torch's takes long to enter."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def directly(
    op: Callable[P, R],
    run: Callable[P, R],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[P, R]:
    """Call an op as what it runs, where nothing but autograd has to see it.

    An op of torch.library costs the host several times what a planned call does. Whatever traces, transforms or watches
    operations gets the op.

    Args:
        op: The op, of tensors, None and settings.
        run: What it runs.
        save: Its ``setup_context`` for autograd; None where it has no gradients.
        backward: Its backward.
    """
    function = None if save is None or backward is None else _function(run, save, backward)

    def call(*inputs: P.args, **settings: P.kwargs) -> R:
        if is_tracing():
            return op(*inputs, **settings)
        derives, needs_gradient = torch.is_grad_enabled(), False
        for x in inputs:
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                needs_gradient = needs_gradient or (derives and x.requires_grad)  # type: ignore[attr-defined]
            elif kind not in PLAIN and isinstance(x, Tensor):
                return op(*inputs, **settings)
        if not needs_gradient:
            return run(*inputs, **settings)
        if function is None:
            return op(*inputs, **settings)
        result: R = function.apply(*inputs)
        return result

    return call


def _function(run: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            # With a setup_context of its own torch would look at signatures in every call.
            found = run(*inputs)
            save(ctx, inputs, found)
            return found

    Function.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Function
