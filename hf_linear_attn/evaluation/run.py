"""One evaluation from end to end: load, estimate the cost, run the suites, collect the results, write them."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import latency, perplexity, retrieval
from hf_linear_attn.evaluation.generation import forward, is_out_of_memory, prefill
from hf_linear_attn.evaluation.latency import timed
from hf_linear_attn.evaluation.lm_eval_bridge import check_lm_eval, collect_lm_eval, run_lm_eval
from hf_linear_attn.evaluation.report import write_report
from hf_linear_attn.evaluation.results import (
    SCHEMA_VERSION,
    add_comparisons,
    combine,
    read_results,
    write_results,
)
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import (
    Subject,
    check_tokenizer,
    gather_subjects,
)
from hf_linear_attn.evaluation.text import Corpus, load_corpus
from hf_linear_attn.loading import load_tokenizer, load_users_maps, make_folder, process_state

# Long enough for attention's square to show, short enough to be a small part of any run.
_CALIBRATION_TOKENS = (256, 2048)


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
        ArgumentError: If a setting cannot be used with these models or this tokenizer.
        CheckpointError: If a path cannot be loaded, or the output folder holds another run.
        UnsupportedError: If a model cannot be evaluated as asked.
    """
    begin = time.perf_counter()
    if settings.output_dir is not None:
        make_folder(settings.output_dir)
    subjects, tokenizer, corpus = _prepare(settings, model, tokenizer, teacher, baselines or {})
    state = process_state()
    rank = state.process_index
    store = _open_store(settings, subjects, state)
    with torch.inference_mode():
        cost = estimate_cost(settings, subjects, tokenizer, corpus)
    if settings.progress and rank == 0:
        tqdm.write(cost.describe(), file=sys.stderr)
    _run_suites(settings, subjects, tokenizer, corpus, store, state, cost)
    results = _collect(settings, subjects, corpus, store, extras or {})
    results["timing"] = {
        "command": " ".join(sys.argv),
        "commit": source_commit(),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "estimated_s": cost.seconds,
        "wall_s": time.perf_counter() - begin,
    }
    if settings.output_dir is not None and rank == 0:
        write_results(results, Path(settings.output_dir))
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
        settings: As for `evaluate`.
        model: A model like the one to evaluate, trained or not.
        tokenizer: As for `evaluate`.
        teacher: As for `evaluate`.

    Raises:
        ArgumentError: As `evaluate` does.
        CheckpointError: As `evaluate` does.
        UnsupportedError: As `evaluate` does.
    """
    _prepare(settings, model, tokenizer, teacher, {})


def _prepare(
    settings: EvaluationSettings,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    teacher: PreTrainedModel | None,
    baselines: Mapping[str, PreTrainedModel],
) -> tuple[list[Subject], PreTrainedTokenizerBase, Corpus | None]:
    """Load what is to be loaded, and check it all."""
    if settings.feature_map_file is not None:
        load_users_maps(settings.feature_map_file)
    if process_state().num_processes > 1 and settings.output_dir is None:
        raise ArgumentError("output_dir", "be set when several processes share the work", None, "Name a folder.")
    subjects = gather_subjects(settings, model, teacher, baselines)
    if tokenizer is None:
        if settings.model is None:
            raise ArgumentError("tokenizer", "be given with a model in memory", None, "Pass tokenizer=...")
        local = settings.offline or os.path.isdir(settings.model)
        tokenizer = load_tokenizer(settings.model, local_files_only=local)
    check_tokenizer(tokenizer)
    return subjects, tokenizer, _check(settings, subjects, tokenizer)


def _check(
    settings: EvaluationSettings, subjects: Sequence[Subject], tokenizer: PreTrainedTokenizerBase
) -> Corpus | None:
    """Refuse at once whatever cannot work, before anything slow begins; returns the text where one is needed."""
    for length in settings.lengths[:1]:
        refusals = [subject.refusal(length) for subject in subjects]
        if refusals[0] is not None:
            raise ArgumentError(refusals[0])
    if "retrieval" in settings.suite:
        retrieval.check_retrieval(settings, tokenizer)
    if "latency" in settings.suite:
        latency.check_latency(subjects)
    if "lm-eval" in settings.suite:
        check_lm_eval(settings, subjects, tokenizer)
    if "perplexity" not in settings.suite:
        return None
    corpus = load_corpus(settings, tokenizer)
    perplexity.plan_perplexity(settings, corpus)
    return corpus


def _open_store(settings: EvaluationSettings, subjects: Sequence[Subject], state: PartialState) -> SampleStore:
    folder = Path(settings.output_dir) if settings.output_dir is not None else None
    prints = {subject.name: subject.fingerprint for subject in subjects}

    def make(*, resume: bool, overwrite: bool) -> SampleStore:
        return SampleStore(
            folder, settings.identity(), prints, resume=resume, overwrite=overwrite, rank=state.process_index
        )

    # The first process checks and clears the folder before the others look into it.
    store = make(resume=settings.resume, overwrite=settings.overwrite) if state.is_main_process else None
    state.wait_for_everyone()
    return store or make(resume=True, overwrite=False)


def _run_suites(
    settings: EvaluationSettings,
    subjects: Sequence[Subject],
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus | None,
    store: SampleStore,
    state: PartialState,
    cost: Cost,
) -> None:
    rank, world = state.process_index, state.num_processes
    quiet = not settings.progress or rank != 0
    # Latency first: it wants a machine that has not been heated up, and its cells are what a user waits for least.
    if "latency" in settings.suite and rank == 0:
        with tqdm(total=sum(settings.lengths) * len(subjects), desc="latency", unit="tok", disable=quiet) as bar:
            for subject in subjects:
                for tokens in latency.run_latency(subject, settings, store):
                    bar.update(tokens)
    state.wait_for_everyone()
    if "retrieval" in settings.suite:
        with tqdm(total=cost.retrieval_tokens, desc="retrieval", unit="tok", disable=quiet) as bar:
            for subject in subjects:
                for tokens in retrieval.run_retrieval(subject, tokenizer, settings, store, rank=rank, world=world):
                    bar.update(tokens)
    if corpus is not None:
        with tqdm(total=cost.perplexity_tokens, desc="perplexity", unit="tok", disable=quiet) as bar:
            perplexity.run_perplexity(subjects, corpus, settings, store, rank=rank, world=world, on_tokens=bar.update)
    state.wait_for_everyone()
    if "lm-eval" in settings.suite and rank == 0:
        runs = len(subjects) * len(settings.lm_eval_tasks)
        with tqdm(total=runs, desc="lm-eval", unit="task", disable=quiet) as bar:
            for count in run_lm_eval(subjects, tokenizer, settings, store):
                bar.update(count)
    if rank == 0:
        store.merge_files()
    state.wait_for_everyone()
    store.reload()


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run is expected to read and how long that takes, from short trials of each model.

    Args:
        retrieval_tokens: Prompt tokens of all retrieval samples and models, shared prefixes counted each time.
        perplexity_tokens: Tokens of all perplexity windows, counted once for all models.
        latency_tokens: Tokens of all latency cells, repeats included.
        seconds: Expected duration of these suites.
    """

    retrieval_tokens: int
    perplexity_tokens: int
    latency_tokens: int
    seconds: float

    def describe(self) -> str:
        """Say it in a sentence."""
        total = self.retrieval_tokens + self.perplexity_tokens + self.latency_tokens
        return (
            f"About {_duration(self.seconds)} for {total:,} tokens: retrieval {self.retrieval_tokens:,}, "
            f"perplexity {self.perplexity_tokens:,}, latency {self.latency_tokens:,}."
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclasses.dataclass(frozen=True)
class _Pace:
    """How long a model takes, as polynomials in the context length: softmax attention grows with it, linear does not.

    Args:
        read: Seconds per token, and per token squared, of reading one row of a batch.
        step: Seconds of decoding a token of every row, and more of them per token before it.
    """

    read: tuple[float, float]
    step: tuple[float, float]

    def read_s(self, tokens: int, shared: int = 0) -> float:
        """Return the seconds of reading a row of `tokens`, the first `shared` of them read before."""
        return self.read[0] * (tokens - shared) + self.read[1] * (tokens**2 - shared**2)

    def step_s(self, context: int) -> float:
        """Return the seconds of decoding a token of every row."""
        return self.step[0] + self.step[1] * context


def estimate_cost(
    settings: EvaluationSettings,
    subjects: Sequence[Subject],
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus | None,
) -> Cost:
    """Estimate what a run costs, from short reads and decode steps of each model."""
    retrieval_tokens = latency_tokens = 0
    seconds = 0.0
    plans = perplexity.plan_perplexity(settings, corpus) if corpus is not None else []
    perplexity_tokens = sum(window.stop - window.start for plan in plans for window in plan.windows)
    prompts = retrieval.plan_prompts(settings, tokenizer) if "retrieval" in settings.suite else []
    for subject in subjects:
        able = [length for length in settings.lengths if subject.refusal(length) is None]
        if not able:
            continue
        pace = _calibrate(subject, settings, able[-1])
        for prompt in prompts:
            retrieval_tokens += prompt.samples * prompt.length
            if prompt.length in able:
                answer_s = prompt.max_new_tokens * pace.step_s(prompt.length) / settings.batch_size
                seconds += prompt.samples * (pace.read_s(prompt.length, prompt.shared) + answer_s)
        for plan in plans:
            if plan.length in able:
                seconds += sum(pace.read_s(window.stop - window.start) for window in plan.windows)
        for length in able if "latency" in settings.suite else ():
            # One more run is watched for its memory.
            runs = settings.warmups + settings.repeats + 1
            decoded = min(settings.decode_tokens, length // 2)
            latency_tokens += runs * settings.batch_size * length
            seconds += runs * (settings.batch_size * pace.read_s(length - decoded) + decoded * pace.step_s(length))
    return Cost(retrieval_tokens, perplexity_tokens, latency_tokens, seconds)


def _calibrate(subject: Subject, settings: EvaluationSettings, longest: int) -> _Pace:
    """Time a model at two lengths; where memory ends before the longer one, the shorter has to do."""
    short, long = (min(tokens, longest - 1) for tokens in _CALIBRATION_TOKENS)
    # The first warms up.
    found = [_trial(subject, settings, short) for _ in range(2)][1:]
    if long > short:
        try:
            found.append(_trial(subject, settings, long))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    (read, step), (long_read, long_step) = found[0], found[-1]
    if len(found) == 1:
        return _Pace((read, 0.0), (step, 0.0))
    # Rounding and noise must not make a longer context cheaper.
    growth = max(0.0, long_read - read) / (long - short)
    step_growth = max(0.0, long_step - step) / (long - short)
    return _Pace((max(0.0, long_read - growth * long), growth), (max(0.0, long_step - step_growth * long), step_growth))


def _trial(subject: Subject, settings: EvaluationSettings, tokens: int) -> tuple[float, float]:
    """Return seconds per token read and per decode step at a length."""
    ids = torch.zeros(settings.batch_size, tokens, dtype=torch.long, device=subject.device)
    caches: list[Any] = []

    def read() -> None:
        caches.append(prefill(subject.model, ids, None, settings.prefill_chunk)[1])

    def step() -> None:
        forward(subject.model, ids[:, :1], caches[-1], all_logits=False)

    read_ms = timed(subject.device, read)
    # The first has what the later ones do not: a place for the tokens to come.
    step_ms = [timed(subject.device, step) for _ in range(2)][-1]
    return read_ms / 1000 / ids.numel(), step_ms / 1000


def _collect(
    settings: EvaluationSettings,
    subjects: Sequence[Subject],
    corpus: Corpus | None,
    store: SampleStore,
    extras: Mapping[str, float | str],
) -> dict[str, Any]:
    cells, floors = retrieval.collect_cells(subjects, settings, store) if "retrieval" in settings.suite else ([], [])
    results: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "environment": environment(subjects[0].device),
        "model": subjects[0].facts(),
        "references": [subject.facts() for subject in subjects[1:]],
        "args": settings.identity(),
        "cells": cells,
        "floors": floors,
        "perplexity": None if corpus is None else perplexity.collect_perplexity(subjects, corpus, settings, store),
        "latency": latency.collect_latency(subjects, settings, store) if "latency" in settings.suite else [],
        "lm_eval": collect_lm_eval(subjects, settings, store) if "lm-eval" in settings.suite else [],
        "extras": dict(extras),
    }
    return add_comparisons(results)


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and the machine that the figures come from."""
    versions: dict[str, str | None] = {}
    for package in ("hf_linear_attn", "torch", "transformers", "triton", "accelerate", "lm_eval"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        **versions,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "device_name": name,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def source_commit() -> str | None:
    """Return the commit of this package's source, marked where it was changed, or None where it is no checkout."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        # A package installed inside of somebody's repository is not that repository's commit.
        subprocess.run([*here, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        found = subprocess.run(
            [*here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def compare(paths: Sequence[str | Path], output_dir: str | Path, *, plots: bool = True) -> dict[str, Any]:
    """Make one report of several runs.

    Args:
        paths: `results.json` files, or the folders that hold one; the first one's model leads the report.
        output_dir: Where `results.json`, `report.html` and `report.md` go.
        plots: Whether to draw the pictures; default True.

    Returns:
        The combined results.

    Raises:
        ArgumentError: If fewer than two paths are given, or the folder cannot be written.
        CheckpointError: If a file is missing, damaged or of another schema version.
    """
    if len(paths) < 2:
        raise ArgumentError("paths", "be at least two results", list(map(str, paths)), "Name another run.")
    make_folder(output_dir)
    results = combine([(_label(Path(path)), read_results(Path(path))) for path in paths])
    write_results(results, Path(output_dir))
    write_report(results, output_dir, plots=plots)
    return results


def _label(path: Path) -> str:
    folder = path.parent if path.suffix == ".json" else path
    return folder.resolve().name
