"""A converted model drafts for its teacher: rounds are counted, answers compared, and what cannot draft is refused."""

import contextlib
import copy

import jsonschema
import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.cli import main
from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.evaluation import (
    EvaluationSettings,
    compare,
    evaluate,
    read_results,
    schema,
    without_times,
    write_report,
)
from hf_linear_attn.evaluation.drafting import answer, drafts_of, watched_caches
from tests.evaluation.helpers import byte_tokenizer, no_memory, tiny_gpt2, tiny_linear, tiny_llama

SMALL = {
    "suite": ("drafts",),
    "lengths": (32, 64),
    "drafted": (1, 3),
    "draft_prompts": 2,
    "draft_answer": 12,
    "progress": False,
}


def run(text, model=None, teacher=None, **options):
    settings = EvaluationSettings(**{**SMALL, "draft_file": text, **options})
    model = tiny_linear() if model is None else model
    return evaluate(settings, model=model, teacher=teacher, tokenizer=byte_tokenizer())


def prompt(tokens=20):
    return torch.randint(0, 250, (1, tokens), generator=torch.Generator().manual_seed(0))


def test_rounds_are_drafts_that_were_accepted_and_one_more_token():
    teacher = tiny_llama()
    alone = answer(teacher, prompt(), 13)
    assert alone.rounds == [1] * 13
    assert torch.equal(torch.tensor([alone.tokens]), teacher.generate(prompt(), max_new_tokens=13)[:, 20:])
    # A draft by the model itself is right always: rounds of 4 tokens, and what is left.
    same = answer(teacher, prompt(), 13, copy.deepcopy(teacher), drafted=3)
    assert (same.rounds, same.tokens) == ([4, 4, 4, 1], alone.tokens)
    other = answer(teacher, prompt(), 13, tiny_llama(seed=1), drafted=3)
    assert (len(other.rounds), other.tokens) == (13, alone.tokens)
    assert min(other.first_ms, other.rest_ms, alone.first_ms, alone.rest_ms) > 0


def test_an_answer_goes_on_beyond_an_end_and_settings_stay():
    teacher, student = tiny_llama(), tiny_linear()
    ends = answer(teacher, prompt(), 8).tokens[2]
    for model in (teacher, student):
        model.generation_config.eos_token_id = ends
    before = student.generation_config.to_dict()
    assert len(answer(teacher, prompt(), 8).tokens) == len(answer(teacher, prompt(), 8, student, 3).tokens) == 8
    with contextlib.suppress(ZeroDivisionError), drafts_of(student, 7):
        assert student.generation_config.num_assistant_tokens == 7
        raise ZeroDivisionError
    assert student.generation_config.to_dict() == before


def test_rows_tell_what_was_accepted_by_length_and_number(text):
    results = run(text, teacher=tiny_llama())
    jsonschema.validate(results, schema())
    rows = results["drafts"]
    assert [(row["length"], row["drafted"]) for row in rows] == [(32, 1), (32, 3), (64, 1), (64, 3)]
    for row in rows:
        assert (row["model"], row["status"], row["prompts"], row["new_tokens"]) == ("model", "ok", 2, 12)
        assert row["identical"] == 2
        assert not row["shared_weights"]
        # Every round gives one more token than it accepts.
        assert row["accepted_per_round"] == pytest.approx(2 * 12 / row["rounds"] - 1)
        low, high = row["accepted_per_round_ci95"]
        assert 0 <= low <= row["accepted_per_round"] <= high <= row["drafted"]
        assert min(row[name] for name in ("first_ms", "teacher_first_ms", "tokens_per_s", "teacher_tokens_per_s")) > 0
    # Keys of every token beside a state and what a rollback of so short a text needs.
    assert rows[2]["teacher_cache_bytes"] == 2 * 2 * 16 * (64 - 1) * 4
    assert rows[2]["draft_cache_bytes"] > 0
    again = run(text, teacher=tiny_llama())
    assert without_times(again)["drafts"] == without_times(results)["drafts"]
    assert not {"first_ms", "tokens_per_s"} & set(without_times(results)["drafts"][0])


def test_one_set_of_weights_is_teacher_and_student(text):
    plain = tiny_llama()
    student = patch_model(copy.deepcopy(plain), "elu", window=64)
    rows = run(text, student, teacher=None)["drafts"]
    assert all(row["shared_weights"] for row in rows)
    # A window as long as the text reads it as the teacher does: all drafts are right.
    assert {row["drafted"]: row["accepted_per_round"] for row in rows} == {1: 1.0, 3: 3.0}
    beside = run(text, patch_model(copy.deepcopy(plain), "elu", window=64), teacher=plain)["drafts"]
    assert [row["rounds"] for row in beside] == [row["rounds"] for row in rows]


def test_the_drafting_models_cache_is_watched():
    teacher, student = tiny_llama(), tiny_linear()
    found = []
    for tokens in (1300, 2400):
        with watched_caches(student, teacher) as most:
            answer(teacher, prompt(tokens), 6, student, 3)
        found.append(most)
    (short, keys), (long, more_keys) = found
    assert long <= short
    assert more_keys > keys


@pytest.mark.parametrize(
    ("model", "teacher", "options", "error", "message"),
    [
        (
            tiny_llama,
            None,
            {},
            UnsupportedError,
            r"^`model` must have a converted layer for the drafts suite, got 'LlamaForCausalLM' \(model\)\. Call patch",
        ),
        (
            tiny_linear,
            lambda: tiny_llama(vocab_size=300),
            {},
            ArgumentError,
            r"^`teacher` must have the 259 tokens of the model beside it, got 300 \(model\)\. Name the softmax model",
        ),
        (
            tiny_linear,
            tiny_llama,
            {"draft_lengths": (32, 900)},
            ArgumentError,
            r"^`draft_lengths` must leave prompts of at most 307 tokens, got 900\. Shorten it, or name a longer text",
        ),
    ],
)
def test_what_cannot_draft_is_refused_in_a_line(model, teacher, options, error, message, text):
    with pytest.raises(error, match=message) as found:
        run(text, model(), teacher and teacher(), **options)
    assert "\n" not in str(found.value)


def test_lengths_beyond_the_positions_and_the_memory_are_marked(text, monkeypatch):
    small = tiny_gpt2(positions=40)
    rows = run(text, patch_model(tiny_gpt2(positions=40), "elu"), teacher=small, drafted=(2,))["drafts"]
    assert [row["status"] for row in rows] == ["ok", "unsupported"]
    assert "`lengths` must stay within the 40 learned positions" in rows[1]["reason"]
    assert rows[1]["accepted_per_round"] is None

    monkeypatch.setattr("hf_linear_attn.evaluation.suites.drafts.answer", no_memory)
    rows = run(text, drafted=(2,))["drafts"]
    assert {row["status"] for row in rows} == {"out-of-memory"}


def test_the_command_writes_table_pictures_and_sentences(models, text, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["evaluate", *models, "--suite", "drafts", "--drafted", "1,3", "--draft-lengths", "32,64"]
    words += ["--draft-prompts", "2", "--draft-answer", "12", "--draft-file", text, "--no-progress"]
    words += ["--output-dir", str(out)]
    main(words)
    assert "answers with drafts at 64 tokens" in capsys.readouterr().out
    results = read_results(out)
    assert len(results["drafts"]) == 4
    assert "8 of 8 greedy answers are the teacher's own" in results["summary"]["quality"][0]
    names = {path.stem for path in (out / "figures").iterdir()}
    assert names == {f"drafts-{what}-{n}" for what in ("accepted", "speed") for n in (1, 3)}
    report = (out / "report.md").read_text()
    assert "| model | length | drafted | prompts | accepted in a round | identical |" in report
    assert "Accepted drafts" in (out / "report.html").read_text()
    # What was answered is kept.
    samples = (out / "samples.jsonl").read_text()
    main([*words, "--resume"])
    assert (out / "samples.jsonl").read_text() == samples
    both = compare([out, out], tmp_path / "both")
    write_report(both, tmp_path / "both")
    assert len(both["drafts"]) == 4
