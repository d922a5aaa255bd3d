"""A learned map that bends directions and keeps lengths."""

import math
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.feature_maps.base import Pair, register_feature_map, saturated, second_gradients
from hf_linear_attn.feature_maps.learned import ProjectedMap, Side, identity_like
from hf_linear_attn.tracing import needs_operations

TINY = 1e-12
"""Keeps the gradients of lengths and logarithms finite at 0."""


@register_feature_map
class NormPreserving(ProjectedMap):
    """Compute ``|y| r^p / |r^p|`` with ``y = xW``, ``r = relu(cat[y, -y])`` and a learned power p.

    The length of the features is that of y, so long keys keep their weight; the power pulls features towards
    the largest entries (Han et al., 2023, arXiv:2308.00442). A query's length cancels in the normaliser: as
    in softmax it must decide how sharp the weights are, so the query's power grows with it, ``p = a (1/2 +
    tanh(sqrt(scaling) |y|))`` (after Meng et al., 2025, arXiv:2506.21137); for keys ``p = a``. ``W [D, F / 2]``
    starts as the identity, beyond D columns with orthogonal directions beside it that keep lengths; ``a`` at 3.

    Args:
        num_features: ``F``, even; defaults to ``2 * head_dim``.
        **options: Sizes and others as in :class:`FeatureMap`.

    Example:
        >>> x = torch.tensor([3.0, -4.0]).view(1, 1, 1, 2)
        >>> phi = NormPreserving(head_dim=2).phi_k(x).detach()
        >>> phi.argmax().item(), round(phi.norm().item(), 4)
        (3, 5.0)
    """

    name: ClassVar[str] = "norm_preserving"
    formula: ClassVar[str] = "|y| r^p / |r^p|, y = xW, r = max([y, -y], 0), p learned"
    paper: ClassVar[str] = "after Han et al., 2023, arXiv:2308.00442 and Meng et al., 2025, arXiv:2506.21137"
    joint: ClassVar[bool] = True

    @override
    def add_weights(self, columns: int) -> None:
        self.add_weight("weight", _directions(self.head_dim, columns))
        self.add_weight("power", torch.full((1, 1), 3.0))

    @override
    def pair(self, side: Side) -> Pair:
        sharpness = math.sqrt(self.scaling) if side == "q" else 0.0
        power = self.weight_of("power", side).flatten()
        return Pair("norm_preserving", self.weight_of("weight", side), self.scale, power, sharpness)

    @override
    def features(self, x: Tensor, side: Side) -> Tensor:
        y, power = x @ self.weight_of("weight", side, x), self.weight_of("power", side, x)
        sharpness = math.sqrt(self.scaling) if side == "q" else 0.0
        if needs_operations():
            return _bend(y, power, sharpness)
        features: Tensor = _Bend.apply(y, power, sharpness)  # type: ignore[no-untyped-call]
        return features

    @override
    def phi_step(self, q: Tensor, k: Tensor) -> Tensor:
        y = self.columns_of_step(q, k)
        kv_heads, group = q.shape[1:3]
        of_k, of_q = self.weight_of("power", "k", y), self.weight_of("power", "q", y)
        if len(of_q) == 1:
            of_k, of_q = of_k.expand(kv_heads, 1, 1), of_q.expand(kv_heads * group, 1, 1)
        power = torch.cat([of_k, of_q.view(kv_heads, group, 1)], 1)
        constants = _constants if torch.compiler.is_compiling() else _kept_constants
        tiny, factors, offsets = constants(group, math.sqrt(self.scaling), y.dtype, y.device)
        # Of each vector what its power depends on, its length, and minus that.
        lengths = torch.linalg.vector_norm(y, dim=-1, keepdim=True) * factors
        power = lengths[..., :1].tanh().add_(offsets).mul_(power)
        # p log y^2 is twice p log |y|.
        r = torch.xlogy(power, torch.addcmul(tiny, y, y)).softmax(-1).sqrt_()
        bent = r.copysign_(y)[..., None, :] * lengths[..., 1:, None]
        return saturated(bent.relu_().flatten(-2), q.dtype)


def _directions(head_dim: int, columns: int) -> Tensor:
    """Return ``[D, M]``: the identity, and further orthogonal bases beside it, drawn with a fixed seed.

    ``[I, -I]`` would not do: of y and -y a map has both halves already, and twice the same features stay the same.
    """
    if columns <= head_dim:
        return identity_like(head_dim, columns)
    g = torch.Generator().manual_seed(0)
    bases = [torch.eye(head_dim)]
    for _ in range(-(-columns // head_dim) - 1):
        basis = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=g, device="cpu"))[0]
        bases.append(basis.to(torch.get_default_device()))
    return torch.cat(bases, dim=1)[:, :columns] * math.sqrt(head_dim / columns)


def _bend(y: Tensor, power: Tensor, sharpness: float) -> Tensor:
    """Return ``|y| r^p / |r^p|`` with ``r = relu(cat[y, -y])``.

    ``|y|^p / ||y|^p|`` is the root of a softmax: it neither overflows nor needs two powers in its backward. Of y and -y
    one is positive in every entry, so half of r says it all.
    """
    length = (y.square().sum(-1, keepdim=True) + TINY).sqrt()
    if sharpness:
        power = power * (0.5 + torch.tanh(sharpness * length))
    shares = (2 * power * (y.abs() + TINY).log()).log_softmax(-1)
    bent = length * (0.5 * shares).exp() * y.sign()
    return torch.relu(torch.cat([bent, -bent], dim=-1))


class _Bend(torch.autograd.Function):
    """:func:`_bend` in few passes over memory, forward and backward.

    With ``w = |y|^(p - 1)`` it is ``|y| y w / |y w|``, which needs no sign. On CPUs a power of 2 costs least.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, power: Tensor, sharpness: float) -> Tensor:
        """Return the features ``[..., 2 D]`` of ``y [..., D]``."""
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().add_(TINY).sqrt_()
        growth = torch.tanh(sharpness * length).add_(0.5) if sharpness else torch.ones_like(length)
        # Of y^2: half of the exponent does.
        logs = torch.addcmul(y.new_full((), TINY**2), y, y).log2_()
        exponent = (power * growth).sub_(1).mul_(0.5)
        # Relative to the largest, so that powers stay finite and the largest is not lost.
        bent = (logs * exponent).sub_(logs.amax(-1, keepdim=True) * exponent).exp2_().mul_(y)
        bent.mul_(length / torch.linalg.vector_norm(bent, dim=-1, keepdim=True).clamp_min_(TINY**2))
        features = y.new_empty(*y.shape[:-1], 2 * y.shape[-1])
        up, down = features.chunk(2, -1)
        torch.clamp_min(bent, 0, out=up)
        torch.sub(up, bent, out=down)
        ctx.save_for_backward(y, power, length, growth, logs, bent)
        ctx.sharpness = sharpness
        return features

    @staticmethod
    def backward(ctx: Any, dfeatures: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of y and of the power, and none of the sharpness."""
        y, power, length, growth, logs, bent = ctx.saved_tensors
        if torch.is_grad_enabled():
            return second_gradients(ctx, _bend, (y, power, ctx.sharpness), dfeatures)
        up, down = dfeatures.chunk(2, -1)
        # The gradient of the bent vector, times itself. One of its two features is 0: what reaches that is no part.
        g = bent.clamp_min(0)
        other = g - bent
        g.mul_(up).addcmul_(other, down)
        total = g.sum(-1, keepdim=True)
        # That of the logarithms of y^2, times the power's inverse, twice: a part of each share is everyone's.
        g.addcmul_(bent * (total / length.square()), bent, value=-1)
        dgrown = torch.linalg.vecdot(g, logs)[..., None].mul_(0.5 * math.log(2))
        dlength = total / length
        if ctx.sharpness:
            bend = growth - 0.5
            dlength.addcmul_(dgrown * power, 1 - bend * bend, value=ctx.sharpness)
        # Of 0 the gradient is 0: nothing of rounding is divided by TINY.
        inverse = y / torch.addcmul(y.new_full((), TINY**2), y, y)
        dy = g.mul_(inverse).mul_(power * growth).addcmul_(y, dlength / length)
        return dy, (dgrown * growth).sum_to_size(power.shape), None


def _constants(group: int, sharpness: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :meth:`NormPreserving.phi_step` needs: TINY squared, factors on lengths, offsets of powers."""
    factors = torch.tensor([[0.0, 1.0, -1.0], *[[sharpness, 1.0, -1.0]] * group], dtype=dtype, device=device)
    offsets = torch.tensor([[1.0], *[[0.5]] * group], dtype=dtype, device=device)
    return torch.tensor(TINY**2, dtype=dtype, device=device), factors, offsets


_kept_constants = cache(_constants)
