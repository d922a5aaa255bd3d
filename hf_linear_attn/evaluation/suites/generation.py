"""The generation suite: what a model writes beside its teacher, from the same places of a text, by context length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import view
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.figures import Axes
from hf_linear_attn.evaluation.generation import continue_rows, prefill, unless_out_of_memory
from hf_linear_attn.evaluation.scoring import score_tokens
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.statistics import bootstrap_ratio_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject, check_vocabulary
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.text import Corpus, load_corpus, plan_final_windows, window_ids
from hf_linear_attn.evaluation.view import Results, Row

_GRAM = 4
_MODES = ("greedy", "sampled")
_FIGURES = {"agreement": "tokens as the teacher's", "nats": "nats per token", "distinct": "distinct 4-grams"}
_EXAMPLES = 2
# Tokens of the text that an example shows before what was written.
_BEFORE = 16


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of the generation suite.

    Args:
        continuations: Places in the text that models write on from, the same at every length.
        continuation_tokens: Tokens that they write there, at most half of the shortest length.
        continuation_file: UTF-8 text to write on; without it, held-out source of the standard library.
    """

    continuations: int = 16
    continuation_tokens: int = 64
    continuation_file: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, continuations=1, continuation_tokens=_GRAM)


@register_suite
class Generation(Suite):
    """What does the model write, and what does its teacher think of it?"""

    name = "generation"
    title = "generation suite"
    Settings = GenerationSettings
    parts = {"generation": []}  # noqa: RUF012
    row_key = ("model", "length", "mode")
    place = 25
    own: GenerationSettings

    @cached_property
    def corpus(self) -> Corpus:
        """The text."""
        return load_corpus(self.tokenizer, self.own.continuation_file, joined=True, name="continuation_file")

    @property
    def new_tokens(self) -> int:
        """Tokens of a continuation."""
        return min(self.own.continuation_tokens, self.settings.lengths[0] // 2)

    def prompts(self, length: int) -> Tensor:
        """Return what is written on in a context of that length, continuation included, `[B, T]`.

        All lengths end at the same places.
        """
        longest, count = self.settings.lengths[-1], self.own.continuations
        windows = plan_final_windows(self.corpus, length, longest, self.new_tokens, count)
        return torch.tensor(window_ids(self.corpus, windows))[:, : length - self.new_tokens]

    def check(self) -> None:
        """Refuse a teacher of another vocabulary, and lengths that leave nothing to write or to read.

        Raises:
            ArgumentError: If one of them is met.
        """
        for subject in self.subjects:
            check_vocabulary(self.teacher, subject)
        shortest, longest = self.settings.lengths[0], self.settings.lengths[-1]
        if self.new_tokens < _GRAM:
            rule, remedy = f"be at least {2 * _GRAM} for the generation suite", "Leave it out."
            raise ArgumentError("lengths", rule, shortest, remedy)
        there = len(self.corpus.documents[0].ids) + len(self.corpus.bos)
        if longest > there:
            remedy = "Leave it out, or name a longer text: continuation_file."
            raise ArgumentError("lengths", f"be at most the text's {there} tokens", longest, remedy)

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the tokens: each model reads and writes in both modes, and one reads what was written."""
        texts, read, seconds = len(_MODES) * self.own.continuations, 0, 0.0
        for length in self.settings.lengths:
            for subject in self.able(length):
                pace, judging = paces[subject.name], paces.get(self.judge(subject).name)
                read += 2 * texts * length
                seconds += texts * (pace.read_s(length) + (judging.read_s(length) if judging else 0.0))
                seconds += texts * self.new_tokens * pace.step_s(length) / self.settings.batch_size
        return Plan(len(self.subjects) * sum(self.settings.lengths), read, seconds)

    def judge(self, subject: Subject) -> Subject:
        """Return the model whose nats are asked of what a model wrote: the teacher, or where none is, its own."""
        return self.teacher or subject

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Write every continuation that the store does not hold."""
        for length in self.settings.lengths:
            for subject in self.subjects:
                for mode in _MODES if subject.refusal(length) is None else ():
                    if self.record(store, subject, f"{length}/{mode}") is None:
                        found = unless_out_of_memory(self._write, subject, length, mode)
                        self.keep(store, subject, f"{length}/{mode}", **(found or {"tokens": None}))
                advance(length)

    @torch.inference_mode()
    def _write(self, subject: Subject, length: int, mode: str) -> dict[str, Any]:
        """Return the tokens of every continuation, and the judge's sum of nats, None where it cannot tell."""
        judge, chunk, size = self.judge(subject), self.settings.prefill_chunk, self.settings.batch_size
        tokens: list[list[int]] = []
        nats: list[float] | None = [] if judge.refusal(length) is None else None
        prompts, random = self.prompts(length), torch.Generator().manual_seed(self.settings.seed)
        # One number for each place and token: all models draw by the same ones.
        uniforms = torch.rand(len(prompts), self.new_tokens, generator=random, dtype=torch.float64)
        for part, numbers in zip(torch.split(prompts, size), torch.split(uniforms, size), strict=True):
            last, cache = prefill(subject.model, part.to(subject.device), None, chunk)
            by = numbers if mode == "sampled" else None
            # None ends a text, so that all are of one length.
            written = continue_rows(subject.model, last, cache, self.new_tokens, frozenset(), uniforms=by)
            tokens += written
            if nats is not None:
                whole = torch.cat([part, torch.tensor(written)], dim=1)
                scores = score_tokens([judge], whole, part.shape[1], chunk, lambda count: None)[judge.name]
                nats = None if scores is None else [*nats, *scores["nll"].sum(1).tolist()]  # type: ignore[union-attr]
        return {"tokens": tokens, "nats": nats}

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's continuations into rows."""
        rows = []
        for subject in self.subjects:
            for length in self.settings.lengths:
                for mode in _MODES:
                    what, reference = f"{length}/{mode}", None if subject is self.teacher else self.teacher
                    record = self.record(store, subject, what)
                    beside = None if reference is None else self.record(store, reference, what)
                    row = {"model": subject.name, "length": length, "mode": mode, "judge": self.judge(subject).name}
                    row |= _figures(record, beside, subject.refusal(length))
                    rows.append(row | {"examples": self._examples(length, record)})
        return {"generation": rows}

    def _examples(self, length: int, record: Row | None) -> list[dict[str, str]]:
        """Return the first continuations as text, with what stands before them."""
        written = (record or {}).get("tokens") or []
        prompts = self.prompts(length)[:, -_BEFORE:].tolist() if written else []
        pairs = list(zip(prompts, written, strict=True))[:_EXAMPLES]
        return [{"after": str(self.tokenizer.decode(p)), "text": str(self.tokenizer.decode(w))} for p, w in pairs]

    @classmethod
    def quality(cls, results: Results) -> list[str]:
        """Say what the model under test writes at its longest length, beside its teacher."""
        mine = view.measured(results["generation"], results["model"]["name"])
        longest = max((row["length"] for row in mine), default=0)
        said = []
        for row in (row for row in mine if row["length"] == longest):
            parts = [f"{row['distinct']:.0%} of 4-grams distinct"]
            if row["nats"] is not None:
                parts.insert(0, f"{row['nats']:.2f} nats per token by the {row['judge']}")
            if row["agreement"] is not None:
                parts.insert(0, f"{row['agreement']:.1f} of {row['new_tokens']} tokens as the teacher's")
            at = f"at {view.tokens(row['length'])} tokens, {row['mode']}"
            said.append(f"What {row['model']} writes {at}: {', '.join(parts)}.")
        return said

    @classmethod
    def pictures(cls, results: Results) -> list[view.Section]:
        """Draw every figure by length."""
        found: list[view.Picture] = []
        for mode in _MODES:
            rows = [row for row in results["generation"] if row["mode"] == mode]
            for name, title in _FIGURES.items():
                axes = Axes("context length in tokens", title, percent=name == "distinct")
                series = view.lines(results, rows, name)
                found += view.chart(f"generation-{name}-{mode}", title.capitalize(), mode, series, axes)
        text = "Tokens as the teacher's are those until the first that differs. Nats are the teacher's, or without one "
        text += "the model's own. Sampled texts of all models are drawn by the same numbers. "
        return [view.Section("What it writes", text + "Whiskers are bootstrap 95% intervals over texts.", found)]

    @classmethod
    def tables(cls, results: Results) -> list[view.Table]:
        """Return the rows, and examples at the longest length side by side."""
        columns: view.Columns = {
            "model": ("model", str),
            "mode": ("mode", str),
            "length": ("length", view.tokens),
            "texts": ("texts", str),
            **{title: (name, str) for name, title in _FIGURES.items()},
            "nats of": ("judge", str),
        }
        rows: list[Row] = results["generation"]
        shown = [{**row, **{name: _with_interval(row, name) for name in _FIGURES}} for row in rows]
        longest = max((row["length"] for row in rows), default=0)
        listed = [
            [mode, _quoted(one["after"]), row["model"], _quoted(one["text"])]
            for mode in _MODES
            for at in range(_EXAMPLES)
            for row in rows
            if (row["mode"], row["length"]) == (mode, longest)
            for one in row["examples"][at : at + 1]
        ]
        examples = view.Table("Examples of what is written", ("mode", "after", "model", "written"), listed)
        return [view.table("What it writes", shown, columns, status="texts"), examples]


def _figures(record: Row | None, beside: Row | None, reason: str | None) -> dict[str, Any]:
    """Sum continuations up to a row's figures."""
    found: dict[str, Any] = {"status": "ok", "reason": None, "texts": 0, "new_tokens": None}
    found |= {f"{name}{end}": None for name in _FIGURES for end in ("", "_ci95")}
    if record is None:
        return found | {"status": "unsupported", "reason": reason}
    if record["tokens"] is None:
        return found | {"status": "out-of-memory", "reason": "The model ran out of memory."}
    tokens, others = record["tokens"], (beside or {}).get("tokens")
    n, length = len(tokens), len(tokens[0])
    values = {
        "agreement": others and [_agreement(*pair) for pair in zip(tokens, others, strict=True)],
        "nats": record["nats"] and [sum_ / length for sum_ in record["nats"]],
        "distinct": [_distinct(text) for text in tokens],
    }
    for name, ones in values.items():
        if ones:
            found |= {name: sum(ones) / n, f"{name}_ci95": list(bootstrap_ratio_interval(ones, [1] * n))}
    return found | {"texts": n, "new_tokens": length}


def _agreement(text: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common until the first that differs."""
    return next((at for at, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), len(text))


def _distinct(text: Sequence[int]) -> float:
    """Return the share of a text's 4-grams that are distinct."""
    grams = [tuple(text[at : at + _GRAM]) for at in range(len(text) - _GRAM + 1)]
    return len(set(grams)) / len(grams)


def _with_interval(row: Row, name: str) -> str | None:
    return None if row[name] is None else "{:.3g} ({:.3g} to {:.3g})".format(row[name], *row[f"{name}_ci95"])


def _quoted(text: str) -> str:
    """Write a text into one line, as code."""
    line = text.replace("\n", "↵").replace("`", "'")
    return f"`{''.join(one if one.isprintable() else '·' for one in line)}`"
