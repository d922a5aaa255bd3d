"""A score that is learned from the teacher's attention, over a key's age."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.retention.base import Retention
from hf_linear_attn.layers.rules import Sizes
from hf_linear_attn.layers.window import Tokens
from hf_linear_attn.ops.kept import AGES

HIDDEN = 64
"""Units between what a key says and its scores."""

AHEAD = 16
"""Tokens behind a key, at most, that its scores are made of too: what follows tells what it is good for."""


AT_ONCE = 1024
"""Keys that are scored at once."""


class Learned(Retention):
    """Let the key go that has the least score for its age.

    The scores of a key are made once, when it leaves the window, by a small net of each key head: of the keys and
    values of all key heads at that token, and of their mean over the next ones, less their usual mean and over their
    usual deviation. They are learned from the most attention that a softmax model will pay to the key, compare Locret
    (Huang et al., 2024, arXiv:2410.01805). At the start all scores are equal, and the oldest key goes.
    """

    name: ClassVar[str] = "learned"
    scores: ClassVar[bool] = True
    reads_keys: ClassVar[bool] = True

    def __init__(self, sizes: Sizes, window: int) -> None:
        super().__init__(sizes, window)
        self.ahead = min(AHEAD, window)

    @override
    def weights(self) -> dict[str, Tensor]:
        heads = self.sizes.num_kv_heads
        inputs = 2 * heads * (self.sizes.head_dim + self.sizes.values)
        # The same in every layer and run, whatever random numbers were drawn before.
        drawn = torch.randn(heads, inputs, HIDDEN, generator=torch.Generator().manual_seed(0), device="cpu")
        return {
            "mean": torch.zeros(inputs),
            "deviation": torch.ones(inputs),
            "in": drawn.to(torch.get_default_dtype()) * inputs**-0.5,
            "in_bias": torch.zeros(heads, HIDDEN),
            "out": torch.zeros(heads, HIDDEN, AGES),
            "bias": torch.zeros(heads, AGES),
        }

    @override
    def score(self, tokens: Tokens, count: int, weights: Mapping[str, Tensor], backend: str) -> Tensor:
        if torch.compiler.is_compiling():
            return self.scores_of(self.inputs(tokens, count, backend), weights)
        # What scores are made of takes more memory than all else of a call.
        found = []
        for start in range(0, max(count, 1), AT_ONCE):
            end = min(start + AT_ONCE, count)
            some = self.inputs(tokens.cut(start, end + self.ahead), end - start, backend)
            found.append(self.scores_of(some, weights))
        return torch.cat(found, 2) if len(found) > 1 else found[0]

    def inputs(self, tokens: Tokens, count: int, backend: str) -> Tensor:
        """Return what scores are made of ``[B, count, I]``, fp32 (fp64); see :meth:`score`."""
        end = count + self.ahead
        k, v = tokens.k[:, :, :end], tokens.v[:, :, :end]
        if tokens.rotation is not None:
            k = tokens.rotation.cut(0, end).undo(k, backend)
        said = upcast(torch.cat([k, v], 3).transpose(1, 2).flatten(2))
        if tokens.mask is not None:
            said = said.masked_fill(~tokens.mask[:, :end, None], 0)
        after = F.avg_pool1d(said[:, 1:].mT, self.ahead, 1).mT if count else said[:, :0]
        return torch.cat([said[:, :count], after], 2)

    def scores_of(self, inputs: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the scores of keys at :data:`hf_linear_attn.ops.kept.problem.AGES`, ``[B, HKV, count, 6]``."""
        w = {name: x.to(inputs.dtype) for name, x in weights.items()}
        x = ((inputs - w["mean"]) / w["deviation"])[:, None]
        return F.silu(x @ w["in"] + w["in_bias"][:, None]) @ w["out"] + w["bias"][:, None]
