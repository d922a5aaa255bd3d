"""AdamW for where memory is short: weights in bf16 that lose nothing to rounding, moments in 8 bits, or both."""

import importlib.util
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.errors import ArgumentError

BLOCK = 256
"""Numbers that share a scale in 8-bit moments."""


def make_optimizer(settings: DistillationSettings, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimiser that the settings name, over groups with ``params`` and ``lr``, if it can run here."""
    options: dict[str, Any] = {"betas": tuple(settings.betas), "weight_decay": settings.weight_decay}
    device = groups[0]["params"][0].device.type
    if settings.optimizer == "paged_adamw_8bit":
        if device != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
            rule = "be `adamw` or `adamw_8bit` without bitsandbytes and a CUDA device"
            remedy = "Run `pip install bitsandbytes` on a machine with such a device, or use adamw_8bit."
            raise ArgumentError("optimizer", rule, settings.optimizer, remedy)
        import bitsandbytes

        return bitsandbytes.optim.PagedAdamW8bit(groups, **options)  # type: ignore[no-any-return]
    if settings.optimizer == "adamw" and settings.master_weights == "fp32":
        # The fused one needs no copy of the weights' size beside the moments.
        return torch.optim.AdamW(groups, **options, fused=True if device == "cuda" else None)
    eight_bits = settings.optimizer == "adamw_8bit"
    return LeanAdamW(groups, **options, rounding=settings.master_weights, eight_bits=eight_bits, seed=settings.seed)


def moment_bytes(settings: DistillationSettings, parameter: Tensor) -> float:
    """Return the bytes that an optimiser keeps beside a parameter and its gradient."""
    numbers = parameter.numel()
    lean = settings.optimizer != "adamw" and numbers >= BLOCK
    moments = 2 * (numbers + 4 * math.ceil(numbers / BLOCK)) if lean else 8 * numbers
    dropped = settings.master_weights == "compensated" and parameter.dtype == torch.bfloat16
    return moments + 2 * numbers * dropped


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) that computes in fp32 and keeps less.

    Args:
        groups: Parameters, or groups of them; from here to ``weight_decay`` as for torch's.
        rounding: How a parameter in bf16 takes its new value. ``stochastic``: it is rounded up or down with the
            probabilities that make the mean right. ``compensated``: what rounding dropped is kept in a second bf16
            number and added at the next step (Kahan, 1965). Parameters in fp32 need neither.
        eight_bits: Keep the moments in 8 bits, blocks of 256 on a scale of their own (Dettmers et al., 2022,
            arXiv:2110.02861); small parameters keep them in fp32.
        seed: Of stochastic rounding.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rounding: str = "fp32",
        eight_bits: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.rounding, self.eight_bits, self.seed = rounding, eight_bits, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step."""
        loss = None if closure is None else closure()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, index)
                index += 1
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("mean", "square"):
                state |= self._stored(name, torch.zeros_like(parameter, dtype=torch.float32))
            if self.rounding == "compensated" and parameter.dtype == torch.bfloat16:
                state["dropped"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2), lr = state["step"], group["betas"], group["lr"]
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        mean = self._loaded(state, "mean", parameter).lerp_(gradient, 1 - beta1)
        square = self._loaded(state, "square", parameter).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state |= self._stored("mean", mean) | self._stored("square", square)
        root = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        value: Tensor = parameter if parameter.dtype == torch.float32 else parameter.float()
        if "dropped" in state:
            value += state["dropped"]
        value.mul_(1 - lr * group["weight_decay"]).addcdiv_(mean, root, value=-lr / (1 - beta1**step))
        if value is parameter:
            return
        if self.rounding == "stochastic" and parameter.dtype == torch.bfloat16:
            # Replicas of a weight have to round alike, so not by what else the process drew.
            generator = torch.Generator(value.device).manual_seed(hash((self.seed, step, index)) % 2**63)
            value = round_stochastically(value, generator)
        parameter.copy_(value)
        if "dropped" in state:
            state["dropped"].copy_(value.sub_(parameter))

    def _stored(self, name: str, x: Tensor) -> dict[str, Tensor]:
        if not self.eight_bits or x.numel() < BLOCK:
            return {name: x}
        codes, scales = quantise(x, signed=name == "mean")
        return {f"{name}_codes": codes, f"{name}_scales": scales}

    def _loaded(self, state: dict[str, Any], name: str, like: Tensor) -> Tensor:
        if name in state:
            kept: Tensor = state[name]
            return kept
        return dequantise(state[f"{name}_codes"], state[f"{name}_scales"], signed=name == "mean").view_as(like)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; unlike torch's optimisers, leave its dtypes alone."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, values in state_dict["state"].items():
            device = parameters[index].device
            self.state[parameters[index]] = {
                name: x.to(device, copy=True) if isinstance(x, Tensor) else x for name, x in values.items()
            }


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 numbers to ones that bf16 holds, up or down, such that the mean is right."""
    # bf16 is the upper half of fp32's bits: what is below carries into it as often as it is large.
    noise = torch.randint(0, 2**16, x.shape, generator=generator, device=x.device, dtype=torch.int32)
    return (x.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32)


@cache
def codebook(signed: bool) -> Tensor:
    """Return the 256 numbers, ascending in -1..1 or 0..1, that 8 bits stand for: dense near 0, as moments are.

    Each power of ten has twice as many numbers as the one below it.
    """
    bits = 7 if signed else 8
    positive = [
        10.0 ** (power - 6) * (0.1 + 0.9 * (i + 0.5) / 2 ** (power + bits - 7))
        for power in range(7)
        for i in range(2 ** (power + bits - 7))
    ]
    # The largest number is its block's scale.
    numbers = [*positive, 0.0, 1.0]
    return torch.tensor(sorted([*numbers, *(-x for x in positive)] if signed else numbers))


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes and the scale of each block of them."""
    flat = x.flatten()
    blocks = nn.functional.pad(flat, [0, -flat.numel() % BLOCK]).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = codebook(signed).to(x.device)
    codes = torch.bucketize(blocks / scales, (numbers[1:] + numbers[:-1]) / 2)
    return codes.to(torch.uint8).flatten()[: flat.numel()], scales[:, 0]


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the numbers that :func:`quantise` was given, nearly."""
    numbers = codebook(signed).to(codes.device)[codes.int()]
    return numbers * scales.repeat_interleave(BLOCK)[: codes.numel()]
