"""Calls that are repeated: what a call of kernels decides is decided once for all calls that are like it.

To check a call, to choose its backend and to plan its launches takes the host longer than to launch its kernels. All of
that depends on nothing but shapes, strides, dtypes and settings. :func:`remembered` therefore writes down what a call
does the first time, and does it again with the tensors of the next call that is like it. A call that reads numbers from
memory on the way is not repeated.

Nothing is remembered of fake tensors, nor while something else watches: under ``torch.compile`` ops are remembered when
they run, with real ones.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.feature_maps.base import registered_as
from hf_linear_attn.ops.triton.plan import takes_tf32
from hf_linear_attn.ops.triton.record import Recorder, recording
from hf_linear_attn.ops.triton.start import ALIGNMENT, PLAIN, Number, Start, told_apart

MOST_CALLS = 1024
"""Calls that are remembered of one function; a run that meets more shapes forgets the oldest."""

MOST_TEXTS = 8
"""Results of :func:`shared_by_texts` that are remembered of one function."""

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = nullcontext()


def _on(device: torch.device) -> Any:
    """Return a context in which launches go to a device; most are on it already, and torch's takes long to enter."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def _there(call: Callable[..., Any] | None, device: torch.device) -> Callable[..., Any] | None:
    """Return a call that runs on its device, whichever is the current one."""
    if call is None or device.type != "cuda" or torch.cuda.device_count() == 1:
        return call

    def run(*given: Any) -> Any:
        with _on(device):
            return call(*given)

    return run


_lock = threading.Lock()
_caches: list[dict[Any, Any]] = []


def _keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put something into a cache, in place of the oldest where it is full."""
    with _lock:
        while len(cache) >= most:
            cache.pop(next(iter(cache)))
        cache[key] = value


def forget() -> None:
    """Forget all calls: they know nothing of settings that have changed since."""
    with _lock:
        for cache in _caches:
            cache.clear()


def is_seen() -> bool:
    """Tell whether something traces, transforms or watches operations, be it a :class:`Recorder`."""
    return bool(
        is_compiling()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _get_tracing_state()
        or forward_ad._current_level >= 0
    )


def is_replaced() -> bool:
    """Tell whether something may do other than an operation says, as what :func:`is_seen` tells of can.

    Modes that have ``watches_only`` look on: what runs beside PyTorch's operations does no harm to them.
    """
    if not is_seen():
        return False
    others = is_compiling() or _are_functorch_transforms_active() or _get_tracing_state()
    if others or forward_ad._current_level >= 0:
        return True
    return not all(getattr(mode, "watches_only", False) for mode in _get_current_dispatch_mode_stack())


def remembered(function: Callable[P, R], only: Callable[..., bool] | None = None) -> Callable[P, R]:
    """Run a function, and repeat what it has done in calls that are alike.

    Args:
        function: Takes tensors, tuples of them, settings that hash, and a :class:`Number` where an integer only goes on
            to launches; returns tensors, Nones and tuples of them. Apart from its arguments it may depend on the
            precision of fp32 products alone, and :func:`launch` starts its kernels. Calls whose gradients are asked for
            are not remembered, nor those with other arguments.
        only: Tells, of the arguments by position and those by name, whether a call is to be remembered.
    """
    calls: dict[Any, Callable[..., Any] | None] = {}
    _caches.append(calls)

    # Nothing here is done twice or for good form: at each token of each layer the host waits for this.
    @functools.wraps(function)
    def run(*arguments: P.args, **settings: P.kwargs) -> R:
        if is_seen() or (only is not None and not only(arguments, settings)):
            return function(*arguments, **settings)
        given: list[Any] = []
        key: list[Any] = [takes_tf32(), *settings]
        values = (*arguments, *settings.values()) if settings else arguments
        if not _tell(values, given, key) or (is_grad_enabled() and any(map(_requires_grad, given))):
            return function(*arguments, **settings)
        named = tuple(key)
        known = calls.get(named)
        if known is not None:
            return known(*given)  # type: ignore[no-any-return]
        if named in calls:
            return function(*arguments, **settings)
        recorder = Recorder(given)
        if not recorder.repeatable:
            # It is given one tensor twice: the next call like it may not be.
            return function(*arguments, **settings)
        with recorder:
            result = function(*arguments, **settings)
        _keep(calls, named, _there(recorder.plan(result), given[0].device), MOST_CALLS)
        return result

    return run


def _requires_grad(x: Tensor | Number) -> bool:
    return type(x) is not Number and x.requires_grad  # type: ignore[union-attr]


def _tell(values: Any, given: list[Any], key: list[Any]) -> bool:
    """Add to a key what tells calls apart, and their tensors to those given; False where calls are not remembered."""
    for x in values:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            given.append(x)
            # Triton compiles for addresses, too.
            key += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT)
        elif kind is str:
            # A map that is registered anew under its name is another one.
            key += (x, registered_as(x))
        elif kind in PLAIN:
            # 1 is True, and equal to it.
            key += (kind, x)
        elif kind is Number:
            given.append(x)
            key += told_apart(x)
        elif isinstance(x, tuple):
            key += (kind, len(x))
            if not _tell(x, given, key):
                return False
        elif isinstance(x, FeatureMap) and x.kernel is not None:
            # Such a map holds nothing: kernels know it by name.
            key += (kind, x.kernel)
        else:
            return False
    return True


def launch(starts: Sequence[Start], device: torch.device) -> None:
    """Launch kernels on a device, in order."""
    recorder = recording()
    with _on(device), _NOTHING if recorder is None else recorder.paused():
        for start in starts:
            kernel = start.run()
            if recorder is not None:
                recorder.note_launch(start, kernel)


def aside(function: Callable[..., R], *arguments: Any) -> R:
    """Run a function whose operations a remembered call does not repeat one by one, but as that function."""
    recorder = recording()
    if recorder is None:
        return function(*arguments)
    with recorder.paused():
        value = function(*arguments)
    recorder.note(function, arguments, {}, value)
    return value


def _stream(device: torch.device) -> int | None:
    """Return where work of a device is queued now; None while it is captured, for replays to do it again."""
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def shared_by_texts(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute a tensor once for all layers and calls whose texts are of one shape; nobody changes it.

    Args:
        compute: Takes a device, and settings that hash; of a tensor among them it is computed anew.
    """
    results: dict[Any, Tensor] = {}
    _caches.append(results)

    @functools.wraps(compute)
    def shared(device: torch.device, *settings: Any) -> Tensor:
        stream = None if is_seen() or any(isinstance(x, Tensor) for x in settings) else _stream(device)
        if stream is None:
            return compute(device, *settings)
        key = device, stream, settings
        known = results.get(key)
        if known is None:
            # Gradients may need it another time.
            with torch.inference_mode(False):
                known = compute(device, *settings)
            _keep(results, key, known, MOST_TEXTS)
        return known

    return shared
