import copy
import gc
import sys
import weakref

import pytest
import torch

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill import DistillationSettings, available_stages, registry, stages
from hf_linear_attn.distill.cli import main
from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.distill.sharding import clip_gradients
from hf_linear_attn.distill.stages.distill import Distill
from hf_linear_attn.distill.stages.extend import Extend
from hf_linear_attn.distill.stages.transfer import Transfer, teacher_forced, weights_forced
from hf_linear_attn.errors import ArgumentError
from tests.distill.tiny import tiny_teacher

STUDENTS = [
    {"feature_map": "hedgehog"},
    {"feature_map": "hedgehog", "window": 4, "sinks": 1},
    {"feature_map": "hedgehog", "window": 4, "mix": "shared"},
]


def ids(rows=2, tokens=16):
    return torch.randint(3, 259, (rows, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", STUDENTS)
@pytest.mark.parametrize("forced", [teacher_forced, weights_forced])
def test_a_teacher_forced_student_computes_what_the_teacher_does(teacher, options, forced):
    student = patch_model(copy.deepcopy(teacher), **options)
    expected = teacher(ids()).logits
    with forced(student, lambda part, output, softmax: None):
        torch.testing.assert_close(student(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(student(ids()).logits, expected, atol=1e-2)


def test_teacher_forcing_keeps_padding_and_packing_apart(teacher):
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :5] = 0
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None].expand(2, -1)
    for arguments in ({"attention_mask": mask}, {"position_ids": positions}):
        expected = teacher(ids(), **arguments).logits
        with teacher_forced(student, lambda part, output, softmax: None):
            found = student(ids(), **arguments).logits
        real = mask.bool() if "attention_mask" in arguments else torch.ones_like(mask).bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


def transfer(model, settings, data):
    stage = Transfer(settings, model)
    stage.loss(data.batch(range(2), 16))


def test_transfer_trains_feature_maps_alone_and_layers_apart(teacher, settings, data):
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    transfer(student, settings, data[0])
    for name, parameter in student.named_parameters():
        assert (parameter.grad is not None) == ("linear_attention" in name), name
    # A layer's gradient does not depend on what later layers make of it.
    other = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    with torch.no_grad():
        linear_attention_parts(other)[1].feature_map.weight_q.mul_(3)
    transfer(other, settings, data[0])
    first, second = (linear_attention_parts(m)[0].feature_map.weight_q.grad for m in (student, other))
    assert torch.equal(first, second)
    assert first.abs().max() > 0


def peak_graph_bytes(layers, settings, data):
    """Return the most bytes that autograd kept for a backward at any one time."""
    student = patch_model(tiny_teacher(layers), feature_map="hedgehog", window=4)
    alive = peak = 0

    class Kept:
        def __init__(self, x):
            self.x = x

    def release(size):
        nonlocal alive
        alive -= size

    def pack(x):
        nonlocal alive, peak
        kept, size = Kept(x), x.numel() * x.element_size()
        alive += size
        peak = max(peak, alive)
        weakref.finalize(kept, release, size)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
        transfer(student, settings, data)
    gc.collect()
    return peak


def test_memory_of_transfer_does_not_grow_with_layers(settings, data):
    few, many = (peak_graph_bytes(layers, settings, data[0]) for layers in (4, 16))
    assert few == many > 0


@pytest.mark.parametrize("loss", ["output", "weights"])
def test_transfer_lowers_its_loss(teacher, settings, data, loss):
    settings = settings.with_changes(transfer_loss=loss)
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")
    stage = Transfer(settings, student)
    optimizer = torch.optim.Adam(stage.groups[0]["params"], lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(stage.loss(data[0].batch(range(4), 16)).item())
        optimizer.step()
    assert losses[-1] < losses[0]


def test_maps_without_parameters_have_nothing_to_transfer(teacher, settings):
    student = patch_model(copy.deepcopy(teacher), feature_map="elu")
    with pytest.raises(ArgumentError, match=r"`stages` must train something, got 'transfer'. The feature map"):
        Transfer(settings, student)


def test_window_dropout_falls_to_nothing(teacher):
    settings = DistillationSettings(distill_steps=200, window_dropout=0.5)
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    stage = Distill(settings, student)
    dropped = []
    for step in range(200):
        stage.begin_step(step)
        dropped.append(sum("window" in part.disabled for part in linear_attention_parts(student)))
    assert 0.3 * 100 < sum(dropped[:50]) < 0.6 * 100
    assert sum(dropped[150:]) < 0.2 * 100
    stage.end()
    assert not any(part.disabled for part in linear_attention_parts(student))


def test_groups_have_the_settings_rates(teacher):
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    settings = DistillationSettings(distill_lr=0.5, rest_lr_share=0.1, map_lr=2.0, extend_lr=0.25)
    stage = Distill(settings, student)
    rates = {id(p): group["lr"] for group in stage.groups for p in group["params"]}
    assert len(rates) == sum(1 for _ in student.parameters())
    for name, parameter in student.named_parameters():
        expected = 2.0 if "linear_attention" in name else 0.5 if "self_attn" in name else 0.05
        assert rates[id(parameter)] == expected, name
    gentler = {group["lr"] for group in Extend(settings, student).groups}
    assert gentler == {1.0, 0.25, 0.025}
    assert {group["lr"] for group in Transfer(settings, student).groups} == {2.0}
    frozen = Distill(DistillationSettings(rest_lr_share=0, train_feature_maps=False), student)
    names = {name for name, p in student.named_parameters() if p.requires_grad}
    assert names == {f"model.layers.{n}.self_attn.{x}_proj.weight" for n in (0, 1) for x in "qkvo"}
    assert len(frozen.groups) == 1


ONE_FILE = '''
"""A stage that learns the text alone, at a fixed length."""

from hf_linear_attn.distill.forward import predictions
from hf_linear_attn.distill.losses import ce_loss
from hf_linear_attn.distill.registry import register_stage
from hf_linear_attn.distill.stages.base import Stage


@register_stage
class Polish(Stage):
    name = "polish"
    place = 15

    @classmethod
    def steps(cls, settings):
        return 3

    @classmethod
    def lengths(cls, settings):
        return [settings.block_tokens]

    def trained(self):
        return [{"params": list(self.student.parameters()), "lr": 1e-2}]

    def loss(self, batch):
        targets, weights, logits = predictions(self.student, batch)
        return ce_loss(logits, targets, weights)
'''


def test_a_new_stage_is_one_new_file(teacher, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "polish.py").write_text(ONE_FILE)
    monkeypatch.setattr(registry, "_STAGES", dict(registry._STAGES))
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path / "stage")])
    stages.discover()
    assert available_stages() == ("retain", "transfer", "polish", "distill", "extend", "embed")
    teacher.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    (tmp_path / "texts.txt").write_text("a text to read " * 200)
    flags = f"--model {tmp_path}/teacher --dataset {tmp_path}/texts.txt --output-dir {tmp_path}/student --window 4"
    flags += " --stages transfer polish --transfer-steps 1 --block-tokens 16 --rows 2 --heldout-rows 0 --log-every 1"
    result = main([*flags.split(), "--no-progress"])
    assert [record["stage"] for record in result.history] == ["transfer"] + ["polish"] * 3
    assert result.history[-1]["loss_nats"] < result.history[1]["loss_nats"]
    assert result.tokens == 4 * 2 * 16
    assert from_pretrained(tmp_path / "student").config.linear_attention["trained_length"] == 32
    del sys.modules["hf_linear_attn.distill.stages.polish"]


def test_a_stage_of_the_users_that_has_nothing_to_train_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_STAGES", dict(registry._STAGES))

    @registry.register_stage
    class Idle(Distill):
        name = "idle"

        @classmethod
        def serves(cls, settings):
            return False

    with pytest.raises(ArgumentError, match="`stages` must be without `idle`: it has nothing to train, got"):
        DistillationSettings(stages=["distill", "idle"])


def test_a_norm_of_0_leaves_gradients_as_they_are():
    weight = torch.nn.Parameter(torch.ones(3))
    for limit, expected in ((0.0, 3.0), (1e9, 3.0), (1.0, 3 / (27**0.5 + 1e-6))):
        weight.grad = torch.full((3,), 3.0)
        assert clip_gradients([weight], limit) == pytest.approx(27**0.5)
        torch.testing.assert_close(weight.grad, torch.full((3,), expected))
