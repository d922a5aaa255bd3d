"""The linear branch as one more key of the window's softmax."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import upcast
from hf_linear_attn.layers.mixes.base import Far, LastToken, Mix, Near
from hf_linear_attn.ops.window import OwnKey


class Key(Mix):
    """Let the linear branch's output be the value of a key of each query's own.

    Its score is ``log n + scaling q.m + a + u.q`` for the mean m of the n keys beyond the window, and a, u learned per
    head. It starts as the mean key's score times their number, which softmax's mass of them is at least.
    """

    name: ClassVar[str] = "key"
    sums_keys: ClassVar[bool] = True
    steps: ClassVar[bool] = True
    takes_slot: ClassVar[bool] = True

    @override
    def weights(self) -> dict[str, Tensor]:
        heads = self.sizes.num_heads
        return {"bias": torch.zeros(heads), "weight": torch.zeros(heads, self.sizes.head_dim)}

    @override
    def join(self, near: Near, far: Far, weights: Mapping[str, Tensor]) -> Tensor:
        own = OwnKey(far.o, weights["bias"], weights["weight"], far.counts, far.number, far.keys, far.gone)
        return near.attend(own)

    @override
    def join_last(self, last: LastToken, weights: Mapping[str, Tensor]) -> Tensor:
        if last.keys is None:
            raise RuntimeError("the sum of the keys beyond the window is not kept")
        q, o_far, number = last.q, last.o_far, last.number
        learned, bias = weights["weight"].view(q.shape[1:]), weights["bias"].view(*q.shape[1:3], 1)
        if isinstance(number, Tensor):
            direction = torch.addcdiv(learned, last.keys[:, :, None], number.clamp(min=1), value=last.scaling)
            # Of no key the logarithm is -inf, which is what it should weigh.
            base = number.log() + bias
        else:
            direction = torch.add(learned, last.keys[:, :, None], alpha=last.scaling / number)
            # In half precision nothing would be left of the logarithm's last digits.
            base = upcast(bias) + math.log(number)
        own = torch.bmm(q.reshape(-1, 1, q.shape[3]), direction.view(-1, q.shape[3], 1)).view(*q.shape[:3], 1)
        if last.free is None:
            shares = torch.cat([last.scores, own.add_(base)], -1).softmax(-1)
            return (shares[..., :-1].to(last.v.dtype) @ last.v).addcmul_(shares[..., -1:], o_far)
        at = last.scores.narrow(3, last.free, 1)
        torch.add(own, base, out=at)
        shares = last.scores.softmax(-1)
        o = torch.bmm(shares.to(last.v.dtype).flatten(0, 1), last.v.flatten(0, 1)).view(o_far.shape)
        return o.addcmul_(shares.narrow(3, last.free, 1), o_far)
