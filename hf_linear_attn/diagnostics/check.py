"""``hf-linear-attn check``: what this machine has, which backend runs on it, and whether what it computes is right.

Every part is computed twice by the backend, with fresh memory filled with NaN, and once in float64 by the plainest
form that the package has: outputs, states and gradients have to agree by norm, and kernels have to give the same bits
twice. The parts are those of the recommended recipe (norm-preserving features, linear attention that lags behind a
window with sinks and a key of each query's own, the step of generation) and what else the kernels take.
"""

import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hf_linear_attn.arguments import CommandLine
from hf_linear_attn.diagnostics.parts import INTERPRETED, ON_CPU, ON_GPU, Part, Sizes, Tensors, parts
from hf_linear_attn.errors import BackendError
from hf_linear_attn.loading import find_device
from hf_linear_attn.ops.dispatch import choose_backend, device_fault, device_obstacle, numbers, wants_loops
from hf_linear_attn.ops.triton.plan import target_of

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error by norm: twice the largest that rounding makes in the gradients of short sequences, whose parts cancel;
in fp32, what products as 3 x tf32 may cost."""


TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "transformers": ("5.17", "5.24")}
"""The oldest and the newest release that the whole suite was run with."""


@dataclass(frozen=True)
class Outcome:
    """What one part gave.

    Attributes:
        part: Its name.
        dtype: Dtype of its inputs.
        errors: By result, the norm of what is wrong over the norm of what is right.
        wrong: Results beyond the tolerance.
        unsteady: Results whose bits differ between two runs.
        failure: What was raised instead, if anything.
        seconds: Time that it took.
    """

    part: str
    dtype: torch.dtype
    errors: dict[str, float]
    wrong: tuple[str, ...]
    unsteady: tuple[str, ...]
    failure: str | None
    seconds: float

    @property
    def right(self) -> bool:
        """Whether all is as it should be."""
        return not (self.wrong or self.unsteady or self.failure)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.failure is not None:
            found = self.failure
        else:
            # NaN is the largest.
            worst = max(self.errors, key=lambda name: (math.isnan(self.errors[name]), self.errors[name]))
            found = f"worst error {self.errors[worst]:.1e} ({worst}), at most {TOLERANCE[self.dtype]:.1e}"
            if self.wrong:
                found += f"; beyond it: {', '.join(self.wrong)}"
            if self.unsteady:
                found += f"; other bits the second time: {', '.join(self.unsteady)}"
        return f"{'right' if self.right else 'WRONG'}  {self.part}, {dtype}: {found} [{self.seconds:.1f} s]"


def check(part: Part, backend: str) -> Outcome:
    """Compute a part by ``"triton"``, ``"numba"`` or ``"torch"``, and compare it with float64."""
    started = time.perf_counter()
    dtype = next(iter(part.inputs.values())).dtype
    errors: dict[str, float] = {}
    unsteady: tuple[str, ...] = ()
    failure = None
    try:
        with poisoned():
            found, again = (_results(part, part.inputs, backend) for _ in range(2))
        exact = _results(part, {name: x.double() for name, x in part.inputs.items()}, "reference")
        errors = {name: float((x.double() - exact[name]).norm() / exact[name].norm()) for name, x in found.items()}
        # Libraries promise less than our kernels do.
        if backend == "triton":
            unsteady = tuple(name for name, x in found.items() if not torch.equal(x, again[name]))
    # Whatever a compiler or a driver raises is the finding; they have no base in common.
    except Exception as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    # NaN fails every comparison.
    wrong = tuple(name for name, error in errors.items() if not error <= TOLERANCE[dtype])
    return Outcome(part.name, dtype, errors, wrong, unsteady, failure, time.perf_counter() - started)


def _results(part: Part, inputs: Tensors, backend: str) -> Tensors:
    """Return results, and the gradients of their sum with weights that are drawn anew, and alike, for each call."""
    with torch.set_grad_enabled(part.backward):
        leaves = {name: x.detach().requires_grad_(part.backward) for name, x in inputs.items()}
        found = part.compute(leaves, backend)
    results = {name: x.detach() for name, x in found.items()}
    if not part.backward:
        return results
    g = torch.Generator(next(iter(inputs.values())).device).manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, device=x.device).to(x.dtype) for x in found.values()]
    gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), weights)
    return results | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory with NaN when it is allocated, so that reads of uninitialised memory are noticed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # torch.utils.deterministic is made at import, and type checkers do not see what it holds.
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def choose(device: torch.device) -> tuple[str, Sizes]:
    """Return the backend to check on a device, and how large the problems may be."""
    if device_obstacle(device) is None:
        return "triton", ON_GPU if device.type == "cuda" else INTERPRETED
    return "numba" if wants_loops("auto", device) else "torch", ON_GPU if device.type == "cuda" else ON_CPU


def facts(device: torch.device) -> list[str]:
    """Return what was found, a line for each thing."""
    packages = ("hf_linear_attn", "torch", "triton", "numba", "transformers")
    found = ", ".join(f"{name} {_version(name)}" for name in packages)
    lines = [f"versions: {found}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    lines.append(f"tested with: {', '.join(f'{name} {a} to {b}' for name, (a, b) in TESTED.items())}{_untested()}")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        system = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}{_driver()}"
        size = f"{properties.multi_processor_count} processors, {properties.total_memory / 2**30:.0f} GiB"
        lines.append(f"device: {device}, {properties.name}, {name}, {size}, {system}")
    else:
        lines.append(f"device: {device}, {torch.get_num_threads()} threads")
    names = ("TRITON_INTERPRET", "TRITON_PTXAS_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    settings = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    if settings:
        lines.append(f"environment: {', '.join(settings)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = device_obstacle(device)
    taken = choose_backend("auto", device, lambda: reason)
    if taken == "triton":
        target = target_of(device)
        why = f"the kernels run here, with the tiles of {target.arch if target else None}"
    elif device.type != "cuda":
        why = "kernels are for GPUs" if reason else "interpreted kernels have to be asked for by name"
    else:
        why = reason or ""
    lines.append(f"backend: `auto` takes {taken}: {why}")
    if device.type == "cpu":
        loops = "loops that Numba compiles" if wants_loops("auto", device) else "PyTorch's; Numba is not installed"
        lines.append(f"prompts and steps of a layer: {loops}")
    fault = device_fault(device) if _version("triton") is not None else None
    if fault is not None and not fault.refused:
        lines.append(f"warning: this Triton {fault.what}")
    return lines


def _untested() -> str:
    """Name what is here and was not tested."""
    here = {name: found for name in TESTED if (found := _version(name)) is not None}
    others = [
        f"{name} {found} is {'older' if numbers(found)[:2] < numbers(TESTED[name][0]) else 'newer'}"
        for name, found in here.items()
        if not numbers(TESTED[name][0]) <= numbers(found)[:2] <= numbers(TESTED[name][1])
    ]
    return f"; not with what is here: {', '.join(others)}" if others else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", driver {found[0]}" if found else ""


@dataclass(frozen=True)
class CheckSettings:
    """Settings of a check.

    Args:
        device: Device to check.
        backend: What to check; what runs there where it is left out.
        full: Every dtype and more shapes; minutes where kernels are to be compiled.
    """

    device: str | None = None
    backend: Literal["triton", "numba", "torch"] | None = None
    full: bool = False


def main(argv: Sequence[str]) -> None:
    """Check this machine; exit with status 1 where something is wrong.

    Args:
        argv: Arguments without the program's name.

    Raises:
        ArgumentError: If there is no such device.
        BackendError: If the backend asked for cannot run there.
    """
    flags = CommandLine(
        "hf-linear-attn check",
        "Say what this machine has and which backend runs on it, and compare what that computes with float64. Ends "
        "with a verdict to paste into an issue; the status is 1 where something is wrong. On a CPU PyTorch's backend "
        "is checked, with Numba's loops where it is installed, and with TRITON_INTERPRET=1 the kernels, interpreted.",
        example="hf-linear-attn check\nhf-linear-attn check --full",
        config=False,
    )
    arguments = flags.settings_from(argv, CheckSettings, device="cuda where there is one")
    device = find_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backend, sizes = choose(device)
    if arguments.backend == "triton" != backend:
        raise BackendError(
            "backend", "be able to run here", "triton", f"{device_obstacle(device)}; use --backend torch."
        )
    backend = arguments.backend or backend
    # Refuses loops where they cannot run.
    wants_loops(backend, device)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtypes = tuple(TOLERANCE) if arguments.full else (half,)
    for line in facts(device):
        sys.stdout.write(f"{line}\n")
    outcomes = []
    for dtype in dtypes:
        for part in parts(device, dtype, sizes, full=arguments.full):
            outcomes.append(check(part, backend))
            sys.stdout.write(f"{outcomes[-1]}\n")
            sys.stdout.flush()
    wrong = [outcome for outcome in outcomes if not outcome.right]
    what = {"triton": "kernels" if device.type == "cuda" else "kernels, interpreted,", "torch": "PyTorch's backend"}
    what["numba"] = f"{what['torch']}, with loops by Numba,"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    verdict = f"{len(wrong)} of {len(outcomes)} parts WRONG" if wrong else f"all {len(outcomes)} parts right"
    seconds = sum(outcome.seconds for outcome in outcomes)
    sys.stdout.write(f"verdict: {what[backend]} on {where}: {verdict}, in {seconds:.0f} s\n")
    if wrong:
        raise SystemExit(1)
