"""Text that a layer with a window reads without gradients: features, both branches and their join in one."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import Pair
from hf_linear_attn.ops.features import computes_features
from hf_linear_attn.ops.rotation import Rotation
from hf_linear_attn.ops.triton.plan import has_tile, target_of
from hf_linear_attn.ops.window.api import window_obstacle

SERVED = {
    "triton": {("additive", "key")},
    "numba": {(rule, mix) for rule in ("additive", "decay") for mix in ("key", "gate", "window")},
}
"""Update rules and mixes that are read in one, by who reads."""


class Prefill(NamedTuple):
    """Some tokens of a layer with a window.

    Attributes:
        q: Queries ``[B, H, T, D]``, as the model made them.
        k: Keys ``[B, HKV, P + T, D]``: P keys from before the first query, at most W, then its own.
        v: Values ``[B, HKV, P + T, V]``.
        phi_k: Features of the first T keys ``[B, HKV, T, F]``; None before :func:`prefill`, which computes them.
        key_mask: ``[B, P + T]`` bool, True = a key that the window shows; None where all are, then also ``counts``.
        counts: ``[B, P + T]`` bool, True = a key that counts in the linear branch once it has left the window.
        sink_k: Keys of the sinks ``[B, HKV, N, D]``; None without sinks.
        sink_v: Their values ``[B, HKV, N, V]``.
        seen: Which query sees which ``[B, T, N]`` bool.
        number: Keys beyond each query's window ``[B, T]`` int64; None where there is no linear branch.
        far_keys: Sum of those that ``k`` does not hold ``[B, HKV, D]`` fp32; None where there are none.
        kv: The linear branch's state before these tokens ``[B, HKV, F, V]`` fp32; None where there is none.
        z: Its normaliser ``[B, HKV, F]`` fp32.
        turns: By which queries are turned, cosines and then sines ``[B or 1, T, R]``, where their features are those of
            what they were before; None where they are not.
        weight: W of the map for queries ``[H or 1, D, F / 2]``; None for an elementwise map, whose F is D.
        power: Its power ``[H or 1]``; None where it has none.
        bias: The mix's ``[H]``; None without a linear branch.
        direction: The mix's weight ``[H, D]``.
        name: The map.
        factor: On ``x W``.
        sharpness: By which a query's power grows with its length.
        pairs: Which entries are turned together, ``"half"`` or ``"next"``.
        at_end: Whether the last R entries are turned, rather than the first.
        window: W.
        scaling: Factor on ``q.k``.
        eps: Added to the normaliser, away from 0.
        mix: How the branches are joined, ``"key"`` or ``"gate"``, or that there is but the ``"window"``.
        decay_bias: What a key's score of the decay begins with ``[HKV]``; None where nothing fades.
        decay_key: By which a key enters it, as features see it ``[HKV, D]``.
        decay_value: By which its value does ``[HKV, V]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    phi_k: Tensor | None
    key_mask: Tensor | None
    counts: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    seen: Tensor | None
    number: Tensor | None
    far_keys: Tensor | None
    kv: Tensor | None
    z: Tensor | None
    turns: Tensor | None
    weight: Tensor | None
    power: Tensor | None
    bias: Tensor | None
    direction: Tensor | None
    name: str
    factor: float
    sharpness: float
    pairs: str
    at_end: bool
    window: int
    scaling: float
    eps: float
    mix: str = "key"
    decay_bias: Tensor | None = None
    decay_key: Tensor | None = None
    decay_value: Tensor | None = None

    @property
    def features(self) -> Tensor:
        """Those of the keys."""
        if self.phi_k is None:
            raise RuntimeError("the keys' features are not computed")
        return self.phi_k

    @property
    def learned(self) -> Tensor:
        """W of the map."""
        if self.weight is None:
            raise RuntimeError("an elementwise map has no weights")
        return self.weight


class Prefilled(NamedTuple):
    """What such tokens give.

    Attributes:
        o: Outputs ``[B, H, T, V]``.
        kv: The linear branch's state after them ``[B, HKV, F, V]``, fp32.
        z: Its normaliser ``[B, HKV, F]``, fp32.
        far_keys: Sum of the keys that count and have left the window ``[B, HKV, D]``, fp32.
    """

    o: Tensor
    kv: Tensor
    z: Tensor
    far_keys: Tensor


def prefill_obstacle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_q: Pair | None,
    of_k: Pair | None,
    window: int,
    backend: Literal["triton", "numba"],
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
    if not computes_features(q, of_q) or not computes_features(k, of_k):
        return "no kernel computes the map's features here"
    features, dim = 2 * int(of_q.weight.shape[2]), int(v.shape[3])
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


def prefill(
    call: Prefill, of_k: Pair | None, rotation: Rotation | None, backend: Literal["triton", "numba"]
) -> Prefilled:
    """Attend from the queries of some tokens; see :func:`prefill_obstacle` for what can be asked.

    The kernels and the loop are the only implementations: what is computed is said by the general path of a layer.

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
        from hf_linear_attn.ops.prefill.numba import prefill_numba

        return prefill_numba(call, of_k, None if rotation is None else rotation.turns)
    if of_k is None:
        raise RuntimeError("no kernel reads a text with an elementwise map")
    from hf_linear_attn.ops.features.triton.op import features_triton
    from hf_linear_attn.ops.prefill.triton.op import prefill_triton

    phi_k = features_triton(call.k[:, :, : call.q.shape[2]], of_k, rotation)
    return prefill_triton(call._replace(phi_k=phi_k))
