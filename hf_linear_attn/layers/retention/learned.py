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

    def __init__(self, sizes: Sizes, window: int, units: int) -> None:
        super().__init__(sizes, window, units)
        self.ahead = min(AHEAD, window)

    @override
    def weights(self) -> dict[str, Tensor]:
        heads, units = self.sizes.num_kv_heads, self.units
        inputs = 2 * heads * (self.sizes.head_dim + self.sizes.values)
        # The same in every layer and run, whatever random numbers were drawn before.
        drawn = torch.randn(heads, inputs, units, generator=torch.Generator().manual_seed(0), device="cpu")
        return {
            "mean": torch.zeros(inputs),
            "deviation": torch.ones(inputs),
            "in": drawn.to(torch.get_default_dtype()) * inputs**-0.5,
            "in_bias": torch.zeros(heads, units),
            "out": torch.zeros(heads, units, AGES),
            "bias": torch.zeros(heads, AGES),
        }

    @override
    def score(self, tokens: Tokens, count: int, weights: Mapping[str, Tensor], backend: str) -> Tensor:
        entering, bias = self.entering(weights, torch.promote_types(tokens.k.dtype, torch.float32))
        # The mean of what follows is taken of what it gives the hidden units, which are fewer than its entries.
        both = torch.cat(entering.chunk(2), 1)

        def some(start: int, end: int) -> Tensor:
            part, size = tokens.cut(start, end + self.ahead), end - start
            own, after = (self.said(part, size + self.ahead, backend) @ both).chunk(2, 2)
            return self.answers(own[:, :size] + self.mean_after(after, size) + bias, weights)

        if torch.compiler.is_compiling() or count <= AT_ONCE:
            return some(0, count)
        # What scores are made of takes more memory than all else of a call.
        return torch.cat([some(start, min(start + AT_ONCE, count)) for start in range(0, count, AT_ONCE)], 2)

    def inputs(self, tokens: Tokens, count: int, backend: str) -> Tensor:
        """Return what scores are made of ``[B, count, I]``, fp32 (fp64); see :meth:`score`."""
        said = self.said(tokens, count + self.ahead, backend)
        return torch.cat([said[:, :count], self.mean_after(said, count)], 2)

    def scores_of(self, inputs: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the scores of keys at :data:`hf_linear_attn.ops.kept.problem.AGES`, ``[B, HKV, count, 6]``."""
        entering, bias = self.entering(weights, inputs.dtype)
        return self.answers(inputs @ entering + bias, weights)

    def said(self, tokens: Tokens, end: int, backend: str) -> Tensor:
        """Return the keys and values of all heads at the first tokens ``[B, end, I / 2]``, fp32 (fp64); 0 if masked."""
        k, v = tokens.k[:, :, :end], tokens.v[:, :, :end]
        if tokens.rotation is not None:
            k = tokens.rotation.cut(0, end).undo(k, backend)
        # So it is copied once.
        said = upcast(torch.cat([k.transpose(1, 2), v.transpose(1, 2)], 3).flatten(2))
        return said if tokens.mask is None else said.masked_fill(~tokens.mask[:, :end, None], 0)

    def mean_after(self, x: Tensor, count: int) -> Tensor:
        """Return the mean of the next tokens' rows of the first ones ``[B, count, ...]``."""
        # Sums of 1, 2, 4, ... rows, of which those are added that the number of rows is made of.
        sums, size, number, place, total = x[:, 1:], 1, self.ahead, 0, x.new_zeros(())
        while number:
            if number % 2:
                total = total + sums[:, place : place + count]
                place += size
            if number := number // 2:
                sums, size = sums[:, :-size] + sums[:, size:], 2 * size
        return total / self.ahead

    def entering(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return by what inputs as they are enter the hidden units of all heads ``[I, HKV * units]``, and the bias."""
        w = {name: weights[name].to(dtype) for name in ("mean", "deviation", "in", "in_bias")}
        entering = (w["in"] / w["deviation"][:, None]).transpose(0, 1).flatten(1)
        return entering, w["in_bias"].flatten() - w["mean"] @ entering

    def answers(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the scores that hidden units ``[B, count, HKV * units]`` give."""
        out, bias = (weights[name].to(hidden.dtype) for name in ("out", "bias"))
        hidden = hidden.view(*hidden.shape[:2], *out.shape[:2]).transpose(1, 2)
        return F.silu(hidden) @ out + bias[:, None]
