"""The retrieval suite: generated tasks, scored by what the answer contains, by length and depth."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.generation import (
    PrefixReader,
    end_tokens,
    greedy,
    is_out_of_memory,
    shared_prefix,
)
from hf_linear_attn.evaluation.settings import EvaluationSettings, parse_task
from hf_linear_attn.evaluation.statistics import effective_length, paired_difference, wilson_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.tasks import Sample, Task, sample_rng, score
from hf_linear_attn.evaluation.tasks.base import bos_ids

FLOOR_DEPTH = 50.0
_TEMPLATE_MARK = "\u241e"


@dataclass(frozen=True)
class Template:
    """Token ids that a chat template puts before and after a prompt; both empty without one."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def cost(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the tokens it adds to a prompt, whose own BOS it replaces."""
        return len(self.before) + len(self.after) - (len(bos_ids(tokenizer)) if self.before else 0)


@dataclass(frozen=True)
class Group:
    """The samples of one task and length, by depth: what can share prefixes.

    Args:
        spec: The task as the settings name it.
        length: Asked length in tokens.
        depths: Depths in percent, ascending; `(None,)` where the task has none.
        floor: Whether the asked needles are cut out, to see what can be guessed without them.
    """

    spec: str
    length: int
    depths: tuple[float | None, ...]
    floor: bool = False

    def slots(self, settings: EvaluationSettings) -> list[tuple[float | None, int]]:
        """Return depth and index of every sample, in order."""
        return [(depth, index) for depth in self.depths for index in range(settings.num_samples)]

    def sample_id(self, subject: str, depth: float | None, index: int) -> str:
        """Return the name of a sample, unique within a run."""
        kind = "floor" if self.floor else "cell"
        return f"retrieval/{kind}/{subject}/{self.spec}/{self.length}/{depth}/{index}"


def plan_groups(settings: EvaluationSettings) -> list[Group]:
    """Return the work of the suite: each task at each length, and its no-context floor at the shortest."""
    groups = []
    for spec in settings.tasks:
        task = parse_task(spec)
        depths: tuple[float | None, ...] = settings.depths if task.needs_depth else (None,)
        groups += [Group(spec, length, depths) for length in settings.lengths]
        if task.needs_depth:
            groups.append(Group(spec, settings.lengths[0], (FLOOR_DEPTH,), floor=True))
    return groups


@dataclass(frozen=True)
class Prompts:
    """The prompts of a group at one depth, for the cost of a run.

    Args:
        samples: How many there are.
        length: Tokens of each, generation budget included.
        shared: Leading tokens that are read once for all.
        max_new_tokens: Generation budget of each.
    """

    samples: int
    length: int
    shared: int
    max_new_tokens: int


def plan_prompts(settings: EvaluationSettings, tokenizer: PreTrainedTokenizerBase) -> list[Prompts]:
    """Return what every group has to read at every depth, judged by two samples of it."""
    template = make_template(tokenizer, settings)
    planned = []
    for group in plan_groups(settings):
        task = parse_task(group.spec)
        for depth in group.depths:
            built = [build_prompt(task, group, depth, index, tokenizer, template, settings.seed) for index in range(2)]
            shared = shared_prefix([prompt for _, prompt in built])
            planned.append(Prompts(settings.num_samples, group.length, shared, built[0][0].max_new_tokens))
    return planned


def make_template(tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings) -> Template:
    """Split the tokenizer's chat template around a prompt.

    Raises:
        ArgumentError: If `chat_template` was asked and the tokenizer has none.
    """
    if not settings.chat_template:
        return Template()
    if not tokenizer.chat_template:
        raise ArgumentError(
            "chat_template",
            "be left out for a tokenizer without one",
            True,
            "Set tokenizer.chat_template.",
            where=type(tokenizer).__name__,
        )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _TEMPLATE_MARK}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(text).partition(_TEMPLATE_MARK)
    return Template(
        tuple(tokenizer(before, add_special_tokens=False)["input_ids"]),
        tuple(tokenizer(after, add_special_tokens=False)["input_ids"]),
    )


def check_retrieval(settings: EvaluationSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse at once what cannot be built.

    Raises:
        ArgumentError: If a task cannot fit into a length, or a template leaves too few tokens.
    """
    template = make_template(tokenizer, settings)
    spent = template.cost(tokenizer)
    for spec in settings.tasks:
        task = parse_task(spec)
        for length in settings.lengths:
            shortest = task.min_length(tokenizer)
            if length < shortest:
                raise ArgumentError(
                    "lengths",
                    f"be at least {shortest + spent} tokens",
                    length,
                    "Ask for a longer context or leave the task out.",
                    where=f"task {spec!r}",
                )
            if length - spent < shortest:
                raise ArgumentError(
                    "chat_template",
                    f"leave {shortest} tokens for the task",
                    length - spent,
                    "Ask for a longer context or leave the template out.",
                    where=f"task {spec!r} at {length} tokens",
                )


def build_prompt(
    task: Task,
    group: Group,
    depth: float | None,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    seed: int,
) -> tuple[Sample, Tensor]:
    """Build a sample and its prompt as a 1-D tensor of token ids."""
    at = 0.0 if depth is None else depth
    rng = sample_rng(seed, group.spec, group.length, at, index)
    sample = task.build(tokenizer, group.length - template.cost(tokenizer), at, rng)
    ids = list(sample.input_ids)
    if group.floor:
        for start, stop in sorted(sample.meta["needle_spans"], reverse=True):
            del ids[start:stop]
    if template.before:
        ids = ids[len(bos_ids(tokenizer)) :]
    return sample, torch.tensor([*template.before, *ids, *template.after])


def run_retrieval(
    subject: Subject,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    store: SampleStore,
    *,
    rank: int = 0,
    world: int = 1,
) -> Iterator[int]:
    """Answer every sample that the store does not hold yet.

    Args:
        subject: The model.
        tokenizer: Its tokenizer.
        settings: What to run.
        store: Where the answers go.
        rank: Number of this process; it takes every `world`-th batch.
        world: Number of processes.

    Yields:
        The number of prompt tokens dealt with, after each batch.
    """
    template = make_template(tokenizer, settings)
    for group in plan_groups(settings):
        slots = group.slots(settings)
        if subject.refusal(group.length):
            yield group.length * len(slots)
            continue
        yield from _run_group(subject, tokenizer, settings, store, group, slots, template, rank, world)


def _run_group(
    subject: Subject,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    store: SampleStore,
    group: Group,
    slots: Sequence[tuple[float | None, int]],
    template: Template,
    rank: int,
    world: int,
) -> Iterator[int]:
    task = parse_task(group.spec)
    size = settings.batch_size
    batches = [slots[i : i + size] for i in range(0, len(slots), size)]
    keys = [
        [store.key(subject.fingerprint, group.sample_id(subject.name, *slot)) for slot in batch] for batch in batches
    ]
    pending = [b % world == rank and any(store.get(key) is None for key in keys[b]) for b in range(len(batches))]
    last = max((b for b in range(len(batches)) if pending[b]), default=-1)
    reader = PrefixReader(subject.model, settings.prefill_chunk, pad_id=next(iter(_any_token(tokenizer))))
    ends = end_tokens(subject.model, tokenizer)

    def build(batch: Sequence[tuple[float | None, int]]) -> list[tuple[Sample, Tensor]]:
        return [build_prompt(task, group, *slot, tokenizer, template, settings.seed) for slot in batch]

    following = build(batches[0]) if last >= 0 else []
    exhausted = False
    for b, batch in enumerate(batches):
        if b > last:
            yield group.length * len(batch)
            continue
        built, following = following, build(batches[b + 1]) if b < last else []
        prompts = [prompt for _, prompt in built]
        answers: list[list[int]] | None = None
        if not exhausted:
            try:
                with torch.inference_mode():
                    reader.advance(prompts, [prompt for _, prompt in following] or None)
                    if pending[b]:
                        logits, cache, mask = reader.read(prompts)
                        answers = greedy(subject.model, logits, cache, built[0][0].max_new_tokens, ends, mask)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                exhausted = True
        if pending[b]:
            store.add(
                _record(
                    subject,
                    group,
                    keys[b][row],
                    slot,
                    built[row],
                    None if answers is None else answers[row],
                    tokenizer,
                )
                for row, slot in enumerate(batch)
            )
        yield group.length * len(batch)


def _any_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [
        token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) if token is not None
    ]


def _record(
    subject: Subject,
    group: Group,
    key: str,
    slot: tuple[float | None, int],
    built: tuple[Sample, Tensor],
    answer: list[int] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    sample, prompt = built
    text = None if answer is None else str(tokenizer.decode(answer, skip_special_tokens=True))
    return {
        "key": key,
        "id": group.sample_id(subject.name, *slot),
        "text": text,
        "references": list(sample.references),
        "score": None if text is None else score(sample, text),
        "measured_tokens": len(prompt) + sample.max_new_tokens,
        "prompt_sha256": hashlib.sha256(prompt.numpy().tobytes()).hexdigest(),
        "status": "out-of-memory" if text is None else "ok",
    }


def collect_cells(
    subjects: Sequence[Subject], settings: EvaluationSettings, store: SampleStore
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Turn the store's records into the report's cells and floors."""
    cells: list[dict[str, Any]] = []
    floors: list[dict[str, Any]] = []
    for subject in subjects:
        for group in plan_groups(settings):
            for depth in group.depths:
                cell = _collect_cell(subject, group, depth, settings, store)
                (floors if group.floor else cells).append(cell)
    return cells, floors


def _collect_cell(
    subject: Subject, group: Group, depth: float | None, settings: EvaluationSettings, store: SampleStore
) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "model": subject.name,
        "task": group.spec,
        "length": group.length,
        "depth": depth,
        "n": 0,
        "score": None,
        "ci95": None,
        "nulls": 0,
        "measured_tokens": None,
        "status": "ok",
        "reason": None,
        "prompts_sha256": None,
        "scores": [],
    }
    refusal = subject.refusal(group.length)
    if refusal:
        return {**cell, "status": "unsupported", "reason": refusal}
    records = []
    for index in range(settings.num_samples):
        record = store.get(store.key(subject.fingerprint, group.sample_id(subject.name, depth, index)))
        if record is None:
            raise RuntimeError(f"no record of sample {group.sample_id(subject.name, depth, index)}")
        records.append(record)
    if any(record["status"] != "ok" for record in records):
        return {**cell, "status": "out-of-memory", "reason": "The model ran out of memory at this length."}
    scores = [float(record["score"]) for record in records]
    prompts = hashlib.sha256("".join(record["prompt_sha256"] for record in records).encode()).hexdigest()
    return {
        **cell,
        "n": len(scores),
        "score": sum(scores) / len(scores),
        "ci95": list(wilson_interval(sum(scores), len(scores))),
        "nulls": sum(not record["text"].strip() for record in records),
        "measured_tokens": sum(record["measured_tokens"] for record in records) / len(records),
        "prompts_sha256": prompts,
        "scores": scores,
    }


def by_length(cells: Sequence[dict[str, Any]], model: str, task: str) -> list[dict[str, Any]]:
    """Pool the depths of a task: one row per length in which every depth was measured."""
    rows = []
    mine = [cell for cell in cells if cell["model"] == model and cell["task"] == task]
    for length in sorted({cell["length"] for cell in mine}):
        at = [cell for cell in mine if cell["length"] == length]
        if all(cell["status"] == "ok" for cell in at):
            scores = [value for cell in at for value in cell["scores"]]
            low, high = wilson_interval(sum(scores), len(scores))
            rows.append(
                {
                    "length": length,
                    "n": len(scores),
                    "score": sum(scores) / len(scores),
                    "ci95": [low, high],
                    "scores": scores,
                    "prompts": [cell["prompts_sha256"] for cell in at],
                }
            )
    return rows


def effective_lengths(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the effective length of every model on every task that was measured."""
    found = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        for task in dict.fromkeys(cell["task"] for cell in cells):
            rows = by_length(cells, model, task)
            if rows:
                length = effective_length([row["length"] for row in rows], [row["scores"] for row in rows])
                found.append({"model": model, "task": task, **length})
    return found


def paired_differences(cells: Sequence[dict[str, Any]], first: str, others: Sequence[str]) -> list[dict[str, Any]]:
    """Compare a model with others wherever both answered the very same prompts."""
    found = []
    for other in others:
        for task in dict.fromkeys(cell["task"] for cell in cells):
            theirs = {row["length"]: row for row in by_length(cells, other, task)}
            for row in by_length(cells, first, task):
                match = theirs.get(row["length"])
                if match is not None and match["prompts"] == row["prompts"]:
                    difference = paired_difference(row["scores"], match["scores"])
                    found.append(
                        {
                            "model": first,
                            "other": other,
                            "task": task,
                            "length": row["length"],
                            **difference.to_dict(),
                        }
                    )
    return found
