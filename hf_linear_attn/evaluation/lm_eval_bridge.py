"""The bridge to EleutherAI's lm-evaluation-harness: its tasks on any model of a run, in memory or from a path."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.tasks.base import bos_ids

# These make their own data; every other task of the harness downloads some.
OFFLINE_TASKS = ("niah_single_1", "ruler_cwe", "ruler_fwe", "ruler_vt")
_RULER_PREFIXES = ("niah_", "ruler_")
# RULER's generators make this many samples per length and put the lengths one after another.
_RULER_SAMPLES = 500
# The longest budget of a RULER task: prompts fill the length, and fwe's leave no room for the answer.
_RULER_BUDGET = 128


def is_ruler(task: str) -> bool:
    """Tell whether a harness task is one of RULER's, whose length is a setting."""
    return task.startswith(_RULER_PREFIXES)


def check_lm_eval(
    settings: EvaluationSettings, subjects: Sequence[Subject], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse at once what the harness cannot run here.

    Raises:
        UnsupportedError: If lm-evaluation-harness is not installed.
        ArgumentError: If a task needs a network under `offline`, more samples than RULER makes are asked, or a model
            would silently see a prompt cut off at the left.
    """
    if find_spec("lm_eval") is None:
        raise UnsupportedError(
            "suite",
            "not contain it without lm-evaluation-harness",
            "lm-eval",
            "Install it: pip install 'hf_linear_attn[lm-eval]'.",
        )
    for task in settings.lm_eval_tasks:
        if settings.offline and task not in OFFLINE_TASKS:
            raise ArgumentError(
                "lm_eval_tasks",
                "need no network under `offline`",
                task,
                "Use one of those",
                available=OFFLINE_TASKS,
            )
    if settings.lm_eval_samples > _RULER_SAMPLES and any(is_ruler(task) for task in settings.lm_eval_tasks):
        raise ArgumentError(
            "lm_eval_samples", f"be at most {_RULER_SAMPLES}", settings.lm_eval_samples, "Ask for fewer."
        )
    needed = max(settings.lengths) + _RULER_BUDGET
    for subject in subjects:
        if subject.refusal(needed) and any(is_ruler(task) for task in settings.lm_eval_tasks):
            raise ArgumentError(
                "lengths",
                f"leave {_RULER_BUDGET} of the model's {subject.position_limit} positions for the answer",
                max(settings.lengths),
                "The harness would cut the prompt off at the left; ask for shorter ones.",
                where=subject.name,
            )


def _key(store: SampleStore, subject: Subject, task: str) -> str:
    return store.key(subject.fingerprint, f"lm-eval/{subject.name}/{task}")


def run_lm_eval(
    subjects: Sequence[Subject],
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    store: SampleStore,
) -> Iterator[int]:
    """Run every harness task on every model that the store holds no result of; yields 1 after each."""
    for name in settings.lm_eval_tasks:
        pending = [subject for subject in subjects if store.get(_key(store, subject, name)) is None]
        if pending:
            # Built once for all models: RULER's generators draw from state that another build would find changed.
            task, manager = _build_task(name, tokenizer, settings)
            for subject in pending:
                rows = _run_task(subject, name, task, manager, tokenizer, settings)
                store.add([{"key": _key(store, subject, name), "id": f"lm-eval/{subject.name}/{name}", "rows": rows}])
        for _ in subjects:
            yield 1


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """Keep the harness and its libraries off the network."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    if active:
        os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _build_task(name: str, tokenizer: PreTrainedTokenizerBase, settings: EvaluationSettings) -> tuple[Any, Any]:
    from lm_eval.tasks import TaskManager

    # The generators draw from the global generators, and take the tokenizer by path alone.
    states = random.getstate(), np.random.get_state()
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    try:
        with tempfile.TemporaryDirectory() as folder, _offline(settings.offline):
            tokenizer.save_pretrained(folder)
            manager = TaskManager(metadata={"max_seq_lengths": list(settings.lengths), "tokenizer": folder})
            task = next(iter(manager.load([name])["tasks"].values()))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    # Where a prompt does not fit, the harness's generators leave out the very words that are asked for.
    short = [doc["max_length"] for doc in task.dataset["test"] if not doc["outputs"]] if is_ruler(name) else []
    if short:
        raise ArgumentError(
            "lengths",
            "leave the harness room for what it asks for",
            min(short),
            "Ask for a longer context or leave the task out.",
            where=f"task {name!r}",
        )
    return task, manager


def _run_task(
    subject: Subject,
    name: str,
    task: Any,
    manager: Any,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
) -> list[dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    ruler = is_ruler(name)
    options: dict[str, Any] = {}
    if ruler:
        # `limit` would take samples of the first length alone.
        options["samples"] = {
            name: [
                place * _RULER_SAMPLES + index
                for place in range(len(settings.lengths))
                for index in range(settings.lm_eval_samples)
            ]
        }
    else:
        options["limit"] = settings.lm_eval_samples
    model = HFLM(
        pretrained=subject.model,
        tokenizer=tokenizer,
        batch_size=settings.batch_size,
        # The harness leaves BOS out unless told; everywhere else a text begins as the tokenizer begins it.
        add_bos_token=bool(bos_ids(tokenizer)),
        max_length=max(settings.lengths) + _RULER_BUDGET if ruler else None,
    )
    with _offline(settings.offline):
        found = simple_evaluate(
            model=model,
            tasks=[task],
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0 if ruler else 1000,
            random_seed=settings.seed,
            **options,
        )
    if ruler:
        return _ruler_rows(subject, name, found["samples"][name], settings)
    return [
        {
            "model": subject.name,
            "task": name,
            "length": None,
            "metric": metric,
            "value": float(value),
            "ci95": None,
            "n": len(found["samples"][name]),
            "prompts_sha256": None,
            "status": "ok",
        }
        for metric, value in sorted(found["results"][name].items())
        if isinstance(value, int | float) and "stderr" not in metric and metric not in ("sample_len",)
    ]


def _ruler_rows(
    subject: Subject, name: str, samples: Sequence[dict[str, Any]], settings: EvaluationSettings
) -> list[dict[str, Any]]:
    """Score RULER's samples by length as RULER does: the harness reports a fixed list of lengths only."""
    rows = []
    for length in settings.lengths:
        here = [sample for sample in samples if sample["doc"]["max_length"] == length]
        scores = [
            sum(reference.lower() in answer.lower() for reference in references) / len(references)
            for sample in here
            for answer, references in [(sample["filtered_resps"][0], sample["doc"]["outputs"])]
        ]
        prompts = "".join(sample["doc"]["input"] for sample in here)
        rows.append(
            {
                "model": subject.name,
                "task": name,
                "length": length,
                "metric": "string_match",
                "value": sum(scores) / len(scores),
                "ci95": list(wilson_interval(sum(scores), len(scores))),
                "n": len(scores),
                "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
                "status": "ok",
            }
        )
    return rows


def collect_lm_eval(
    subjects: Sequence[Subject], settings: EvaluationSettings, store: SampleStore
) -> list[dict[str, Any]]:
    """Turn the store's records into the report's rows."""
    rows = []
    for subject in subjects:
        for task in settings.lm_eval_tasks:
            record = store.get(_key(store, subject, task))
            if record is not None:
                rows += record["rows"]
    return rows
