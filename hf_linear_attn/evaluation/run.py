"""One evaluation from end to end: load, estimate the cost, run the suites, collect the results, write them."""

import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.cost import Pace, calibrate, duration
from hf_linear_attn.evaluation.provenance import environment, source_commit
from hf_linear_attn.evaluation.report import write_report
from hf_linear_attn.evaluation.results import SCHEMA_VERSION, add_comparisons, combine, read_results, write_results
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.store import RUN_FILE, SampleStore
from hf_linear_attn.evaluation.subjects import Subject, check_tokenizer, gather_subjects
from hf_linear_attn.evaluation.suite import Plan, Suite, suites_of
from hf_linear_attn.files import locked, output_folder, paths_read
from hf_linear_attn.loading import Kind, load_tokenizer, load_users_maps, process_state, trained_positions

logger = logging.getLogger(__name__)

_READ = (
    "model", "teacher", "haystack_files", "text_file", "draft_file", "continuation_file", "embedding_file",
    "feature_map_file", "suite_file",
)  # fmt: skip
"""Settings that name what is read."""


@dataclass(frozen=True)
class Cost:
    """What a run is expected to read and how long that takes, from short trials of each model.

    Args:
        plans: What each suite has to do, by its name.
    """

    plans: Mapping[str, Plan]

    @property
    def seconds(self) -> float:
        """Expected duration."""
        return sum(plan.seconds for plan in self.plans.values())

    def describe(self) -> str:
        """Say it in a sentence."""
        total = sum(plan.tokens for plan in self.plans.values())
        listed = ", ".join(f"{name} {plan.tokens:,}" for name, plan in self.plans.items() if plan.tokens)
        return f"About {duration(self.seconds)} for {total:,} tokens: {listed}." if listed else "Running."


def evaluate(
    settings: EvaluationSettings,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    teacher: PreTrainedModel | None = None,
    baselines: Mapping[str, PreTrainedModel] | None = None,
    extras: Mapping[str, float | str] | None = None,
) -> dict[str, Any]:
    """Evaluate a causal language model at long context, beside its teacher and any baselines.

    Args:
        settings: What to run; `settings.output_dir`, where given, receives `samples.jsonl` and `results.json`.
        model: The model under test; loaded from `settings.model` where not given.
        tokenizer: Its tokenizer; loaded from `settings.model` where not given.
        teacher: The softmax model to stand beside it; loaded from `settings.teacher` where that is given.
        baselines: More models by name, such as the merely patched one or one with a window alone.
        extras: Further figures for the report, such as `linear_branch_off_nats`, the loss increase with the linear
            branch off.

    Returns:
        The results, as written to `results.json`; see `results.schema.json`.

    Raises:
        ArgumentError: If a setting cannot be used with these models or this tokenizer, or the output folder holds what
            is read, or files that are no evaluation's.
        CheckpointError: If a path cannot be loaded, or the output folder holds another run.
        UnsupportedError: If a model cannot be evaluated as asked.
    """
    begin = time.perf_counter()
    if settings.output_dir is not None and process_state().is_main_process:
        loaded = {"model": model, "tokenizer": tokenizer, "teacher": teacher, **(baselines or {})}
        inputs = paths_read(settings, _READ, **loaded)
        output_folder(settings.output_dir, inputs=inputs, marks=[RUN_FILE], overwrite=settings.overwrite)
    subjects, suites = _prepare(settings, model, tokenizer, teacher, baselines or {})
    state = process_state()
    rank = state.process_index
    folder = None if settings.output_dir is None or rank != 0 else Path(settings.output_dir)
    with locked(folder):
        store = _open_store(settings, subjects, state)
        cost = estimate_cost(settings, subjects, suites)
        if settings.progress and rank == 0:
            tqdm.write(cost.describe(), file=sys.stderr)
        _run_suites(settings, suites, store, state, cost)
        results: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "environment": environment(subjects[0].device),
            "model": subjects[0].facts(),
            "references": [subject.facts() for subject in subjects[1:]],
            "args": settings.identity(),
        }
        for suite in suites:
            results |= suite.collect(store)
        results = add_comparisons({**results, "extras": dict(extras or {})})
        results["timing"] = {
            "command": shlex.join(sys.argv),
            "commit": source_commit(),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "estimated_s": cost.seconds,
            "wall_s": time.perf_counter() - begin,
        }
        if folder is not None:
            write_results(results, folder)
        return results


def check_evaluation(
    settings: EvaluationSettings,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    teacher: PreTrainedModel | None = None,
) -> None:
    """Refuse at once what `evaluate` would refuse, for those who train for hours before they evaluate.

    Args:
        settings: As for `evaluate`, like the rest.
        model: A model like the one to evaluate, trained or not.
        tokenizer: Its tokenizer.
        teacher: The softmax model.

    Raises:
        HFLinearAttnError: As `evaluate` does.
    """
    _prepare(settings, model, tokenizer, teacher, {})


def _prepare(
    settings: EvaluationSettings,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    teacher: PreTrainedModel | None,
    baselines: Mapping[str, PreTrainedModel],
) -> tuple[list[Subject], list[Suite]]:
    """Load what is to be loaded, and refuse at once whatever cannot work."""
    load_users_maps(settings.feature_map_file)
    if process_state().num_processes > 1 and settings.output_dir is None:
        raise ArgumentError("output_dir", "be set when several processes share the work", None, "Name a folder.")
    kind = kind_of(suites_of(settings))
    subjects = gather_subjects(settings, model, teacher, baselines, kind)
    if tokenizer is None:
        if settings.model is None:
            raise ArgumentError("tokenizer", "be given with a model in memory", None, "Pass tokenizer=...")
        local = settings.offline or os.path.isdir(settings.model)
        tokenizer = load_tokenizer(settings.model, local_files_only=local)
    check_tokenizer(tokenizer, subjects)
    refusal = subjects[0].refusal(settings.lengths[0])
    if refusal is not None and kind == "causal":
        raise ArgumentError(refusal)
    if kind == "causal" and process_state().is_main_process:
        _name_unseen_positions(subjects, settings.lengths[-1])
    suites = [suite(settings, subjects, tokenizer) for suite in suites_of(settings)]
    for suite in suites:
        suite.check()
    return subjects, suites


def _name_unseen_positions(subjects: Sequence[Subject], longest: int) -> None:
    """Log which models read on beyond the positions that they were trained on; none says so itself."""
    for subject in subjects:
        positions = trained_positions(subject.model)
        if positions is not None and longest > positions and subject.position_limit is None:
            logger.warning(
                "lengths of up to %d tokens reach beyond the %d positions that %s was trained on: what it says there "
                "is not to be trusted",
                longest,
                positions,
                subject.name,
            )


def kind_of(suites: Sequence[type[Suite]]) -> Kind:
    """Return the kind of model that suites measure.

    Raises:
        ArgumentError: If they do not all measure one kind.
    """
    kinds = {suite.kind for suite in suites}
    if len(kinds) > 1:
        raise ArgumentError(
            "suite",
            "be for one kind of model",
            [suite.name for suite in suites],
            "Run those for encoders by themselves.",
            available=[suite.name for suite in suites if suite.kind == "encoder"],
        )
    return next(iter(kinds), "causal")


def _open_store(settings: EvaluationSettings, subjects: Sequence[Subject], state: PartialState) -> SampleStore:
    folder = Path(settings.output_dir) if settings.output_dir is not None else None
    prints = {subject.name: subject.fingerprint for subject in subjects}
    options = {"resume": settings.resume, "overwrite": settings.overwrite, "rank": state.process_index}
    # It checks and clears the folder before the others look into it.
    with state.main_process_first():
        return SampleStore(folder, settings.identity(), prints, **options)


def _run_suites(
    settings: EvaluationSettings, suites: Sequence[Suite], store: SampleStore, state: PartialState, cost: Cost
) -> None:
    rank, world = state.process_index, state.num_processes
    for suite in suites:
        if rank == 0 or not suite.alone:
            quiet = not settings.progress or rank != 0
            total = cost.plans[suite.name].total
            with tqdm(total=total, desc=suite.name, unit=suite.unit, disable=quiet) as bar:
                suite.run(store, bar.update, rank=rank, world=world)
        state.wait_for_everyone()
    if rank == 0:
        store.merge_files()
    state.wait_for_everyone()
    store.reload()


def estimate_cost(settings: EvaluationSettings, subjects: Sequence[Subject], suites: Sequence[Suite]) -> Cost:
    """Estimate what a run costs, from short reads and decode steps of each model.

    Args:
        settings: The settings of the run.
        subjects: The models.
        suites: What is to run, checked.
    """
    paces: dict[str, Pace] = {}
    # An encoder decodes nothing, and has read all there is before a trial would be over.
    decoding = subjects if kind_of([type(suite) for suite in suites]) == "causal" else ()
    with torch.inference_mode():
        for subject in decoding:
            able = [length for length in settings.lengths if subject.refusal(length) is None]
            if able:
                paces[subject.name] = calibrate(subject, settings, able[-1])
    return Cost({suite.name: suite.plan(paces) for suite in suites})


def compare(
    paths: Sequence[str | Path], output_dir: str | Path, *, plots: bool = True, overwrite: bool = False
) -> dict[str, Any]:
    """Make one report of several runs.

    Args:
        paths: `results.json` files, or the folders that hold one; the first one's model leads the report.
        output_dir: Where `results.json`, `report.html` and `report.md` go.
        plots: Whether to draw the pictures; default True.
        overwrite: Whether to replace an earlier report there.

    Returns:
        The combined results.

    Raises:
        ArgumentError: If fewer than two paths are given, or the folder holds one of them, is not empty, or cannot be
            written.
        CheckpointError: If a file is missing, damaged or of another schema version.
    """
    if len(paths) < 2:
        raise ArgumentError("paths", "be at least two results", list(map(str, paths)), "Name another run.")
    results = combine([(_label(Path(path)), read_results(Path(path))) for path in paths])
    output_folder(output_dir, inputs={"results": paths}, overwrite=overwrite)
    write_results(results, Path(output_dir))
    write_report(results, output_dir, plots=plots)
    return results


def _label(path: Path) -> str:
    folder = path.parent if path.suffix == ".json" else path
    return folder.resolve().name
