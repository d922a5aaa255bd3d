"""A gate between the two branches, each normalised by itself."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.mixes.base import Far, LastToken, Mix, Near

START = -3.0
"""The gate's bias at the start: a share of sigmoid(-3) = 5% for the linear branch."""


class Gate(Mix):
    """Compute ``o = (1 - g) o_window + g o_linear`` with ``g = sigmoid(a + u.q)``, a and u learned per head."""

    name: ClassVar[str] = "gate"
    steps: ClassVar[bool] = True

    @override
    def weights(self) -> dict[str, Tensor]:
        heads = self.sizes.num_heads
        return {"bias": torch.full((heads,), START), "weight": torch.zeros(heads, self.sizes.head_dim)}

    @override
    def join(self, near: Near, far: Far, weights: Mapping[str, Tensor]) -> Tensor:
        x = upcast(near.q)
        score = torch.einsum("bhtd,hd->bht", x, weights["weight"].to(x.dtype)) + weights["bias"][:, None]
        gate = (score.sigmoid() * (far.number > 0)[:, None])[..., None].to(near.q.dtype)
        return torch.lerp(near.attend(), far.o, gate)

    @override
    def join_last(self, last: LastToken, weights: Mapping[str, Tensor]) -> Tensor:
        learned, bias = weights["weight"].view(last.q.shape[1:]), weights["bias"].view(*last.q.shape[1:3], 1)
        gate = ((last.q * learned).sum(-1, keepdim=True) + bias).sigmoid()
        if isinstance(last.number, Tensor):
            gate = gate * (last.number > 0)
        near = last.scores.softmax(-1).to(last.v.dtype) @ last.v
        # Kernels answer in the dtype of tokens.
        return torch.lerp(near.to(gate.dtype), last.o_far.to(gate.dtype), gate).to(last.v.dtype)
