"""One denominator for both branches, as LoLCATs."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.mixes.base import Far, Mix, Near

START = math.log(0.1 / 0.9)
"""The bias at the start: LoLCATs' factor of 0.1 for the window."""


class Shared(Mix):
    """Divide the sum of both branches' numerators by that of their denominators (Zhang et al., 2024, arXiv:2410.10254).

    The window's weights are relative to the row's largest score, and count ``sigmoid(a)`` times, a learned per head.
    """

    name: ClassVar[str] = "shared"
    needs: ClassVar[frozenset[str]] = frozenset({"mass"})

    @override
    def weights(self) -> dict[str, Tensor]:
        return {"bias": torch.full((self.sizes.num_heads,), START)}

    @override
    def join(self, near: Near, far: Far, weights: Mapping[str, Tensor]) -> Tensor:
        if far.mass is None:
            raise RuntimeError("a rule that provides the mass did not return it")
        num, den = near.sums()
        share = upcast(weights["bias"]).sigmoid()[:, None]
        den, far_num = share * den, upcast(far.o) * (far.mass + self.eps)[..., None]
        o = (share[..., None] * num + far_num) / (den + far.mass + self.eps)[..., None]
        return o.to(near.q.dtype)
