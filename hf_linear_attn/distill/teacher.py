"""What a student is compared with: a softmax model that runs beside it, or its logits on disk."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, weighted
from hf_linear_attn.distill.losses import kl_loss

Divergence = Callable[[Tensor, Tensor, slice], Tensor]
"""Sums the divergence over some of a batch's weighted tokens.

Given are the student's logits ``[N, vocabulary]`` there, the tokens' weights ``[N]``, and which of them they are.
"""


class Teacher(ABC):
    """What a student's next-token distributions are compared with."""

    @abstractmethod
    def divergence(self, batch: Batch) -> Divergence:
        """Return the divergence from the teacher on a batch."""


class LiveTeacher(Teacher):
    """A softmax model.

    Args:
        model: On the student's device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.predictor = Predictor(model)

    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        """Yield a model that computes what the teacher computes, for use within a ``with`` block; no gradients."""
        with torch.no_grad():
            yield self.model

    @override
    def divergence(self, batch: Batch) -> Divergence:
        with self.running():
            expected = weighted(batch, self.predictor.states(batch))

        def divergence(logits: Tensor, weights: Tensor, which: slice) -> Tensor:
            with torch.no_grad():
                of_teacher = self.predictor.logits(expected[which])
            return kl_loss(logits, of_teacher, weights)

        return divergence
