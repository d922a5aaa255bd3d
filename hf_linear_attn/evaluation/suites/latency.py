"""The latency suite: prefill, decode, peak memory and cache bytes by length, each cell on a fresh cache."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.evaluation import view
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.figures import Axes
from hf_linear_attn.evaluation.generation import forward, prefill, unless_out_of_memory
from hf_linear_attn.evaluation.meters import cache_bytes, peak_memory_mib, timed
from hf_linear_attn.evaluation.settings import check_settings
from hf_linear_attn.evaluation.statistics import crossing
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.view import Results, Row

# What is compared by length: names of the measured columns and what they cost.
BREAK_EVEN_COLUMNS = {"prefill": "ttft_ms", "decode": "decode_ms_per_token", "memory": "peak_mib"}

_NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "prompt_tokens", "decoded_tokens", "batch_size", "repeats", "ttft_ms", "ttft_ms_iqr", "prefill_tokens_per_s",
        "decode_ms_per_token", "decode_ms_per_token_iqr", "peak_mib", "peak_method", "cache_bytes",
    )
)  # fmt: skip
_OUT_OF_MEMORY = {**_NOTHING, "status": "out-of-memory", "reason": "The model ran out of memory."}

_PICTURES = (
    ("decode", "Decode", "milliseconds per token", "decode_ms_per_token", "ms per token", 1.0),
    ("prefill", "Prefill", "time to first token", "ttft_ms", "ms", 1.0),
    ("memory", "Peak memory above the weights", "prefill and decode", "peak_mib", "MiB", 1.0),
    ("cache", "Cache", "kept from token to token", "cache_bytes", "KiB", 1 / 1024),
)


@dataclass(frozen=True)
class LatencySettings:
    """Settings of the latency suite.

    Args:
        latency_lengths: Context lengths to time; those of ``lengths`` where it is left out.
        latency_batch_size: Prompts read together; ``batch_size`` where it is left out.
        decode_tokens: Forced tokens per decode measurement.
        warmups: Discarded runs of each shape before timing.
        repeats: Timed runs of each shape.
    """

    latency_lengths: tuple[int, ...] | None = None
    latency_batch_size: int | None = None
    decode_tokens: int = 64
    warmups: int = 3
    repeats: int = 10

    def __post_init__(self) -> None:
        check_settings(self, latency_lengths=2, latency_batch_size=1, decode_tokens=1, warmups=0, repeats=1)


@register_suite
class Latency(Suite):
    """Time and memory of prefill and decode, by length."""

    name = "latency"
    title = "latency suite"
    Settings = LatencySettings
    parts = {"latency": []}  # noqa: RUF012
    row_key = ("model", "length", "batch_size")
    place = 30
    by_default = True
    # It wants a machine that has not been heated up, and its cells are what a user waits for least.
    goes_first = True
    own: LatencySettings

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to time, ascending."""
        return tuple(sorted(self.own.latency_lengths or self.settings.lengths))

    @property
    def batch_size(self) -> int:
        """Prompts read together."""
        return self.own.latency_batch_size or self.settings.batch_size

    def check(self) -> None:
        """Refuse to time an eager softmax, which no one would deploy."""
        for subject in self.subjects:
            if subject.linear_attention is None and subject.model.config._attn_implementation == "eager":
                rule = "be a fused one for the latency suite"
                remedy = "Load the model with attn_implementation='sdpa', or leave the latency suite out."
                raise UnsupportedError("attn_implementation", rule, "eager", remedy, where=subject.name)

    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Count the tokens of all runs, and the time they take."""
        read, seconds = 0, 0.0
        # One more run is watched for its memory.
        runs = self.own.warmups + self.own.repeats + 1
        for length in self.lengths:
            for pace in (paces[subject.name] for subject in self.able(length) if subject.name in paces):
                decoded = min(self.own.decode_tokens, length // 2)
                read += runs * self.batch_size * length
                # A step of one row takes hardly less than one of a batch.
                seconds += runs * (self.batch_size * pace.read_s(length - decoded) + decoded * pace.step_s(length))
        return Plan(sum(self.lengths) * len(self.subjects), read, seconds)

    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Measure every length that the store does not hold yet."""
        # What is compared is timed one right after the other: a machine is faster at one time than at another.
        for length in self.lengths:
            for subject in self.subjects:
                if self.record(store, subject, length) is None and subject.refusal(length) is None:
                    found = unless_out_of_memory(self.measure, subject, length)
                    figures = {"status": "ok", "reason": None, **(found or _OUT_OF_MEMORY)}
                    self.keep(store, subject, length, figures=figures)
                advance(length)

    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's records into cells."""
        cells = []
        for subject in self.subjects:
            for length in self.lengths:
                record = self.record(store, subject, length)
                unread = {"status": "unsupported", "reason": subject.refusal(length), **_NOTHING}
                figures = unread if record is None else record["figures"]
                cells.append({"model": subject.name, "length": length, **figures})
        return {"latency": cells}

    @torch.inference_mode()
    def measure(self, subject: Subject, length: int) -> dict[str, Any]:
        """Measure one cell: reading `length - decode_tokens` tokens, then decoding `decode_tokens` forced ones.

        Args:
            subject: The model.
            length: Tokens in the cache when the measurement ends; at least 2.

        Returns:
            Medians and quartiles of the repeats, and the memory of one more run.
        """
        decoded, runs = min(self.own.decode_tokens, length // 2), self.own.warmups + self.own.repeats
        generator = torch.Generator().manual_seed(self.settings.seed)
        ids = torch.randint(0, subject.vocabulary, (self.batch_size, length), generator=generator).to(subject.device)
        prompt, forced = ids[:, : length - decoded], ids[:, length - decoded :]

        def decode(cache: Any) -> Any:
            for at in range(decoded):
                _, cache = forward(subject.model, forced[:, at : at + 1], cache, all_logits=False)
            return cache

        def fill() -> Any:
            return prefill(subject.model, prompt, None, self.settings.prefill_chunk)[1]

        reads, decodes = [], []
        filled: list[Any] = []
        for _ in range(runs):
            filled.clear()
            reads.append(timed(subject.device, lambda: filled.append(fill())))
        for _ in range(runs):
            cache = copy.deepcopy(filled[0])
            decodes.append(timed(subject.device, partial(decode, cache)) / decoded)
        filled.clear()
        del cache
        peak_mib, method = peak_memory_mib(subject.device, lambda: filled.append(decode(fill())))
        read, step = _quartiles(reads[self.own.warmups :]), _quartiles(decodes[self.own.warmups :])
        return {
            "prompt_tokens": length - decoded,
            "decoded_tokens": decoded,
            "batch_size": self.batch_size,
            "repeats": self.own.repeats,
            "ttft_ms": read[1],
            "ttft_ms_iqr": [read[0], read[2]],
            "prefill_tokens_per_s": 1000 * prompt.numel() / read[1],
            "decode_ms_per_token": step[1],
            "decode_ms_per_token_iqr": [step[0], step[2]],
            "peak_mib": peak_mib,
            "peak_method": method,
            "cache_bytes": cache_bytes(filled[0]),
        }

    @classmethod
    def conclude(cls, results: Results) -> dict[str, Any]:
        """Find the lengths from which the model costs less than each other one."""
        first, cells = results["model"]["name"], results["latency"]
        others = [reference["name"] for reference in results["references"]] if cells else []
        return {"break_even": [break_even(cells, first, other) for other in others]}

    @classmethod
    def without_times(cls, results: dict[str, Any]) -> dict[str, Any]:
        """Return results without durations and what follows from them."""
        results.pop("break_even", None)
        for cell in results["latency"]:
            for column in [column for column in cell if "_ms" in column or column.endswith("_per_s")]:
                del cell[column]
        return results

    @classmethod
    def merge(cls, merged: dict[str, Any], run: Results, lead: Results, label: str) -> str | None:
        """Add a run's cells, and say so where they were taken elsewhere."""
        super().merge(merged, run, lead, label)
        elsewhere = run["latency"] and run["environment"] != lead["environment"]
        return f"Times of {label} were taken in another environment." if elsewhere else None

    @classmethod
    def headlines(cls, results: Results) -> list[view.Headline]:
        """Say how much faster decode is, and how much smaller the cache."""
        pair = _longest_pair(results)
        if pair is None:
            return []
        mine, theirs, other = pair
        at = f"at {view.tokens(mine['length'])} tokens"
        step, read, held = (theirs[name] / mine[name] for name in ("decode_ms_per_token", "ttft_ms", "cache_bytes"))
        figure, word = view.compared(step, "faster", "slower")
        read_figure, read_word = view.compared(read, "faster", "slower")
        cache, cache_word = view.compared(held, "smaller", "larger")
        prefill_text = f"prefill {read_figure} {read_word}" if read_word else "prefill as fast"
        return [
            view.Headline(
                figure,
                f"{word} decode {at}" if word else f"decode about as fast {at}",
                f"{mine['decode_ms_per_token']:.3g} ms a token, {other} {theirs['decode_ms_per_token']:.3g}; "
                f"{prefill_text}, batch of {mine['batch_size']}",
            ),
            view.Headline(
                cache,
                f"{cache_word} cache {at}" if cache_word else f"cache about as large {at}",
                f"{view.size(mine['cache_bytes'])}, {other} {view.size(theirs['cache_bytes'])}",
            ),
        ]

    @classmethod
    def speed(cls, results: Results) -> list[str]:
        """Compare time and memory with the teacher's at the longest length, and say from where they are less."""
        pair = _longest_pair(results)
        if pair is None:
            return []
        mine, theirs, other = pair
        first = results["model"]["name"]
        listed = ", ".join(
            [
                _ratio("decode", theirs["decode_ms_per_token"] / mine["decode_ms_per_token"], "faster", "slower"),
                _ratio("prefill", theirs["ttft_ms"] / mine["ttft_ms"], "faster", "slower"),
                _ratio("the cache", theirs["cache_bytes"] / mine["cache_bytes"], "smaller", "larger"),
                _ratio("peak memory above the weights", theirs["peak_mib"] / mine["peak_mib"], "smaller", "larger"),
            ]
        )
        batch = "" if mine["batch_size"] == 1 else f" in a batch of {mine['batch_size']}"
        found = [f"At {view.tokens(mine['length'])} tokens{batch}, {first} beside {other}: {listed}."]
        for row in (row for row in results["break_even"] if row["other"] == other):
            places = [f"{name} from {view.tokens(row[name])} tokens" for name in BREAK_EVEN_COLUMNS if row[name]]
            never = [name for name in BREAK_EVEN_COLUMNS if not row[name]]
            if places:
                found.append(f"{first} costs less than {other} in " + ", ".join(places) + ".")
            if never:
                found.append(f"{first} does not cost less than {other} in {' or '.join(never)} at the tested lengths.")
        return found

    @classmethod
    def pictures(cls, results: Results) -> list[view.Section]:
        """Draw time and memory by length."""
        sizes = sorted({row["batch_size"] for row in results["latency"] if row["status"] == "ok"})
        batch = f", batch of {' or '.join(map(str, sizes))}"
        found: list[view.Picture] = []
        for name, title, subtitle, column, unit, scale in _PICTURES:
            marks = [
                (row[name], f"= {row['other']} at {row[name]:,.0f}") for row in results["break_even"] if row.get(name)
            ]
            series = view.lines(results, results["latency"], column, scale=scale)
            axes = Axes("context length in tokens", unit, log_y=True, marks=marks)
            found += view.chart(f"latency-{name}", title, f"{subtitle}{batch}", series, axes)
        text = "Both axes are logarithmic, lower is better. Dotted verticals mark the break-even length."
        return [view.Section("Speed and memory", text, found)]

    @classmethod
    def tables(cls, results: Results) -> list[view.Table]:
        """Return the cells."""
        columns: view.Columns = {
            "model": ("model", str),
            "length": ("length", view.tokens),
            "batch": ("batch_size", str),
            "repeats": ("repeats", str),
            "prefill tok/s": ("prefill_tokens_per_s", view.number),
            "first token ms": ("ttft_ms", view.number),
            "decode ms/token": ("decode_ms_per_token", partial(view.number, digits=3)),
            "peak MiB": ("peak_mib", view.number),
            "cache bytes": ("cache_bytes", view.tokens),
        }
        return [view.table("Latency and memory", results["latency"], columns, status="prefill tok/s")]


def _quartiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, [0.25, 0.5, 0.75])]


def break_even(cells: Sequence[Row], first: str, other: str) -> dict[str, Any]:
    """Return the lengths from which `first` costs less than `other` in time to first token, decode and memory."""
    mine, theirs = _shared(cells, first, other)
    lengths = sorted(mine)
    found: dict[str, Any] = {"model": first, "other": other}
    for name, column in BREAK_EVEN_COLUMNS.items():
        costs = [mine[n][column] for n in lengths], [theirs[n][column] for n in lengths]
        found[name] = crossing(lengths, *costs) if lengths else None
    return found


def _shared(cells: Sequence[Row], first: str, other: str) -> tuple[dict[int, Row], dict[int, Row]]:
    """Return two models' cells by length, where both were measured in a batch of the same size."""
    ok = {(c["model"], c["length"], c.get("batch_size", 1)): c for c in cells if c["status"] == "ok"}
    both = {key[1:] for key in ok if key[0] == first} & {key[1:] for key in ok if key[0] == other}
    # Where several sizes were measured, those of the smallest.
    smallest = min((batch for _, batch in both), default=0)
    lengths = [length for length, batch in both if batch == smallest]
    mine, theirs = ({length: ok[name, length, smallest] for length in lengths} for name in (first, other))
    return mine, theirs


def _longest_pair(results: Results) -> tuple[Row, Row, str] | None:
    """Return the cells of the model and of the other at the longest length that both could read, and its name."""
    other = view.other_of(results)
    if other is None:
        return None
    mine, theirs = _shared(results["latency"], results["model"]["name"], other)
    return (mine[max(mine)], theirs[max(mine)], other) if mine else None


def _ratio(what: str, ratio: float, better: str, worse: str) -> str:
    figure, word = view.compared(ratio, better, worse)
    return f"{what} {figure} {word}" if word else f"{what} about the same"
