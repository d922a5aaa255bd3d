"""A layer with a window in one call of a kernel or a loop: a step, and text that is read without gradients."""

from typing import Literal

import torch
from torch import Tensor

from hf_linear_attn.errors import BackendError
from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.dispatch import LARGEST_FEATURES, LARGEST_HEAD
from hf_linear_attn.ops.features import feature_obstacle, weights_obstacle
from hf_linear_attn.ops.hybrid.checks import HYBRID_MIXES
from hf_linear_attn.ops.hybrid.records import HybridStep, Prefill, Prefilled
from hf_linear_attn.ops.kept import AGES, choice_obstacle
from hf_linear_attn.ops.library import refuse_functional
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.triton.plan import has_tile, target_of
from hf_linear_attn.ops.window.api import window_obstacle
from hf_linear_attn.tracing import is_transformed

STEPS = {(rule, mix) for rule in ("additive", "decay") for mix in HYBRID_MIXES}
"""Update rules and mixes of which a step is one call."""

KEEPS = {"redundancy", "learned"}
"""Rules by which a step keeps keys beyond the window, and a loop that reads a text."""

PREFILLS = {"triton": {("additive", "key")}, "numba": STEPS}
"""Those of which text is read in one, by what reads."""


def hybrid_obstacle(step: HybridStep, backend: Literal["triton", "numba"]) -> str | None:
    """Say why the kernel, or the loop, cannot take a step here, or None where it can."""
    kept = step.kept
    if backend == "numba":
        # Imported here so that the package needs no Numba.
        from hf_linear_attn.ops.numba.run import loop_obstacle

        held, weights = ((), ()) if kept is None else ((kept.k, kept.v, kept.turns), kept.weights)
        tokens = step.q, step.k, step.v, step.near_k, step.near_v, step.near_turns, *held
        return loop_obstacle(tokens, (*step.learned, *weights))
    reason = window_obstacle(step.q, step.k, step.v)
    if reason is not None:
        return reason
    if not step.q.dtype == step.k.dtype == step.v.dtype == step.near_k.dtype == (kept or step).k.dtype:
        return "tokens and window are of several dtypes"
    if kept is not None:
        reason = choice_obstacle(kept.k.shape[2], AGES if kept.nearest is None else kept.v.shape[3])
        if reason is not None:
            return reason
    if step.weight_q is None or step.weight_k is None:
        return None
    return weights_obstacle(step.q.device, step.weight_q, step.weight_k)


def hybrid_step_(step: HybridStep, backend: Literal["triton", "numba"]) -> Tensor:
    """Read one new token per row and update the tensors of its state in place, but for the number of tokens seen.

    What is computed is said by :func:`hybrid_reference`; see :func:`hybrid_obstacle` for what can be asked. Masked rows
    leave sums and sinks as they are. Raise ``seen`` afterwards.

    Args:
        step: The tokens, the state and the settings.
        backend: Which of both.

    Returns:
        ``o [B, H, 1, V]`` in q's dtype; of masked rows anything finite.

    Raises:
        ArgumentError: If shapes or names do not fit, or a tensor is not contiguous.
        ArgumentTypeError: If dtypes do not fit.
        BackendError: Under vmap and torch.func, of which neither knows; loops also while operations are traced.
    """
    # Imported here so that the package needs neither Triton nor a GPU, nor Numba.
    if backend == "numba":
        if is_transformed():
            wanted = "not be 'numba' under vmap, for forward-mode derivatives or while operations are traced"
            raise BackendError("backend", wanted, backend, "Use a layer with backend='torch'.")
        from hf_linear_attn.ops.hybrid.numba.step import hybrid_step_numba_

        return hybrid_step_numba_(step)
    refuse_functional("triton", step.q, step.k, step.v)
    from hf_linear_attn.ops.hybrid.triton.op import hybrid_step_triton_

    return hybrid_step_triton_(step)


def prefill_obstacle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_q: Pair | None,
    of_k: Pair | None,
    window: int,
    backend: Literal["triton", "numba"],
    *,
    trains: bool = False,
) -> str | None:
    """Say why the kernels, or the loop, cannot read such tokens in one, or None where they can.

    Args:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, P + T, D]``.
        v: Values ``[B, HKV, P + T, V]``.
        of_q: The map of queries; None for an elementwise one.
        of_k: That of keys.
        window: W.
        backend: Which of both.
        trains: Whether gradients are asked for, which kernels alone give.
    """
    if backend == "numba":
        # Imported here so that the package needs no Numba.
        from hf_linear_attn.ops.numba.run import loop_obstacle

        learned = [x for pair in (of_q, of_k) if pair is not None for x in (pair.weight, pair.power)]
        return loop_obstacle((q, k, v), learned)
    if of_q is None or of_k is None:
        return "the map is elementwise"
    reason = window_obstacle(q, k, v)
    if reason is not None:
        return reason
    reason = feature_obstacle(q, of_q) or feature_obstacle(k, of_k)
    if reason is not None:
        return reason
    features, dim = 2 * int(of_q.weight.shape[2]), int(v.shape[3])
    if trains:
        most = LARGEST_HEAD if q.dtype == torch.float32 else LARGEST_FEATURES
        return f"the kernels hold at most {most} features" if features > most else None
    if not _has_tile(q.device, q.dtype, features, dim):
        return f"there is no tile for {features} features and values of {dim} on this device"
    if k.shape[2] <= window:
        return "no key leaves the window"
    return None


# As for obstacles of a device, torch.compile need not look into this.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_tile(device: torch.device, dtype: torch.dtype, features: int, value_dim: int) -> bool:
    target = target_of(device)
    return target is not None and has_tile(target, dtype, "prefill", features, value_dim)


def hybrid_prefill(
    call: Prefill, of_k: Pair | None, rotation: Rotation | None, backend: Literal["triton", "numba"]
) -> Prefilled:
    """Attend from the queries of some tokens; see :func:`prefill_obstacle` for what can be asked.

    What is computed is said by :func:`hybrid_reference`.

    Args:
        call: The tokens.
        of_k: The map of keys; None for an elementwise one.
        rotation: By which the first T keys are turned, where their features are those of what they were before.
        backend: Which of both.

    Returns:
        What they give.
    """
    # Imported here so that the package needs neither Triton nor a GPU, nor Numba.
    if backend == "numba":
        from hf_linear_attn.ops.hybrid.numba.prefill import prefill_numba

        return prefill_numba(call, of_k, None if rotation is None else rotation.turns)
    if of_k is None:
        raise RuntimeError("no kernel reads a text with an elementwise map")
    from hf_linear_attn.ops.features.triton.op import features_triton
    from hf_linear_attn.ops.hybrid.triton.op import prefill_triton

    phi_k = features_triton(call.k[:, :, : call.q.shape[2]], of_k, rotation)
    return prefill_triton(call._replace(phi_k=phi_k))


def hybrid_train(call: Prefill, of_k: Pair, rotation: Rotation | None, *, first: bool = False) -> Tensor:
    """Attend from the queries of some tokens with gradients, by kernels and as one node of autograd's graph.

    What is computed is as of :func:`hybrid_prefill`, without a state before the tokens or after them.

    Args:
        call: The tokens.
        of_k: The map of keys.
        rotation: By which the first T keys are turned, where their features are those of what they were before.
        first: Whether the sinks are the first of the keys.

    Returns:
        ``o [B, H, T, V]``.
    """
    # Imported here so that the package needs neither Triton nor a GPU.
    from hf_linear_attn.ops.hybrid.triton.train import train_triton

    return train_triton(call, of_k, rotation, first)
