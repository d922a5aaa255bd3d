"""What a student is compared with: a softmax model that runs beside it, or its logits on disk."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, weighted
from hf_linear_attn.distill.losses import kl_loss
from hf_linear_attn.parallel import whole_texts
from hf_linear_attn.patching import softmax

Divergence = Callable[[Tensor, Tensor, slice], Tensor]
"""Sums the divergence over some of a batch's weighted tokens.

Given are the student's logits ``[N, vocabulary]`` there, the tokens' weights ``[N]``, and which of them they are.
"""


class Teacher(ABC):
    """What a student's next-token distributions are compared with."""

    @abstractmethod
    def divergence(self, batch: Batch) -> Divergence:
        """Return the divergence from the teacher on a batch."""


class ModelTeacher(Teacher):
    """A softmax model that is run."""

    @abstractmethod
    def running(self) -> AbstractContextManager[nn.Module]:
        """Return a context that yields a model which computes what the teacher computes, without gradients."""

    @property
    @abstractmethod
    def predictor(self) -> Predictor:
        """The teacher's two steps, the first of them to be taken while it is :meth:`running`."""

    @override
    def divergence(self, batch: Batch) -> Divergence:
        with self.running() as model:
            if batch.part is None:
                expected = weighted(batch, self.predictor.states(batch))
            else:
                # Softmax needs every earlier key: each rank reads the whole, and keeps its part.
                with whole_texts(model):
                    expected = weighted(batch, self.predictor.states(batch.part.whole)[:, batch.part.own])

        def divergence(logits: Tensor, weights: Tensor, which: slice) -> Tensor:
            with torch.no_grad():
                of_teacher = self.predictor.logits(expected[which])
            return kl_loss(logits, of_teacher, weights)

        return divergence


class LiveTeacher(ModelTeacher):
    """A softmax model beside the student, loaded on its device when the first stage asks."""

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        self._load = load

    @override
    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self._load().train(False))

    @override
    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        with torch.no_grad():
            yield self.predictor.model


class SharedTeacher(ModelTeacher):
    """The student itself as it was before it was converted; none of its own weights are trained."""

    def __init__(self, student: nn.Module) -> None:
        self.student = student

    @override
    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self.student)

    @override
    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        # Told that training is over, bitsandbytes lays weights on a CPU out anew, such that no gradient passes them.
        numbers = [m for m in self.student.modules() if all(p.is_floating_point() for p in m.parameters(recurse=False))]
        training = [m for m in numbers if m.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad(), softmax(self.student):
                yield self.student
        finally:
            for module in training:
                module.training = True
