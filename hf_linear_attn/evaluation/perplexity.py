"""The perplexity suite: each token scored once, by window length, by position, and under growing context.

Perplexity is `exp(sum NLL / sum tokens)`, never a mean of window means; bits per byte is
`sum NLL / (ln 2 * bytes of the scored text)`, which compares models across tokenizers. All models of a run read the
same windows side by side, so that `KL(teacher || student)` needs no second pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.generation import forward, is_out_of_memory, prefill
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.statistics import bootstrap_ratio_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.text import Corpus, Window, plan_final_windows, plan_windows, window_ids

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


@dataclass(frozen=True)
class Plan:
    """The windows of one length.

    Args:
        kind: `"windows"` (the whole text) or `"final"` (the same final tokens under growing context).
        length: Tokens from a fresh state, BOS included.
        windows: The windows; empty where the text has no document that long.
    """

    kind: str
    length: int
    windows: tuple[Window, ...]


def plan_perplexity(settings: EvaluationSettings, corpus: Corpus) -> list[Plan]:
    """Plan the windows of every length.

    Raises:
        ArgumentError: If the stride does not fit, or no document reaches the shortest length.
    """
    longest = max(len(document.ids) for document in corpus.documents) + len(corpus.bos)
    reachable = [length for length in settings.lengths if length <= longest]
    if not reachable:
        raise ArgumentError(
            "lengths",
            f"include one of at most {longest} tokens, the longest document's",
            settings.lengths,
            "Ask for a shorter one, give a longer text, join the documents or raise max_text_tokens.",
        )
    plans = []
    for length in settings.lengths:
        windows = plan_windows(corpus, length, settings.stride) if length in reachable else []
        plans.append(Plan("windows", length, tuple(windows)))
    final = min(settings.final_tokens, reachable[0] // 2)
    for length in settings.lengths if settings.final_windows else ():
        windows = (
            plan_final_windows(corpus, length, reachable[-1], final, settings.final_windows)
            if length in reachable
            else []
        )
        plans.append(Plan("final", length, tuple(windows)))
    return plans


def _able(subjects: Sequence[Subject], length: int) -> list[Subject]:
    return [subject for subject in subjects if subject.refusal(length) is None]


def _key(store: SampleStore, subjects: Sequence[Subject], plan: Plan, number: int, text_sha256: str) -> str:
    prints = "/".join(f"{subject.name}={subject.fingerprint}" for subject in subjects)
    return store.key(prints, f"perplexity/{text_sha256}/{plan.kind}/{plan.length}/{number}")


def run_perplexity(
    subjects: Sequence[Subject],
    corpus: Corpus,
    settings: EvaluationSettings,
    store: SampleStore,
    *,
    rank: int = 0,
    world: int = 1,
    on_tokens: Any = None,
) -> None:
    """Score every window that the store does not hold yet.

    Args:
        subjects: The models.
        corpus: The text.
        settings: What to run.
        store: Where the scores go.
        rank: Number of this process; it takes every `world`-th batch.
        world: Number of processes.
        on_tokens: Called with the number of window tokens dealt with.
    """
    text = corpus.facts()["sha256"]
    for plan in plan_perplexity(settings, corpus):
        able = _able(subjects, plan.length)
        if not able:
            continue
        numbers = range(len(plan.windows))
        keys = [_key(store, able, plan, number, text) for number in numbers]
        batches = [list(numbers)[i : i + settings.batch_size] for i in range(0, len(numbers), settings.batch_size)]
        for b, batch in enumerate(batches):
            if b % world == rank and any(store.get(keys[number]) is None for number in batch):
                windows = [plan.windows[number] for number in batch]
                store.add(_score_batch(able, corpus, plan, windows, [keys[n] for n in batch], settings, on_tokens))
            elif on_tokens is not None:
                on_tokens(sum(plan.windows[n].stop - plan.windows[n].start for n in batch))


def _score_batch(
    subjects: Sequence[Subject],
    corpus: Corpus,
    plan: Plan,
    windows: Sequence[Window],
    keys: Sequence[str],
    settings: EvaluationSettings,
    on_tokens: Any,
) -> list[dict[str, Any]]:
    rows = window_ids(corpus, windows)
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    firsts = [window.score_from - window.start + len(corpus.bos) for window in windows]
    size = len(rows)
    scores = score_tokens(
        subjects,
        ids,
        first=max(1, min(firsts)),
        chunk=settings.prefill_chunk,
        on_piece=None if on_tokens is None else lambda tokens: on_tokens(tokens * size),
    )
    records = []
    for number, (row, window, first) in enumerate(zip(rows, windows, firsts, strict=True)):
        first = max(1, first)
        edges = [bucket(position) for position in range(first, len(row))]
        where, buckets = torch.tensor(edges), max(edges) + 1
        models: dict[str, Any] = {}
        for subject in subjects:
            found = scores[subject.name]
            if found is None:
                models[subject.name] = {"status": "out-of-memory"}
                continue
            sums = {
                name: None
                if values is None
                else torch.zeros(buckets, dtype=torch.float64)
                .index_add_(0, where, values[number, first : len(row)].double())
                .tolist()
                for name, values in (("nll", found.nll), ("kl", found.kl), ("agree", found.agree))
            }
            models[subject.name] = {"status": "ok", **sums}
        records.append(
            {
                "key": keys[number],
                "id": f"perplexity/{plan.kind}/{plan.length}/{window.document}/{window.start}",
                "tokens": torch.bincount(where, minlength=buckets).tolist(),
                "models": models,
            }
        )
    return records


def collect_perplexity(
    subjects: Sequence[Subject], corpus: Corpus, settings: EvaluationSettings, store: SampleStore
) -> dict[str, Any]:
    """Turn the store's records into the report's perplexity section."""
    text = corpus.facts()
    result: dict[str, Any] = {"text": text, "windows": [], "by_position": [], "growing_context": []}
    plans = plan_perplexity(settings, corpus)
    for plan in plans:
        able = _able(subjects, plan.length)
        names = {subject.name for subject in able}
        records = [
            record
            for number in range(len(plan.windows))
            if (record := store.get(_key(store, able, plan, number, text["sha256"]))) is not None
        ]
        for subject in subjects:
            row: dict[str, Any] = {"model": subject.name, "length": plan.length}
            if subject.name not in names:
                row |= _nothing("unsupported", subject.refusal(plan.length))
            elif not plan.windows:
                row |= _nothing("unsupported", "No document of the text is that long.")
            elif any(record["models"][subject.name]["status"] != "ok" for record in records):
                row |= _nothing("out-of-memory", "The model ran out of memory at this length.")
            else:
                scored_bytes = text["scored_bytes"] if plan.kind == "windows" else None
                row |= _summarise(records, subject.name, scored_bytes)
            result["windows" if plan.kind == "windows" else "growing_context"].append(row)
    for subject in subjects:
        result["by_position"] += _by_position(subject, subjects, plans, result["windows"], store, text["sha256"])
    return result


def _nothing(status: str, reason: str | None) -> dict[str, Any]:
    return {
        "status": status,
        "reason": reason,
        "windows": 0,
        "tokens": 0,
        "nll_nats": None,
        "perplexity": None,
        "perplexity_ci95": None,
        "bits_per_byte": None,
        "kl_nats": None,
        "agreement": None,
    }


def _summarise(records: Sequence[dict[str, Any]], name: str, scored_bytes: int | None) -> dict[str, Any]:
    nll = [sum(record["models"][name]["nll"]) for record in records]
    tokens = [sum(record["tokens"]) for record in records]
    low, high = bootstrap_ratio_interval(nll, tokens)
    mean = sum(nll) / sum(tokens)
    return {
        **_nothing("ok", None),
        "windows": len(records),
        "tokens": sum(tokens),
        "nll_nats": mean,
        "perplexity": _exp(mean),
        "perplexity_ci95": [_exp(low), _exp(high)],
        "bits_per_byte": None if scored_bytes is None else sum(nll) / (math.log(2) * scored_bytes),
        **_against_teacher(records, name, sum(tokens), None),
    }


def _against_teacher(
    records: Sequence[dict[str, Any]], name: str, tokens: int, number: int | None
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for source, target in (("kl", "kl_nats"), ("agree", "agreement")):
        if any(record["models"][name][source] is None for record in records):
            found[target] = None
        elif number is None:
            found[target] = sum(sum(record["models"][name][source]) for record in records) / tokens
        else:
            found[target] = sum(record["models"][name][source][number] for record in records) / tokens
    return found


def _exp(nats: float) -> float:
    """Return exp(nats), capped where a float would overflow."""
    return math.exp(min(nats, 700.0))


def _by_position(
    subject: Subject,
    subjects: Sequence[Subject],
    plans: Sequence[Plan],
    rows: Sequence[dict[str, Any]],
    store: SampleStore,
    text_sha256: str,
) -> list[dict[str, Any]]:
    """Split the longest length the model could read by position."""
    done = [row["length"] for row in rows if row["model"] == subject.name and row["status"] == "ok"]
    if not done:
        return []
    plan = next(plan for plan in plans if plan.kind == "windows" and plan.length == max(done))
    able = _able(subjects, plan.length)
    records = [
        record
        for number in range(len(plan.windows))
        if (record := store.get(_key(store, able, plan, number, text_sha256))) is not None
    ]
    found = []
    for number in range(max(len(record["tokens"]) for record in records)):
        here = [r for r in records if len(r["tokens"]) > number and r["tokens"][number]]
        tokens = [record["tokens"][number] for record in here]
        nll = [record["models"][subject.name]["nll"][number] for record in here]
        if not tokens:
            continue
        low, high = bootstrap_ratio_interval(nll, tokens)
        start, stop = bucket_range(number)
        found.append(
            {
                "model": subject.name,
                "window_length": plan.length,
                "start": start,
                "stop": min(stop, plan.length),
                "windows": len(here),
                "tokens": sum(tokens),
                "nll_nats": sum(nll) / sum(tokens),
                "nll_nats_ci95": [low, high],
                "perplexity": _exp(sum(nll) / sum(tokens)),
                **_against_teacher(here, subject.name, sum(tokens), number),
            }
        )
    return found
