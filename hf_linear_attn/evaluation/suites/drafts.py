"""The drafts suite: a converted model drafts what its teacher answers, by context length and by tokens drafted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.evaluation import view
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.drafting import Answer, answer, watched_caches
from hf_linear_attn.evaluation.figures import Axes
from hf_linear_attn.evaluation.generation import unless_out_of_memory
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.statistics import bootstrap_ratio_interval
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject, check_vocabulary
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.text import load_corpus
from hf_linear_attn.evaluation.view import Results, Row
from hf_linear_attn.patching import teacher_of

_NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "prompts", "new_tokens", "rounds", "accepted_per_round", "accepted_per_round_ci95", "identical", "first_ms",
        "teacher_first_ms", "tokens_per_s", "teacher_tokens_per_s", "draft_cache_bytes", "teacher_cache_bytes",
    )
)  # fmt: skip

_TIMES = ("first_ms", "teacher_first_ms", "tokens_per_s", "teacher_tokens_per_s")


@dataclass(frozen=True)
class DraftsSettings:
    """Settings of the drafts suite.

    Args:
        drafted: Tokens that are drafted in a round.
        draft_lengths: Context lengths in tokens, answers included; those of ``lengths`` where it is left out.
        draft_prompts: Prompts of each length.
        draft_answer: Tokens of an answer, at most half of the length.
        draft_file: UTF-8 text to cut prompts from; without it, held-out source of the standard library.
    """

    drafted: tuple[int, ...] = (2, 4, 8)
    draft_lengths: tuple[int, ...] | None = None
    draft_prompts: int = 8
    draft_answer: int = 64
    draft_file: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, drafted=1, draft_lengths=2, draft_prompts=1, draft_answer=1)


@register_suite
class Drafts(Suite):
    """Is the teacher faster with a converted model that drafts for it?"""

    name = "drafts"
    title = "drafts suite"
    Settings = DraftsSettings
    parts = {"drafts": []}  # noqa: RUF012
    row_key = ("model", "length", "drafted")
    place = 35
    own: DraftsSettings

    @property
    def lengths(self) -> tuple[int, ...]:
        """The context lengths, ascending."""
        return tuple(sorted(self.own.draft_lengths or self.settings.lengths))

    @cached_property
    def pairs(self) -> list[tuple[Subject, PreTrainedModel]]:
        """Every converted model, with the softmax model that answers: of its own weights where no teacher is given."""
        drafting = [subject for subject in self.subjects if subject.linear_attention is not None]
        return [(one, teacher_of(one.model) if self.teacher is None else self.teacher.model) for one in drafting]

    @cached_property
    def _text(self) -> tuple[tuple[int, ...], Tensor]:
        corpus = load_corpus(self.tokenizer, self.own.draft_file, joined=True, name="draft_file")
        return corpus.bos, torch.tensor(corpus.documents[0].ids)

    def answer_tokens(self, length: int) -> int:
        """Return the tokens of an answer at a length."""
        return min(self.own.draft_answer, length // 2)

    def prompts(self, length: int) -> list[Tensor]:
        """Return the prompts of a length, `[1, T]` each, from places all over the text."""
        bos, ids = self._text
        size = length - self.answer_tokens(length) - len(bos)
        last, count = len(ids) - size, self.own.draft_prompts
        starts = [last * n // max(1, count - 1) for n in range(count)]
        return [torch.tensor([[*bos, *ids[start : start + size].tolist()]]) for start in starts]

    def check(self) -> None:
        """Refuse models that cannot draft for the teacher, and lengths that the text does not have.

        Raises:
            UnsupportedError: If the model has no converted layer.
            ArgumentError: If the teacher has another vocabulary, or the text is too short.
        """
        first = self.subjects[0]
        if first.linear_attention is None:
            rule, kind = "have a converted layer for the drafts suite", type(first.model).__name__
            remedy = "Call patch_model first, or load a folder that a patched model was saved to."
            raise UnsupportedError("model", rule, kind, remedy, where=first.name)
        for subject, _ in self.pairs:
            check_vocabulary(self.teacher, subject)
        longest, length = sum(map(len, self._text)), self.lengths[-1]
        if length - self.answer_tokens(length) > longest:
            remedy = "Shorten it, or name a longer text: draft_file."
            raise ArgumentError("draft_lengths", f"leave prompts of at most {longest} tokens", length, remedy)

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the tokens that teachers read and answer, and the time of that."""
        read, seconds = 0, 0.0
        runs = (self.own.draft_prompts + 1) * (1 + len(self.own.drafted))
        for subject, _ in self.pairs:
            pace = paces.get(subject.name if self.teacher is None else self.teacher.name)
            for length in self.lengths:
                if pace is not None and self._refusal(subject, length) is None:
                    read += runs * length
                    # What drafts save and cost is not known before.
                    seconds += runs * (pace.read_s(length) + self.answer_tokens(length) * pace.step_s(length))
        return Plan(len(self.pairs) * sum(self.lengths), read, seconds)

    def _refusal(self, subject: Subject, length: int) -> str | None:
        """Say why one of the two models cannot read a length."""
        return subject.refusal(length) or (None if self.teacher is None else self.teacher.refusal(length))

    def _what(self, length: int) -> str:
        return f"{length}/{'own' if self.teacher is None else self.teacher.fingerprint}"

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Answer every prompt that the store holds no answers to."""
        for length in self.lengths:
            for subject, teacher in self.pairs:
                done = self.record(store, subject, self._what(length)) is not None
                if not done and self._refusal(subject, length) is None:
                    found = unless_out_of_memory(self._answers, subject, teacher, length)
                    self.keep(store, subject, self._what(length), **(found or {"alone": None}))
                advance(length)

    def _answers(self, subject: Subject, teacher: PreTrainedModel, length: int) -> dict[str, Any]:
        """Answer the prompts of a length alone and with drafts, one right after the other."""
        new, student = self.answer_tokens(length), subject.model
        prompts = [prompt.to(subject.device) for prompt in self.prompts(length)]
        held = {}
        for drafted in self.own.drafted:
            # What is asked first compiles; it is watched for memory, which takes time too.
            with watched_caches(student, teacher) as most:
                answer(teacher, prompts[0], new, student, drafted)
            held[str(drafted)] = most[0]
        with watched_caches(teacher) as most:
            answer(teacher, prompts[0], new)
        alone, with_drafts = [], []
        for prompt in prompts:
            alone.append(asdict(answer(teacher, prompt, new)))
            found = {str(n): asdict(answer(teacher, prompt, new, student, n)) for n in self.own.drafted}
            with_drafts.append(found)
        return {"alone": alone, "drafts": with_drafts, "draft_cache_bytes": held, "teacher_cache_bytes": most[0]}

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's answers into rows."""
        rows = []
        for subject, _ in self.pairs:
            for length in self.lengths:
                record, reason = self.record(store, subject, self._what(length)), self._refusal(subject, length)
                for drafted in self.own.drafted:
                    row = {"model": subject.name, "length": length, "drafted": drafted}
                    row["shared_weights"] = self.teacher is None
                    rows.append(row | _figures(record, drafted, reason))
        return {"drafts": rows}

    @classmethod
    def without_times(cls, results: dict[str, Any]) -> dict[str, Any]:
        """Return results without what a clock decides."""
        for row in results["drafts"]:
            for name in _TIMES:
                row.pop(name, None)
        return results

    @classmethod
    def headlines(cls, results: Results) -> list[view.Headline]:
        """Say how much faster answers come with drafts at the longest length."""
        best = _best(results)
        if not best:
            return []
        row = best[-1]
        figure, word = view.compared(row["tokens_per_s"] / row["teacher_tokens_per_s"], "faster", "slower")
        at = f"answers with drafts at {view.tokens(row['length'])} tokens"
        detail = f"{row['accepted_per_round']:.2g} of {row['drafted']} drafted tokens accepted in a round; "
        detail += f"{row['identical']} of {row['prompts']} greedy answers identical"
        return [view.Headline(figure, f"{word} {at}" if word else f"{at} about as fast", detail)]

    @classmethod
    def quality(cls, results: Results) -> list[str]:
        """Say how many answers are the teacher's own, and what is accepted at the longest length."""
        rows = _rows(results)
        if not rows:
            return []
        same, asked = (sum(row[name] for row in rows) for name in ("identical", "prompts"))
        far = [row for row in rows if row["length"] == max(row["length"] for row in rows)]
        listed = ", ".join(f"{row['accepted_per_round']:.2f} of {row['drafted']}" for row in far)
        return [
            f"With drafts of {results['model']['name']}, {same} of {asked} greedy answers are the teacher's own; in a "
            f"round at {view.tokens(far[0]['length'])} tokens it accepts {listed} drafted tokens."
        ]

    @classmethod
    def speed(cls, results: Results) -> list[str]:
        """Compare tokens per second at every length, each with the best number of drafted tokens."""
        listed = [
            f"{row['tokens_per_s'] / row['teacher_tokens_per_s']:.2f} times at {view.tokens(row['length'])} with "
            f"{row['drafted']} drafted"
            for row in _best(results)
        ]
        what = "After the first round, answers with drafts come at these rates beside the teacher alone"
        return [f"{what}: {', '.join(listed)}."] if listed else []

    @classmethod
    def pictures(cls, results: Results) -> list[view.Section]:
        """Draw what is accepted by length, for each number of drafted tokens, and the answers' speed."""
        found: list[view.Picture] = []
        for drafted in sorted({row["drafted"] for row in results["drafts"]}):
            rows = [row for row in results["drafts"] if row["drafted"] == drafted]
            axes = Axes("context length in tokens", "tokens in a round", y_range=(0.0, float(drafted)))
            series = view.lines(results, rows, "accepted_per_round")
            subtitle = f"accepted in a round, {drafted} drafted"
            found += view.chart(f"drafts-accepted-{drafted}", "Accepted drafts", subtitle, series, axes)
            axes = Axes("context length in tokens", "tokens per second", log_y=True)
            series = view.lines(results, [*rows, *_of_teachers(results, rows)], "tokens_per_s")
            subtitle = f"greedy, after the first round, {drafted} drafted"
            found += view.chart(f"drafts-speed-{drafted}", "Answers with drafts", subtitle, series, axes)
        text = "A model's line is the teacher with its drafts. Whiskers are bootstrap 95% intervals over prompts."
        return [view.Section("Drafts", text, found)]

    @classmethod
    def tables(cls, results: Results) -> list[view.Table]:
        """Return the rows."""
        columns: view.Columns = {
            "model": ("model", str),
            "length": ("length", view.tokens),
            "drafted": ("drafted", str),
            "prompts": ("prompts", str),
            "accepted in a round": ("accepted_per_round", partial(view.number, digits=3)),
            "identical": ("identical", str),
            "tokens/s": ("tokens_per_s", view.number),
            "teacher tokens/s": ("teacher_tokens_per_s", view.number),
            "first ms": ("first_ms", view.number),
            "teacher first ms": ("teacher_first_ms", view.number),
            "draft cache": ("draft_cache_bytes", view.size),
            "teacher cache": ("teacher_cache_bytes", view.size),
        }
        return [view.table("Drafts", results["drafts"], columns, status="accepted in a round")]


def _figures(record: Row | None, drafted: int, reason: str | None) -> dict[str, Any]:
    """Sum answers up to a row's figures."""
    if record is None:
        return {"status": "unsupported", "reason": reason, **_NOTHING}
    if record["alone"] is None:
        return {"status": "out-of-memory", "reason": "A model ran out of memory.", **_NOTHING}
    alone = [Answer(**one) for one in record["alone"]]
    drafts = [Answer(**one[str(drafted)]) for one in record["drafts"]]
    accepted, rounds = [sum(one.rounds) - len(one.rounds) for one in drafts], [len(one.rounds) for one in drafts]
    return {
        "status": "ok",
        "reason": None,
        "prompts": len(drafts),
        "new_tokens": len(drafts[0].tokens),
        "rounds": sum(rounds),
        "accepted_per_round": sum(accepted) / sum(rounds),
        "accepted_per_round_ci95": list(bootstrap_ratio_interval(accepted, rounds)),
        "identical": sum(one.tokens == other.tokens for one, other in zip(alone, drafts, strict=True)),
        "first_ms": fmean(one.first_ms for one in drafts),
        "teacher_first_ms": fmean(one.first_ms for one in alone),
        "tokens_per_s": _per_second(drafts),
        "teacher_tokens_per_s": _per_second(alone),
        "draft_cache_bytes": record["draft_cache_bytes"][str(drafted)],
        "teacher_cache_bytes": record["teacher_cache_bytes"],
    }


def _per_second(answers: Sequence[Answer]) -> float | None:
    """Return the tokens per second after first rounds; None where those were all."""
    tokens, ms = sum(sum(one.rounds[1:]) for one in answers), sum(one.rest_ms for one in answers)
    return 1000 * tokens / ms if tokens else None


def _rows(results: Results) -> list[Row]:
    """Return the measured rows of the model under test."""
    rows = view.measured(results["drafts"], results["model"]["name"])
    return [row for row in rows if row["tokens_per_s"] and row["teacher_tokens_per_s"]]


def _best(results: Results) -> list[Row]:
    """Return the fastest of them at each length, ascending."""
    rows = sorted(_rows(results), key=lambda row: (row["length"], row["tokens_per_s"]))
    return list({row["length"]: row for row in rows}.values())


def _of_teachers(results: Results, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows of the teacher alone, where it is one of the models."""
    return [
        {**row, "model": teacher, "tokens_per_s": row["teacher_tokens_per_s"]}
        for teacher in view.teachers_of(results)[:1]
        for row in rows
        if row["model"] == results["model"]["name"]
    ]
