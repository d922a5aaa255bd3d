"""Layers get as many keys as they need, and all together no more than evenly."""

import copy
from dataclasses import replace

import pytest
import torch

from hf_linear_attn import patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.baseline import window_alone
from hf_linear_attn.distill.divide import Division, divide, given_out
from hf_linear_attn.distill.selection import mean_over_tokens
from hf_linear_attn.distill.teacher import SharedTeacher
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching.call_cache import returned_cache
from tests.distill.test_run import StoppedError, stop_at
from tests.distill.tiny import tiny_settings, tiny_teacher

RECIPE = {"window": 8, "sinks": 1, "kept": 8, "mix": "window"}


@pytest.fixture
def batches(data):
    return [data[0].batch(range(n, n + 2), 128) for n in (0, 2)]


def near_sighted(layers):
    """Return a teacher of 4 layers of which only some pay attention: the others' values are next to nothing."""
    teacher = tiny_teacher(4)
    with torch.no_grad():
        for index, layer in enumerate(teacher.model.layers):
            layer.self_attn.v_proj.weight.mul_(8 if index in layers else 1e-4)
    return teacher


def test_what_is_measured_is_the_kl_of_a_model_with_that_layer_alone_converted(batches):
    teacher = tiny_teacher(4)
    student = patch_model(copy.deepcopy(teacher), "hedgehog", **RECIPE | {"mix": "key"})
    division = divide(student, SharedTeacher(student), batches)
    assert [(entry["layer"], entry["share"]) for entry in division.measured] == [
        (layer, share) for layer in range(4) for share in (0.25, 0.5, 1, 2, 4)
    ]
    asked = [SharedTeacher(student).divergence(batch) for batch in batches]
    for entry in division.measured:
        window, kept = (int(entry["share"] * RECIPE[name]) for name in ("window", "kept"))
        sizes = {"window": window + kept, "kept": 0} if entry["share"] < 1 else {"window": window, "kept": kept}
        other = patch_model(copy.deepcopy(teacher), layers=[entry["layer"]], **RECIPE | sizes)
        assert entry["kl_nats"] == pytest.approx(mean_over_tokens(other, batches, asked), rel=1e-3, abs=1e-7)


def test_layers_that_look_far_get_what_others_do_not_need(batches):
    student = patch_model(near_sighted({2}), **RECIPE)
    division = divide(student, SharedTeacher(student), batches)
    quarter = {"window": 4, "kept": 0}
    assert division.per_layer == {"0": quarter, "1": quarter, "2": {"window": 26, "kept": 26}, "3": quarter}


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        # All alike: what is given is given in turn.
        ([{0.25: 4.0, 0.5: 3.0, 1: 2.0, 2: 1.0}] * 4, [1, 1, 1, 1]),
        ([{0.25: 0.0, 0.5: 0.0, 1: 0.0, 2: 0.0}, {0.25: 4.0, 0.5: 3.0, 1: 2.0, 2: 1.0}], [0.25, 1.75]),
        # Where nothing tells them apart, all get as much.
        ([{0.25: 0.0, 0.5: 0.0, 1: 0.0, 2: 0.0}] * 3, [1, 1, 1]),
        # A share that costs more than a smaller one is as good as that, and what nobody can have is left.
        ([{0.25: 0.0, 0.5: 1.0, 1: 1.0}, {0.25: 9.0, 0.5: 5.0, 1: 4.0}], [1, 1]),
        ([{0.25: 0.0, 0.5: 0.0}, {0.25: 1.0, 0.5: 0.0}], [0.5, 0.5]),
    ],
    ids=["alike", "one needs", "nothing told", "not falling", "too little"],
)
def test_shares(curves, expected):
    found = given_out(curves)
    assert sorted(found) == sorted(expected)
    assert sum(found) <= len(found)


def test_texts_too_short_to_see_more_are_not_asked(data):
    student = patch_model(tiny_teacher(4), **RECIPE)
    division = divide(student, SharedTeacher(student), [data[0].batch(range(2), 64)])
    assert {entry["share"] for entry in division.measured} == {0.25, 0.5, 1, 2}


@pytest.mark.parametrize("near", [{"window": 4, "kept": 4}, {"window": 8, "kept": 0}], ids=["kept", "window alone"])
@torch.no_grad()
def test_a_window_alone_of_as_many_bytes_is_divided_alike(teacher, near):
    own = {0: near, 1: {"window": 12, "kept": 12}}
    student = patch_model(copy.deepcopy(teacher), **RECIPE, per_layer=own)
    settings = window_alone(student)
    other = patch_model(copy.deepcopy(teacher), **settings)
    ids = torch.arange(3, 83)[None]
    sizes = [
        sum(x.nbytes for layer in returned_cache(model(ids, use_cache=True)).layers for x in layer.tensors.values())
        for model in (student, other)
    ]
    token = 4 * 2 * sum(student.config.head_dim for _ in range(student.config.num_key_value_heads))
    # Rounded in the window's favour: a token of each layer. What tells padding and numbers tokens is not counted.
    assert abs(sizes[1] - sizes[0]) < 3 * token + 800
    windows = [part["window"] for part in settings["per_layer"].values()]
    assert windows[1] == pytest.approx(3 * windows[0], abs=2)
    assert sum(windows) == pytest.approx(2 * settings["window"], abs=1)


@pytest.fixture
def dividing():
    sizes = {"window": 8, "block_tokens": 64, "length_factors": [1], "rows": 2}
    changes = {"stages": ["distill"], "distill_steps": 3, "teacher_share": 0.0, "checkpoint_every": 1}
    return tiny_settings("kept_keys", **sizes, **changes, kept=4, retention="redundancy")


@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_a_run_divides_saves_and_goes_on_with_what_it_saved(dividing, tokenizer, data, tmp_path, trainable):
    settings = dividing.with_changes(output_dir=str(tmp_path / "run"), trainable=trainable, merge_lora=False)
    common = {"tokenizer": tokenizer, "data": data}
    near_sighted({1}).save_pretrained(tmp_path / "teacher")
    settings = settings.with_changes(model=str(tmp_path / "teacher"))
    with pytest.raises(StoppedError):
        distill(settings, **common, on_step=stop_at(1, "distill"))
    path = tmp_path / "run" / "division.json"
    division = Division.load(path)
    assert division.per_layer["1"]["window"] > 8
    # What is measured anew would not give this one.
    own = {"3": {"window": 9, "kept": 3}}
    replace(division, per_layer=own).save(path)
    student = distill(settings, **common).student
    assert student.config.linear_attention["per_layer"] == own
    card = (tmp_path / "run" / "README.md").read_text()
    assert trainable == "full" or f"per_layer={own}" in card


def test_a_student_that_was_divided_goes_on_by_the_same_preset(dividing, tokenizer, data, tmp_path):
    near_sighted({1}).save_pretrained(tmp_path / "teacher")
    changes = {"model": str(tmp_path / "teacher"), "output_dir": str(tmp_path / "first")}
    first = distill(dividing.with_changes(**changes), tokenizer=tokenizer, data=data).student
    own = first.config.linear_attention["per_layer"]
    # The preset's window and kept keys are not the student's, and it is not divided again.
    changes = {"stages": ["distill"], "distill_steps": 1, "block_tokens": 64, "length_factors": [1], "rows": 2}
    changes |= {"model": str(tmp_path / "teacher"), "student": str(tmp_path / "first"), "heldout_rows": 0}
    again = DistillationSettings.from_preset("kept_keys", **changes)
    student = distill(again, tokenizer=tokenizer, data=data).student
    assert student.config.linear_attention["per_layer"] == own
    with pytest.raises(ArgumentError, match=r"`divide` must be the student's own, 'evenly', got 'kl'"):
        distill(again.with_changes(divide="kl"), tokenizer=tokenizer, data=data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": None, "mix": "key"}, r"`divide` must be 'evenly' without a window, got 'kl'"),
        ({"per_layer": {0: {"window": 3}}}, r"`divide` must be 'evenly' with `per_layer`, got 'kl'"),
        ({"shard": True}, r"`shard` must be False with `divide`, for which the teacher is run whole, got True"),
        ({"context_parallel": 2}, r"`context_parallel` must be 1 with `divide`"),
        ({"teacher_logits": "x"}, r"`teacher_logits` must be None with `divide`"),
    ],
    ids=str,
)
def test_refusals(changes, message):
    with pytest.raises(ArgumentError, match=message):
        DistillationSettings(divide="kl", **changes)
