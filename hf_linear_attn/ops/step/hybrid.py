"""A whole step of a layer with a window in one call: features, fold, read, window, sinks and join."""

from typing import Literal

from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.ops.dispatch import choose_backend, wants_kernels, wants_loops
from hf_linear_attn.ops.features import LARGEST_PAIR
from hf_linear_attn.ops.library import is_transformed, refuse_functional
from hf_linear_attn.ops.step.problem import HybridStep
from hf_linear_attn.ops.window.api import window_obstacle


def hybrid_obstacle(step: HybridStep, backend: Literal["triton", "numba"]) -> str | None:
    """Say why the kernel, or the loop, cannot take a step here, or None where it can."""
    if backend == "numba":
        return _loop_obstacle(step)
    reason = window_obstacle(step.q, step.k, step.v)
    if reason is not None:
        return reason
    if not step.q.dtype == step.k.dtype == step.v.dtype == step.near_k.dtype:
        return "tokens and window are of several dtypes"
    if step.weight_q is None or step.weight_k is None:
        return None
    if max(step.weight_k.shape[1:]) > LARGEST_PAIR:
        return (
            f"the map's weights have size {max(step.weight_k.shape[1:])}, and the kernel holds at most {LARGEST_PAIR}"
        )
    if not step.weight_q.device == step.weight_k.device == step.q.device:
        return "the map's weights are kept elsewhere"
    return None


def _loop_obstacle(step: HybridStep) -> str | None:
    # Imported here so that the package needs no Numba.
    from hf_linear_attn.ops.numba.run import loop_obstacle

    return loop_obstacle((step.q, step.k, step.v, step.near_k, step.near_v, step.near_turns), step.learned)


def hybrid_step_(step: HybridStep, *, backend: str = "auto") -> Tensor:
    """Read one new token per row and update the tensors of its state in place, but for the number of tokens seen.

    The kernel and the loop are the only implementations: what is computed is said by the general path of a layer, of
    which it is one step. Masked rows leave sums and sinks as they are. Raise ``seen`` afterwards.

    Args:
        step: The tokens, the state and the settings.
        backend: ``"triton"``, ``"numba"``, or ``"auto"``, which is the first on a GPU and the second on a CPU.

    Returns:
        ``o [B, H, 1, V]`` in q's dtype; of masked rows anything finite.

    Raises:
        ArgumentError: If shapes or names do not fit, or a tensor is not contiguous.
        ArgumentTypeError: If sums are not fp32.
        BackendError: If neither can run here.
    """
    if not wants_kernels(backend, step.q.device):
        return _looped_(step, backend)
    return _advance_(step, "triton")


def _looped_(step: HybridStep, backend: str) -> Tensor:
    refuse_functional("numba", step.q, step.k, step.v)
    if not wants_loops(backend, step.q.device):
        reason: str | None = "there is neither a GPU nor Numba"
    elif is_transformed():
        reason = "loops cannot run under vmap, nor while operations are traced"
    else:
        reason = _loop_obstacle(step)
    if reason is not None:
        raise BackendError("backend", "be able to run here", backend, f"{reason}; use a layer with backend='torch'.")
    # Imported here so that the package needs no Numba.
    from hf_linear_attn.ops.step.numba import hybrid_step_numba_

    return hybrid_step_numba_(step)


def _advance_(step: HybridStep, backend: str) -> Tensor:
    choose_backend(backend, step.q.device, lambda: hybrid_obstacle(step, "triton"))
    refuse_functional("triton", step.q, step.k, step.v)
    # Imported here so that the package needs neither Triton nor a GPU.
    from hf_linear_attn.ops.step.triton.op import hybrid_step_triton_

    return hybrid_step_triton_(step)
