"""A forward over a batch: its arguments, its results, and the layers it goes through."""

import inspect
from typing import Any

from torch import Tensor, nn

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.patching import LinearAttention, part_of


def linear_attention_parts(model: nn.Module) -> list[LinearAttention]:
    """Return the converted layers of a model, in order."""
    return [part for module in model.modules() if (part := part_of(module)) is not None]


def takes(model: nn.Module, argument: str) -> bool:
    """Tell whether the forward of a model knows an argument."""
    return argument in inspect.signature(model.forward).parameters


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a forward over a batch."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    return inputs if batch.position_ids is None else inputs | {"position_ids": batch.position_ids}


def encoder_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of an encoder's forward: it sees tokens on both sides, so padding has to be named."""
    return {"input_ids": batch.input_ids, "attention_mask": batch.real.long()}


def predictions(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return next tokens ``[N]``, their weights ``[N]`` and the model's logits ``[N, vocabulary]``."""
    logits = model(**model_inputs(batch)).logits[:, :-1]
    where = batch.weights[:, 1:] > 0
    return batch.input_ids[:, 1:][where], batch.weights[:, 1:][where], logits[where]
