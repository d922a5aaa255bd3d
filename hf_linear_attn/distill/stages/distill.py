"""Logit distillation."""

import random
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts, map_parameters, next_tokens, weighted
from hf_linear_attn.distill.losses import ce_loss
from hf_linear_attn.distill.registry import register_stage
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages.base import Group, Stage
from hf_linear_attn.distill.teacher import Teacher
from hf_linear_attn.patching import part_of


@register_stage
class Distill(Stage):
    """Logit distillation: the whole model learns the teacher's distribution over the next token."""

    name: ClassVar[str] = "distill"
    place: ClassVar[int] = 20
    encoder: ClassVar[bool | None] = False
    lora: ClassVar[bool] = True
    splits: ClassVar[bool] = True

    @override
    @classmethod
    def steps(cls, settings: DistillationSettings) -> int:
        return settings.distill_steps

    @override
    @classmethod
    def needs_teacher(cls, settings: DistillationSettings) -> bool:
        return settings.distill_loss == "kl" and settings.ce_share < 1

    @property
    def hidden_size(self) -> int:
        """The width of the language model."""
        size: int = self.student.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
        return size

    @property
    def peak_lr(self) -> float:
        """Learning rate of the attention modules."""
        return self.settings.learning_rate(self.hidden_size)

    @override
    def trained(self) -> list[Group]:
        settings, lr = self.settings, self.peak_lr
        if settings.trainable == "lora":
            adapters = [p for name, p in self.student.named_parameters() if "lora_" in name]
            groups = [{"params": adapters, "lr": lr}]
        else:
            converted = [module for module in self.student.modules() if part_of(module) is not None]
            of_attention = {p for module in converted for p in module.parameters()}
            maps = map_parameters(self.student)
            others = [p for p in self.student.parameters() if p not in maps]
            groups = [
                {"params": [p for p in others if p in of_attention], "lr": lr},
                {"params": [p for p in others if p not in of_attention], "lr": lr * settings.rest_lr_share},
            ]
        if settings.train_feature_maps:
            # A stage with gentler steps is gentler to the maps too.
            share = lr / settings.learning_rate(self.hidden_size)
            groups += [group | {"lr": group["lr"] * share} for group in self.map_groups()]
        return groups

    @override
    def begin_step(self, step: int) -> None:
        share = self.settings.window_dropout * (1 - step / max(1, self.steps(self.settings)))
        rng = random.Random(f"{self.settings.seed}/window/{step}")
        for part in linear_attention_parts(self.student):
            dropped = rng.random() < share and part.settings.window is not None and part.settings.mix != "window"
            part.disabled = frozenset({"window"}) if dropped else frozenset()

    @override
    def end(self) -> None:
        for part in linear_attention_parts(self.student):
            part.disabled = frozenset()

    @override
    def loss(self, batch: Batch) -> Tensor:
        share = 1 - self.settings.ce_share if self.needs_teacher(self.settings) else 0.0
        return next_token_loss(self.predictor, batch, self.teacher if share else None, share)


def next_token_loss(student: Predictor, batch: Batch, teacher: Teacher | None = None, share: float = 0.0) -> Tensor:
    """Sum the loss of predicting the next token over a batch's weighted tokens.

    ``share``, 0..1, is that of the divergence from the teacher, the rest being cross-entropy.
    """
    # The teacher first: what it needs is gone again before the student's activations are kept.
    divergence = None if teacher is None else teacher.divergence(batch)
    targets, weights = next_tokens(batch)

    def loss_of(logits: Tensor, which: slice) -> Tensor:
        loss = logits.new_zeros((), dtype=torch.float32)
        if share < 1:
            loss = loss + (1 - share) * ce_loss(logits, targets[which], weights[which])
        if divergence is not None:
            loss = loss + share * divergence(logits, weights[which], which)
        return loss

    return student.total(weighted(batch, student.states(batch)), loss_of)
