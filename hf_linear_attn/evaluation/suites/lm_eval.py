"""The lm-eval suite: tasks of EleutherAI's lm-evaluation-harness on any model of a run, in memory or from a path."""

import hashlib
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
from accelerate.utils import patch_environment

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.tasks import Sample, score
from hf_linear_attn.evaluation.tasks.base import bos_ids
from hf_linear_attn.evaluation.view import Columns, Results, Table, interval, measured, number, table, tokens

# These make their own data; every other task of the harness downloads some.
OFFLINE_TASKS = ("niah_single_1", "ruler_vt", "ruler_cwe", "ruler_fwe")
# They keep the harness and its libraries off the network.
_OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), 1)
_RULER_PREFIXES = ("niah_", "ruler_")
# RULER's generators make this many samples per length and put the lengths one after another.
_RULER_SAMPLES = 500
# BABILong's first five tasks have data of these lengths, named 1k to 128k; the others have one, 0k.
_BABILONG = tuple(f"babilong_qa{number}" for number in range(1, 6))
_BABILONG_LENGTHS = tuple(1024 << power for power in range(8))
# More than any prompt: what is longer, the harness cuts off at the left with no more than a warning.
_UNCUT = 2**30
# The longest budget of a RULER task: prompts fill the length, and fwe's leave no room for the answer.
_RULER_BUDGET = 128


@dataclass(frozen=True)
class LmEvalSettings:
    """Settings of the lm-eval suite.

    Args:
        lm_eval_tasks: Tasks of lm-evaluation-harness.
        lm_eval_samples: Samples per lm-eval task and length.
    """

    lm_eval_tasks: tuple[str, ...] = OFFLINE_TASKS
    lm_eval_samples: int = 50

    def __post_init__(self) -> None:
        check_settings(self, lm_eval_samples=1)


def is_ruler(task: str) -> bool:
    """Tell whether a harness task is one of RULER's, whose length is a setting."""
    return task.startswith(_RULER_PREFIXES)


def is_babilong(task: str) -> bool:
    """Tell whether a harness task is one of BABILong's, whose data have names by length."""
    return task.startswith("babilong")


@register_suite
class LmEval(Suite):
    """How does the model do on the field's common benchmarks?"""

    name = "lm-eval"
    title = "lm-eval suite (pip install 'hf_linear_attn[lm-eval]')"
    Settings = LmEvalSettings
    parts = {"lm_eval": []}  # noqa: RUF012
    row_key = ("model", "task", "length", "metric")
    place = 40
    unit = "task"
    own: LmEvalSettings

    def check(self) -> None:
        """Refuse what the harness cannot run here.

        Raises:
            UnsupportedError: If lm-evaluation-harness is not installed.
            ArgumentError: If a task needs a network under `offline`, more samples than RULER makes are asked, or a
                model would silently see a prompt cut off at the left.
        """
        if find_spec("lm_eval") is None:
            remedy = "Install it: pip install 'hf_linear_attn[lm-eval]'."
            raise UnsupportedError("suite", "not contain it without lm-evaluation-harness", "lm-eval", remedy)
        for task in self.own.lm_eval_tasks:
            if self.settings.offline and task not in OFFLINE_TASKS:
                rule = "need no network under `offline`"
                raise ArgumentError("lm_eval_tasks", rule, task, "Use one of those", available=OFFLINE_TASKS)
            for length in self._lengths(task):
                if length not in (None, *_BABILONG_LENGTHS):
                    rule, remedy = "be 1024 times a power of two, up to 131072", "BABILong has no others."
                    raise ArgumentError("lengths", rule, length, remedy, where=f"task {task!r}")
        if not any(is_ruler(task) for task in self.own.lm_eval_tasks):
            return
        if self.own.lm_eval_samples > _RULER_SAMPLES:
            raise ArgumentError(
                "lm_eval_samples", f"be at most {_RULER_SAMPLES}", self.own.lm_eval_samples, "Ask for fewer."
            )
        longest = max(self.settings.lengths)
        for subject in self.subjects:
            if subject.refusal(longest + _RULER_BUDGET):
                rule = f"leave {_RULER_BUDGET} of the model's {subject.position_limit} positions for the answer"
                remedy = "The harness would cut the prompt off at the left; ask for shorter ones."
                raise ArgumentError("lengths", rule, longest, remedy, where=subject.name)

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the runs; how long they take is the harness's own business."""
        return Plan(len(self.subjects) * len(self.own.lm_eval_tasks))

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Run every task on every model that the store holds no result of."""
        for name in self.own.lm_eval_tasks:
            pending = [subject for subject in self.subjects if self.record(store, subject, name) is None]
            if pending:
                # Built once for all models: RULER's generators draw from state that another build would find changed.
                builds = {length: self.build(name, length) for length in self._lengths(name)}
                for subject in pending:
                    found = [self._run_task(subject, name, length, *build) for length, build in builds.items()]
                    self.keep(store, subject, name, rows=list(chain.from_iterable(found)))
            advance(len(self.subjects))

    def _lengths(self, name: str) -> tuple[int | None, ...]:
        """Return the lengths that a task is run at one by one; None where it has all in one, or those of its data."""
        return self.settings.lengths if name in _BABILONG else (None,)

    def _network(self) -> AbstractContextManager[None]:
        """Keep the harness off the network within a block, if that is asked for."""
        return patch_environment(**_OFFLINE) if self.settings.offline else nullcontext()

    def build(self, name: str, length: int | None = None) -> tuple[Any, Any]:
        """Build a task of the harness, with its data of one length or of all, and return it and its manager.

        Raises:
            ArgumentError: If a length leaves no room for what the task asks for.
        """
        from lm_eval.tasks import TaskManager

        # The generators draw from the global generators, and take the tokenizer by path alone.
        states = random.getstate(), np.random.get_state()
        random.seed(self.settings.seed)
        np.random.seed(self.settings.seed)
        try:
            with tempfile.TemporaryDirectory() as folder, self._network():
                self.tokenizer.save_pretrained(folder)
                lengths = f"{(length or 0) // 1024}k" if is_babilong(name) else list(self.settings.lengths)
                manager = TaskManager(metadata={"max_seq_lengths": lengths, "tokenizer": folder})
                task = next(iter(manager.load([name])["tasks"].values()))
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        # Where a prompt does not fit, the harness's generators leave out the very words that are asked for.
        short = [doc["max_length"] for doc in task.dataset["test"] if not doc["outputs"]] if is_ruler(name) else []
        if short:
            rule = "leave the harness room for what it asks for"
            remedy = "Ask for a longer context or leave the task out."
            raise ArgumentError("lengths", rule, min(short), remedy, where=f"task {name!r}")
        return task, manager

    def _run_task(
        self, subject: Subject, name: str, length: int | None, task: Any, manager: Any
    ) -> list[dict[str, Any]]:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        ruler = is_ruler(name)
        options: dict[str, Any] = {"limit": self.own.lm_eval_samples}
        if ruler:
            # `limit` would take samples of the first length alone.
            firsts = [place * _RULER_SAMPLES for place in range(len(self.settings.lengths))]
            options = {"samples": {name: [first + n for first in firsts for n in range(self.own.lm_eval_samples)]}}
        model = HFLM(
            pretrained=subject.model,
            tokenizer=self.tokenizer,
            batch_size=self.settings.batch_size,
            # The harness leaves BOS out unless told; everywhere else a text begins as the tokenizer begins it.
            add_bos_token=bool(bos_ids(self.tokenizer)),
            max_length=max(self.settings.lengths) + _RULER_BUDGET if ruler else _UNCUT if is_babilong(name) else None,
        )
        with self._network():
            found = simple_evaluate(
                model=model,
                tasks=[task],
                task_manager=manager,
                log_samples=True,
                bootstrap_iters=0 if ruler else 1000,
                random_seed=self.settings.seed,
                **options,
            )
        if ruler:
            return self._ruler_rows(subject, name, found["samples"][name])
        common = {"model": subject.name, "task": name, "length": length, "n": len(found["samples"][name])}
        common |= {"status": "ok", "ci95": None, "prompts_sha256": None}
        return [
            {**common, "metric": metric, "value": float(value)}
            for metric, value in sorted(found["results"][name].items())
            if isinstance(value, int | float) and "stderr" not in metric and metric not in ("sample_len",)
        ]

    def _ruler_rows(self, subject: Subject, name: str, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Score RULER's samples by length as RULER does: the harness reports a fixed list of lengths only."""
        rows = []
        for length in self.settings.lengths:
            here = [sample for sample in samples if sample["doc"]["max_length"] == length]
            asked = [Sample((), tuple(sample["doc"]["outputs"]), 0) for sample in here]
            scores = [score(one, sample["filtered_resps"][0]) for one, sample in zip(asked, here, strict=True)]
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

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's records into rows."""
        pairs = [(subject, task) for subject in self.subjects for task in self.own.lm_eval_tasks]
        records = [self.record(store, subject, task) for subject, task in pairs]
        return {"lm_eval": [row for record in records if record is not None for row in record["rows"]]}

    @classmethod
    def quality(cls, results: Results) -> list[str]:
        """List the scores of the model under test."""
        first = results["model"]["name"]
        rows = measured(results["lm_eval"], first)
        listed = ", ".join(f"{row['task']}{_at(row)}: {row['value']:.0%}" for row in rows if 0 <= row["value"] <= 1)
        return [f"lm-evaluation-harness on {first}: {listed}."] if listed else []

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Return the scores."""
        columns: Columns = {
            "model": ("model", str),
            "task": ("task", str),
            "length": ("length", tokens),
            "metric": ("metric", str),
            "value": ("value", number),
            "95% interval": ("ci95", interval),
            "n": ("n", str),
        }
        return [table("lm-evaluation-harness", results["lm_eval"], columns)]


def _at(row: Mapping[str, Any]) -> str:
    return f" at {tokens(row['length'])}" if row["length"] is not None else f" ({row['metric']})"
