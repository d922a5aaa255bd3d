"""``hf-linear-attn check``: what this machine has, which backend runs on it, and whether what it computes is right.

Every part is computed twice by the backend, with fresh memory filled with NaN, and once in float64 by the plainest
form that the package has: outputs, states and gradients have to agree by norm, and kernels have to give the same bits
twice. The parts are those of the recommended recipe (norm-preserving features, linear attention that lags behind a
window with sinks and a key of each query's own, the step of generation) and what else the kernels take.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hf_linear_attn.arguments import CommandLine, settings_of
from hf_linear_attn.errors import BackendError
from hf_linear_attn.feature_maps import get_feature_map
from hf_linear_attn.loading import find_device
from hf_linear_attn.ops.delta_rule import DeltaRuleState, delta_rule, delta_step_
from hf_linear_attn.ops.dispatch import choose_backend, device_fault, device_obstacle
from hf_linear_attn.ops.features import features_of
from hf_linear_attn.ops.linear_attention import linear_attention
from hf_linear_attn.ops.state import LinearAttentionState
from hf_linear_attn.ops.step import decode_state, decode_step_
from hf_linear_attn.ops.triton.plan import target_of
from hf_linear_attn.ops.window import OwnKey, window_attention

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error by norm: twice the largest that rounding makes in the gradients of short sequences, whose parts cancel;
in fp32, what products as 3 x tf32 may cost."""

WINDOW, SINKS = 64, 4

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """Something to compute.

    Attributes:
        name: What it is, for people.
        inputs: Tensors that gradients are taken by, in the dtype that is checked.
        compute: Returns results by name, from the inputs and a backend's name; differentiable where ``backward``.
        backward: Whether it has gradients.
    """

    name: str
    inputs: Tensors
    compute: Callable[[Tensors, str], Tensors]
    backward: bool = True


@dataclass(frozen=True)
class Sizes:
    """How large the problems are.

    Attributes:
        tokens: Tokens of most.
        long: Tokens of the one whose sequence is cut into segments on most GPUs.
        D: Head size; features have twice as many.
        odd: A head size that is no power of two.
    """

    tokens: int
    long: int
    D: int
    odd: int


ON_GPU = Sizes(700, 4_100, 128, 80)
ON_CPU = Sizes(300, 2_100, 64, 40)
INTERPRETED = Sizes(90, 1_100, 16, 24)


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
            worst = max(self.errors, key=lambda name: _order(self.errors[name]))
            found = f"worst error {self.errors[worst]:.1e} ({worst}), at most {TOLERANCE[self.dtype]:.1e}"
            if self.wrong:
                found += f"; beyond it: {', '.join(self.wrong)}"
            if self.unsteady:
                found += f"; other bits the second time: {', '.join(self.unsteady)}"
        return f"{'right' if self.right else 'WRONG'}  {self.part}, {dtype}: {found} [{self.seconds:.1f} s]"


def _order(error: float) -> float:
    """Return an error such that NaN is the largest."""
    return error if error == error else float("inf")


def parts(device: torch.device, dtype: torch.dtype, sizes: Sizes, *, full: bool = False) -> Iterator[Part]:
    """Draw the problems.

    Args:
        device: Where.
        dtype: Dtype of queries, keys and values.
        sizes: How large they are.
        full: Whether to draw more than the recommended recipe.
    """
    g = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    def tokens(heads: int, count: int, dim: int, batch: int = 2) -> Tensor:
        # Laid out as projections leave them.
        return tensor(batch, count, heads, dim).transpose(1, 2)

    def qkv(D: int, V: int | None = None, count: int = sizes.tokens, batch: int = 2, heads: int = 4) -> Tensors:
        x = {"q": tokens(heads, count, D, batch), "k": tokens(heads // 2, count, D, batch)}
        return x | {"v": tokens(heads // 2, count, D if V is None else V, batch)}

    def features(x: Tensors) -> Tensors:
        # As those of the recommended map they are not negative, so that the normaliser does not vanish.
        return x | {name: x[name].abs() for name in ("q", "k")}

    def state(D: int, V: int, rows: int = 2, heads: int = 2) -> Tensors:
        kv = tensor(rows, heads, D, V, dtype=torch.float32)
        return {"kv0": kv, "z0": 1 + tensor(rows, heads, D, dtype=torch.float32).abs()}

    def linear(name: str, inputs: Tensors, **settings: Any) -> Part:
        return Part(name, inputs, partial(_linear, **settings))

    D, count = sizes.D, sizes.tokens
    mask = torch.rand(2, count, generator=g, device=device) > 0.2
    yield from _feature_parts(tokens, D, count, device)
    yield linear(
        f"linear attention of {2 * D} features, masked, delayed, from a state",
        features(qkv(2 * D, D)) | state(2 * D, D),
        feature_map=None,
        key_mask=mask,
        delay=WINDOW,
    )
    yield _window_part(tokens, tensor, D, count, device)
    yield _step_part(qkv, state, 2 * D, D)
    yield linear(f"one sequence of {sizes.long} tokens, elu", qkv(D, count=sizes.long, batch=1, heads=2))
    bounds = torch.tensor([0, 1, count // 3, count // 3, count], device=device)
    yield linear("packed sequences, elu", qkv(D, batch=1), cu_seqlens=bounds)
    if not full:
        return
    yield linear("both directions, elu", qkv(D), causal=False)
    yield linear(f"heads of {sizes.odd}, elu, delayed", qkv(sizes.odd), delay=WINDOW)
    yield linear("values wider than heads, squared_relu", qkv(D, 2 * D), feature_map="squared_relu")
    gates = {name: tensor(2, count, 2).transpose(1, 2) for name in ("beta", "decay")}
    delta = qkv(D) | gates | {"kv0": state(D, D)["kv0"]}
    yield Part(f"gated delta rule of {D}, masked, delayed, from a state", delta, partial(_delta, key_mask=mask))
    # A step at a time from the same state.
    delta = {name: x if name == "kv0" else x[:, :, :3] for name, x in delta.items()}
    yield Part("steps of the gated delta rule", delta, _delta_steps, backward=False)


def _linear(
    x: Tensors,
    backend: str,
    *,
    feature_map: str | None = "elu",
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    delay: int = 0,
) -> Tensors:
    state = LinearAttentionState(x["kv0"], x["z0"]) if "kv0" in x else None
    o, final = linear_attention(
        x["q"],
        x["k"],
        x["v"],
        feature_map=feature_map,
        causal=causal,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=state,
        delay=delay,
        backend=backend,
    )
    return {"o": o, "kv": final.kv, "z": final.z}


def _delta(x: Tensors, backend: str, *, key_mask: Tensor | None, delay: int = WINDOW) -> Tensors:
    o, final = delta_rule(
        x["q"],
        x["k"],
        x["v"],
        x["beta"].sigmoid(),
        -softplus(x["decay"]),
        key_mask=key_mask,
        state=DeltaRuleState(x["kv0"]),
        delay=delay,
        backend=backend,
    )
    return {"o": o, "kv": final.kv}


def _delta_steps(x: Tensors, backend: str) -> Tensors:
    if backend == "reference":
        return _delta(x, backend, key_mask=None, delay=0)
    held, steps = DeltaRuleState(x["kv0"].clone()), []
    for piece in (slice(0, 1), slice(1, 3)):
        q, k, v, beta, decay = (x[name][:, :, piece] for name in ("q", "k", "v", "beta", "decay"))
        steps.append(delta_step_(q, k, v, beta.sigmoid(), -softplus(decay), held, backend=backend))
    return {"o": torch.cat(steps, 2), "kv": held.kv}


def _feature_parts(
    tokens: Callable[[int, int, int], Tensor], D: int, count: int, device: torch.device
) -> Iterator[Part]:
    feature_map = get_feature_map("norm_preserving", D, 4, 2).to(device).requires_grad_(False)
    for side, heads in (("q", 4), ("k", 2)):

        def compute(x: Tensors, backend: str, side: str = side) -> Tensors:
            return {"features": features_of(feature_map, x["x"], side, backend=backend)}  # type: ignore[arg-type]

        yield Part(f"norm-preserving features of {side}", {"x": tokens(heads, count, D)}, compute)


def _window_part(
    tokens: Callable[[int, int, int], Tensor],
    tensor: Callable[..., Tensor],
    D: int,
    count: int,
    device: torch.device,
) -> Part:
    x = {"q": tokens(4, count, D), "k": tokens(2, count, D), "v": tokens(2, count, D), "f": tokens(4, count, D)}
    x |= {"sink_k": tensor(2, 2, SINKS, D), "sink_v": tensor(2, 2, SINKS, D)}
    x |= {"bias": tensor(4, dtype=torch.float32), "weight": 0.1 * tensor(4, D, dtype=torch.float32)}
    index = torch.arange(count, device=device)
    # The first tokens are padding of the second row.
    real = index >= torch.tensor([[0], [count // 5]], device=device)
    number = (real.cumsum(1) - WINDOW).clamp(min=0)
    seen = (index >= WINDOW)[None, :, None].expand(2, -1, SINKS).contiguous()

    def compute(x: Tensors, backend: str) -> Tensors:
        own_key = OwnKey(x["f"], x["bias"], x["weight"], real, number)
        sinks = x["sink_k"], x["sink_v"], seen
        settings = {"window": WINDOW, "scaling": D**-0.5, "key_mask": real, "sinks": sinks, "own_key": own_key}
        o = window_attention(x["q"], x["k"], x["v"], **settings, backend=backend)  # type: ignore[arg-type]
        # What a padded query gives, nobody reads.
        return {"o": o * real[:, None, :, None]}

    return Part(f"a window of {WINDOW} with {SINKS} sinks and a key of each query's own", x, compute)


def _step_part(qkv: Callable[..., Tensors], state: Callable[[int, int], Tensors], F: int, V: int) -> Part:
    x = qkv(F, V, count=3)
    x |= {name: x[name].abs() for name in ("q", "k")} | state(F, V)

    def compute(x: Tensors, backend: str) -> Tensors:
        if backend == "reference":
            return _linear(x, backend, feature_map=None)
        held = decode_state(2, 2, F, V, device=x["q"].device)
        held.kv.copy_(x["kv0"])
        held.z.copy_(x["z0"][:, :, None])
        steps = []
        for piece in (slice(0, 1), slice(1, 3)):
            q, k, v = (x[name][:, :, piece] for name in "qkv")
            steps.append(decode_step_(q, k, v, held, phi="identity", backend=backend))
        return {"o": torch.cat(steps, 2), "kv": held.kv, "z": held.z[:, :, 0]}

    return Part(f"steps of generation, {F} features", x, compute, backward=False)


def check(part: Part, backend: str) -> Outcome:
    """Compute a part and compare it with float64.

    Args:
        part: The part.
        backend: ``"triton"`` or ``"torch"``.
    """
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
    """Fill memory with NaN when it is allocated, so that what nobody writes is noticed."""
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
    return "torch", ON_GPU if device.type == "cuda" else ON_CPU


def facts(device: torch.device) -> list[str]:
    """Return what was found, a line for each thing."""
    packages = ("hf_linear_attn", "torch", "triton", "transformers")
    found = ", ".join(f"{name} {_version(name)}" for name in packages)
    lines = [f"versions: {found}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"]
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
    fault = device_fault(device) if _version("triton") is not None else None
    if fault is not None and not fault.refused:
        lines.append(f"warning: this Triton {fault.what}")
    return lines


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
    backend: Literal["triton", "torch"] | None = None
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
        "is checked, and with TRITON_INTERPRET=1 the kernels, interpreted.",
        example="hf-linear-attn check\nhf-linear-attn check --full",
        config=False,
    )
    flags.add("settings", settings_of(CheckSettings, {"device": "cuda where there is one"}))
    arguments = CheckSettings(**flags.read(argv).values)
    device = find_device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backend, sizes = choose(device)
    if arguments.backend == "triton" != backend:
        raise BackendError(
            "backend", "be able to run here", "triton", f"{device_obstacle(device)}; use --backend torch."
        )
    backend = arguments.backend or backend
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
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    verdict = f"{len(wrong)} of {len(outcomes)} parts WRONG" if wrong else f"all {len(outcomes)} parts right"
    seconds = sum(outcome.seconds for outcome in outcomes)
    sys.stdout.write(f"verdict: {what[backend]} on {where}: {verdict}, in {seconds:.0f} s\n")
    if wrong:
        raise SystemExit(1)
