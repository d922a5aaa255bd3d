"""A suite is one file: settings, check, plan, run, collect, and its part of the report."""

import json
import sys

import jsonschema
import pytest

from hf_linear_attn.cli import main
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import EvaluationSettings, read_results, schema, settings, suite

COUNTING = '''
"""How many tokens does a text have, and how often was it counted?"""

from dataclasses import dataclass

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.figures import Axes
from hf_linear_attn.evaluation.suite import Plan, Suite, register_suite
from hf_linear_attn.evaluation.view import Headline, Section, Table, chart, lines


@dataclass(frozen=True)
class CountingSettings:
    """Settings of the counting suite.

    Args:
        word: The word to count.
        often: How often, at least once.
    """

    word: str = "a"
    often: int = 2


@register_suite
class Counting(Suite):
    name = "counting"
    title = "counting suite"
    Settings = CountingSettings
    parts = {"counts": [], "most": None}
    row_key = ("model", "length")

    def check(self):
        if self.own.often < 1:
            raise ArgumentError("often", "be at least 1", self.own.often, "Raise it.")

    def plan(self, paces):
        return Plan(total=self.own.often * len(self.subjects), tokens=self.own.often, seconds=0.0)

    def run(self, store, advance, *, rank=0, world=1):
        for one in self.subjects:
            for at in range(self.own.often):
                key = store.key(one.fingerprint, f"counting/{one.name}/{at}")
                if store.get(key) is None:
                    count = len(self.tokenizer(self.own.word * (at + 1))["input_ids"])
                    store.add([{"key": key, "id": f"counting/{one.name}/{at}", "count": count}])
                advance(1)

    def collect(self, store):
        rows = []
        for one in self.subjects:
            for at in range(self.own.often):
                record = store.get(store.key(one.fingerprint, f"counting/{one.name}/{at}"))
                rows.append({"model": one.name, "length": at + 1, "count": record["count"], "status": "ok"})
        return {"counts": rows}

    @classmethod
    def conclude(cls, results):
        return {"most": max((row["count"] for row in results["counts"]), default=None)}

    @classmethod
    def quality(cls, results):
        return [f"The most tokens are {results['most']}."] if results["counts"] else []

    @classmethod
    def headlines(cls, results):
        return [Headline(str(results["most"]), "tokens at most")] if results["counts"] else []

    @classmethod
    def pictures(cls, results):
        series = lines(results, results["counts"], "count")
        return [Section("Counts", "Counted.", chart("counts", "Counts", "by length", series, Axes("n", "tokens")))]

    @classmethod
    def tables(cls, results):
        rows = [[row["model"], str(row["length"]), str(row["count"])] for row in results["counts"]]
        return [Table("Counts", ("model", "length", "tokens"), rows)]
'''


@pytest.fixture
def registry():
    """Forget the suites that a test registers."""
    modules, before = set(sys.modules), dict(settings.SUITES)
    yield
    settings.SUITES.clear()
    settings.SUITES.update(before)
    for name in set(sys.modules) - modules:
        if name.startswith("suites_of_"):
            del sys.modules[name]


def test_a_suite_of_ones_own_is_one_file_and_works_from_its_settings_to_the_report(registry, models, tmp_path, capsys):
    (tmp_path / "counting.py").write_text(COUNTING)
    mine = ["--suite-file", str(tmp_path / "counting.py")]
    with pytest.raises(SystemExit):
        main(["evaluate", *mine, "--help"])
    text = capsys.readouterr().out
    assert "counting suite:\n  --word TEXT" in text
    assert "The word to count. Default: a." in text

    out = tmp_path / "out"
    main(["evaluate", *models, *mine, "--suite", "counting", "--often=3", "--output-dir", str(out), "--lengths", "64"])
    shown = capsys.readouterr()
    assert "     4  tokens at most\n" in shown.out
    assert "counting: 100%" in shown.err
    results = read_results(out)
    # A byte a word, and BOS.
    counts = [(row["model"], row["count"]) for row in results["counts"]]
    assert counts == [(model, n) for model in ("model", "teacher") for n in (2, 3, 4)]
    assert results["args"]["often"] == 3
    assert "num_samples" not in results["args"]
    assert (results["cells"], results["latency"], results["perplexity"]) == ([], [], None)
    jsonschema.validate(results, schema())
    report = (out / "report.html").read_text()
    assert '<p class="figure">4</p><p class="label">tokens at most</p>' in report
    assert "<h2>Counts</h2>" in report
    assert (out / "figures" / "counts.svg").exists()
    assert "| teacher | 3 | 4 |" in (out / "report.md").read_text()
    assert "The most tokens are 4." in report

    # What was counted stays, and is not counted again.
    samples = (out / "samples.jsonl").read_text()
    main(["evaluate", *models, *mine, "--suite", "counting", "--often", "3", "--output-dir", str(out), "--lengths",
          "64", "--resume"])  # fmt: skip
    assert (out / "samples.jsonl").read_text() == samples
    main(["compare", str(out), str(out), "--output-dir", str(tmp_path / "both")])
    assert len(read_results(tmp_path / "both")["counts"]) == 6

    with pytest.raises(SystemExit) as stop:
        main(["evaluate", *models, *mine, "--suite", "counting", "--often", "0", "--output-dir", str(tmp_path / "x")])
    assert stop.value.code == 2
    assert "`often` must be at least 1, got 0. Raise it." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"`suite_file` must be a Python file"),
        ("x = 1\n", r"`suite_file` must register a suite, got .*Decorate its class with @register_suite"),
        ("x = 1\nraise ValueError('no')\n", r"`suite_file` must run without an error.*ValueError in line 2: no"),
        (
            COUNTING.replace('"counting"', '"latency"'),
            r"`name` must be new, got 'latency' \(Counting\). Choose another one",
        ),
        (COUNTING.replace("word", "seed"), r"`Settings` must have names of their own, got \['seed'\].*all suites"),
        (COUNTING.replace("often", "repeats"), r"`Settings` must have names of their own.*They belong to latency"),
    ],
)
def test_a_file_that_brings_no_suite_is_refused(registry, text, message, tmp_path):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        suite.load_users_suites(tmp_path / "mine.py")


def test_every_suite_says_what_its_settings_are():
    assert [one.name for one in suite.suites()] == [
        "retrieval",
        "perplexity",
        "generation",
        "latency",
        "drafts",
        "embedding",
        "lm-eval",
    ]
    for one in suite.suites():
        assert EvaluationSettings().of(one.Settings)
        assert one.__doc__
        json.dumps(one.parts)
