import copy

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.distill import distill
from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.distill.selection import Selection, mean_kl, select_layers
from hf_linear_attn.distill.softmax import as_softmax
from hf_linear_attn.distill.teacher import LiveTeacher
from hf_linear_attn.errors import ArgumentError
from tests.distill.tiny import tiny_teacher


@pytest.fixture
def four(data):
    teacher = tiny_teacher(4)
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")
    return teacher, student, [data[1].batch(range(4), 16)]


def test_the_ranking_is_the_kl_of_models_patched_without_that_layer(four):
    teacher, student, batches = four
    selection = select_layers(student, LiveTeacher(lambda: teacher), batches, 0.5)
    expected = [LiveTeacher(lambda: teacher).divergence(batch) for batch in batches]
    for entry in selection.ranking:
        layers = [n for n in range(4) if n != entry["layer"]]
        other = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", layers=layers)
        assert entry["kl_nats"] == pytest.approx(mean_kl(other, batches, expected), rel=1e-4)
    assert [entry["kl_nats"] for entry in selection.ranking] == sorted(e["kl_nats"] for e in selection.ranking)


def test_the_curve_is_greedy_and_begins_at_the_ranking(four):
    teacher, student, batches = four
    selection = select_layers(student, LiveTeacher(lambda: teacher), batches, 0.5)
    assert [entry["softmax_layers"] for entry in selection.curve] == [0, 1, 2]
    assert selection.curve[1]["layer"] == selection.ranking[0]["layer"]
    assert selection.curve[1]["kl_nats"] == selection.ranking[0]["kl_nats"]
    assert selection.chosen == sorted(entry["layer"] for entry in selection.curve[1:])
    expected = [LiveTeacher(lambda: teacher).divergence(batch) for batch in batches]
    with as_softmax([linear_attention_parts(student)[n] for n in selection.chosen]), torch.no_grad():
        assert mean_kl(student, batches, expected) == selection.curve[-1]["kl_nats"]


def test_restoring_all_layers_gives_the_teacher(four):
    teacher, student, batches = four
    with as_softmax(linear_attention_parts(student)), torch.no_grad():
        expected = [LiveTeacher(lambda: teacher).divergence(batch) for batch in batches]
        assert mean_kl(student, batches, expected) < 1e-6


def test_budgets_that_leave_nothing_are_refused(four):
    teacher, student, batches = four
    with pytest.raises(ArgumentError, match=r"`softmax_budget` must leave at least one of 4 converted layers, got 0.9"):
        select_layers(student, LiveTeacher(lambda: teacher), batches, 0.9)


def test_distillation_keeps_the_chosen_layers_and_saves_the_choice(settings, tokenizer, data, tmp_path):
    teacher = tiny_teacher(4)
    settings = settings.with_changes(softmax_budget=0.25, output_dir=str(tmp_path), gradient_checkpointing=True)
    result = distill(settings, teacher=teacher, tokenizer=tokenizer, data=data)
    selection = Selection.load(tmp_path / "layers.json")
    assert len(selection.chosen) == 1
    kept = [n for n in range(4) if n not in selection.chosen]
    assert result.student.config.linear_attention["layers"] == kept
    assert all(layer.gradient_checkpointing for layer in result.student.model.layers)
    assert f"| 1 | model.layers.{selection.chosen[0]}.self_attn |" in selection.table()
