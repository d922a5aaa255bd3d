"""Gates of an update rule: how much of the state a key leaves, and how much of what stands at it it replaces."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.feature_maps.base import upcast

DECAY_START = -7.0
"""The bias of a decay at the start: a state falls to half in about 760 tokens."""

BETA_START = 0.0
"""The bias of a replacement at the start: half of what stands at a key is replaced."""


class Gates(NamedTuple):
    """What some keys do to a state, beside being added to it.

    Attributes:
        log_decay: The logarithm of what each leaves of the state, ``[B, HKV, S]``, <= 0; None where all of it stays.
        beta: How much of what stands at each is replaced, ``[B, HKV, S]``, in 0..1; None where nothing is.
        scale: By which outputs are multiplied, ``[H]``; None where they are normalised.
    """

    log_decay: Tensor | None = None
    beta: Tensor | None = None
    scale: Tensor | None = None


def gate_weights(name: str, bias: float, kv_heads: int, head_dim: int, value_dim: int) -> dict[str, Tensor]:
    """Return a gate's weights as they start: the bias alone counts."""
    return {
        f"{name}_bias": torch.full((kv_heads,), bias),
        f"{name}_key": torch.zeros(kv_heads, head_dim),
        f"{name}_value": torch.zeros(kv_heads, value_dim),
    }


def gate_scores(name: str, k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return ``a + u.k + w.v`` of each key ``[B, HKV, S, D]`` and value ``[B, HKV, S, V]``, fp32 (fp64 for fp64 input).

    Raises:
        UnsupportedError: If heads or values have other sizes than the gate's.
    """
    of_key, of_value = weights[f"{name}_key"], weights[f"{name}_value"]
    expected, found = (*of_key.shape, of_value.shape[1]), (k.shape[1], k.shape[3], v.shape[3])
    if expected != found:
        raise UnsupportedError(
            "update_rule",
            f"have gates of the layer's [HKV, D, V] = {found}",
            expected,
            "Its values have a size that could not be found: use update_rule='additive', or leave the layer out.",
        )
    k, v = upcast(k), upcast(v)
    # Of a single key this takes half of an einsum's time.
    parts = [torch.linalg.vecdot(x, w.to(x.dtype)[:, None]) for x, w in ((k, of_key), (v, of_value))]
    scores: Tensor = parts[0] + parts[1] + weights[f"{name}_bias"].to(k.dtype)[:, None]
    return scores


def log_decays(k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return ``-softplus(a + u.k + w.v)``."""
    return -F.softplus(gate_scores("decay", k, v, weights))


def betas(k: Tensor, v: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return ``sigmoid(a + u.k + w.v)``."""
    return gate_scores("beta", k, v, weights).sigmoid()
