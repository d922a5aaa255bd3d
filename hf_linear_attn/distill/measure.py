"""The scale-free numbers of a student: held-out nats and recall, with and without its linear branch; embeddings."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.distill.data import Batch, Data
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts
from hf_linear_attn.encoders import Frame, Pooling
from hf_linear_attn.evaluation.embedding import compare_embeddings
from hf_linear_attn.evaluation.tasks import get_task, sample_rng
from hf_linear_attn.patching import disable_branch

PAIRS = (4, 8)
"""Numbers of key-value pairs at which recall is measured."""

MAX_DEPTH = 75.0
"""Depth in percent beyond which no pair is asked for: what stands just before the question is in the window."""


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
    """Measure key-value recall: the share of samples whose answer greedy decoding would give token for token.

    Every answer token is the likeliest one given the true ones before it exactly when greedy decoding writes it, so
    one forward tells.

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
    device, predictor = next(model.parameters()).device, Predictor(model)
    right = 0
    rows: list[tuple[list[int], int]] = []
    for index in range(samples):
        rng = sample_rng(seed, "kv_recall", length, 0, index)
        sample = task.build(tokenizer, length, rng.uniform(0, max_depth), rng)
        answer = tokenizer(" " + ", ".join(sample.references), add_special_tokens=False)["input_ids"]
        rows.append(([*sample.input_ids, *answer], len(answer)))
    for start in range(0, samples, batch):
        part = rows[start : start + batch]
        width = max(len(row) for row, _ in part)
        ids = torch.zeros(len(part), width, dtype=torch.long, device=device)
        for index, (row, _) in enumerate(part):
            ids[index, : len(row)] = torch.tensor(row)
        states = predictor.states(Batch(ids, ids, ids)).flatten(0, 1)
        best = torch.cat([predictor.logits(states[which]).argmax(-1) for which in predictor.pieces(states)])
        best = best.view(ids.shape)
        for index, (row, size) in enumerate(part):
            end = len(row)
            right += bool((best[index, end - size - 1 : end - 1] == ids[index, end - size : end]).all())
    return right / samples


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
) -> dict[str, Any]:
    """Measure a model on held-out text and on key-value recall.

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

    Returns:
        ``loss_nats``, ``late_loss_nats``, ``recall`` by number of pairs, and ``linear_off`` with the same or None.
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
