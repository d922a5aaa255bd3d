"""The public operation: checks, and the choice of a backend."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.ops.dispatch import choose_backend, kernel_obstacle
from hf_linear_attn.ops.library import is_exporting
from hf_linear_attn.ops.window.problem import KeptKeys, Sinks, WindowCall
from hf_linear_attn.ops.window.reference import window_attention_reference
from hf_linear_attn.ops.window.torch import sums_forward, window_attention_torch, window_forward, window_sums_torch

LARGEST_FP32 = 128
"""Dimensions up to which the kernels find enough registers for fp32."""


class OwnKey(NamedTuple):
    """A key of each query's own, that stands for the n keys beyond its window.

    Its score is that of their mean, plus ``log n``, since the softmax mass of n keys is at least n times that of their
    mean (by Jensen), plus what is learned.

    Attributes:
        value: Its value ``[B, H, T, V]``.
        bias: Added to the score, ``[H]``.
        weight: Multiplied with q and added to the score, ``[H, D]``.
        counts: Which keys count once they lie beyond the window, ``[B, P + T]`` bool.
        number: How many do so by now, ``[B, T]`` int64; where it is 0 the own key is not visible.
        before: Sum of those that came before the P, ``[B, HKV, D]`` fp32, or None.
        gone: The key that it stands for from each query on, 0 where there is no new one, ``[B, HKV, T, D]``; None
            where those are the keys that leave the window.
    """

    value: Tensor
    bias: Tensor
    weight: Tensor
    counts: Tensor
    number: Tensor
    before: Tensor | None = None
    gone: Tensor | None = None

    def score(self, q: Tensor, k: Tensor, window: int, scaling: float) -> Tensor:
        """Return the scores ``[B, H, T]``, fp32 (fp64 for fp64 input)."""
        x = upcast(q)
        keys, left = self.gone, q.shape[2]
        if keys is None:
            left = max(k.shape[2] - window, 0)
            keys = k[:, :, :left].masked_fill(~self.counts[:, None, :left, None], 0)
        keys = running_sum(upcast(keys), q.shape[2] - left, self.before)
        number = self.number.clamp(min=1)[:, None].to(x.dtype)
        learned = (x @ self.weight.to(x.dtype)[..., None])[..., 0] + self.bias[:, None]
        return torch.addcmul(learned + number.log(), key_product(q, keys), scaling / number)


def running_sum(x: Tensor, lag: int, before: Tensor | None) -> Tensor:
    """Sum over tokens up to each one, and put that off by a number of tokens.

    Args:
        x: ``[B, T]`` or ``[B, HKV, T, D]``.
        lag: Number of tokens, >= 0; as many sums of no token come first.
        before: The sum over earlier tokens, without their dimension.

    Returns:
        The sums, with ``T + lag`` tokens.
    """
    dim = 1 if x.ndim == 2 else 2
    sums = x.cumsum(dim)
    if lag:
        sums = F.pad(sums, [0, 0] * (x.ndim - dim - 1) + [lag, 0])
    return sums if before is None else sums + before.unsqueeze(dim)


def key_product(q: Tensor, keys: Tensor) -> Tensor:
    """Return the product of every query with its own key of ``[B, HKV, T, D]``, ``[B, H, T]``."""
    grouped = torch.unflatten(upcast(q), 1, (keys.shape[1], -1))
    return (grouped * keys[:, :, None]).sum(-1).flatten(1, 2)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None = None,
    sinks: Sinks | None = None,
    own_key: OwnKey | None = None,
    kept: KeptKeys | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute causal softmax attention over the last ``window`` keys, the sinks, and a key of each query's own.

    Args:
        q: Queries ``[B, H, T, D]``.
        k: Keys ``[B, HKV, P + T, D]``: P keys from before the first query, at most ``window``, then its own.
        v: Values ``[B, HKV, P + T, V]``.
        window: Keys in sight, the query's own included, >= 1. A query always sees its own.
        scaling: Factor on ``q.k``.
        key_mask: ``[B, P + T]`` bool, True = a real token.
        sinks: Keys ``[B, HKV, n, D]``, values ``[B, HKV, n, V]``, and ``[B, T, n]`` bool: which query sees which. A
            sink inside a query's window must not be visible a second time.
        own_key: One more key per query.
        kept: Keys from beyond the window that are in sight of some queries.
        backend: As in :func:`linear_attention`.

    Returns:
        ``o [B, H, T, V]``.

    Raises:
        ArgumentError: If the window is not positive, or there are fewer keys than queries.
        BackendError: If the backend asked for cannot run here.
    """
    if window < 1 or k.shape[2] < q.shape[2]:
        raise ArgumentError(
            "window", "be at least 1, with a key for each query", (window, tuple(k.shape)), "Pass whole sequences."
        )
    call = WindowCall(q, k, v, key_mask, sinks, None, kept, window, scaling)
    chosen = choose_backend(backend, q.device, lambda: window_obstacle(q, k, v))
    if chosen == "triton":
        # Imported here so that the package needs neither Triton nor a GPU.
        from hf_linear_attn.ops.window.triton.op import window_attention_triton

        return window_attention_triton(call, own_key)
    exporting = is_exporting()
    opaque = chosen == "torch" and (exporting or (torch.compiler.is_compiling() and not torch.is_grad_enabled()))
    if own_key is not None:
        score = own_key.score(q, k, window, scaling)
        call = call._replace(own=(score, own_key.number > 0, own_key.value))
    if opaque:
        o: Tensor = window_forward(*call.inputs())
        return o
    return (window_attention_reference if chosen == "reference" else window_attention_torch)(call)


def window_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scaling: float,
    key_mask: Tensor | None = None,
    sinks: Sinks | None = None,
    kept: KeptKeys | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what softmax over a window divides: ``sum_j exp(s_ij - m_i) v_j`` and ``sum_j exp(s_ij - m_i)``.

    Returns:
        Numerator ``[B, H, T, V]`` and denominator ``[B, H, T]``, fp32, relative to the row's largest score m_i.
    """
    call = WindowCall(q, k, v, key_mask, sinks, None, kept, window, scaling)
    num, den = sums_forward(*call.inputs()) if is_exporting() else window_sums_torch(call)
    return num, den


def window_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say why no kernel can attend to a window of these tensors here, or None where one can."""
    reason = kernel_obstacle(q, k, v)
    if reason is None and q.dtype == torch.float32 and max(q.shape[3], v.shape[3]) > LARGEST_FP32:
        reason = f"in fp32 the window's kernels hold at most {LARGEST_FP32} dimensions"
    return reason
