"""Scoring tokens under several models side by side: likelihood, and distance from the teacher.

All models read the same windows together, so that `KL(teacher || student)` needs no second pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.evaluation.generation import forward, is_out_of_memory, prefill
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.text import Corpus, Window, window_ids

# fp32 logits held at once per model: 131072 tokens of a 128256-word vocabulary would be 67 GB.
_LOGITS_AT_ONCE = 2**26
_FIRST_BUCKET = 64


@dataclass
class TokenScores:
    """Per-token figures of one model on a batch of windows, each `[B, T]` with entry t about token t.

    Args:
        nll: Negative log-likelihood in nats; entry 0 is 0, for it is not predicted.
        kl: KL(teacher || model) in nats, or None without a teacher.
        agree: 1 where the model's most likely token is the teacher's, or None without a teacher.
    """

    nll: Tensor
    kl: Tensor | None
    agree: Tensor | None


@dataclass
class _Reading:
    """One model's place in a batch of windows."""

    subject: Subject
    cache: Any = None
    exhausted: bool = False
    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)


def score_tokens(
    subjects: Sequence[Subject],
    input_ids: Tensor,
    *,
    first: int = 1,
    chunk: int = 2048,
    on_piece: Any = None,
) -> dict[str, TokenScores | None]:
    """Score tokens of a batch under several models, carrying each model's cache from piece to piece.

    Args:
        subjects: The models; one of role `"teacher"` gives the others their KL, if the vocabularies are equal.
        input_ids: `[B, T]`; shorter rows are padded on the right with any token, whose scores mean nothing.
        first: First token that is scored, 1..T - 1; earlier entries of the result are 0. Default 1.
        chunk: Most tokens in one forward; default 2048.
        on_piece: Called with the number of tokens read, after each piece.

    Returns:
        The scores by model name, None for a model that ran out of memory.
    """
    B, T = input_ids.shape
    widest = max(subject.vocabulary for subject in subjects)
    step = max(1, min(chunk, _LOGITS_AT_ONCE // (B * widest)))
    readings = [_Reading(subject) for subject in subjects]
    teacher = next((reading for reading in readings if reading.subject.role == "teacher"), None)
    # The logits of token t - 1 predict token t, so reading starts to matter one token early.
    quiet = first - 1
    with torch.inference_mode():
        for reading in readings:
            if quiet:
                _guard(reading, _skip, input_ids[:, :quiet], chunk)
        if quiet and on_piece is not None:
            on_piece(quiet)
        for start in range(quiet, T, step):
            stop = min(start + step, T)
            targets = input_ids[:, start + 1 : stop + 1]
            log_p: Tensor | None = None
            if teacher is not None:
                log_p = _guard(teacher, _read, input_ids[:, start:stop], targets, None)
            for reading in readings:
                if reading is not teacher:
                    comparable = log_p if teacher and reading.subject.vocabulary == teacher.subject.vocabulary else None
                    _guard(reading, _read, input_ids[:, start:stop], targets, comparable)
            if on_piece is not None:
                on_piece(stop - start)

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat([torch.zeros(B, first), *parts], dim=1)

    return {
        reading.subject.name: None
        if reading.exhausted
        else TokenScores(
            join(reading.nll),
            join(reading.kl) if reading.kl else None,
            join(reading.agree) if reading.agree else None,
        )
        for reading in readings
    }


def _guard(reading: _Reading, step: Callable[..., Any], *arguments: Any) -> Any:
    """Run one model's step unless it has run out of memory before; remember if it does now."""
    if reading.exhausted:
        return None
    try:
        return step(reading, *arguments)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reading.exhausted, reading.cache = True, None
        return None


def _skip(reading: _Reading, ids: Tensor, chunk: int) -> None:
    _, reading.cache = prefill(reading.subject.model, ids.to(reading.subject.device), None, chunk)


def _read(reading: _Reading, ids: Tensor, targets: Tensor, teacher_log_p: Tensor | None) -> Tensor:
    """Read a piece, keep the scores of its targets and return the log-probabilities."""
    device = reading.subject.device
    logits, reading.cache = forward(reading.subject.model, ids.to(device), reading.cache)
    log_p = logits.float().log_softmax(-1)[:, : targets.shape[1]]
    reading.nll.append(-log_p.gather(-1, targets.to(device)[..., None])[..., 0].cpu())
    if teacher_log_p is not None:
        reference = teacher_log_p.to(device)
        # A word the teacher rules out adds nothing, whatever the model makes of it.
        terms = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - log_p))
        # No divergence is negative, but a sum of rounded terms may be.
        reading.kl.append(terms.sum(-1).clamp(min=0).cpu())
        reading.agree.append((reference.argmax(-1) == log_p.argmax(-1)).float().cpu())
    return log_p


def bucket(position: int) -> int:
    """Return the bucket of a token with `position` tokens before it: 0 below 64, then one per doubling.

    Example:
        >>> [bucket(p) for p in (1, 63, 64, 127, 128)]
        [0, 0, 1, 1, 2]
    """
    return 0 if position < _FIRST_BUCKET else int(math.log2(position)) - int(math.log2(_FIRST_BUCKET)) + 1


def bucket_range(number: int) -> tuple[int, int]:
    """Return the positions of a bucket, half-open."""
    return (1, _FIRST_BUCKET) if number == 0 else (_FIRST_BUCKET << (number - 1), _FIRST_BUCKET << number)


def score_windows(
    subjects: Sequence[Subject],
    corpus: Corpus,
    windows: Sequence[Window],
    chunk: int,
    advance: Callable[[int], Any],
) -> list[dict[str, Any]]:
    """Score windows of a text together.

    Args:
        subjects: The models.
        corpus: The text.
        windows: The windows, one row of a batch each.
        chunk: Most tokens in one forward.
        advance: Called with the tokens read, after each piece.

    Returns:
        For each window `tokens` by bucket of position, and `models`: by name the sums of each figure by bucket.
    """
    rows = window_ids(corpus, windows)
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
    firsts = [max(1, window.score_from - window.start + len(corpus.bos)) for window in windows]
    scores = score_tokens(
        subjects, ids, first=min(firsts), chunk=chunk, on_piece=lambda tokens: advance(tokens * len(rows))
    )
    found = []
    for at, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        where = torch.tensor([bucket(position) for position in range(first, len(row))])
        sums = {name: _sums(one, at, first, len(row), where) for name, one in scores.items()}
        found.append({"tokens": torch.bincount(where).tolist(), "models": sums})
    return found


def _sums(scores: TokenScores | None, row: int, first: int, stop: int, where: Tensor) -> dict[str, Any]:
    """Add up a row's figures by bucket."""
    if scores is None:
        return {"status": "out-of-memory"}
    sums: dict[str, Any] = {"status": "ok"}
    for name, values in (("nll", scores.nll), ("kl", scores.kl), ("agree", scores.agree)):
        zeros = torch.zeros(int(where.max()) + 1, dtype=torch.float64)
        sums[name] = None if values is None else zeros.index_add_(0, where, values[row, first:stop].double()).tolist()
    return sums
