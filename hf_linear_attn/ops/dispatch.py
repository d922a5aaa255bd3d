"""Which backend runs an operation, and why not another; said here for all operations.

``"auto"`` is Triton for tensors on a GPU where its kernels can take them, else PyTorch. ``"triton"`` and ``"torch"``
are used or refused. ``"reference"`` is the plainest form of an operation, in float64 where it has one of its own;
operations of which PyTorch's form is the plainest run that one.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError, BackendError
from hf_linear_attn.ops.triton.plan import target_of

BACKENDS = ("auto", "reference", "torch", "triton")

OLDEST_TRITON = (3, 6)
LARGEST_HEAD = 256
"""Size of a head up to which the kernels hold its tiles."""


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
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        reason = obstacle()
        if reason is None:
            return "triton"
        if backend == "triton":
            raise BackendError("backend", "be able to run here", backend, f"{reason}; use backend='torch'.")
    return "reference" if backend == "reference" else "torch"


def kernel_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why no kernel can take these tensors here, or None where they can."""
    reason: str | None = device_obstacle(q.device)
    if reason is not None:
        return reason
    if q.dtype == torch.float64:
        return "the kernels take bf16, fp16 and fp32, not float64"
    for name, size in (("q", q.shape[3]), ("v", v.shape[3])):
        if size > LARGEST_HEAD:
            return f"{name} has head size {size}, and the kernels hold at most {LARGEST_HEAD}"
    return None


# Whatever torch.compile traces, it need not look into this: a device does not change while a program runs.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def device_obstacle(device: torch.device) -> str | None:
    """Say why no kernel runs on a device, or None where they do."""
    reason = _version_obstacle()
    if reason is not None:
        return reason
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU, where kernels run only interpreted (TRITON_INTERPRET=1)"
    if target_of(device) is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return f"{name} is not supported; kernels exist for NVIDIA sm_80 and newer and for AMD gfx942"
    return None


@cache
def _version_obstacle() -> str | None:
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed (pip install 'triton>=3.6')"
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {found} is older than 3.6, the first version that the kernels are built for"
    return None
