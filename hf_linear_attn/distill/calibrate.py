"""Where the gates of an update rule start: read off the teacher's attention, without training."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts
from hf_linear_attn.distill.softmax import instead_of_forward, softmax_output, visibility
from hf_linear_attn.distill.stages.transfer import laid_out
from hf_linear_attn.layers import Call, LinearAttention

BETA, BETA_SPAN = 0.3, 0.4
"""What a key replaces where attention is spread evenly, and how much more where it rests on one key."""

LONGEST_LOOK = 2048
"""Tokens of the longest texts that are looked at: weights of attention are looked at whole, a head at a time."""


class Measured:
    """What is read off one layer's softmax attention to the keys that its linear branch reads."""

    def __init__(self, part: LinearAttention) -> None:
        self.part = part
        heads, kv_heads = part.sizes.num_heads, part.sizes.num_kv_heads
        self.mass = torch.zeros(kv_heads, dtype=torch.float64)
        self.distance, self.concentration = torch.zeros_like(self.mass), torch.zeros_like(self.mass)
        self.product, self.square = (torch.zeros(heads, dtype=torch.float64) for _ in range(2))

    @property
    def half_life(self) -> Tensor:
        """The mean distance of attention to the keys beyond the window, in tokens, ``[HKV]``; 1 at least."""
        return (self.distance / self.mass).clamp(min=1)

    @property
    def beta(self) -> Tensor:
        """``0.3 + 0.4 c`` for the concentration c, ``[HKV]``: 1 less the entropy's share of its largest value."""
        return BETA + BETA_SPAN * (self.concentration / self.mass).clamp(0, 1)

    @property
    def scale(self) -> Tensor:
        """By which the branch's outputs are nearest to softmax's, ``[H]``; 1 where they are 0."""
        return torch.where(self.square > 0, self.product / self.square.clamp(min=torch.finfo(torch.float64).tiny), 1.0)

    def look(self, q: Tensor, k: Tensor, v: Tensor, call: Call, real: Tensor, own: Tensor | None) -> None:
        """Add what the tokens of a call show that are ``real [B, T]``, no padding.

        ``own [B, H, T, V]`` is the linear branch's output, to be scaled; None to measure gates.
        """
        window, sinks = (self.part.settings.window or 0), self.part.settings.sinks
        visible = visibility(q, call.key_mask, call.cu_seqlens, call.causal)
        # Tokens of its text before each: what is masked counts nowhere.
        place = visible.sum(-1) - 1
        apart = place[..., :, None] - place[..., None, :] - window
        far = visible & (apart >= 0) & (place >= sinks)[..., None, :]
        far = far & real[:, None, :, None] & real[:, None, None, :]
        group = q.shape[1] // k.shape[1]
        scaling = self.part.scaling(call)
        for h in range(q.shape[1]):
            scores = scaling * q[:, h].float() @ k[:, h // group].float().mT
            # All that a query sees share its weight.
            shares = scores.masked_fill(~visible[:, 0], -torch.inf).softmax(-1).masked_fill(~far[:, 0], 0)
            mass = shares.sum(-1)
            if own is None:
                self._add(h // group, shares, mass, apart[:, 0], far[:, 0])
            else:
                target = (shares @ v[:, h // group].float()) / mass.clamp(min=1e-30)[..., None]
                branch = own[:, h].float()
                self.product[h] += float((mass[..., None] * branch * target).sum())
                self.square[h] += float((mass[..., None] * branch.square()).sum())

    def _add(self, head: int, shares: Tensor, mass: Tensor, apart: Tensor, far: Tensor) -> None:
        """Add what the shares ``[B, T, T]`` of a head's weight show that lie far, ``mass [B, T]`` of them together."""
        number, relative = far.sum(-1), shares / mass.clamp(min=1e-30)[..., None]
        entropy = torch.special.entr(relative).sum(-1) / number.clamp(min=2).log()
        self.mass[head] += float(mass.sum())
        self.distance[head] += float((shares * apart).sum())
        self.concentration[head] += float((mass * (1 - entropy)).sum())


@torch.no_grad()
def calibrate(model: nn.Module, batches: Sequence[Batch]) -> list[Measured]:
    """Start the gates of a merely patched model's update rule from its softmax attention, without training.

    The half-life of a decay is the mean distance at which attention rests, beta is 0.3 + 0.4 times how concentrated it
    is, and the outputs of a rule without a normaliser get a scale per head, by least squares (after
    arXiv:2606.16429). All of it concerns the keys that the linear branch reads, weighted by the share of softmax's
    weight that they have. Every layer is fed the teacher's hidden states. What was measured is returned, for each layer
    whose rule has gates.
    """
    measured = {part: Measured(part) for part in linear_attention_parts(model) if part.learned["rule"]}
    _look(model, measured, batches, outputs=False)
    for part, found in measured.items():
        known = found.mass > 0
        if "decay_bias" in part.learned["rule"]:
            # softplus(bias) = log 2 / half-life.
            _set(part.rule_decay_bias, torch.expm1(math.log(2) / found.half_life).log(), known)
        if "beta_bias" in part.learned["rule"]:
            _set(part.rule_beta_bias, found.beta.logit(), known)
    scaled = {part: found for part, found in measured.items() if "scale" in part.learned["rule"]}
    if scaled:
        for part in scaled:
            part.rule_scale.fill_(1)  # type: ignore[operator]
        _look(model, scaled, batches, outputs=True)
        for part, found in scaled.items():
            _set(part.rule_scale, found.scale)
    return list(measured.values())


def _set(parameter: object, value: Tensor, known: Tensor | None = None) -> None:
    """Set a parameter, where something is known."""
    if isinstance(parameter, Tensor):
        value = value.to(parameter)
        parameter.copy_(value if known is None else torch.where(known.to(parameter.device), value, parameter))


def _look(
    model: nn.Module, measured: Mapping[LinearAttention, Measured], batches: Iterable[Batch], *, outputs: bool
) -> None:
    """Run a model with softmax attention, and look at some layers' queries and keys, or at their outputs."""
    real = torch.ones(())

    def compute(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if part in measured:
            own = None
            if outputs:
                before, part.disabled = part.disabled, part.disabled | {"window"}
                own = type(part).forward(part, q, k, v, call)
                part.disabled = before
            tokens = laid_out(real, q)
            measured[part].look(q, k, v, call, tokens if call.key_mask is None else tokens & call.key_mask, own)
        return softmax_output(part, q, k, v, call)

    predictor = Predictor(model)
    with instead_of_forward(linear_attention_parts(model), compute):
        for batch in batches:
            real = batch.real
            predictor.states(batch)
