import copy
from dataclasses import replace

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.distill import distill
from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.distill.selection import (
    LEAST_LOSS_NATS,
    Selection,
    mean_over_tokens,
    select_by_kl,
    select_by_recall,
    text_loss,
)
from hf_linear_attn.distill.softmax import instead_of_forward, softmax_output
from hf_linear_attn.distill.teacher import LiveTeacher
from hf_linear_attn.errors import ArgumentError
from tests.distill.test_run import StoppedError, stop_at
from tests.distill.tiny import tiny_teacher


@pytest.fixture
def four(data):
    teacher = tiny_teacher(4)
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")
    return teacher, student, [data[1].batch(range(4), 16)]


def test_the_ranking_is_the_kl_of_models_patched_without_that_layer(four):
    teacher, student, batches = four
    selection = select_by_kl(student, LiveTeacher(lambda: teacher), batches, 0.5)
    expected = [LiveTeacher(lambda: teacher).divergence(batch) for batch in batches]
    for entry in selection.ranking:
        layers = [n for n in range(4) if n != entry["layer"]]
        other = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", layers=layers)
        assert entry["kl_nats"] == pytest.approx(mean_over_tokens(other, batches, expected), rel=1e-4)
    assert [entry["kl_nats"] for entry in selection.ranking] == sorted(e["kl_nats"] for e in selection.ranking)


def test_the_curve_is_greedy_and_begins_at_the_ranking(four):
    teacher, student, batches = four
    selection = select_by_kl(student, LiveTeacher(lambda: teacher), batches, 0.5)
    assert [entry["softmax_layers"] for entry in selection.curve] == [0, 1, 2]
    assert selection.curve[1]["layer"] == selection.ranking[0]["layer"]
    assert selection.curve[1]["kl_nats"] == selection.ranking[0]["kl_nats"]
    assert selection.chosen == sorted(entry["layer"] for entry in selection.curve[1:])
    expected = [LiveTeacher(lambda: teacher).divergence(batch) for batch in batches]
    parts = linear_attention_parts(student)
    with instead_of_forward([parts[n] for n in selection.chosen], softmax_output), torch.no_grad():
        assert mean_over_tokens(student, batches, expected) == selection.curve[-1]["kl_nats"]


def test_restoring_all_layers_gives_the_teacher(four):
    teacher, student, batches = four
    with instead_of_forward(linear_attention_parts(student), softmax_output), torch.no_grad():
        expected = [LiveTeacher(lambda: teacher).divergence(batch) for batch in batches]
        assert mean_over_tokens(student, batches, expected) < 1e-6


def test_budgets_that_leave_nothing_are_refused(four):
    teacher, student, batches = four
    with pytest.raises(ArgumentError, match=r"`softmax_budget` must leave at least one of 4 converted layers, got 0.9"):
        select_by_kl(student, LiveTeacher(lambda: teacher), batches, 0.9)


@pytest.fixture
def rows(data):
    text = [data[1].collate([data[1].text_row(n, 32) for n in range(4)], 32)]
    return text, [data[1].collate([data[1].recall_row(n, 32) for n in range(4)], 32)]


def nats(model, batches):
    return mean_over_tokens(model, batches, [text_loss(batch) for batch in batches])


def test_recall_scores_are_of_models_with_that_layer_alone_converted(four, rows):
    teacher, student, _ = four
    selection = select_by_recall(student, *rows, 0.25)
    text, answers = (nats(teacher, batches) for batches in rows)
    assert sorted(entry["layer"] for entry in selection.ranking) == [0, 1, 2, 3]
    for entry in selection.ranking:
        other = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", layers=[entry["layer"]])
        found = [nats(other, batches) for batches in rows]
        assert [entry["loss_nats"], entry["answer_nats"]] == pytest.approx(found, rel=1e-4)
        rise = max(entry["loss_nats"] - text, LEAST_LOSS_NATS)
        assert entry["score"] == pytest.approx((entry["answer_nats"] - answers) / rise, rel=1e-2, abs=1e-2)
    scores = [entry["score"] for entry in selection.ranking]
    assert scores == sorted(scores, reverse=True)
    assert selection.chosen == [selection.ranking[0]["layer"]]


def test_the_curve_by_recall_restores_the_chosen_layers_in_turn(four, rows):
    _, student, _ = four
    selection = select_by_recall(student, *rows, 0.5)
    assert [entry["softmax_layers"] for entry in selection.curve] == [0, 1, 2]
    assert [entry["layer"] for entry in selection.curve] == [None, *(e["layer"] for e in selection.ranking[:2])]
    parts = linear_attention_parts(student)
    with instead_of_forward([parts[n] for n in selection.chosen], softmax_output):
        assert selection.curve[-1]["answer_nats"] == nats(student, rows[1])
    assert selection.curve[0]["loss_nats"] == nats(student, rows[0])


def test_a_layer_that_only_answers_need_is_kept_by_recall_and_not_by_text(four, rows, monkeypatch):
    _, student, _ = four
    parts = linear_attention_parts(student)
    # Rise of text and of answers where a layer alone is converted: of layer 2, text cannot tell anything from noise.
    rises = {0: (0.5, 0.5), 1: (0.1, 1.0), 2: (1e-6, 1e-3), 3: (-1e-6, 0.0)}

    def found(model, batches, losses):
        converted = [n for n, part in enumerate(parts) if "forward" not in vars(part)]
        return 2.0 + sum(rises[n][batches is rows[1]] for n in converted)

    monkeypatch.setattr("hf_linear_attn.distill.selection.mean_over_tokens", found)
    selection = select_by_recall(student, *rows, 0.25)
    assert [entry["layer"] for entry in selection.ranking] == [1, 0, 2, 3]
    assert [entry["score"] for entry in selection.ranking] == pytest.approx([10, 1, 0.1, 0])
    assert selection.chosen == [1]


@pytest.mark.parametrize("by", ["kl", "recall"])
def test_distillation_keeps_the_chosen_layers_and_saves_the_choice(settings, tokenizer, data, tmp_path, by):
    teacher = tiny_teacher(4)
    changes = {"softmax_by": by, "output_dir": str(tmp_path), "gradient_checkpointing": True}
    settings = settings.with_changes(softmax_budget=0.25, **changes)
    result = distill(settings, teacher=teacher, tokenizer=tokenizer, data=data)
    selection = Selection.load(tmp_path / "layers.json")
    assert selection.by == by
    assert len(selection.chosen) == 1
    kept = [n for n in range(4) if n not in selection.chosen]
    assert result.student.config.linear_attention["layers"] == kept
    assert all(layer.gradient_checkpointing for layer in result.student.model.layers)


def test_a_run_goes_on_with_the_layers_it_chose_and_refuses_another_choice(settings, tokenizer, data, tmp_path):
    settings = settings.with_changes(softmax_budget=0.25, softmax_by="recall", output_dir=str(tmp_path))
    common = {"teacher": tiny_teacher(4), "tokenizer": tokenizer, "data": data}
    with pytest.raises(StoppedError):
        distill(settings, **common, on_step=stop_at(1, "transfer"))
    path = tmp_path / "layers.json"
    selection = Selection.load(path)
    # What is measured anew would not give this one.
    other = (selection.chosen[0] + 1) % 4
    replace(selection, chosen=[other]).save(path)
    with pytest.raises(ArgumentError, match=r"`softmax_by` must be what chose the layers in .*, 'recall', got 'kl'"):
        distill(settings.with_changes(softmax_by="kl"), **common)
    result = distill(settings, **common)
    assert result.student.config.linear_attention["layers"] == [n for n in range(4) if n != other]


def test_recall_chooses_layers_where_adapters_share_the_teachers_weights(settings, tokenizer, data, tmp_path):
    tiny_teacher(4).save_pretrained(tmp_path / "base")
    changes = {"model": str(tmp_path / "base"), "trainable": "lora", "output_dir": str(tmp_path / "run")}
    settings = settings.with_changes(softmax_budget=0.5, softmax_by="recall", **changes)
    result = distill(settings, tokenizer=tokenizer, data=data)
    selection = Selection.load(tmp_path / "run" / "layers.json")
    assert len(selection.chosen) == 2
    kept = [n for n in range(4) if n not in selection.chosen]
    assert result.student.config.linear_attention["layers"] == kept
