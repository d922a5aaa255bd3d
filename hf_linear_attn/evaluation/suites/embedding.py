"""The embedding suite, for encoders: nearness to the teacher, retrieval of a text's other half, and time, by length."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from hf_linear_attn.encoders import Frame, Pooling, embed, pooling_of
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import view
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.embedding import LOW_PERCENT, compare_embeddings
from hf_linear_attn.evaluation.figures import Axes
from hf_linear_attn.evaluation.meters import timed
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.view import Results, Row
from hf_linear_attn.loading import Kind, read_text

_LOW = f"cosine_p{LOW_PERCENT:02d}"
_FIGURES = (
    "texts", "mean_reciprocal_rank", "top1", "median_rank", "cosine_mean", _LOW, "cosine_min", "between_texts",
    "ms_per_text",
)  # fmt: skip


@dataclass(frozen=True)
class EmbeddingSettings:
    """Settings of the embedding suite.

    Args:
        embedding_lengths: Tokens of a text, special ones included.
        embedding_texts: Texts of each length.
        embedding_file: UTF-8 text to cut them from; without it, held-out source of the standard library.
        embedding_repeats: Timed forwards of each length.
        pooling: How an embedding is made of tokens; without it, what the model's folder says, else ``mean``.
    """

    embedding_lengths: tuple[int, ...] = (32, 128, 512)
    embedding_texts: int = 128
    embedding_file: str | None = None
    embedding_repeats: int = 5
    pooling: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, embedding_lengths=8, embedding_texts=2, embedding_repeats=1)


@register_suite
class Embedding(Suite):
    """Are a student encoder's embeddings the teacher's?"""

    name = "embedding"
    title = "embedding suite (encoders)"
    Settings = EmbeddingSettings
    kind: ClassVar[Kind] = "encoder"
    parts = {"embedding": []}  # noqa: RUF012
    row_key = ("model", "length")
    place = 40
    unit = "text"
    own: EmbeddingSettings

    @cached_property
    def frame(self) -> Frame:
        """The special tokens around a text."""
        return Frame.of(self.tokenizer)

    @cached_property
    def pooling(self) -> Pooling:
        """How an embedding is made of hidden states."""
        return pooling_of(self.subjects[0].path, self.own.pooling)

    @cached_property
    def documents(self) -> list[list[int]]:
        """The tokens of the documents that texts are cut from."""
        named = self.own.embedding_file
        texts = load_stdlib_documents("heldout") if named is None else [read_text(named, "embedding_file")]
        return [self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]

    def texts(self, length: int) -> list[list[int]]:
        """Return texts of that many tokens, special ones included, spread over all documents."""
        size = length - len(self.frame.begin) - len(self.frame.end)
        found = [ids[n : n + size] for ids in self.documents for n in range(0, len(ids) - size + 1, size)]
        count = min(self.own.embedding_texts, len(found))
        return [found[n * len(found) // count] for n in range(count)]

    def check(self) -> None:
        """Refuse lengths of which there are no two texts."""
        _ = self.pooling
        for length in self.own.embedding_lengths:
            if len(self.texts(length)) < 2:
                raise ArgumentError(
                    "embedding_lengths", "leave two texts at least", length, "Shorten it, or name a longer file."
                )

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the texts that are read: whole and in halves, and again to time them."""
        counts = {n: 2 * len(self.texts(n)) + self.own.embedding_repeats for n in self.own.embedding_lengths}
        read = sum(length * count for length, count in counts.items())
        return Plan(sum(counts.values()) * len(self.subjects), read * len(self.subjects))

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Measure every length that the store does not hold yet."""
        for length in self.own.embedding_lengths:
            able = self.able(length)
            if any(self.record(store, subject, length) is None for subject in able):
                texts = self.texts(length)
                models = {subject.name: subject.model for subject in able}
                found = compare_embeddings(models, texts, self.frame, self.pooling, pad=self.pad)
                for subject in able:
                    found[subject.name]["ms_per_text"] = self._time(subject.model, texts[0])
                    self.keep(store, subject, length, figures=found[subject.name])
            advance((2 * self.own.embedding_texts + self.own.embedding_repeats) * len(self.subjects))

    @property
    def pad(self) -> int:
        """The token that fills up short rows."""
        return self.tokenizer.pad_token_id or 0

    def _time(self, model: Any, text: list[int]) -> float:
        device = next(model.parameters()).device
        ids = torch.tensor([self.frame.around(text)], device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        taken = [
            timed(device, lambda: embed(model, ids, mask, self.pooling)) for _ in range(self.own.embedding_repeats + 1)
        ]
        return statistics.median(taken[1:])

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's records into rows."""
        rows = []
        for subject in self.subjects:
            for length in self.own.embedding_lengths:
                record = self.record(store, subject, length)
                unread = {"status": "unsupported", "reason": subject.refusal(length)}
                row = {"model": subject.name, "length": length, "status": "ok", "reason": None}
                rows.append(row | dict.fromkeys(_FIGURES) | (unread if record is None else record["figures"]))
        return {"embedding": rows}

    @classmethod
    def without_times(cls, results: dict[str, Any]) -> dict[str, Any]:
        """Return results without what a clock decides."""
        for row in results["embedding"]:
            row.pop("ms_per_text", None)
        return results

    @classmethod
    def headlines(cls, results: Results) -> list[view.Headline]:
        """Say how near the embeddings are."""
        mine, _ = _longest(results)
        if mine is None or mine["cosine_mean"] is None:
            return []
        label = f"mean cosine to the teacher at {view.tokens(mine['length'])} tokens"
        detail = f"worst {LOW_PERCENT}% {mine[_LOW]:.3f}; different texts have {mine['between_texts']:.3f}"
        return [view.Headline(f"{mine['cosine_mean']:.3f}", label, detail)]

    @classmethod
    def quality(cls, results: Results) -> list[str]:
        """Compare retrieval with the teacher's at the longest length."""
        mine, theirs = _longest(results)
        if mine is None or theirs is None:
            return []
        return [
            f"Among {mine['texts']} texts of {view.tokens(mine['length'])} tokens, {mine['model']} finds the second "
            f"half of {view.percent(mine['top1'])} by the first, {theirs['model']} of {view.percent(theirs['top1'])}."
        ]

    @classmethod
    def speed(cls, results: Results) -> list[str]:
        """Compare the time of a text with the teacher's at the longest length."""
        mine, theirs = _longest(results)
        if mine is None or theirs is None:
            return []
        figure, word = view.compared(theirs["ms_per_text"] / mine["ms_per_text"], "faster", "slower")
        how = f"{figure} {word} than" if word else "about as fast as"
        return [f"A text of {view.tokens(mine['length'])} tokens is embedded {how} by {theirs['model']}."]

    @classmethod
    def pictures(cls, results: Results) -> list[view.Section]:
        """Draw the time of a text by its length."""
        series = view.lines(results, results["embedding"], "ms_per_text")
        axes = Axes("tokens of a text", "ms per text", log_y=True)
        drawn = view.chart("embedding-time", "Embedding", "one text at a time", series, axes)
        return [view.Section("Embeddings", "Both axes are logarithmic, lower is better.", drawn)]

    @classmethod
    def tables(cls, results: Results) -> list[view.Table]:
        """Return the rows."""
        columns: view.Columns = {
            "model": ("model", str),
            "length": ("length", view.tokens),
            "texts": ("texts", str),
            "mean cosine": ("cosine_mean", view.number),
            f"worst {LOW_PERCENT}%": (_LOW, view.number),
            "different texts": ("between_texts", view.number),
            "reciprocal rank": ("mean_reciprocal_rank", view.number),
            "found first": ("top1", view.percent),
            "ms per text": ("ms_per_text", view.number),
        }
        return [view.table("Embeddings", results["embedding"], columns, status="texts")]


def _longest(results: Results) -> tuple[Row | None, Row | None]:
    """Return the row of the model under test at its longest length, and the other model's at the same length."""
    mine, theirs = (
        {row["length"]: row for row in view.measured(results["embedding"], name)}
        for name in (results["model"]["name"], view.other_of(results))
    )
    longest = max(mine, default=0)
    return mine.get(longest), theirs.get(longest)
