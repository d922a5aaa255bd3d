"""Which backend runs an operation, and why not another; said here for all operations.

``"auto"`` is Triton for tensors on a GPU where its kernels can take them, else PyTorch; on a CPU a layer's steps and
prompts are loops that Numba compiles, where it is installed and they can take them. ``"triton"``, ``"numba"`` and
``"torch"`` are used or refused; what Numba has no loop for is PyTorch's. ``"reference"`` is the plainest form of an
operation, in float64 where it has one of its own; operations of which PyTorch's form is the plainest run that one.
"""

import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, BackendError
from hf_linear_attn.ops.triton.plan import target_of

BACKENDS = ("auto", "reference", "torch", "triton", "numba")

OLDEST_TRITON = (3, 6)
HAS_NUMBA = find_spec("numba") is not None
LARGEST_HEAD = 256
"""Size of a head up to which the kernels hold its tiles."""
LARGEST_FEATURES = 2 * LARGEST_HEAD
"""Features of one up to which linear attention does in half precision, which a paired map makes of it."""


class Fault(NamedTuple):
    """A range of Triton versions that makes wrong code of loops like ours on some NVIDIA processors.

    Attributes:
        majors: Major compute capabilities of the processors.
        fixed: The first version without it; none of those supported is older than it.
        refused: Whether the kernels do not run there; otherwise they warn.
        what: What goes wrong, and where it is documented.
    """

    majors: tuple[int, ...]
    fixed: tuple[int, ...]
    refused: bool
    what: str


FAULTS = (
    # Loops that carry an fp32 state through products, as all our walks do, gave other bits on every call on sm_100
    # (mended in 3.7) and sm_103 (mended in 3.8). Consumer Blackwell, 12.x, has other matrix units.
    Fault(
        (10, 11),
        (3, 8),
        True,
        "races in loops that carry a sum through matrix products (triton-lang/triton issues 9871 and 10590)",
    ),
    # Which ptxas a release calls for sm_90: 12.8.93 in 3.6 and 3.7, 12.9.86 in 3.8, 13.4.59 in 3.9. Before CUDA 13.3 it
    # may reuse the registers of an operand that a warp-group product has yet to read. Two more faults of Hopper concern
    # operands that no kernel here has, and benchmarks/compile_check.py looks for them: ptxas 12.8 takes addresses of
    # narrow ones from registers that nothing wrote, and Triton before 3.7.1 stores transposed results wrongly.
    Fault(
        (9,),
        (3, 9),
        False,
        "brings a ptxas older than CUDA 13.3's, which may overwrite registers that a matrix product still reads "
        "(triton-lang/triton pull request 11781)",
    ),
)
"""What is documented of released versions; ``hf-linear-attn check`` shows whether a machine computes right."""


def choose_backend(
    backend: str, device: torch.device, obstacle: Callable[[], str | None]
) -> Literal["reference", "torch", "triton"]:
    """Choose the backend of one call.

    Args:
        backend: What was asked for.
        device: Where the tensors are.
        obstacle: Says why the kernels cannot take them, or returns None.

    Raises:
        ArgumentError: If there is no such backend.
        BackendError: If the kernels were asked for by name and cannot run here.
    """
    if backend not in BACKENDS:
        raise ArgumentError("backend", "be a known backend", backend, "Use one of those", available=BACKENDS)
    if wants_kernels(backend, device):
        reason = obstacle()
        if reason is None:
            return "triton"
        if backend == "triton":
            raise BackendError("backend", "be able to run here", backend, f"{reason}; use backend='torch'.")
        warn_fallback(reason)
    # Asked for by name they are refused where they cannot run; what they have no loop for is PyTorch's.
    wants_loops(backend, device)
    return "reference" if backend == "reference" else "torch"


def warn_fallback(reason: str) -> None:
    """Say once for each cause why PyTorch computes what kernels could have; compilers hear nothing."""
    if not torch.compiler.is_compiling():
        _warn_once(reason)


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason}: PyTorch's operations take its place, which is slower", RuntimeWarning, stacklevel=3)


def wants_kernels(backend: str, device: torch.device) -> bool:
    """Tell whether the kernels compute what they can take there."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


def wants_loops(backend: str, device: torch.device) -> bool:
    """Tell whether loops compute what they can take there.

    Raises:
        BackendError: If they were asked for by name and cannot run here.
    """
    if backend not in ("auto", "numba"):
        return False
    reason = None
    if device.type != "cpu":
        reason = f"the tensors are on {device.type}, and loops run on the CPU"
    elif not HAS_NUMBA:
        reason = "Numba is not installed (pip install 'hf_linear_attn[cpu]')"
    if reason is not None and backend == "numba":
        raise BackendError("backend", "be able to run here", backend, f"{reason}; use backend='torch'.")
    return reason is None


def check_backend(backend: str) -> None:
    """Refuse a backend that runs nowhere on this machine, whatever device a model is moved to.

    Raises:
        BackendError: If that is so.
    """
    wants_loops(backend, torch.device("cpu"))
    if backend != "triton":
        return
    reason = device_obstacle(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if reason is not None:
        raise BackendError("backend", "be able to run here", backend, f"{reason}; use backend='torch'.")


def kernel_obstacle(q: Tensor, k: Tensor, v: Tensor, largest: int = LARGEST_HEAD) -> str | None:
    """Say why no kernel can take these tensors here, or None where they can.

    Args:
        q: Queries, or their features.
        k: Keys, or theirs.
        v: Values.
        largest: The size of queries up to which it can.
    """
    reason = tensor_obstacle(q)
    if reason is not None:
        return reason
    if q.shape[3] > largest:
        return f"q has head size {q.shape[3]}, and the kernels hold at most {largest}"
    if v.shape[3] > LARGEST_HEAD:
        return f"v has head size {v.shape[3]}, and the kernels hold at most {LARGEST_HEAD}"
    return None


def tensor_obstacle(x: Tensor) -> str | None:
    """Say why no kernel can take a tensor of such a dtype, or run where it is, or None where one can."""
    reason: str | None = device_obstacle(x.device)
    if reason is None and x.dtype == torch.float64:
        return "the kernels take bf16, fp16 and fp32, not float64"
    return reason


# Whatever torch.compile traces, it need not look into this: a device does not change while a program runs.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def device_obstacle(device: torch.device) -> str | None:
    """Say why no kernel runs on a device, or None where they do."""
    return _gpu_obstacle(device) if device.type == "cuda" else _obstacle(device)


def _obstacle(device: torch.device) -> str | None:
    reason = _version_obstacle()
    if reason is not None:
        return reason
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU, where kernels run only interpreted (TRITON_INTERPRET=1)"
    if target_of(device) is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return f"{name} is not supported; kernels exist for NVIDIA sm_80 and newer and for AMD gfx942"
    fault = device_fault(device)
    if fault is None:
        return None
    message = _explain(fault, device)
    if fault.refused:
        return message
    warnings.warn(f"{message}. `hf-linear-attn check` compares the kernels here with float64.", stacklevel=2)
    return None


_gpu_obstacle = cache(_obstacle)
"""What is true of a GPU stays true, and each warns once."""


def device_fault(device: torch.device) -> Fault | None:
    """Return what is documented to be wrong with this Triton's code for a device, or None."""
    if device.type != "cuda" or torch.version.hip:
        return None
    major, release = torch.cuda.get_device_capability(device)[0], numbers(version("triton"))
    # A ptxas of the user's own takes the place of Triton's.
    faults = (fault for fault in FAULTS if fault.refused or not os.environ.get("TRITON_PTXAS_PATH"))
    return next((fault for fault in faults if major in fault.majors and release < fault.fixed), None)


def _explain(fault: Fault, device: torch.device) -> str:
    first = ".".join(map(str, fault.fixed))
    name = torch.cuda.get_device_name(device)
    own = "" if fault.refused else ", or set TRITON_PTXAS_PATH to a newer ptxas"
    return f"Triton {version('triton')} on {name} {fault.what}; install triton>={first}{own}"


@cache
def _version_obstacle() -> str | None:
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed (pip install 'triton>=3.6')"
    if numbers(found) < OLDEST_TRITON:
        return f"Triton {found} is older than 3.6, the first version that the kernels are built for"
    return None


def numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what a build or a pre-release adds to them."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
