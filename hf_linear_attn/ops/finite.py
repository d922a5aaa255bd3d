"""One rule for keys and values that are not finite, where sums are products of matrices.

What a mask hides never matters, whatever it holds. A real key that is NaN or infinite is seen by every query that sees
the key, and by no other. A product with weights of zero keeps neither promise, since ``0 * NaN`` is NaN: such keys are
taken out before it, and put back into what sees them.

On a CPU one look tells that there are none. On a GPU to look would be to wait for it, in every layer, and a graph that
is traced has no numbers to look at: there they are always taken out and put back, by operations that need no answer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

LEAST_LOG_DECAY = -1000.0
"""Smaller ones count as this one, minus infinity among them: its exponential is 0, in fp64 as well, and unlike infinity
it can be taken out of a sum again. Sums with it keep their small terms in fp64, and in two numbers of fp32."""


def broken_keys(k: Tensor, v: Tensor, *gates: Tensor) -> Tensor | None:
    """Tell which keys are not finite, ``[B, HKV, S]`` bool; None where it is known that all are.

    Args:
        k: Keys ``[B, HKV, S, D]``.
        v: Values ``[B, HKV, S, V]``.
        *gates: What comes with them, ``[B, HKV, S]`` each.
    """
    k, v = k.detach(), v.detach()
    gates = tuple(gate.detach() for gate in gates)
    if _can_look(k) and bool(sum((x.sum() for x in gates), k.sum() + v.sum()).isfinite()):
        return None
    # The largest of a row is NaN where one of it is: one read, and nothing of the size of k is written.
    sound: Tensor = (vector_norm(k, torch.inf, -1) < torch.inf) & (vector_norm(v, torch.inf, -1) < torch.inf)
    for gate in gates:
        sound = sound & (gate.abs() < torch.inf)
    return ~sound


def _can_look(x: Tensor) -> bool:
    active = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.device.type == "cpu" and not active


def without(x: Tensor, broken: Tensor) -> Tensor:
    """Return ``x [B, HKV, S, E]`` with zeros for broken keys."""
    return x.masked_fill(broken[..., None], 0)


def who_sees(
    broken: Tensor, queries: int, *, causal: bool = True, cu_seqlens: Tensor | None = None, delay: int = 0
) -> tuple[Tensor, Tensor]:
    """Tell what sees a broken key of ``[B, HKV, S]``.

    Args:
        broken: Which keys are, those that count alone.
        queries: T.
        causal: Whether query i sees only keys up to ``i - delay``.
        cu_seqlens: Boundaries of packed sequences, B = 1.
        delay: Tokens by which keys lag.

    Returns:
        Which queries do ``[B, HKV, T]``, and which final states ``[B or N, HKV]``.
    """
    if cu_seqlens is None:
        if not causal:
            found = broken.any(2, keepdim=True)
            return found.expand(-1, -1, queries), found[:, :, 0]
        read = F.pad(broken, (delay, 0))[:, :, :queries]
        return read.long().cumsum(2) > 0, read.any(2)
    bounds = cu_seqlens.long()
    number = F.pad(broken.long().cumsum(2), (1, 0))
    tokens = torch.arange(queries, device=broken.device)
    text = torch.searchsorted(bounds, tokens, right=True) - 1
    starts, ends = bounds[:-1], bounds[1:]
    first = starts[text]
    last = torch.maximum(tokens + 1 - delay, first) if causal else ends[text]
    kept = torch.maximum(ends - delay, starts) if causal else ends
    return number[:, :, last] > number[:, :, first], (number[0, :, kept] > number[0, :, starts]).mT


def see(o: Tensor, seen: Tensor) -> Tensor:
    """Return ``o [B, H, T, V]``, NaN where a query sees a broken key, ``seen [B, HKV, T]`` bool.

    It is added, so that gradients are NaN as well, and nothing that diverges looks sound.
    """
    return o + _nan_where(seen, o.dtype).repeat_interleave(o.shape[1] // seen.shape[1], 1)[..., None]


def keep(sums: Tensor, kept: Tensor) -> Tensor:
    """Return a state's ``sums [B, HKV, ...]``, NaN where they hold a broken key, ``kept [B, HKV]`` bool."""
    return sums + _nan_where(kept, sums.dtype).view(*kept.shape, *(1,) * (sums.ndim - 2))


def _nan_where(chosen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(chosen, torch.nan, 0.0).to(dtype)
