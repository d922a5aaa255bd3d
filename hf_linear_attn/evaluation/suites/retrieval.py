"""The retrieval suite: generated tasks, scored by what the answer contains, by length and depth."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import retrieval_view
from hf_linear_attn.evaluation.answering import Answerer
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.generation import shared_prefix
from hf_linear_attn.evaluation.prompts import Group, Slot, Template, build_prompt, make_template
from hf_linear_attn.evaluation.scores import effective_lengths, paired_differences
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.tasks import Sample, Task, Text, parse_task
from hf_linear_attn.evaluation.view import Results

FLOOR_DEPTH = 50.0


TASKS = ("capital", "assignment", "json_record", "default_argument", "kv_recall", "passkey")
"""Forms that are held out of training, and two that are not."""


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of the retrieval suite.

    Args:
        tasks: Retrieval tasks; settings follow a colon, as in kv_recall:pairs=8 or passkey:haystack=noise.
        haystack: What needles are hidden in: real text, or noise, which is a few sentences over and over.
        haystack_files: UTF-8 texts of your own to hide needles in. Without them, text is source files of the standard
            library that distillation never reads.
        capacity: Numbers of pairs that the first task with pairs is asked at, at the shortest length that all of them
            fit into; without one, those that fit at the longest.
        depths: Where the asked needle stands, in percent of the haystack.
        num_samples: Samples per retrieval cell.
        chat_template: Put each prompt into the tokenizer's chat template.
    """

    tasks: tuple[str, ...] = TASKS
    haystack: Literal["text", "noise"] = "text"
    haystack_files: tuple[str, ...] | None = None
    capacity: tuple[int, ...] | None = (4, 8, 16, 32, 64)
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    num_samples: int = 50
    chat_template: bool = False

    def __post_init__(self) -> None:
        check_settings(self, num_samples=1, capacity=1)
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ArgumentError("depths", "lie in 0..100", depth, "Pass it in percent.")
        labels = [task.label for task in self.made()]
        if len(set(labels)) < len(labels):
            raise ArgumentError("tasks", "hold no task twice", labels, "Drop the repeated ones.")
        if self.haystack_files and not any(" in " in label for label in labels):
            raise ArgumentError("haystack_files", "be left out with noise", self.haystack_files, "Take haystack=text.")
        object.__setattr__(self, "depths", tuple(sorted(self.depths)))

    def made(self) -> list[Task]:
        """Return the tasks with their haystacks."""
        text = Text(self.haystack_files or ())
        return [parse_task(spec, self.haystack, text) for spec in self.tasks]

    def of_pairs(self) -> list[Task]:
        """Return the first task that has pairs, once for each number of pairs of the capacity curve."""
        text = Text(self.haystack_files or ())
        found = next((spec for spec, task in zip(self.tasks, self.made(), strict=True) if task.pairs), None)
        if found is None:
            return []
        plain = re.sub(r":pairs=\d+", "", found)
        return [parse_task(f"{plain}:pairs={pairs}", self.haystack, text) for pairs in self.capacity or ()]


@register_suite
class Retrieval(Suite):
    """Can the model still find what stands far back?"""

    name = "retrieval"
    title = "retrieval suite"
    Settings = RetrievalSettings
    parts = {"cells": [], "floors": [], "capacity": []}  # noqa: RUF012
    row_key = ("model", "task", "length", "depth")
    place = 10
    by_default = True
    alone = False
    own: RetrievalSettings

    @cached_property
    def template(self) -> Template:
        """The chat template around each prompt; empty unless asked for."""
        return make_template(self.tokenizer) if self.own.chat_template else Template()

    @cached_property
    def groups(self) -> list[Group]:
        """The work: each task at each length, its no-context floor at the shortest, and numbers of pairs at one."""
        lengths, groups = self.settings.lengths, []
        for task in self.own.made():
            depths: tuple[float | None, ...] = self.own.depths if task.needs_depth else (None,)
            groups += [Group(task, length, depths) for length in lengths]
            if task.needs_depth:
                groups.append(Group(task, lengths[0], (FLOOR_DEPTH,), part="floors"))
        spent = self.template.cost(self.tokenizer)
        least = [(task, task.min_length(self.tokenizer) + spent) for task in self.own.of_pairs()]
        length = next((n for n in lengths if all(shortest <= n for _, shortest in least)), lengths[-1])
        fitting = [task for task, shortest in least if shortest <= length]
        return [*groups, *(Group(task, length, self.own.depths, part="capacity") for task in fitting)]

    def check(self) -> None:
        """Refuse what cannot be built."""
        spent = self.template.cost(self.tokenizer)
        for task in self.own.made():
            shortest = task.min_length(self.tokenizer)
            for length in self.settings.lengths:
                if length < shortest:
                    rule = f"be at least {shortest + spent} tokens"
                    remedy = "Ask for a longer context or leave the task out."
                    raise ArgumentError("lengths", rule, length, remedy, where=f"task {task.label!r}")
                if length - spent < shortest:
                    raise ArgumentError(
                        "chat_template",
                        f"leave {shortest} tokens for the task",
                        length - spent,
                        "Ask for a longer context or leave the template out.",
                        where=f"task {task.label!r} at {length} tokens",
                    )
                task.check(self.tokenizer, length, FLOOR_DEPTH)

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the tokens of all prompts, judged by two samples of each kind."""
        read, seconds = 0, 0.0
        for group in self.groups:
            for depth in group.depths:
                built = [self._build(group, (depth, index)) for index in range(2)]
                shared = shared_prefix([prompt for _, prompt in built])
                answer = built[0][0].max_new_tokens
                for subject in self.subjects:
                    read += self.own.num_samples * group.length
                    if subject.name in paces and subject.refusal(group.length) is None:
                        pace = paces[subject.name]
                        answer_s = answer * pace.step_s(group.length) / self.settings.batch_size
                        seconds += self.own.num_samples * (pace.read_s(group.length, shared) + answer_s)
        return Plan(read, read, seconds)

    def _build(self, group: Group, slot: Slot) -> tuple[Sample, Tensor]:
        return build_prompt(group, *slot, self.tokenizer, self.template, self.settings.seed)

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Answer every sample that the store does not hold yet."""
        for subject in self.subjects:
            answerer = Answerer(subject, self.tokenizer, self.settings.batch_size, self.settings.prefill_chunk)
            for group in self.groups:
                slots = group.slots(self.own.num_samples)
                if subject.refusal(group.length):
                    advance(group.length * len(slots))
                else:
                    answerer.answer(group, slots, self._build, store, advance, rank=rank, world=world)

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's records into cells and floors."""
        found: dict[str, list[dict[str, Any]]] = {part: [] for part in self.parts}
        for subject in self.subjects:
            for group in self.groups:
                for depth in group.depths:
                    found[group.part].append(self._cell(subject, group, depth, store))
        return found

    def _cell(self, subject: Subject, group: Group, depth: float | None, store: SampleStore) -> dict[str, Any]:
        cell = {
            "model": subject.name, "task": group.task.label, "length": group.length, "depth": depth, "n": 0,
            "score": None, "ci95": None, "nulls": 0, "measured_tokens": None, "status": "ok", "reason": None,
            "prompts_sha256": None, "scores": [], **group.task.facts(),
        }  # fmt: skip
        refusal = subject.refusal(group.length)
        if refusal:
            return {**cell, "status": "unsupported", "reason": refusal}
        records = []
        for index in range(self.own.num_samples):
            name = group.sample_id(subject.name, depth, index)
            record = store.get(store.key(subject.fingerprint, name))
            if record is None:
                raise RuntimeError(f"no record of sample {name}")
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

    @classmethod
    def conclude(cls, results: Results) -> dict[str, Any]:
        """Find effective lengths, and compare the model with the others on the same prompts."""
        others = [reference["name"] for reference in results["references"]]
        return {
            "effective_length": effective_lengths(results["cells"]),
            "paired": paired_differences(results["cells"], results["model"]["name"], others),
        }

    quality = staticmethod(retrieval_view.sentences)
    headlines = staticmethod(retrieval_view.headlines)
    pictures = staticmethod(retrieval_view.pictures)
    tables = staticmethod(retrieval_view.tables)
