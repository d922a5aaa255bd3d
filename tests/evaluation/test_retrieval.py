"""The retrieval suite, run with models whose score is known beforehand."""

import random
import re

import pytest

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import retrieval_view
from hf_linear_attn.evaluation.scores import effective_lengths, out_of_reach, paired_differences
from hf_linear_attn.evaluation.settings import EvaluationSettings
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.suites.retrieval import Retrieval
from hf_linear_attn.evaluation.tasks import available_tasks
from hf_linear_attn.evaluation.tasks.base import parse_task
from tests.evaluation.helpers import (
    BOS,
    ScriptedModel,
    SmallModel,
    answering,
    byte_tokenizer,
    subject,
    tiny_gpt2,
    tiny_linear,
    tiny_llama,
)
from tests.evaluation.test_tasks import oracle

TOKENIZER = byte_tokenizer()


def settings(**options):
    given = {"suite": ("retrieval",), "num_samples": 2, "depths": (0, 50, 100), "progress": False}
    return EvaluationSettings(**given | {"haystack": "noise", "capacity": None} | options)


def run(subjects, chosen, tokenizer=TOKENIZER, store=None):
    store = store or SampleStore(None, chosen.identity(), {})
    suite = Retrieval(chosen, subjects, tokenizer)
    suite.run(store, lambda tokens: None)
    found = suite.collect(store)
    return found["cells"], found["floors"], store


def parsing(task):
    def answer(prompt):
        try:
            return oracle(prompt, task)
        except (KeyError, IndexError, TypeError):
            # The needle was cut out of this prompt.
            return "nothing"

    return subject(ScriptedModel(answering(TOKENIZER, answer)))


@pytest.mark.parametrize("task", available_tasks())
def test_an_oracle_scores_one_in_every_cell(task):
    shortest = parse_task(task).min_length(TOKENIZER)
    chosen = settings(tasks=(task,), lengths=(shortest, shortest + 301), num_samples=1, batch_size=3)
    cells, floors, _ = run([parsing(task)], chosen)
    assert len(cells) == (6 if parse_task(task).needs_depth else 2)
    assert [cell["score"] for cell in cells] == [1.0] * len(cells)
    assert [cell["status"] for cell in cells] == ["ok"] * len(cells)
    for cell in cells:
        assert 0.98 * cell["length"] <= cell["measured_tokens"] <= cell["length"]
    # The oracle itself cannot answer where the needle was cut out.
    assert all(floor["score"] < 1 for floor in floors)


@pytest.mark.parametrize("task", ["passkey", "niah_single"])
def test_a_context_blind_model_scores_zero_on_needles(task):
    blind = subject(ScriptedModel(answering(TOKENIZER, lambda prompt: "It is 12345, as always.")))
    cells, floors, _ = run([blind], settings(tasks=(task,), lengths=(700,), num_samples=4))
    assert {cell["score"] for cell in [*cells, *floors]} == {0.0}
    assert {cell["nulls"] for cell in cells} == {0}


def test_a_model_that_says_nothing_counts_as_nulls():
    silent = subject(ScriptedModel(answering(TOKENIZER, lambda prompt: "")))
    cells, _, _ = run([silent], settings(tasks=("passkey",), lengths=(400,), depths=(50,), num_samples=3))
    assert (cells[0]["nulls"], cells[0]["score"], cells[0]["n"]) == (3, 0.0, 3)


def test_a_guesser_among_the_values_it_saw_hits_one_in_k():
    rng = random.Random(1)
    choices = {}

    def guess(prompt):
        # One draw per prompt, for the script asks again at every token.
        if prompt not in choices:
            choices[prompt] = rng.choice(re.findall(r"code of \w+ is (\w+)\.", prompt))
        return choices[prompt]

    guesser = subject(ScriptedModel(answering(TOKENIZER, guess)))
    chosen = settings(tasks=("kv_recall:pairs=4",), lengths=(420,), depths=(50,), num_samples=60, batch_size=20)
    cells, _, _ = run([guesser], chosen)
    low, high = cells[0]["ci95"]
    assert low <= 0.25 <= high
    assert high - low < 0.25


def test_an_oracle_with_a_window_succeeds_iff_the_needle_lies_inside():
    window = 300

    def near_sighted(prompt):
        # The question's end stays visible; the key is found only where it stands among the last tokens.
        found = re.findall(r"pass key is (\d+)\.", prompt[-window:])
        return found[-1] if found else "nothing"

    cells, _, _ = run(
        [subject(ScriptedModel(answering(TOKENIZER, near_sighted)))],
        settings(tasks=("passkey",), lengths=(900,), depths=(0, 25, 75, 100), num_samples=2),
    )
    # The haystack ends 40 tokens before the prompt does, so 300 tokens reach back past depth 75 but not to 25.
    assert {cell["depth"]: cell["score"] for cell in cells} == {0: 0.0, 25: 0.0, 75: 1.0, 100: 1.0}


@pytest.mark.parametrize("make", [tiny_llama, tiny_linear])
def test_batch_size_changes_no_answer(make):
    texts = []
    for size in (1, 4):
        chosen = settings(tasks=("passkey",), lengths=(300,), depths=(0, 100), num_samples=3, batch_size=size)
        store = SampleStore(None, chosen.identity(), {})
        run([subject(make())], chosen, store=store)
        texts.append([(record["id"], record["text"]) for record in store._records.values()])
    assert texts[0] == texts[1]
    assert any(text for _, text in texts[0])


def test_more_lengths_depths_or_samples_leave_a_sample_as_it_was():
    prompts = []
    for options in ({"lengths": (400,), "depths": (50,)}, {"lengths": (400, 500), "depths": (0, 50), "num_samples": 4}):
        chosen = settings(tasks=("passkey",), **options)
        *_, store = run([subject(ScriptedModel(lambda ids: 1))], chosen)
        prompts.append({r["id"]: r["prompt_sha256"] for r in store._records.values()})
    assert prompts[0].items() <= prompts[1].items()


def test_equal_models_differ_by_nothing_and_pairs_need_equal_prompts():
    chosen = settings(tasks=("passkey",), lengths=(400,))
    student = subject(tiny_llama(), "model")
    teacher = subject(tiny_llama(), "teacher", "teacher")
    cells, _, _ = run([student, teacher], chosen)
    (found,) = paired_differences(cells, "model", ["teacher"])
    assert (found["n"], found["difference"], found["ci95"], found["p_value"]) == (6, 0.0, [0.0, 0.0], 1.0)
    other = [{**cell, "prompts_sha256": "another"} if cell["model"] == "teacher" else cell for cell in cells]
    assert paired_differences(other, "model", ["teacher"]) == []
    assert {row["model"] for row in effective_lengths(cells)} == {"model", "teacher"}


def test_a_length_beyond_learned_positions_is_unsupported_not_zero():
    chosen = settings(tasks=("passkey",), lengths=(300, 600), depths=(50,))
    cells, _, _ = run([subject(tiny_gpt2(positions=320))], chosen)
    short, long = cells
    assert (short["status"], short["n"]) == ("ok", 2)
    assert (long["status"], long["score"], long["n"]) == ("unsupported", None, 0)
    assert long["reason"].startswith("`lengths` must stay within the 320 learned positions, got 600 (model).")


def test_running_out_of_memory_marks_the_cell_and_goes_on():
    chosen = settings(tasks=("passkey",), lengths=(400, 700), depths=(50,))
    cells, _, _ = run([subject(SmallModel(lambda ids: 1, 450))], chosen)
    assert [cell["status"] for cell in cells] == ["ok", "out-of-memory"]
    assert cells[1]["score"] is None


def test_a_programming_error_is_not_taken_for_lack_of_memory():
    class Broken(ScriptedModel):
        def forward(self, **options):
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run([subject(Broken(None))], settings(tasks=("passkey",), lengths=(400,)))


def test_the_chat_template_goes_around_the_prompt_and_counts():
    tokenizer = byte_tokenizer(chat=True)
    seen = []
    model = ScriptedModel(lambda ids: (seen.append(ids), 1)[1])
    chosen = settings(tasks=("passkey",), lengths=(400,), depths=(50,), num_samples=1, chat_template=True)
    cells, _, _ = run([subject(model)], chosen, tokenizer)
    assert cells[0]["measured_tokens"] == 400
    prompts = [ids for ids in seen if tokenizer.decode(ids).endswith("Assistant:")]
    assert prompts
    for ids in prompts:
        assert tokenizer.decode(ids).startswith("<bos>User: There is")
        assert ids.count(BOS) == 1


def test_floors_are_measured_for_tasks_with_a_needle_of_known_depth():
    groups = Retrieval(settings(tasks=("passkey", "cwe"), lengths=(2000, 3000)), [], TOKENIZER).groups
    assert [(g.task.spec, g.length) for g in groups if g.part == "floors"] == [("passkey", 2000)]


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        (byte_tokenizer(), {"lengths": (100,)}, r"`lengths` must be at least \d+ tokens, got 100 \(task 'passkey'\)"),
        (
            byte_tokenizer(),
            {"chat_template": True},
            r"`chat_template` must be left out for a tokenizer without one, got True",
        ),
        (
            byte_tokenizer(chat=True),
            {"chat_template": True, "lengths": (parse_task("passkey").min_length(byte_tokenizer()) + 3,)},
            r"`chat_template` must leave \d+ tokens for the task, got \d+ \(task 'passkey' at \d+ tokens\)",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(tokenizer, options, message):
    with pytest.raises(ArgumentError, match=message):
        Retrieval(settings(tasks=("passkey",), **{"lengths": (400,), **options}), [], tokenizer).check()


def test_text_is_the_haystack_unless_noise_is_asked_for():
    model = [subject(ScriptedModel(lambda ids: 1))]
    default = EvaluationSettings(suite=("retrieval",), tasks=("passkey",), lengths=(400,), depths=(50,), num_samples=1)
    assert [cell["task"] for cell in run(model, default)[0]] == ["passkey in text"]
    both = settings(tasks=("passkey:haystack=text", "passkey", "cwe"), lengths=(7200,), depths=(50,), num_samples=1)
    cells, _, store = run(model, both)
    assert [(cell["task"], cell["haystack"]) for cell in cells] == [
        ("passkey in text", "text"),
        ("passkey", "noise"),
        ("cwe", None),
    ]
    assert len({record["prompt_sha256"] for record in store._records.values()}) == 5


def test_an_oracle_scores_one_on_every_held_out_form_in_text_and_cells_say_what_they_are():
    for task in available_tasks(held_out=True):
        chosen = settings(tasks=(task,), lengths=(500,), num_samples=1, haystack="text", batch_size=3)
        cells, floors, _ = run([parsing(task)], chosen)
        assert [cell["score"] for cell in cells] == [1.0] * 3, task
        for cell in cells:
            assert (cell["task"], cell["held_out"], cell["haystack"]) == (f"{task} in text", True, "text")
            assert (cell["chance"], cell["pairs"]) == (0.25, 4)
        assert floors[0]["score"] < 1


def test_a_sample_is_asked_anew_where_its_text_has_changed(tmp_path):
    names = []
    for text in ("It rains.\n", "It snows.\n"):
        # A folder each: a text that is read once is remembered.
        folder = tmp_path / str(len(names))
        folder.mkdir()
        (folder / "mine.txt").write_text(text * 100)
        chosen = settings(tasks=("passkey", "vt:haystack=text"), haystack_files=(str(folder / "mine.txt"),))
        names.append([group.sample_id("model", 0, 0) for group in Retrieval(chosen, [], TOKENIZER).groups])
    known = [a == b for a, b in zip(*names, strict=True)]
    assert known == ["passkey" in name for name in names[0]]
    assert set(known) == {True, False}


def test_capacity_asks_the_first_task_with_pairs_at_the_longest_length_as_far_as_they_fit():
    chosen = settings(tasks=("passkey", "capital:pairs=2:haystack=text"), lengths=(400, 900), capacity=(4, 8, 64))
    suite = Retrieval(chosen, [parsing("capital")], TOKENIZER)
    store = SampleStore(None, chosen.identity(), {})
    suite.run(store, lambda tokens: None)
    found = suite.collect(store)
    assert {(row["task"], row["length"], row["pairs"], row["score"]) for row in found["capacity"]} == {
        ("capital:pairs=4 in text", 900, 4, 1.0),
        ("capital:pairs=8 in text", 900, 8, 1.0),
    }
    assert {row["task"] for row in found["cells"]} == {"passkey", "capital:pairs=2 in text"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("vt", "vt:haystack=noise")}, r"`tasks` must hold no task twice, got \['vt', 'vt'\]"),
        ({"haystack_files": ("a.txt",)}, "`haystack_files` must be left out with noise"),
        ({"haystack": "hay"}, "`haystack` must be a known choice, got 'hay'"),
        ({"tasks": ("vt:haystack=hay",)}, "`haystack` must be a known kind, got 'hay'"),
    ],
)
def test_a_wrong_haystack_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        settings(**options)


def test_a_length_that_the_text_does_not_have_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "mine.txt").write_text("It rains and snows.\n" * 100)
    files = (str(tmp_path / "mine.txt"),)
    chosen = settings(tasks=("capital",), lengths=(400, 3000), haystack="text", haystack_files=files)
    message = r"`haystack` must hold at least 3000 tokens, got 2000 \(task 'capital in mine.txt'\)"
    with pytest.raises(ArgumentError, match=message):
        Retrieval(chosen, [], TOKENIZER).check()


def test_where_the_teacher_does_no_better_than_chance_nothing_is_asked_of_others():
    def cells(model, scores, task="capital in text", length=500, **more):
        return {
            "model": model, "task": task, "length": length, "depth": None, "status": "ok", "scores": scores,
            "prompts_sha256": "1", "chance": 0.25, "held_out": True, "haystack": "text", "n": len(scores), **more,
        }  # fmt: skip

    measured = [
        cells("model", [1.0] * 10),
        cells("teacher", [1.0] * 10),
        cells("model", [1.0] * 10, length=900),
        cells("teacher", [1.0] * 4 + [0.0] * 6, length=900),
    ]
    assert out_of_reach(measured, "teacher") == {"capital in text": [900]}
    results = {
        "model": {"name": "model", "role": "model"}, "references": [{"name": "teacher", "role": "teacher"}],
        "cells": measured, "floors": [], "effective_length": [],
    }  # fmt: skip
    assert retrieval_view.sentences(results) == [
        "capital in text: teacher itself finds no more than by chance at 900 tokens, so nothing is asked of the others "
        "there."
    ]
    (one,) = retrieval_view.headlines(results)
    assert (one.figure, one.label) == ("100%", "of the teacher's score kept at 500 tokens: held-out forms in text")
    results["cells"] = measured[2:]
    (one,) = retrieval_view.headlines(results)
    assert (one.figure, one.label) == ("-", "nothing asked: held-out forms in text")
