"""The scale-free numbers of a student: held-out nats and recall, with and without its linear branch; embeddings."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.distill.answers import MAX_DEPTH, foretold, measure_answers
from hf_linear_attn.distill.data import Data
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts
from hf_linear_attn.encoders import Frame, Pooling
from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.evaluation.embedding import compare_embeddings
from hf_linear_attn.evaluation.tasks import get_task, sample_rng
from hf_linear_attn.patching import disable_branch

logger = logging.getLogger(__name__)

PAIRS = (4, 8)
"""Numbers of key-value pairs at which recall is measured."""


@torch.no_grad()
def heldout_loss(model: nn.Module, data: Data, rows: int, length: int, *, batch: int = 8) -> dict[str, float]:
    """Measure a model's mean loss on held-out text.

    Args:
        model: A causal language model.
        data: Held-out data.
        rows: Number of sequences, a fixed choice of them.
        length: Their tokens.
        batch: Sequences per forward.

    Returns:
        ``loss_nats`` per token, and ``late_loss_nats`` over the second half of the positions.
    """
    device, predictor = next(model.parameters()).device, Predictor(model)
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    for start in range(0, rows, batch):
        texts = [data.text_row(number, length) for number in range(start, min(start + batch, rows))]
        found = data.collate(texts, length).to(device)
        states, targets = predictor.states(found)[:, :-1].flatten(0, 1), found.input_ids[:, 1:].flatten()
        pieces = [
            torch.nn.functional.cross_entropy(predictor.logits(states[which]).float(), targets[which], reduction="none")
            for which in predictor.pieces(states)
        ]
        losses.append(torch.cat(pieces).view(len(texts), -1))
        weights.append(found.weights[:, 1:])
    loss, weight = torch.cat(losses), torch.cat(weights)

    def mean(first: int) -> float:
        return ((loss * weight)[:, first:].sum() / weight[:, first:].sum()).item()

    return {"loss_nats": mean(0), "late_loss_nats": mean(length // 2)}


@torch.no_grad()
def recall_accuracy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: int,
    length: int,
    samples: int,
    seed: int,
    max_depth: float = 100.0,
    batch: int = 8,
) -> float | None:
    """Measure key-value recall: the share of samples whose answer greedy decoding would write, as one forward tells.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        pairs: Key-value pairs in a sample.
        length: Tokens of a sample.
        samples: Number of samples.
        seed: Of the samples.
        max_depth: Greatest depth of the asked pair in percent, so that it stands beyond a window at the end.
        batch: Samples per forward.

    Returns:
        The share, 0..1, or None where the task does not fit into the length.
    """
    task = get_task("kv_recall", pairs=pairs)
    if task.min_length(tokenizer) > length:
        return None
    asked = []
    for index in range(samples):
        rng = sample_rng(seed, "kv_recall", length, 0, index)
        asked.append(task.build(tokenizer, length, rng.uniform(0, max_depth), rng))
    return sum(exact for exact, _ in foretold(model, tokenizer, asked, batch)) / samples


def measure(
    model: nn.Module,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: int,
    length: int,
    seed: int,
    samples: int = 64,
    branches: bool = True,
    answers: int = 0,
    cached: bool = True,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure a model on held-out text, on key-value recall and by what it writes.

    A student with a window is measured again with its linear branch off: what that costs is what the branch does.

    Args:
        model: A causal language model, patched or not.
        data: Held-out data.
        tokenizer: Its tokenizer.
        rows: Text sequences.
        length: Tokens of a sequence.
        seed: Of the recall samples.
        samples: Recall samples per number of pairs.
        branches: Whether a student is measured without its linear branch too.
        answers: Questions per task and length that it answers in writing; 0 for none.
        cached: Whether it can do so from a cache, see :func:`measure_answers`.
        progress: Show a progress bar while it writes.

    Returns:
        ``loss_nats``, ``late_loss_nats``, ``recall`` by number of pairs, ``linear_off`` with the same or None, and
        ``answers`` as :func:`measure_answers` returns them, none where none were asked for.
    """
    training = model.training
    model.eval()
    has_branches = branches and any(
        part.settings.window is not None and part.settings.mix != "window" for part in linear_attention_parts(model)
    )

    def once() -> dict[str, Any]:
        found: dict[str, Any] = dict(heldout_loss(model, data, rows, length))
        found["recall"] = {
            str(pairs): recall_accuracy(
                model,
                tokenizer,
                pairs=pairs,
                length=length,
                samples=samples,
                seed=seed,
                max_depth=MAX_DEPTH,
            )
            for pairs in PAIRS
        }
        return found

    result = once()
    with disable_branch(model, "linear") if has_branches else nullcontext():
        result["linear_off"] = once() if has_branches else None
    result["answers"] = []
    if answers:
        asked: dict[str, Any] = {"length": length, "samples": answers, "seed": seed}
        try:
            result["answers"] = measure_answers(model, tokenizer, **asked, cached=cached, progress=progress)
        except UnsupportedError as error:
            # A student that took hours to train is not lost for it.
            logger.warning("no written answers are measured: %s", error)
    model.train(training)
    return result


def measure_encoders(
    models: Mapping[str, nn.Module],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    pooling: Pooling,
    *,
    rows: int,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Measure encoders on held-out texts of all lengths.

    Args:
        models: ``teacher``, ``student`` or both.
        data: Held-out data.
        tokenizer: Their tokenizer.
        pooling: Makes an embedding of hidden states.
        rows: Number of texts.
        lengths: Their tokens, special ones included, in turn.

    Returns:
        As :func:`compare_embeddings` returns it.
    """
    frame = Frame.of(tokenizer)
    texts = []
    for number in range(rows):
        row, index = divmod(number, len(lengths))
        ids = data.text_row(row, lengths[index]).input_ids
        texts.append(ids[len(frame.begin) : len(ids) - len(frame.end)])
    return compare_embeddings(models, texts, frame, pooling, pad=data.pad)
