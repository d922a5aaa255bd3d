"""What models write from the same places of a text: agreement, the teacher's nats, repetition."""

import copy
from itertools import chain

import jsonschema
import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.cli import main
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import EvaluationSettings, compare, evaluate, read_results, schema
from hf_linear_attn.evaluation.generation import drawn
from hf_linear_attn.evaluation.suites.generation import Generation
from tests.evaluation.helpers import (
    ScriptedModel,
    byte_tokenizer,
    no_memory,
    subject,
    tiny_gpt2,
    tiny_linear,
    tiny_llama,
)

SMALL = {
    "suite": ("generation",),
    "lengths": (32, 64),
    "continuations": 3,
    "continuation_tokens": 12,
    "progress": False,
}


def run(text, model=None, teacher=None, **options):
    settings = EvaluationSettings(**{**SMALL, "continuation_file": text, **options})
    model = tiny_linear() if model is None else model
    results = evaluate(settings, model=model, teacher=teacher, tokenizer=byte_tokenizer())
    jsonschema.validate(results, schema())
    return {(row["model"], row["length"], row["mode"]): row for row in results["generation"]}


def test_a_model_that_is_its_teacher_writes_what_it_writes(text):
    plain = tiny_llama()
    rows = run(text, patch_model(copy.deepcopy(plain), "elu", window=64), plain)
    assert len(rows) == 2 * 2 * 2
    for length in (32, 64):
        for mode in ("greedy", "sampled"):
            mine, theirs = (rows[name, length, mode] for name in ("model", "teacher"))
            assert (mine["agreement"], mine["agreement_ci95"], mine["texts"]) == (12, [12, 12], 3)
            assert theirs["agreement"] is None
            assert mine["nats"] == pytest.approx(theirs["nats"], rel=1e-5)
            assert mine["examples"] == theirs["examples"]
    assert rows["model", 64, "greedy"]["nats"] < rows["model", 64, "sampled"]["nats"]


def test_agreement_ends_at_the_first_token_that_differs(text):
    def counting(ids):
        return len(ids) % 100

    teacher = ScriptedModel(counting)
    # The 58th token of 64 is another: 5 of the 12 before it are the teacher's.
    rows = run(text, ScriptedModel(lambda ids: 200 if len(ids) == 57 else counting(ids)), teacher, lengths=(64,))
    assert rows["model", 64, "greedy"]["agreement"] == rows["model", 64, "sampled"]["agreement"] == 5
    # Its words are 60 apart in logits, and one in twelve is not the teacher's.
    assert rows["model", 64, "greedy"]["nats"] == pytest.approx(60 / 12)
    assert rows["teacher", 64, "greedy"]["nats"] == pytest.approx(0, abs=1e-6)


def test_the_share_of_distinct_grams_is_counted(text):
    for script, share in ((lambda ids: 7, 1 / 9), (lambda ids: len(ids) % 2, 2 / 9), (lambda ids: len(ids), 1.0)):
        rows = run(text, ScriptedModel(script))
        assert [row["distinct"] for row in rows.values()] == [pytest.approx(share)] * 4


def test_nats_are_those_that_the_teacher_gives(text):
    teacher, settings = tiny_llama(), EvaluationSettings(**SMALL, continuation_file=text)
    suite = Generation(settings, [subject(tiny_linear()), subject(teacher, "teacher", "teacher")], byte_tokenizer())
    prompts = suite.prompts(64)
    assert prompts.shape == (3, 52)
    # All lengths are written on from the same places; a text begins with BOS.
    assert torch.equal(suite.prompts(32)[:, 1:], prompts[:, -19:])
    written = torch.tensor(suite._write(suite.subjects[0], 64, "sampled")["tokens"])
    with torch.no_grad():
        log_p = teacher(torch.cat([prompts, written], dim=1)).logits.log_softmax(-1)[:, 51:-1]
    expected = -log_p.gather(-1, written[..., None]).mean()
    found = run(text, tiny_linear(), teacher)["model", 64, "sampled"]
    assert found["nats"] == pytest.approx(float(expected), rel=1e-5)
    assert found["judge"] == "teacher"
    low, high = found["nats_ci95"]
    assert low < found["nats"] < high
    assert found["examples"][0]["text"] == byte_tokenizer().decode(written[0])


def test_without_a_teacher_nats_are_the_models_own(text):
    model = tiny_linear()
    alone, beside = run(text, model), run(text, tiny_linear(), tiny_llama())
    for key, row in alone.items():
        assert (row["agreement"], row["judge"]) == (None, "model")
        assert row["examples"] == beside[key]["examples"]
        assert row["nats"] < beside[key]["nats"]


def test_numbers_draw_by_cumulative_probability_and_again_the_same(text):
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2])
    count = 10_000
    found = drawn(p.log().repeat(count, 1), (torch.arange(count) + 0.5) / count)
    torch.testing.assert_close(torch.bincount(found, minlength=5) / count, p, rtol=0, atol=1e-3)
    # A token without probability is drawn at no end.
    assert drawn(p.log().repeat(2, 1), torch.tensor([0.0, 1.0 - 2**-24])).tolist() == [1, 4]
    one, two = (run(text, batch_size=size, prefill_chunk=20) for size in (1, 3))
    for key, row in one.items():
        assert row["examples"] == two[key]["examples"]
        assert row["nats"] == pytest.approx(two[key]["nats"], rel=1e-4)
    other = run(text, seed=1)
    assert other["model", 32, "sampled"]["examples"] != one["model", 32, "sampled"]["examples"]
    assert other["model", 32, "greedy"]["examples"] == one["model", 32, "greedy"]["examples"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (6, 64)}, r"`lengths` must be at least 8 for the generation suite, got 6"),
        ({"lengths": (64, 900)}, r"`lengths` must be at most the text's 307 tokens, got 900.*continuation_file"),
        ({"continuation_tokens": 3}, r"`continuation_tokens` must be at least 4, got 3"),
        ({"continuation_file": "missing.txt"}, r"`continuation_file` must be a readable UTF-8 text"),
        ({"teacher": 300}, r"`teacher` must have the 259 tokens of the model beside it, got 300 \(model\)"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message, text):
    teacher = tiny_llama(vocab_size=options.pop("teacher")) if "teacher" in options else None
    with pytest.raises(ArgumentError, match=message):
        run(text, teacher=teacher, **options)


def test_lengths_beyond_positions_and_memory_are_marked(text, monkeypatch):
    rows = run(text, tiny_linear(), tiny_gpt2(positions=40))
    assert {row["status"] for row in rows.values() if row["model"] == "model"} == {"ok"}
    assert rows["teacher", 64, "greedy"]["status"] == "unsupported"
    # What the teacher cannot read it has no nats of.
    assert rows["model", 64, "greedy"]["nats"] is rows["model", 64, "greedy"]["agreement"] is None
    assert rows["model", 32, "greedy"]["nats"] > 0

    monkeypatch.setattr("hf_linear_attn.evaluation.suites.generation.continue_rows", no_memory)
    assert {row["status"] for row in run(text).values()} == {"out-of-memory"}


def test_the_command_writes_tables_pictures_and_examples_and_keeps_what_was_written(models, text, tmp_path):
    out = tmp_path / "out"
    words = ["evaluate", *models, "--suite", "generation", "--lengths", "32,64", "--continuations", "3"]
    words += ["--continuation-tokens", "12", "--continuation-file", text, "--no-progress", "--output-dir", str(out)]
    main(words)
    results = read_results(out)
    said = results["summary"]["quality"]
    assert [sentence.partition(": ")[0] for sentence in said] == [
        f"What model writes at 64 tokens, {mode}" for mode in ("greedy", "sampled")
    ]
    names = {path.stem for path in (out / "figures").iterdir()}
    assert names == {
        f"generation-{what}-{mode}" for what in ("agreement", "nats", "distinct") for mode in ("greedy", "sampled")
    }
    report = (out / "report.md").read_text()
    head = "| model | mode | length | texts | tokens as the teacher's | nats per token | distinct 4-grams | nats of |"
    assert head in report
    examples = report.partition("## Examples of what is written")[2].partition("\n## ")[0].strip().splitlines()[2:]
    # Two places in both modes, the models right below each other.
    assert [line.split(" | ")[2] for line in examples] == ["model", "teacher"] * 4
    assert all(line.isprintable() for line in chain(examples, [head]))
    samples = (out / "samples.jsonl").read_text()
    main([*words, "--resume"])
    assert (out / "samples.jsonl").read_text() == samples
    assert len(compare([out, out], tmp_path / "both")["generation"]) == 8
