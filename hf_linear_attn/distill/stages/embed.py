"""Distillation of encoders by their hidden states and embeddings."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.losses import hidden_loss
from hf_linear_attn.distill.registry import register_stage
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages.distill import Distill
from hf_linear_attn.distill.teacher import ModelTeacher, Teacher
from hf_linear_attn.encoders import hidden_states, pooling_of
from hf_linear_attn.errors import ArgumentError


@register_stage
class Embed(Distill):
    """Distillation of an encoder: every layer's hidden states, and the embeddings pooled from the last ones.

    Steps, learning rates and what is trained are those of ``distill``.
    """

    name: ClassVar[str] = "embed"
    place: ClassVar[int] = 40
    encoder: ClassVar[bool | None] = True

    def __init__(self, settings: DistillationSettings, student: nn.Module, teacher: Teacher | None = None) -> None:
        super().__init__(settings, student, teacher)
        self.pool = pooling_of(settings.model, settings.pooling)

    @override
    @classmethod
    def needs_teacher(cls, settings: DistillationSettings) -> bool:
        return True

    @override
    def begin_step(self, step: int) -> None:
        pass

    @override
    def weight(self, batch: Batch) -> Tensor:
        # A short text's embedding counts as much as a long one's.
        return torch.tensor(float(len(batch.input_ids)))

    @override
    def loss(self, batch: Batch) -> Tensor:
        if not isinstance(self.teacher, ModelTeacher):
            raise ArgumentError("teacher", "be there for the stage `embed`", None, "Name `model`.")
        with self.teacher.running() as model:
            expected = hidden_states(model, batch.input_ids, batch.real)
        own = hidden_states(self.student, batch.input_ids, batch.real)
        hidden = torch.stack([hidden_loss(x, y, batch.real) for x, y in zip(own, expected, strict=True)]).mean(0)
        found, wanted = (self.pool(layers[-1].float(), batch.real) for layers in (own, expected))
        cosine = F.cosine_similarity(found, wanted, dim=-1)
        share = self.settings.embedding_share
        return ((1 - share) * hidden + share * (1 - cosine)).sum()
