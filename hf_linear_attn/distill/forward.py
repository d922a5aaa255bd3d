"""A forward over a batch: its arguments, the layers it goes through, and logits that are never whole.

A vocabulary of 128k makes the logits of 4096 tokens 2 GiB in fp32, and a loss holds several copies of them. So the
model is run up to its last hidden states, and what is computed from logits is computed from pieces of them, one at a
time: forward and, at once, backward, which leaves the gradients of the hidden states and of the head. (Liger-Kernel's
fused losses, arXiv:2410.10989, do so for a linear layer of their own; here the model's own head is called.)
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.patching import LinearAttention, part_of
from hf_linear_attn.patching.rotation import has_values

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**26
"""Most bytes of a piece's logits in fp32."""


def linear_attention_parts(model: nn.Module) -> list[LinearAttention]:
    """Return the converted layers of a model, in order."""
    return [part for module in model.modules() if (part := part_of(module)) is not None]


def map_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a model's feature maps, mixing weights and whatever else its conversion added."""
    return {p for part in linear_attention_parts(model) for p in part.parameters()}


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a forward over a batch."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    return inputs if batch.position_ids is None else inputs | {"position_ids": batch.position_ids}


def encoder_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of an encoder's forward: it sees tokens on both sides, so padding has to be named."""
    return {"input_ids": batch.input_ids, "attention_mask": batch.real.long()}


def predictions(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return next tokens ``[N]``, their weights ``[N]`` and the model's logits ``[N, vocabulary]``, whole."""
    logits = model(**model_inputs(batch)).logits
    return (*next_tokens(batch), weighted(batch, logits))


def counted(batch: Batch) -> Tensor:
    """Return the places of the next tokens that count, ``[N]`` int64: in ``[B (T - 1)]``, in a part in ``[B T]``."""
    weights = (batch.weights[:, 1:] if batch.part is None else batch.weights).flatten()
    # A run without data, for `plan`, counts all of them.
    return weights.nonzero()[:, 0] if has_values(weights) else torch.arange(len(weights), device=weights.device)


def next_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the tokens that a loss counts, ``[N]``, and their weights ``[N]``."""
    places = counted(batch)
    if batch.part is not None:
        return batch.part.targets.flatten()[places], batch.weights.flatten()[places]
    return batch.input_ids[:, 1:].flatten()[places], batch.weights[:, 1:].flatten()[places]


def weighted(batch: Batch, x: Tensor) -> Tensor:
    """Return those of ``[B, T, *]`` that the next tokens are predicted from, ``[N, *]``."""
    return (x[:, :-1] if batch.part is None else x).flatten(0, 1)[counted(batch)]


class Predictor:
    """A causal language model, in PEFT or sharded, in two steps: hidden states, and logits from pieces of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        # Gemma 2, Granite, Cohere and Falcon-H1 do so after the head.
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        self.scale /= getattr(config, "logits_scaling", None) or 1.0
        self._checked = False

    def states(self, batch: Batch) -> Tensor:
        """Return what the logits are computed from, ``[B, T, *]``: the last hidden states."""
        if self.head is None:
            return self._whole(batch)
        seen: list[Tensor] = []

        def keep(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(inputs[0])
            # One token's logits are left to compute; with other strides, torch would copy the head for them.
            return (inputs[0][0, -1][None, None], *inputs[1:])

        handle = self.head.register_forward_pre_hook(keep)
        try:
            logits = self.model(**model_inputs(batch)).logits
        finally:
            handle.remove()
        if not self._checked and has_values(logits):
            self._checked = True
            with torch.no_grad():
                same = len(seen) == 1 and seen[0].shape[:2] == batch.input_ids.shape
                same = same and torch.allclose(self.logits(seen[0][0, -1][None, None]), logits, rtol=1e-2, atol=1e-3)
            if not same:
                self.head = None
                logger.info("%s does more than its head to its logits: they are held whole", type(self.model).__name__)
                return self._whole(batch)
        return seen[0]

    def _whole(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(**model_inputs(batch)).logits
        return logits

    def logits(self, states: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """Return the logits ``[..., vocabulary]`` of some hidden states, with ``parameters`` in place of the head's."""
        if self.head is None:
            return states
        logits: Tensor = functional_call(self.head, parameters, (states,)) if parameters else self.head(states)
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def pieces(self, states: Tensor) -> Iterator[slice]:
        """Yield slices over ``[N, *]`` whose logits are small enough."""
        vocabulary: int = self.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        at_once = max(1, PIECE_BYTES // (4 * vocabulary))
        for first in range(0, len(states), at_once):
            yield slice(first, min(first + at_once, len(states)))

    def total(self, states: Tensor, loss_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Return the sum, fp32, of a loss over tokens with states ``[N, *]``, a piece of their logits at a time.

        ``loss_of`` gets a piece of the logits ``[n, vocabulary]``, and which tokens they are of. The gradients of the
        states and the head are computed in the forward, piece by piece.
        """
        head = {} if self.head is None else dict(self.head.named_parameters())
        trained = {name: p for name, p in head.items() if p.requires_grad}
        total: Tensor = _Total.apply(self, loss_of, tuple(trained), states, *trained.values())  # type: ignore[no-untyped-call]
        return total


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        predictor: Predictor,
        loss_of: Callable[[Tensor, slice], Tensor],
        names: tuple[str, ...],
        states: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        learns = ctx.needs_input_grad[3:]
        # Gradients of the head add up in these, in place.
        own = {name: x.detach().requires_grad_() for name, x in zip(names, weights, strict=True)}
        total = torch.zeros((), device=states.device)
        gradients = torch.empty_like(states) if learns[0] else None
        for which in predictor.pieces(states):
            piece = states[which].detach().requires_grad_(learns[0])
            with torch.set_grad_enabled(any(learns)):
                loss = loss_of(predictor.logits(piece, own), which)
            if any(learns):
                with torch.autocast(states.device.type, enabled=False):
                    loss.backward()  # type: ignore[no-untyped-call]
            if gradients is not None and piece.grad is not None:
                gradients[which] = piece.grad
            total += loss.detach()
        ctx.gradients = [gradients, *(x.grad for x in own.values())]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Not to be kept twice: the head's are as large as the head.
        gradients = [x if x is None else x.mul_(gradient) for x in ctx.gradients]
        ctx.gradients = None
        return (None, None, None, *gradients)
