"""Scoring tokens under several models side by side: likelihood, and distance from the teacher.

All models read the same windows together, so that `KL(teacher || student)` needs no second pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_linear_attn.evaluation.generation import forward, prefill, unless_out_of_memory
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.text import Corpus, Window, window_ids

# fp32 logits held at once per model: 131072 tokens of a 128256-word vocabulary would be 67 GB.
_LOGITS_AT_ONCE = 2**26
_FIRST_BUCKET = 64


@dataclass
class _Reading:
    """One model's place in a batch of windows, and its figures piece by piece."""

    subject: Subject
    cache: Any = None
    exhausted: bool = False
    figures: dict[str, list[Tensor]] = field(default_factory=lambda: {"nll": [], "kl": [], "agree": []})


def score_tokens(
    subjects: Sequence[Subject], input_ids: Tensor, first: int, chunk: int, advance: Callable[[int], Any]
) -> dict[str, dict[str, Tensor | None] | None]:
    """Score tokens of a batch under several models, carrying each model's cache from piece to piece.

    Args:
        subjects: The models; one of role `"teacher"` gives the others their KL, if the vocabularies are equal.
        input_ids: `[B, T]`; shorter rows are padded on the right with any token, whose scores mean nothing.
        first: First token that is scored, 1..T - 1; earlier entries of the result are 0.
        chunk: Most tokens in one forward.
        advance: Called with the number of tokens read, after each piece.

    Returns:
        By model name figures `[B, T]`, entry t about token t: `nll` and `kl`, KL(teacher || model), in nats, and
        `agree`, 1 where the most likely token is the teacher's; the latter None without a teacher. None for a model
        that ran out of memory.
    """
    B, T = input_ids.shape
    widest = max(subject.vocabulary for subject in subjects)
    step = max(1, min(chunk, _LOGITS_AT_ONCE // (B * widest)))
    readings = [_Reading(subject) for subject in subjects]
    teacher = next((reading for reading in readings if reading.subject.role == "teacher"), None)
    # The logits of token t - 1 predict token t, so reading starts to matter one token early.
    quiet = first - 1
    with torch.inference_mode():
        if quiet:
            for reading in readings:
                _guard(reading, _skip, input_ids[:, :quiet], chunk)
            advance(B * quiet)
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
            advance(B * (stop - start))

    def join(parts: list[Tensor]) -> Tensor | None:
        return torch.cat([torch.zeros(B, first), *parts], dim=1) if parts else None

    return {
        reading.subject.name: None
        if reading.exhausted
        else {name: join(parts) for name, parts in reading.figures.items()}
        for reading in readings
    }


def _guard(reading: _Reading, step: Callable[..., Tensor], *arguments: Any) -> Tensor | None:
    """Run one model's step unless it has run out of memory before; remember if it does now."""
    found = None if reading.exhausted else unless_out_of_memory(step, reading, *arguments)
    if found is None:
        reading.exhausted, reading.cache = True, None
    return found


def _skip(reading: _Reading, ids: Tensor, chunk: int) -> Tensor:
    logits, reading.cache = prefill(reading.subject.model, ids.to(reading.subject.device), None, chunk)
    return logits


def _read(reading: _Reading, ids: Tensor, targets: Tensor, teacher_log_p: Tensor | None) -> Tensor:
    """Read a piece, keep the figures of its targets and return the log-probabilities."""
    device, figures = reading.subject.device, reading.figures
    logits, reading.cache = forward(reading.subject.model, ids.to(device), reading.cache)
    log_p = logits.float().log_softmax(-1)[:, : targets.shape[1]]
    figures["nll"].append(-log_p.gather(-1, targets.to(device)[..., None])[..., 0].cpu())
    if teacher_log_p is not None:
        reference = teacher_log_p.to(device)
        # A word the teacher rules out adds nothing, whatever the model makes of it.
        terms = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - log_p))
        # No divergence is negative, but a sum of rounded terms may be.
        figures["kl"].append(terms.sum(-1).clamp(min=0).cpu())
        figures["agree"].append((reference.argmax(-1) == log_p.argmax(-1)).float().cpu())
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
    subjects: Sequence[Subject], corpus: Corpus, windows: Sequence[Window], chunk: int, advance: Callable[[int], Any]
) -> list[dict[str, Any]]:
    """Score windows of a text together, one row of a batch each; the rest is as for :func:`score_tokens`.

    Returns:
        For each window `tokens` by bucket of position, and `models`: by name the sums of each figure by bucket.
    """
    rows = window_ids(corpus, windows)
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    firsts = [max(1, window.score_from - window.start + len(corpus.bos)) for window in windows]
    scores = score_tokens(subjects, ids, min(firsts), chunk, advance)
    found = []
    for at, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        where = torch.tensor([bucket(position) for position in range(first, len(row))])
        sums = {name: _sums(one, at, first, len(row), where) for name, one in scores.items()}
        found.append({"tokens": torch.bincount(where).tolist(), "models": sums})
    return found


def _sums(figures: dict[str, Tensor | None] | None, row: int, first: int, stop: int, where: Tensor) -> dict[str, Any]:
    """Add up a row's figures by bucket."""
    if figures is None:
        return {"status": "out-of-memory"}
    sums: dict[str, Any] = {"status": "ok"}
    for name, values in figures.items():
        zeros = torch.zeros(int(where.max()) + 1, dtype=torch.float64)
        sums[name] = None if values is None else zeros.index_add_(0, where, values[row, first:stop].double()).tolist()
    return sums
