"""The perplexity suite: each token scored once, by window length, by position, and under growing context.

Perplexity is `exp(sum NLL / sum tokens)`, never a mean of window means; bits per byte is
`sum NLL / (ln 2 * bytes of the scored text)`, which compares models across tokenizers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import view
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.figures import Axes
from hf_linear_attn.evaluation.losses import Record, by_position, nothing, summarise
from hf_linear_attn.evaluation.scoring import score_windows
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.suite import Plan, Suite, extend, register_suite
from hf_linear_attn.evaluation.text import Corpus, Window, load_corpus, plan_final_windows, plan_windows
from hf_linear_attn.evaluation.view import Results, Row


@dataclass(frozen=True)
class PerplexitySettings:
    """Settings of the perplexity suite.

    Args:
        text_file: UTF-8 text to score; without it, held-out source of the standard library.
        documents: ``joined`` reads all documents as one text, ``separate`` starts afresh at each.
        max_text_tokens: Tokens of text to score, 0 for all of it.
        stride: Tokens between windows; without it, windows do not overlap.
        final_tokens: Final tokens that are scored under growing context.
        final_windows: Places in the text where growing context is measured, 0 for none.
    """

    text_file: str | None = None
    documents: Literal["separate", "joined"] = "separate"
    max_text_tokens: int = 65536
    stride: int | None = None
    final_tokens: int = 128
    final_windows: int = 16

    def __post_init__(self) -> None:
        check_settings(self, max_text_tokens=0, stride=1, final_tokens=1, final_windows=0)


@dataclass(frozen=True)
class Reading:
    """The windows of one length.

    Args:
        kind: `"windows"` (the whole text) or `"final"` (the same final tokens under growing context).
        length: Tokens from a fresh state, BOS included.
        windows: The windows; empty where the text has no document that long.
    """

    kind: str
    length: int
    windows: tuple[Window, ...]


@register_suite
class Perplexity(Suite):
    """How well does the model predict real text?"""

    name = "perplexity"
    title = "perplexity suite"
    Settings = PerplexitySettings
    parts = {"perplexity": None}  # noqa: RUF012
    place = 20
    by_default = True
    alone = False
    own: PerplexitySettings

    @cached_property
    def corpus(self) -> Corpus:
        """The text."""
        joined = self.own.documents == "joined"
        return load_corpus(self.tokenizer, self.own.text_file, joined=joined, max_tokens=self.own.max_text_tokens)

    @cached_property
    def _text(self) -> dict[str, Any]:
        return self.corpus.facts()

    @cached_property
    def readings(self) -> list[Reading]:
        """The windows of every length.

        Raises:
            ArgumentError: If the stride does not fit, or no document reaches the shortest length.
        """
        corpus, lengths = self.corpus, self.settings.lengths
        longest = max(len(document.ids) for document in corpus.documents) + len(corpus.bos)
        reachable = [length for length in lengths if length <= longest]
        if not reachable:
            rule = f"include one of at most {longest} tokens, the longest document's"
            remedy = "Ask for a shorter one, give a longer text, join the documents or raise max_text_tokens."
            raise ArgumentError("lengths", rule, lengths, remedy)
        found = []
        for length in lengths:
            windows = plan_windows(corpus, length, self.own.stride) if length in reachable else []
            found.append(Reading("windows", length, tuple(windows)))
        final, places = min(self.own.final_tokens, reachable[0] // 2), self.own.final_windows
        for length in lengths if places else ():
            fits = length in reachable
            windows = plan_final_windows(corpus, length, reachable[-1], final, places) if fits else []
            found.append(Reading("final", length, tuple(windows)))
        return found

    def check(self) -> None:
        """Refuse a text or a stride from which no windows can be cut."""
        _ = self.readings

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the tokens of all windows, once for all models."""
        read, seconds = 0, 0.0
        for reading in self.readings:
            sizes = [window.stop - window.start for window in reading.windows]
            read += sum(sizes)
            for subject in self.able(reading.length):
                seconds += sum(paces[subject.name].read_s(size) for size in sizes)
        return Plan(read, read, seconds)

    def _key(self, store: SampleStore, reading: Reading, at: int) -> str:
        prints = "/".join(f"{subject.name}={subject.fingerprint}" for subject in self.able(reading.length))
        return store.key(prints, f"perplexity/{self._text['sha256']}/{reading.kind}/{reading.length}/{at}")

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Score every window that the store does not hold yet."""
        size = self.settings.batch_size
        for reading in self.readings:
            able = self.able(reading.length)
            keys = [self._key(store, reading, at) for at in range(len(reading.windows))] if able else []
            for b, start in enumerate(range(0, len(keys), size)):
                windows, batch = reading.windows[start : start + size], keys[start : start + size]
                if b % world == rank and any(store.get(key) is None for key in batch):
                    rows = score_windows(able, self.corpus, windows, self.settings.prefill_chunk, advance)
                    store.add(
                        {
                            "key": key,
                            "id": f"perplexity/{reading.kind}/{reading.length}/{window.document}/{window.start}",
                            **row,
                        }
                        for key, window, row in zip(batch, windows, rows, strict=True)
                    )
                else:
                    advance(sum(window.stop - window.start for window in windows))

    def _records(self, store: SampleStore, reading: Reading) -> list[Record]:
        found = [store.get(self._key(store, reading, at)) for at in range(len(reading.windows))]
        return [record for record in found if record is not None]

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's records into rows by window length, by context and by position."""
        result: dict[str, Any] = {"text": self._text, "windows": [], "by_position": [], "growing_context": []}
        for reading in self.readings:
            part = result["windows" if reading.kind == "windows" else "growing_context"]
            records = self._records(store, reading)
            part.extend(self._row(subject, reading, records) for subject in self.subjects)
        for subject in self.subjects:
            ok = [r["length"] for r in result["windows"] if r["model"] == subject.name and r["status"] == "ok"]
            # The longest length that the model could read.
            for reading in (one for one in self.readings if ok and (one.kind, one.length) == ("windows", max(ok))):
                result["by_position"] += by_position(subject.name, reading.length, self._records(store, reading))
        return {"perplexity": result}

    def _row(self, subject: Subject, reading: Reading, records: Sequence[Record]) -> dict[str, Any]:
        row = {"model": subject.name, "length": reading.length}
        refusal = subject.refusal(reading.length)
        if refusal is not None:
            return row | nothing("unsupported", refusal)
        if not reading.windows:
            return row | nothing("unsupported", "No document of the text is that long.")
        if any(record["models"][subject.name]["status"] != "ok" for record in records):
            return row | nothing("out-of-memory", "The model ran out of memory at this length.")
        scored_bytes = self._text["scored_bytes"] if reading.kind == "windows" else None
        return row | summarise(records, subject.name, scored_bytes)

    @classmethod
    def conclude(cls, results: Results) -> dict[str, Any]:
        """Return `1 - (L_model - L_teacher) / (L_baseline - L_teacher)` for each baseline and length all could read."""
        found: list[dict[str, Any]] = []
        losses = {key: row["nll_nats"] for key, row in _windows(results).items()}
        first = results["model"]["name"]
        baselines = [model["name"] for model in results["references"] if model["role"] == "baseline"]
        for teacher in view.teachers_of(results)[:1]:
            for baseline in baselines:
                for length in sorted({length for _, length in losses}):
                    mine, best, theirs = (losses.get((name, length)) for name in (first, teacher, baseline))
                    if mine is None or best is None or theirs is None or theirs <= best:
                        continue
                    closed = 1 - (mine - best) / (theirs - best)
                    found.append({"baseline": baseline, "teacher": teacher, "length": length, "gap_closed": closed})
        return {"gap_closed": found}

    @classmethod
    def merge(cls, merged: dict[str, Any], run: Results, lead: Results, label: str) -> str | None:
        """Add a run's rows, if they are about the same text."""
        found = run["perplexity"]
        if found is None:
            return None
        if merged["perplexity"] is None:
            merged["perplexity"] = {"text": found["text"], "windows": [], "by_position": [], "growing_context": []}
        if merged["perplexity"]["text"]["sha256"] != found["text"]["sha256"]:
            return f"Perplexities of {label} are left out: they were measured on another text."
        for part in ("windows", "by_position", "growing_context"):
            extend(merged["perplexity"][part], found[part], ("model", "length", "window_length", "start"))
        return None

    @classmethod
    def headlines(cls, results: Results) -> list[view.Headline]:
        """Say how much perplexity was lost, at the length where the other model reads best."""
        first, other, rows = results["model"]["name"], view.other_of(results), _windows(results)
        mine = {length: row["perplexity"] for (name, length), row in rows.items() if name == first}
        theirs = {length: row["perplexity"] for (name, length), row in rows.items() if name == other}
        if not mine:
            return []
        shared = mine.keys() & theirs.keys()
        if not shared:
            return [view.Headline(f"{mine[max(mine)]:.4g}", f"perplexity at {view.tokens(max(mine))} tokens")]
        at = min(shared, key=lambda length: theirs[length])
        change = f"{mine[at] / theirs[at] - 1:+.0%}"
        change = "0%" if change in ("+0%", "-0%") else change
        detail = f"{mine[at]:.4g}, {other} {theirs[at]:.4g}"
        return [view.Headline(change, f"perplexity at {view.tokens(at)} tokens", detail)]

    @classmethod
    def quality(cls, results: Results) -> list[str]:
        """Say how perplex each model is, and how near it is to the teacher and to the baselines."""
        first, rows = results["model"]["name"], list(_windows(results).values())
        mine = [row for row in rows if row["model"] == first]
        if not mine:
            return []
        at = max(mine, key=lambda row: row["length"])
        others = [
            f"{r['model']} {r['perplexity']:.4g}" for r in rows if r["length"] == at["length"] and r["model"] != first
        ]
        beside = f" ({', '.join(others)})" if others else ""
        found = [
            f"Perplexity in windows of {view.tokens(at['length'])} tokens is {at['perplexity']:.4g}{beside}, "
            f"{at['bits_per_byte']:.3f} bits per byte."
        ]
        # Beyond the length a teacher was trained for, to be near it is no merit.
        known = [row for row in mine if row["kl_nats"] is not None]
        losses = {row["length"]: row["nll_nats"] for row in rows if row["model"] in view.teachers_of(results)}
        if known and losses:
            best = min(known, key=lambda row: losses.get(row["length"], math.inf))
            found.append(
                f"Where the teacher reads best, in windows of {view.tokens(best['length'])} tokens, {first} is "
                f"{best['kl_nats']:.3g} nats from it and has the same top token {best['agreement']:.0%} of the time."
            )
        for baseline in dict.fromkeys(row["baseline"] for row in results["gap_closed"]):
            gaps = [row for row in results["gap_closed"] if row["baseline"] == baseline]
            row = min(gaps, key=lambda row: losses[row["length"]])
            found.append(
                f"At {view.tokens(row['length'])} tokens {first} closes {row['gap_closed']:.0%} of the loss between "
                f"{baseline} and {row['teacher']}."
            )
        return found

    @classmethod
    def pictures(cls, results: Results) -> list[view.Section]:
        """Draw loss by position, by context and by window, and the distance from the teacher."""
        found = results["perplexity"]
        if found is None:
            return []
        positions = found["by_position"]
        longest = max((row["window_length"] for row in positions), default=0)
        windows = f"in windows of up to {longest:,} tokens"
        place = Axes("position in the window, up to", "nats per token")
        share = Axes(place.x_label, "share of tokens", percent=True)

        columns = ("nll_nats", "kl_nats", "agreement")
        by_place = {name: view.lines(results, positions, name, x="stop") for name in columns}
        of_context, of_windows = (
            view.lines(results, found[part], "perplexity") for part in ("growing_context", "windows")
        )
        context = Axes("context length in tokens", "perplexity")
        window = Axes("window length in tokens", "perplexity")
        growing, same = "The same final tokens under growing context", "perplexity of the same tokens"
        whole, afresh = "Perplexity of the whole text", "by window length, each from a fresh state"
        loss, far = f"nats per token, {windows}", f"KL(teacher || model), {windows}"
        drawn = [
            *view.chart("nll-by-position", "Loss by position", loss, by_place["nll_nats"], place),
            *view.chart("growing-context", growing, same, of_context, context),
            *view.chart("perplexity-by-window", whole, afresh, of_windows, window),
            *view.chart("kl-by-position", "Distance from the teacher by position", far, by_place["kl_nats"], place),
            *view.chart(
                "agreement-by-position", "Same top token as the teacher", windows, by_place["agreement"], share
            ),
        ]
        text = "Lower is better; every token is scored once, and whiskers are bootstrap 95% intervals over windows."
        return [view.Section("Perplexity", text, drawn)]

    @classmethod
    def tables(cls, results: Results) -> list[view.Table]:
        """Return the rows by window length, and the gaps closed."""
        columns: view.Columns = {
            "model": ("model", str),
            "length": ("length", view.tokens),
            "tokens": ("tokens", view.tokens),
            "perplexity": ("perplexity", view.number),
            "bits per byte": ("bits_per_byte", view.number),
            "KL to teacher": ("kl_nats", partial(view.number, digits=3)),
            "same top token": ("agreement", view.percent),
        }
        gap_columns: view.Columns = {
            "baseline": ("baseline", str),
            "teacher": ("teacher", str),
            "length": ("length", view.tokens),
            "gap closed": ("gap_closed", view.percent),
        }
        rows = (results["perplexity"] or {"windows": []})["windows"]
        return [
            view.table("Perplexity by window length", rows, columns, status="perplexity"),
            view.table("Gap closed", results["gap_closed"], gap_columns),
        ]


def _windows(results: Results) -> dict[tuple[str, int], Row]:
    """Return the rows that have a figure, by model and window length."""
    rows = (results["perplexity"] or {"windows": []})["windows"]
    return {(row["model"], row["length"]): row for row in rows if row["status"] == "ok"}
