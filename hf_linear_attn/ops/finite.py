"""One rule for keys and values that are not finite, where sums are products of matrices.

What a mask hides never matters, whatever it holds. A real key that is NaN or infinite is seen by every query that sees
the key, and by no other. A product with weights of zero keeps neither promise, since ``0 * NaN`` is NaN: such keys are
taken out before it, and put back into what sees them.

On a device to look would be to wait for it, in every layer, and a graph that is traced has no numbers to look at. There
the first promise alone holds, and a NaN is also in rows that share a product with its key: docs/kernels.md says which.
"""

import torch
from torch import Tensor

LEAST_LOG_DECAY = -80.0
"""Smaller ones count as this one: exp(-80) of a state is nothing beside fp32's rounding of what is written next."""


def broken_keys(k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
    """Tell which keys are not finite, ``[B, HKV, S]`` bool; None where all are, or it cannot be told.

    Args:
        k: Keys ``[B, HKV, S, D]``.
        v: Values ``[B, HKV, S, V]``.
        log_decay: What comes with them, ``[B, HKV, S]``; None where nothing does.
    """
    if not _can_look(k):
        return None
    total = k.detach().sum() + v.detach().sum()
    if bool((total if log_decay is None else total + log_decay.detach().sum()).isfinite()):
        return None
    sound = k.detach().isfinite().all(-1) & v.detach().isfinite().all(-1)
    return ~(sound if log_decay is None else sound & log_decay.detach().isfinite())


def _can_look(x: Tensor) -> bool:
    active = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.device.type == "cpu" and not active


def unmasked(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values with zeros for what is not finite behind a mask, where :func:`broken_keys` cannot look."""
    if key_mask is None or _can_look(k):
        return k, v
    hidden = ~key_mask[:, None, :, None]
    return k.masked_fill(hidden & ~k.isfinite(), 0), v.masked_fill(hidden & ~v.isfinite(), 0)


def without(x: Tensor, broken: Tensor) -> Tensor:
    """Return ``x [B, HKV, S, E]`` with zeros for broken keys."""
    return x.masked_fill(broken[..., None], 0)


def see(o: Tensor, seen: Tensor) -> Tensor:
    """Return ``o [B, H, T, V]``, NaN where a query sees a broken key, ``seen [B, HKV, T]`` bool.

    It is added, so that gradients are NaN as well, and nothing that diverges looks sound.
    """
    groups = o.shape[1] // seen.shape[1]
    return o + torch.where(seen, torch.nan, 0.0).to(o.dtype).repeat_interleave(groups, 1)[..., None]
