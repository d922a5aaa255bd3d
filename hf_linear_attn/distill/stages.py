"""The stages of a distillation: what each trains, and how it gets its gradients."""

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.losses import ce_loss, output_loss, weights_loss
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching import LinearAttention
from hf_linear_attn.patching.attention import part_of

Backward = Callable[[Tensor], None]
TeacherLoss = Callable[[Tensor, Tensor], Tensor]
Group = dict[str, Any]


def linear_attention_parts(model: nn.Module) -> list[LinearAttention]:
    """Return the converted layers of a model, in order."""
    return [part for module in model.modules() if (part := part_of(module)) is not None]


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, cu_seqlens: Tensor | None, causal: bool, scaling: float
) -> Tensor:
    """Compute what a converted layer's softmax attention computed; arguments as in :class:`LinearAttention`."""
    if cu_seqlens is not None:
        # Packed sequences one by one: together they would cost the square of their sum.
        sizes = cu_seqlens.diff().tolist()
        pieces = zip(*(torch.split(x, sizes, 2) for x in (q, k, v)), strict=True)
        masks = [None] * len(sizes) if key_mask is None else torch.split(key_mask, sizes, 1)
        return torch.cat(
            [
                softmax_attention(*piece, key_mask=mask, cu_seqlens=None, causal=causal, scaling=scaling)
                for piece, mask in zip(pieces, masks, strict=True)
            ],
            2,
        )
    visible = visibility(q, key_mask, None, causal)
    grouped = q.shape[1] != k.shape[1]
    if visible is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=grouped)


def visibility(q: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, causal: bool) -> Tensor | None:
    """Return which query sees which key, ``[B or 1, 1, T, T]`` bool, or None where causality says it all."""
    if key_mask is None and cu_seqlens is None:
        return None
    tokens = q.shape[2]
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    visible = visible.tril()[None, None] if causal else visible[None, None]
    if key_mask is not None:
        # A padded query sees itself, so that its row is finite; nobody reads it.
        visible = visible & key_mask[:, None, None, :] | torch.eye(tokens, dtype=torch.bool, device=q.device)
    if cu_seqlens is not None:
        piece = torch.searchsorted(cu_seqlens, torch.arange(tokens, device=q.device), right=True)
        visible = visible & (piece[:, None] == piece[None, :])
    return visible


def attention_weights(part: LinearAttention, q: Tensor, k: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """Return the linear branch's weights ``[B, H, T, T]``, rows summing to 1."""
    features_q, features_k = part.feature_map.phi_q(q), part.feature_map.phi_k(k)
    scores = features_q @ features_k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    if visible is not None:
        scores = scores * visible
    elif causal:
        scores = scores.tril()
    return scores / (scores.sum(-1, keepdim=True) + part.settings.eps)


@contextmanager
def teacher_forced(model: nn.Module, observe: Callable[[LinearAttention, Tensor, Tensor], None]) -> Iterator[None]:
    """Make converted layers compute softmax attention within a ``with`` block, and show what they would have computed.

    Every layer so gets the teacher's hidden states. Its own output is computed from detached q, k, v, so that a loss
    on it reaches that layer's parameters only.

    Args:
        model: A patched model whose other weights are the teacher's.
        observe: Called in each layer's forward with the layer, its own output and the softmax output, both
            ``[B, H, T, V]``.
    """

    def before(part: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(x.detach() for x in args), kwargs

    def after(part: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        layer: LinearAttention = part  # type: ignore[assignment]
        scaling = kwargs.get("scaling") or layer.geometry.scaling
        with torch.no_grad():
            softmax = softmax_attention(*(x.detach() for x in args), **{**kwargs, "scaling": scaling})
        observe(layer, output, softmax)
        return softmax

    handles = []
    for part in linear_attention_parts(model):
        handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(part.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Stage(ABC):
    """A stage of training.

    Args:
        settings: The settings.
        student: The patched model; parameters that the stage does not train are frozen.
        hidden_size: The model's width, for the default learning rate.
    """

    name: ClassVar[str]
    needs_teacher = False
    """Whether the loss reads the teacher's logits."""
    suspect: str | None = None
    """The layer whose loss was not finite, where a stage can tell."""

    def __init__(self, settings: DistillationSettings, student: nn.Module, hidden_size: int) -> None:
        self.settings, self.student, self.hidden_size = settings, student, hidden_size
        self.groups: list[Group] = [group for group in self.trained() if group["params"] and group["lr"] > 0]
        chosen = {id(p) for group in self.groups for p in group["params"]}
        for parameter in student.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        if not chosen:
            raise ArgumentError(
                "stages",
                "train something",
                self.name,
                f"The feature map {settings.feature_map!r} has nothing to learn here; leave the stage out.",
            )

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of optimiser steps."""

    @abstractmethod
    def trained(self) -> list[Group]:
        """Return parameter groups with ``params`` and their peak ``lr``."""

    def map_groups(self) -> list[Group]:
        """Return the groups of feature maps and mixing weights."""
        return [
            {"params": list(part.parameters()), "lr": self.settings.map_learning_rate(part.geometry.head_dim)}
            for part in linear_attention_parts(self.student)
        ]

    def begin_step(self, step: int) -> None:  # noqa: B027 - most stages have nothing to prepare
        """Prepare a step; whatever is random depends on the seed and the step alone."""

    def end(self) -> None:  # noqa: B027
        """Undo what :meth:`begin_step` did."""

    def weight(self, batch: Batch) -> Tensor:
        """Return the sum of the batch's token weights."""
        return batch.weights.sum()

    @abstractmethod
    def backward(self, batch: Batch, teacher_loss: TeacherLoss | None, backward: Backward) -> Tensor:
        """Run a forward and a backward.

        Args:
            batch: On the model's device.
            teacher_loss: Sums the divergence from the teacher over the batch's weighted tokens, given the student's
                logits ``[N, vocabulary]`` and the weights ``[N]``.
            backward: Called with a loss, to be summed into the gradients.

        Returns:
            The loss, summed over tokens, detached.
        """


class Transfer(Stage):
    """Attention transfer: every layer learns softmax's output from the teacher's hidden states.

    Each layer's backward runs inside its forward, so that one layer's graph at a time is alive.
    """

    name: ClassVar[str] = "transfer"

    @override
    @property
    def steps(self) -> int:
        return self.settings.transfer_steps

    @override
    def trained(self) -> list[Group]:
        return self.map_groups()

    @override
    def weight(self, batch: Batch) -> Tensor:
        return batch.real.sum()

    @override
    def backward(self, batch: Batch, teacher_loss: TeacherLoss | None, backward: Backward) -> Tensor:
        total = torch.zeros((), device=batch.input_ids.device)
        weights = batch.real.float()
        layers = len(linear_attention_parts(self.student))

        def observe(part: LinearAttention, output: Tensor, softmax: Tensor) -> None:
            loss = output_loss(output, softmax, laid_out(weights, output)) / layers
            self._backward(part, loss, backward, total)

        context = partial(teacher_forced, observe=observe)
        if self.settings.transfer_loss == "weights":
            context = partial(weights_forced, observe=self._weights_observer(weights, layers, backward, total))
        with context(self.student):
            # The logits are not read; models that can leave them out do.
            options = {"logits_to_keep": 1} if takes(self.student, "logits_to_keep") else {}
            self.student(**model_inputs(batch), **options)
        return total

    def _weights_observer(
        self, weights: Tensor, layers: int, backward: Backward, total: Tensor
    ) -> Callable[[LinearAttention, Tensor, Tensor], None]:
        def observe(part: LinearAttention, linear: Tensor, softmax: Tensor) -> None:
            loss = weights_loss(linear, softmax, laid_out(weights, linear)) / layers
            self._backward(part, loss, backward, total)

        return observe

    def _backward(self, part: LinearAttention, loss: Tensor, backward: Backward, total: Tensor) -> None:
        if self.suspect is None and not torch.isfinite(loss):
            self.suspect = f"layer {part.name}"
        backward(loss)
        total.add_(loss.detach())


@contextmanager
def weights_forced(model: nn.Module, observe: Callable[[LinearAttention, Tensor, Tensor], None]) -> Iterator[None]:
    """Do as :func:`teacher_forced`, but show attention weights ``[B, H, T, T]``; costs O(T^2) memory."""

    def instead(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        q, k, v = q.detach(), k.detach(), v.detach()
        scaling, causal = kwargs.get("scaling") or part.geometry.scaling, kwargs["causal"]
        visible = visibility(q, kwargs["key_mask"], kwargs["cu_seqlens"], causal)
        with torch.no_grad():
            groups = q.shape[1] // k.shape[1]
            scores = (q @ k.repeat_interleave(groups, 1).transpose(-1, -2)).float() * scaling
            seen = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if visible is None else visible
            softmax = scores.masked_fill(~seen, -torch.inf).softmax(-1) if causal or visible is not None else scores
            output = softmax.to(v.dtype) @ v.repeat_interleave(groups, 1)
        observe(part, attention_weights(part, q, k, visible, causal), softmax)
        return output

    parts = linear_attention_parts(model)
    for part in parts:
        part.forward = partial(instead, part)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in parts:
            del part.forward


class Distill(Stage):
    """Logit distillation: the whole model learns the teacher's distribution over the next token."""

    name: ClassVar[str] = "distill"

    def __init__(self, settings: DistillationSettings, student: nn.Module, hidden_size: int) -> None:
        super().__init__(settings, student, hidden_size)
        self.needs_teacher = settings.distill_loss == "kl" and settings.ce_share < 1

    @override
    @property
    def steps(self) -> int:
        return self.settings.distill_steps

    @property
    def peak_lr(self) -> float:
        """Learning rate of the attention modules."""
        return self.settings.learning_rate(self.hidden_size)

    @override
    def trained(self) -> list[Group]:
        settings, lr = self.settings, self.peak_lr
        maps = {id(p) for part in linear_attention_parts(self.student) for p in part.parameters()}
        attention = {
            id(p)
            for module in self.student.modules()
            if isinstance(getattr(module, "linear_attention", None), nn.Module)
            for p in module.parameters()
        } - maps
        named = list(self.student.named_parameters())
        if settings.trainable == "lora":
            groups = [{"params": [p for name, p in named if "lora_" in name], "lr": lr}]
        else:
            groups = [
                {"params": [p for _, p in named if id(p) in attention], "lr": lr},
                {
                    "params": [p for _, p in named if id(p) not in attention and id(p) not in maps],
                    "lr": lr * settings.rest_lr_share,
                },
            ]
        if settings.train_feature_maps:
            # A stage with gentler steps is gentler to the maps too.
            share = lr / settings.learning_rate(self.hidden_size)
            groups += [group | {"lr": group["lr"] * share} for group in self.map_groups()]
        return groups

    @override
    def begin_step(self, step: int) -> None:
        share = self.settings.window_dropout * (1 - step / max(1, self.steps))
        rng = random.Random(f"{self.settings.seed}/window/{step}")
        for part in linear_attention_parts(self.student):
            dropped = rng.random() < share and part.settings.window is not None and part.settings.mix != "window"
            part.disabled = frozenset({"window"}) if dropped else frozenset()

    @override
    def end(self) -> None:
        for part in linear_attention_parts(self.student):
            part.disabled = frozenset()

    @override
    def backward(self, batch: Batch, teacher_loss: TeacherLoss | None, backward: Backward) -> Tensor:
        targets, weights, logits = predictions(self.student, batch)
        share = 1.0 if self.settings.distill_loss == "ce" else self.settings.ce_share
        loss = logits.new_zeros((), dtype=torch.float32)
        if share:
            loss = loss + share * ce_loss(logits, targets, weights)
        if share < 1 and teacher_loss is not None:
            loss = loss + (1 - share) * teacher_loss(logits, weights)
        backward(loss)
        return loss.detach()


class Extend(Distill):
    """Cross-entropy on longer sequences than the stages before."""

    name: ClassVar[str] = "extend"

    def __init__(self, settings: DistillationSettings, student: nn.Module, hidden_size: int) -> None:
        super().__init__(settings, student, hidden_size)
        self.needs_teacher = False

    @override
    @property
    def steps(self) -> int:
        return self.settings.extend_steps

    @override
    @property
    def peak_lr(self) -> float:
        return self.settings.extend_lr or 0.1 * self.settings.learning_rate(self.hidden_size)

    @override
    def begin_step(self, step: int) -> None:
        pass

    @override
    def backward(self, batch: Batch, teacher_loss: TeacherLoss | None, backward: Backward) -> Tensor:
        targets, weights, logits = predictions(self.student, batch)
        loss = ce_loss(logits, targets, weights)
        backward(loss)
        return loss.detach()


STAGES: Mapping[str, type[Stage]] = {stage.name: stage for stage in (Transfer, Distill, Extend)}
"""The stages by name, in the order they run."""


def takes(model: nn.Module, argument: str) -> bool:
    """Tell whether the forward of a model knows an argument."""
    return argument in inspect.signature(model.forward).parameters


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a forward over a batch."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    return inputs if batch.position_ids is None else inputs | {"position_ids": batch.position_ids}


def laid_out(weights: Tensor, output: Tensor) -> Tensor:
    """Return weights ``[B, T]`` as an attention layer sees tokens: packed rows lie end to end, ``[1, B T]``."""
    return weights.view(output.shape[0], -1)


def predictions(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return next tokens ``[N]``, their weights ``[N]`` and the model's logits ``[N, vocabulary]``."""
    logits = model(**model_inputs(batch)).logits[:, :-1]
    where = batch.weights[:, 1:] > 0
    return batch.input_ids[:, 1:][where], batch.weights[:, 1:][where], logits[where]
