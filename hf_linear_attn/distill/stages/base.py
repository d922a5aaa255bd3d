"""What every stage of training has."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_linear_attn.distill.data import Batch, Step
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.teacher import Teacher
from hf_linear_attn.errors import ArgumentError

Group = dict[str, Any]


class Stage(ABC):
    """A stage of training.

    Before there is a model, its class says how many steps there are, over which sequences, and whether a teacher is
    needed. What it holds in memory needs no words: ``plan`` runs a step of it without data.

    Args:
        settings: The settings.
        student: The patched model; parameters that the stage does not train are frozen.
        teacher: What its loss compares with, where :meth:`needs_teacher`.

    Raises:
        ArgumentError: If nothing in the student is trained.
    """

    name: ClassVar[str]
    place: ClassVar[int]
    """Stages run in the order of their places."""
    encoder: ClassVar[bool | None] = None
    """Whether it is for encoders, or for language models; None for both."""
    length_setting: ClassVar[str] = "length_factors"
    """The setting that its lengths come from, named where they are too long."""
    lora: ClassVar[bool] = False
    """Whether adapters are trained in place of weights where the settings say ``trainable="lora"``."""
    splits: ClassVar[bool] = False
    """Whether its sequences can be split over processes: the student alone reads them as it will be."""
    recomputes: ClassVar[bool] = True
    """Whether there are activations to recompute: a backward at the end of the forward."""
    idle: ClassVar[str] = "it has nothing to train"
    """Why it does not :meth:`serve <serves>` where it does not."""
    learn: Callable[[Tensor], None] = staticmethod(Tensor.backward)
    """Differentiates a part of the loss at once, so that its graph need not wait for the rest."""

    def __init__(self, settings: DistillationSettings, student: nn.Module, teacher: Teacher | None = None) -> None:
        self.settings, self.student, self.teacher = settings, student, teacher
        # Of each layer on the latest batch, where it has a loss of its own.
        self.losses: list[tuple[str, Tensor]] = []
        self.groups: list[Group] = [group for group in self.trained() if group["params"] and group["lr"] > 0]
        chosen = set(self.parameters)
        for parameter in student.parameters():
            parameter.requires_grad_(parameter in chosen)
        if not chosen:
            feature_map = settings.conversion.feature_map
            remedy = f"The feature map {feature_map!r} has nothing to learn here; leave the stage out."
            raise ArgumentError("stages", "train something", self.name, remedy)

    @cached_property
    def predictor(self) -> Predictor:
        """The student's two steps."""
        return Predictor(self.student)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained, group by group."""
        return [p for group in self.groups for p in group["params"]]

    @classmethod
    @abstractmethod
    def steps(cls, settings: DistillationSettings) -> int:
        """Return the number of optimiser steps."""

    @classmethod
    def lengths(cls, settings: DistillationSettings) -> list[int]:
        """Return the lengths of its sequences in tokens, which steps take in turn."""
        return [factor * settings.block_tokens for factor in settings.factors()]

    @classmethod
    def sequences(cls, settings: DistillationSettings, step: int, rows_per_step: int) -> Step:
        """Return the sequences of a step, counted from the first one of the first stage.

        Every step reads as many tokens as ``rows_per_step`` sequences of ``block_tokens`` have, over all processes.
        Numbers of one length follow on each other, and none is read twice.
        """
        lengths = cls.lengths(settings)
        turn, index = divmod(step, len(lengths))
        factor = lengths[index] // settings.block_tokens
        count = rows_per_step // factor
        return Step(lengths[index], range(turn * count, (turn + 1) * count), max(1, settings.rows // factor))

    @classmethod
    def serves(cls, settings: DistillationSettings) -> bool:
        """Tell whether a model that is converted so has anything to learn here."""
        return True

    @classmethod
    def needs_teacher(cls, settings: DistillationSettings) -> bool:
        """Tell whether the loss compares with a teacher."""
        return False

    @abstractmethod
    def trained(self) -> list[Group]:
        """Return parameter groups with ``params`` and their peak ``lr``."""

    def map_groups(self) -> list[Group]:
        """Return the groups of feature maps and mixing weights; scores of kept keys have a stage of their own."""
        groups = []
        for part in linear_attention_parts(self.student):
            params = [p for name, p in part.named_parameters() if not name.startswith("retention_")]
            groups.append({"params": params, "lr": self.settings.map_learning_rate(part.sizes.head_dim)})
        return groups

    def begin_step(self, step: int) -> None:  # noqa: B027 - most stages have nothing to prepare
        """Prepare a step; whatever is random depends on the seed and the step alone."""

    def end(self) -> None:  # noqa: B027
        """Undo what :meth:`begin_step` did."""

    def suspect(self) -> str | None:
        """Return the layer whose loss on the latest batch was not finite, where a stage can tell."""
        return next((f"layer {name}" for name, loss in self.losses if not torch.isfinite(loss)), None)

    def weight(self, batch: Batch) -> Tensor:
        """Return what the batch's loss is a sum over: its tokens, weighted."""
        return batch.weights.sum()

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch on the model's device, summed over tokens.

        Parts that the stage has differentiated itself, with :attr:`learn`, are detached.
        """
