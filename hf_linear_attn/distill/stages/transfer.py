"""Attention transfer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import encoder_inputs, linear_attention_parts
from hf_linear_attn.distill.losses import output_loss, weights_loss
from hf_linear_attn.distill.registry import register_stage
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.softmax import instead_of_forward, softmax_output, visibility
from hf_linear_attn.distill.stages.base import Group, Stage
from hf_linear_attn.layers import Call, LinearAttention

Observe = Callable[[LinearAttention, Tensor, Tensor], None]


@register_stage
class Transfer(Stage):
    """Attention transfer: every layer learns softmax's output from the teacher's hidden states.

    Each layer's backward runs inside its forward, so that one layer's graph at a time is alive.
    """

    name: ClassVar[str] = "transfer"
    place: ClassVar[int] = 10
    recomputes: ClassVar[bool] = False
    idle: ClassVar[str] = "a window alone has nothing to transfer"

    @override
    @classmethod
    def steps(cls, settings: DistillationSettings) -> int:
        return settings.transfer_steps

    @override
    @classmethod
    def serves(cls, settings: DistillationSettings) -> bool:
        # A window alone has no linear branch whose output could be brought nearer to softmax's.
        return settings.conversion.mix != "window"

    @override
    def trained(self) -> list[Group]:
        return self.map_groups()

    @override
    def weight(self, batch: Batch) -> Tensor:
        return batch.real.sum()

    @override
    def loss(self, batch: Batch) -> Tensor:
        weights = batch.real.float()
        self.losses = []
        layers = len(linear_attention_parts(self.student))
        forced, measured = {"output": (teacher_forced, output_loss), "weights": (weights_forced, weights_loss)}[
            self.settings.transfer_loss
        ]

        def observe(part: LinearAttention, own: Tensor, softmax: Tensor) -> None:
            loss = measured(own, softmax, laid_out(weights, own)) / layers
            self.learn(loss)
            self.losses.append((part.name, loss.detach()))

        with forced(self.student, observe):
            if self.settings.encoder:
                self.student(**encoder_inputs(batch))
            else:
                # The logits are not read.
                self.predictor.states(batch)
        return torch.stack([loss for _, loss in self.losses]).sum()


def laid_out(weights: Tensor, output: Tensor) -> Tensor:
    """Return weights ``[B, T]`` as an attention layer sees tokens: packed rows lie end to end, ``[1, B T]``."""
    return weights.view(output.shape[0], -1)


def attention_weights(part: LinearAttention, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Return the linear branch's weights ``[B, H, T, T]``, rows summing to 1."""
    features_q, features_k = part.feature_map.phi_q(q), part.feature_map.phi_k(k)
    scores = features_q @ features_k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    scores = scores * visible
    return scores / (scores.sum(-1, keepdim=True) + part.settings.eps)


def teacher_forced(model: nn.Module, observe: Observe) -> AbstractContextManager[None]:
    """Make converted layers compute softmax attention within a ``with`` block, and show what they would have computed.

    Every layer so gets the teacher's hidden states. Its own output is computed from detached q, k, v, so that a loss
    on it reaches that layer's parameters only. ``observe`` is called in each layer's forward with the layer, its own
    output and the softmax output, both ``[B, H, T, V]``.
    """

    def compute(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k, v = q.detach(), k.detach(), v.detach()
        own = type(part).forward(part, q, k, v, call)
        with torch.no_grad():
            softmax = softmax_output(part, q, k, v, call)
        observe(part, own, softmax)
        return softmax

    return instead_of_forward(linear_attention_parts(model), compute)


def weights_forced(model: nn.Module, observe: Observe) -> AbstractContextManager[None]:
    """Do as :func:`teacher_forced`, but show attention weights ``[B, H, T, T]``; costs O(T^2) memory."""

    def compute(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        q, k, v = q.detach(), k.detach(), v.detach()
        visible = visibility(q, call.key_mask, call.cu_seqlens, call.causal)
        with torch.no_grad():
            groups = q.shape[1] // k.shape[1]
            scores = (q @ k.repeat_interleave(groups, 1).transpose(-1, -2)).float() * part.scaling(call)
            softmax = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            output = softmax.to(v.dtype) @ v.repeat_interleave(groups, 1)
        if part.undoes and call.rotation is not None:
            backend = part.settings.backend
            q, k = call.rotation.undo(q, backend), call.rotation.undo(k, backend)
        observe(part, attention_weights(part, q, k, visible), softmax)
        return output

    return instead_of_forward(linear_attention_parts(model), compute)
