"""Random features: Monte Carlo estimates of softmax's kernel, the better the more of them."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps.base import FeatureMap, register_feature_map
from hf_linear_attn.feature_maps.elementwise import EXP_CLAMP
from hf_linear_attn.feature_maps.learned import check_size


class RandomFeatures(FeatureMap):
    """A map with a fixed random projection, shared by q and k, saved with the model.

    Args:
        num_features: ``F``.
        orthogonal: Whether directions are drawn orthogonal to each other in blocks of D (with Gaussian
            lengths, so that estimates stay unbiased), which lowers the variance.
        seed: Seed of the projection, which is drawn on the CPU whatever the device.
        **options: As in :class:`FeatureMap`; ``separate`` is False, and with ``per_head`` every key head
            draws its own.

    Raises:
        ArgumentError: If a size does not fit, or ``separate`` is set.
    """

    directions_per_feature: ClassVar[float] = 1.0
    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        *,
        num_features: int = 256,
        orthogonal: bool = True,
        seed: int = 0,
        separate: bool = False,
        per_head: bool = False,
        scaling: float | None = None,
        scale: float = 1.0,
    ) -> None:
        if separate:
            remedy = "Independent projections of q and k estimate no kernel."
            raise ArgumentError("separate", f"be False for {self.name!r}", separate, remedy)
        super().__init__(
            head_dim, num_heads, num_kv_heads, separate=False, per_head=per_head, scaling=scaling, scale=scale
        )
        check_size("num_features", num_features, multiple_of=round(1 / self.directions_per_feature))
        if not 0 <= seed < 2**63:
            raise ArgumentError("seed", "lie in 0..2**63 - 1", seed, "The default is 0.")
        self.num_features, self.orthogonal = num_features, orthogonal
        self.register_buffer("projection", self._draw(seed).to(torch.get_default_device()))

    @override
    @property
    def feature_dim(self) -> int:
        return self.num_features

    def redraw_(self, seed: int) -> None:
        """Draw a new projection in place; states made with the old one are void."""
        self.projection.copy_(self._draw(seed))

    def _draw(self, seed: int) -> Tensor:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        heads = self.num_kv_heads if self.per_head else 1
        rows = round(self.num_features * self.directions_per_feature)

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

        w = gaussian(heads, rows, self.head_dim)
        if self.orthogonal:
            blocks = -(-rows // self.head_dim)
            # Fixing the signs of R's diagonal makes Q uniform over all rotations.
            q, r = torch.linalg.qr(gaussian(heads, blocks, self.head_dim, self.head_dim))
            q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
            w = q.mT.reshape(heads, -1, self.head_dim)[:, :rows] * w.norm(dim=-1, keepdim=True)
        return w.float()

    def project(self, x: Tensor) -> Tensor:
        """Return ``w.x`` for every direction w, ``[B, heads, T, rows]``."""
        w = self.projection.to(x.dtype)
        if w.shape[0] > 1:
            w = w.repeat_interleave(x.shape[1] // w.shape[0], 0)
        return x @ w.mT


@register_feature_map
class RFF(RandomFeatures):
    """Compute ``[cos(Wy), sin(Wy)] / sqrt(F / 2)``: an estimate of ``exp(-scaling |q - k|^2 / 2)``.

    The Gaussian kernel is softmax's but for ``exp(scaling |k|^2 / 2)``: the same where keys are equally long
    (a query's length cancels in the normaliser).

    Args:
        num_features: ``F``, even.
        **options: As in :class:`RandomFeatures`.

    Raises:
        ArgumentError: If a size does not fit, or ``separate`` is set.

    Example:
        >>> phi, x = RFF(head_dim=4), torch.randn(1, 1, 5, 4)
        >>> (phi.phi_q(x) @ phi.phi_k(x).mT).diagonal(dim1=-2, dim2=-1).round(decimals=4).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """

    name: ClassVar[str] = "rff"
    formula: ClassVar[str] = "[cos(Wy), sin(Wy)] / sqrt(F / 2), y = sqrt(scaling) x, W random"
    paper: ClassVar[str] = "Rahimi and Recht, 2007; Peng et al., 2021, arXiv:2103.02143"
    non_negative: bool = False
    caution: ClassVar[str] = (
        "its estimates of small weights can be negative, so the normaliser can come near 0 or change sign; "
        "add features, or use 'performer'"
    )
    directions_per_feature: ClassVar[float] = 0.5

    @override
    def phi(self, x: Tensor) -> Tensor:
        y = self.project(x * math.sqrt(self.scaling))
        return torch.cat([y.cos(), y.sin()], dim=-1) / math.sqrt(self.num_features / 2)


@register_feature_map
class Performer(RandomFeatures):
    """Compute ``exp(Wy - |y|^2 / 2) / sqrt(F)`` (FAVOR+): a positive estimate of ``exp(scaling q.k)``.

    The estimate is unbiased. Stable: exponents of keys are cut at 10, which chance exceeds four times in a
    million, and those of a query are shifted together such that the largest lies in [-10, 10], which cancels
    in the normaliser.

    Args:
        num_features: ``F``.
        **options: As in :class:`RandomFeatures`.

    Raises:
        ArgumentError: If a size does not fit, or ``separate`` is set.

    Example:
        >>> phi = Performer(head_dim=2, num_features=4096, scaling=0.5)
        >>> q, k = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.tensor([0.6, 0.8]).view(1, 1, 1, 2)
        >>> bool(abs((phi.phi_q(q) @ phi.phi_k(k).mT).log() - 0.3) < 0.05)
        True
    """

    name: ClassVar[str] = "performer"
    formula: ClassVar[str] = "exp(Wy - |y|^2 / 2) / sqrt(F), y = sqrt(scaling) x, W random"
    paper: ClassVar[str] = "Choromanski et al., 2021, arXiv:2009.14794"

    def _exponents(self, x: Tensor) -> Tensor:
        y = self.scaled(x) * math.sqrt(self.scaling)
        return self.project(y) - y.square().sum(-1, keepdim=True) / 2

    @override
    def phi_q(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        exponents = self._exponents(q)
        largest = exponents.amax(-1, keepdim=True)
        shift = largest - largest.clamp(-EXP_CLAMP, EXP_CLAMP)
        return (exponents - shift).exp() / math.sqrt(self.num_features)

    @override
    def phi_k(self, k: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._exponents(k).clamp(max=EXP_CLAMP).exp() / math.sqrt(self.num_features)
