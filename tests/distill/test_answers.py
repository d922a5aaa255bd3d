import copy
import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_linear_attn import patch_model
from hf_linear_attn.distill import distill
from hf_linear_attn.distill.card import HELD_OUT, TRAINED, answers_table
from hf_linear_attn.distill.measure import (
    FACTORS,
    NO_POSITIONS,
    NO_TEXT,
    NOT_ASKED,
    TASKS,
    TOO_SHORT,
    measure_answers,
    prompts,
    recall_accuracy,
)
from hf_linear_attn.evaluation.statistics import wilson_interval
from hf_linear_attn.evaluation.tasks import is_exact, parse_task
from tests.distill.tiny import tiny_gpt2, tiny_teacher
from tests.evaluation.helpers import ScriptedModel, answering, byte_tokenizer
from tests.evaluation.test_tasks import oracle

TEACHER = Path(__file__).parents[2] / "examples" / "teacher"
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def teacher():
    return LlamaForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def teachers_tokenizer():
    return AutoTokenizer.from_pretrained(TEACHER)


def scripted(change):
    """Return a model that answers a prompt of any task as `change` changes the true answer."""

    def answer(prompt):
        found = {"pass key": "passkey", "list of words": "copying", "magic": "niah_multikey", "code of": "kv_recall"}
        found |= {"capital": "capital", "city": "json_record", "(mode=": "default_argument", " =": "assignment"}
        task = next(task for said, task in found.items() if said in prompt.split("\n")[-1])
        try:
            return change(oracle(prompt, task))
        except (LookupError, TypeError):
            # One forward asks at every token, before a pair has been read, too.
            return "nothing"

    return ScriptedModel(answering(TOKENIZER, answer))


def ask(model, tokenizer=TOKENIZER, **options):
    options = {"length": 1100, "samples": 2, "seed": 1, "factors": (1,), **options}
    return measure_answers(model, tokenizer, **options)


@pytest.mark.parametrize(
    ("change", "exact", "tasks"),
    [
        (lambda answer: answer, 1.0, TASKS),
        (lambda answer: answer + ". And on it goes", 1.0, TASKS[:2]),
        (lambda answer: answer[:-1], 0.0, TASKS[:2]),
        (lambda answer: answer + "s", 0.0, TASKS[:2]),
        (lambda answer: "It is " + answer, 0.0, TASKS[:2]),
    ],
)
def test_an_answer_counts_where_it_is_the_true_one_word_for_word(change, exact, tasks):
    rows = ask(scripted(change), tasks=tasks)
    assert [(row["task"], row["length"], row["n"], row["missing"]) for row in rows] == [
        (parse_task(task).label, 1100, 2, None) for task in tasks
    ]
    assert {row["exact"] for row in rows} == {exact}
    assert all(row["ci95"] == list(wilson_interval(2 * exact, 2)) for row in rows)
    # As sure of every token of a true answer as the script is; 60 nats where it writes another.
    for row in rows:
        assert (row["answer_nats"] < 1e-3) == (exact == 1.0 or change("x") in ("xs",))


def test_one_forward_foretells_what_is_written(teacher, teachers_tokenizer):
    student = patch_model(copy.deepcopy(teacher), feature_map="norm_preserving", window=64, sinks=4)
    for model, task in itertools.product((teacher, student), ("passkey", "kv_recall")):
        (row,) = ask(model, teachers_tokenizer, length=256, samples=5, tasks=(task,))
        asked = prompts(teachers_tokenizer, parse_task(task), 256, 5, 1)
        right = 0
        for sample in asked:
            ids = torch.tensor([sample.input_ids])
            written = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
            right += is_exact(sample, teachers_tokenizer.decode(written, skip_special_tokens=True))
        assert row["exact"] == right / 5
        assert bool(right) is (model is teacher)


def test_recall_is_what_the_teacher_would_write(teacher, teachers_tokenizer):
    found = recall_accuracy(teacher, teachers_tokenizer, pairs=4, length=256, samples=8, seed=3, max_depth=75)
    assert found >= 0.5
    assert recall_accuracy(teacher, teachers_tokenizer, pairs=80, length=256, samples=8, seed=3) is None


def test_recall_does_not_ask_how_a_word_goes_on_and_a_written_answer_does():
    for change, recalled, exact in ((lambda answer: answer + "s", 1.0, 0.0), (lambda answer: "s" + answer, 0.0, 0.0)):
        model = scripted(change)
        assert recall_accuracy(model, TOKENIZER, pairs=4, length=400, samples=2, seed=0) == recalled
        assert ask(model, length=400, tasks=("kv_recall",))[0]["exact"] == exact


def test_what_is_asked_for_stands_at_depths_from_the_start_to_75_percent():
    depths = [sample.meta["measured_depth"] for sample in prompts(TOKENIZER, parse_task("passkey"), 3000, 5, 0)]
    assert depths == pytest.approx([7.5, 22.5, 37.5, 52.5, 67.5], abs=2)


def test_fields_that_cannot_be_measured_say_why(tokenizer):
    tasks, factors = ("passkey", "niah_multikey"), (1, 4, 8)
    rows = ask(tiny_gpt2(1200), tokenizer, length=300, samples=1, tasks=tasks, factors=factors)
    assert [row["missing"] for row in rows] == [None, None, NO_POSITIONS, TOO_SHORT, None, NO_POSITIONS]
    assert [row["n"] for row in rows] == [1, 1, 0, 0, 1, 0]
    assert rows[3]["exact"] is rows[3]["ci95"] is rows[3]["answer_nats"] is None
    table = answers_table({"student": {"answers": rows}}, 300)
    assert "| | 300 tokens | 1,200 tokens | 2,400 tokens |" in table
    assert f"| niah_multikey, student | {TOO_SHORT} | 0.00 (0.00 to 0.79), " in table
    assert table.count(NO_POSITIONS) == 2


def test_a_length_that_the_held_out_text_does_not_have_says_so():
    (row,) = ask(scripted(str), length=10**6, tasks=("capital:haystack=text",))
    assert (row["missing"], row["n"], row["held_out"], row["haystack"]) == (NO_TEXT, 0, True, "text")


def test_a_student_is_not_asked_where_its_teacher_fails():
    told = {"length": 1100, "missing": None, "answer_nats": 0.1, "held_out": True, "chance": 0.25, "n": 20}
    answers = {
        "student": [told | {"task": name, "exact": 1.0, "ci95": [0.84, 1.0]} for name in ("easy", "hard")],
        "teacher": [
            told | {"task": "easy", "exact": 0.9, "ci95": [0.70, 0.97]},
            told | {"task": "hard", "exact": 0.4, "ci95": [0.22, 0.61]},
        ],
    }
    table = answers_table({name: {"answers": rows} for name, rows in answers.items()}, 300)
    assert "| easy, student | 1.00 (0.84 to 1.00), 0.10 nats |" in table
    assert f"| hard, student | {NOT_ASKED} |" in table
    assert "| hard, teacher | 0.40 (0.22 to 0.61), 0.10 nats |" in table


def test_the_card_lays_written_answers_of_student_and_teacher_side_by_side(settings, tokenizer, data, tmp_path):
    settings = settings.with_changes(heldout_rows=1, heldout_answers=1, output_dir=str(tmp_path), block_tokens=128)
    settings = settings.with_changes(transfer_steps=1, distill_steps=1)
    result = distill(settings, teacher=tiny_teacher(), tokenizer=tokenizer, data=data)
    card = (tmp_path / "README.md").read_text()
    rows = result.metrics["teacher"]["answers"]
    assert [(row["task"], row["length"]) for row in rows] == [
        (parse_task(task).label, 128 * n) for task in TASKS for n in FACTORS
    ]
    assert "| | 128 tokens | 256 tokens | 512 tokens | 1,024 tokens |" in card
    assert "The longest sequences of the training had 256 tokens." in card
    for task in map(parse_task, TASKS):
        assert f"\n| {task.label}, student | " in card
        assert f"\n| {task.label}, teacher | " in card
        # Forms that are held out stand first.
        assert task.held_out == (card.index(f"| {task.label}, student") < card.index(TRAINED))
    assert card.index(HELD_OUT) < card.index(TRAINED)
    assert f"| kv_recall, student | {TOO_SHORT}" in card or NOT_ASKED in card
    assert "the share of 1 questions per field" in card


def test_a_teacher_that_shares_the_students_weights_is_asked_too(settings, tokenizer, data, tmp_path):
    tiny_teacher().save_pretrained(tmp_path)
    changes = {"model": str(tmp_path), "trainable": "lora", "heldout_rows": 1, "heldout_answers": 1}
    settings = settings.with_changes(**changes, block_tokens=128, transfer_steps=1, distill_steps=1)
    found = distill(settings, tokenizer=tokenizer, data=data).metrics["teacher"]["answers"]
    expected = measure_answers(tiny_teacher(), tokenizer, length=128, samples=1, seed=settings.seed)
    assert [row["exact"] for row in found] == [row["exact"] for row in expected]
    measured = [row["answer_nats"] for row in expected if not row["missing"]]
    assert len(measured) >= 4
    assert [row["answer_nats"] for row in found if not row["missing"]] == pytest.approx(measured, rel=1e-3)
