"""How many copies of what the programs of a kernel share a state holds."""

from typing import Literal

import torch

from hf_linear_attn.ops.dispatch import LARGEST_FEATURES, LARGEST_HEAD
from hf_linear_attn.ops.triton.plan import target_of, tile


# Whatever torch.compile traces, it need not look for tiles.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def copies_of(device: torch.device, role: Literal["decode", "hybrid"], feature_dim: int, value_dim: int) -> int | None:
    """Return how many programs share a head in a step; each keeps its own copy of the sums that all of them need.

    It is None where no kernel runs, or only interpreted ones, which run one after another.
    """
    target = target_of(device) if device.type == "cuda" else None
    if target is None or feature_dim > LARGEST_FEATURES or value_dim > LARGEST_HEAD:
        return None
    # Widths are the same for every dtype: a state is fp32.
    return -(-value_dim // tile(target, torch.bfloat16, role, feature_dim, value_dim, 0).width)
