import copy
import json
import logging
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F
from transformers import MambaConfig, MambaForCausalLM

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.checkpoint import checkpoints
from hf_linear_attn.distill.measure import heldout_loss
from hf_linear_attn.distill.stages.distill import Distill
from hf_linear_attn.errors import ArgumentError, CheckpointError, TrainingError
from hf_linear_attn.files import locked
from tests.distill.tiny import (
    byte_tokenizer,
    kill_at,
    killed,
    same,
    save_files,
    tiny_gpt2,
    tiny_multimodal,
    tiny_settings,
    tiny_teacher,
)


def go(settings, teacher, tokenizer, data, **options):
    return distill(settings, teacher=teacher, tokenizer=tokenizer, data=data, **options)


@torch.no_grad()
def divergence(student, teacher, batch):
    """Return the mean KL divergence from the teacher over a batch's real tokens."""
    found, expected = (model(batch.input_ids).logits.log_softmax(-1) for model in (student, teacher))
    return F.kl_div(found, expected, log_target=True, reduction="none").sum(-1)[batch.real].mean().item()


def test_distillation_brings_the_student_nearer_to_the_teacher(settings, teacher, tokenizer, data):
    before = copy.deepcopy(teacher.state_dict())
    # Without a window, which would be near to the teacher from the start.
    settings = settings.with_changes(feature_map="hedgehog", window=None, sinks=0, length_factors=[1])
    settings = settings.with_changes(transfer_steps=10, distill_steps=40, map_lr=1e-2, distill_lr=1e-2)
    result = go(settings, teacher, tokenizer, data)
    stages = [record["stage"] for record in result.history]
    assert stages == ["transfer"] * 10 + ["distill"] * 40
    losses = [record["loss_nats"] for record in result.history]
    assert losses[9] < losses[0]
    heldout = data[1].batch(range(16), 16)
    patched = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")
    assert divergence(result.student, teacher, heldout) < 0.8 * divergence(patched, teacher, heldout)
    assert all(torch.equal(before[name], x) for name, x in teacher.state_dict().items())
    assert all(p.requires_grad for p in result.student.parameters())
    assert result.tokens == 50 * 2 * 16


def test_seeds_decide_everything(settings, teacher, tokenizer, data):
    # The data are drawn already, with a seed of their own: window dropout is what is left to chance.
    settings = settings.with_changes(window_dropout=0.5)
    state = torch.get_rng_state()
    first, second = (go(settings, teacher, tokenizer, data).student for _ in range(2))
    assert same(first, second)
    assert not same(first, go(settings.with_changes(seed=1), teacher, tokenizer, data).student)
    assert torch.equal(state, torch.get_rng_state())


def test_saved_students_load_with_log_picture_and_card(settings, teacher, tokenizer, data, tmp_path):
    settings = settings.with_changes(output_dir=str(tmp_path), heldout_rows=3)
    result = go(settings, teacher, tokenizer, data)
    loaded = from_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(loaded(ids).logits, result.student(ids).logits)
    assert loaded.config.linear_attention["trained_length"] == 32
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log == result.history
    card = (tmp_path / "README.md").read_text()
    assert f"{result.metrics['student']['loss_nats']:.4f}" in card
    assert "linear branch off" in card
    assert (tmp_path / "loss.svg").read_text().count('class="series') == 2
    assert json.loads((tmp_path / "distillation.json").read_text())["metrics"] == result.metrics


def test_extension_reads_longer_sequences(settings, teacher, tokenizer, data):
    settings = settings.with_changes(stages=["extend"], extend_factor=3, extend_steps=2)
    result = go(settings, teacher, tokenizer, data)
    assert result.tokens == 2 * 2 * 48
    assert result.student.config.linear_attention["trained_length"] == 48


def test_weights_are_moved_back_to_the_teachers_when_training_has_ended(settings, teacher, tokenizer, data, tmp_path):
    settings = settings.with_changes(heldout_rows=0, output_dir=str(tmp_path / "whole"))
    learned = go(settings, teacher, tokenizer, data).student.state_dict()
    settings = settings.with_changes(teacher_share=0.25, output_dir=str(tmp_path / "stopped"))
    with pytest.raises(StoppedError):
        go(settings, teacher, tokenizer, data, on_step=stop_at(4))
    result = go(settings, teacher, tokenizer, data)
    own, moved = dict(teacher.named_parameters()), 0
    for name, x in result.student.named_parameters():
        expected = learned[name] + 0.25 * (own[name] - learned[name]) if name in own else learned[name]
        torch.testing.assert_close(x, expected, msg=name)
        moved += name in own and not torch.equal(x, learned[name])
    assert moved > 10


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"shard": True}, "shard"), ({"teacher_logits": "x"}, "teacher_logits")],
)
def test_weights_of_both_models_are_needed_to_move_back(changes, named):
    with pytest.raises(ArgumentError, match=f"`{named}` must be .* with `teacher_share`"):
        DistillationSettings(teacher_share=0.5, **changes)


class StoppedError(Exception):
    pass


def stop_at(step, stage="distill"):
    def callback(record):
        if (record["stage"], record["step"]) == (stage, step):
            raise StoppedError

    return callback


@pytest.mark.parametrize(("stage", "step"), [("transfer", 3), ("distill", 1), ("distill", 4)])
@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    settings, teacher, tokenizer, data, tmp_path, stage, step, trainable
):
    settings = settings.with_changes(output_dir=str(tmp_path), trainable=trainable)
    whole = go(settings.with_changes(output_dir=None), teacher, tokenizer, data)
    with pytest.raises(StoppedError):
        go(settings, teacher, tokenizer, data, on_step=stop_at(step, stage))
    assert checkpoints(tmp_path / "checkpoints")
    resumed = go(settings, teacher, tokenizer, data)
    assert same(resumed.student, whole.student)
    steps = [(record["stage"], record["step"], record["loss_nats"]) for record in resumed.history]
    assert steps == [(record["stage"], record["step"], record["loss_nats"]) for record in whole.history]


def killed_run(folder, step):
    """Train the tiny student from files, and kill the process at a step (0: never)."""
    torch.set_num_threads(1)
    steps = {"transfer_steps": 2, "distill_steps": 6, "checkpoint_every": 2}
    settings = tiny_settings(**steps, dataset=f"{folder}/texts", output_dir=f"{folder}/run")

    return distill(settings, teacher=tiny_teacher(), tokenizer=byte_tokenizer(), on_step=kill_at(step))


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_bits(tmp_path):
    save_files(tmp_path)
    killed("tests.distill.test_run", str(tmp_path), 5)
    resumed = killed_run(tmp_path, 0)
    shutil.rmtree(tmp_path / "run")
    assert same(resumed.student, killed_run(tmp_path, 0).student)


def stopped_run(settings, teacher, tokenizer, data, tmp_path):
    settings = settings.with_changes(output_dir=str(tmp_path))
    with pytest.raises(StoppedError):
        go(settings, teacher, tokenizer, data, on_step=stop_at(4))
    return settings


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over(settings, teacher, tokenizer, data, tmp_path, caplog, damage):
    settings = stopped_run(settings, teacher, tokenizer, data, tmp_path)
    newest = checkpoints(tmp_path / "checkpoints")[-1]
    weights = newest / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (newest / "meta.json").unlink()
    with caplog.at_level(logging.WARNING):
        resumed = go(settings, teacher, tokenizer, data)
    assert f"checkpoint {newest} cannot be read" in caplog.text
    assert same(resumed.student, go(settings.with_changes(output_dir=None), teacher, tokenizer, data).student)


def test_a_folder_of_damaged_checkpoints_is_refused(settings, teacher, tokenizer, data, tmp_path):
    settings = stopped_run(settings, teacher, tokenizer, data, tmp_path)
    for checkpoint in checkpoints(tmp_path / "checkpoints"):
        (checkpoint / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"`output_dir` must hold a readable checkpoint, got \['step-"):
        go(settings, teacher, tokenizer, data)


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(
    settings, teacher, tokenizer, data, tmp_path, monkeypatch
):
    settings = settings.with_changes(output_dir=str(tmp_path))
    save, calls = torch.save, []

    def fills_up(*arguments, **options):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save(*arguments, **options)

    monkeypatch.setattr(torch, "save", fills_up)
    with pytest.raises(CheckpointError, match=r"`output_dir` must have room .* last good one: .*step-00000003"):
        go(settings, teacher, tokenizer, data)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    monkeypatch.setattr(torch, "save", save)
    resumed = go(settings, teacher, tokenizer, data)
    assert same(resumed.student, go(settings.with_changes(output_dir=None), teacher, tokenizer, data).student)


def test_only_so_many_checkpoints_are_kept(settings, teacher, tokenizer, data, tmp_path):
    go(settings.with_changes(output_dir=str(tmp_path), checkpoint_every=1), teacher, tokenizer, data)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-00000006", "step-00000007"]


def test_changed_settings_are_refused_on_resume(settings, teacher, tokenizer, data, tmp_path):
    settings = stopped_run(settings, teacher, tokenizer, data, tmp_path)
    with pytest.raises(ArgumentError, match=r"same settings.*Changed: map_lr None -> 0.02. Restore"):
        go(settings.with_changes(map_lr=0.02), teacher, tokenizer, data)
    with pytest.raises(ArgumentError, match=r"Changed: rows_per_step 2 -> 4"):
        go(settings.with_changes(rows=4, length_factors=[1, 2]), teacher, tokenizer, data)
    go(settings.with_changes(log_every=2), teacher, tokenizer, data)


def test_a_folder_in_use_is_refused(settings, teacher, tokenizer, data, tmp_path):
    with locked(tmp_path), pytest.raises(CheckpointError, match=r"`output_dir` must not be in use, got .*Another run"):
        go(settings.with_changes(output_dir=str(tmp_path)), teacher, tokenizer, data)


def test_a_loss_that_is_not_finite_names_step_and_layer(settings, teacher, tokenizer, data, tmp_path):
    settings = settings.with_changes(output_dir=str(tmp_path), sinks=0)

    def poison(record):
        if (record["stage"], record["step"]) == ("distill", 3):
            with torch.no_grad():
                student.model.layers[1].mlp.up_proj.weight.fill_(float("inf"))

    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    message = r"at step 4 of distill .* got nan \(parameter model.layers.1.mlp.up_proj.weight\).*step-00000005"
    with pytest.raises(TrainingError, match=message):
        go(settings, teacher, tokenizer, data, student=student, on_step=poison)


def test_a_transfer_loss_that_is_not_finite_names_step_and_layer(settings, teacher, tokenizer, data):
    def poison(record):
        with torch.no_grad():
            student.model.layers[1].self_attn.linear_attention.feature_map.weight_k.fill_(torch.nan)

    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    settings = settings.with_changes(sinks=0)
    message = r"at step 2 of transfer .* got nan \(layer model.layers.1.self_attn\).*checkpoint: None"
    with pytest.raises(TrainingError, match=message):
        go(settings, teacher, tokenizer, data, student=student, on_step=poison)


def test_models_that_do_not_fit_are_refused(settings, teacher, tokenizer, data):
    patched = patch_model(copy.deepcopy(teacher), feature_map="hedgehog")
    with pytest.raises(ArgumentError, match="must be a softmax model"):
        go(settings, patched, tokenizer, data)
    with pytest.raises(ArgumentError, match="`student` must be patched"):
        go(settings, teacher, tokenizer, data, student=copy.deepcopy(teacher))
    other = patch_model(tiny_teacher(vocab_size=300), feature_map="hedgehog")
    with pytest.raises(
        ArgumentError, match="`student` must have the teacher's tokenizer and vocabulary of 259, got 300"
    ):
        go(settings, teacher, tokenizer, data, student=other)
    other = patch_model(tiny_gpt2(positions=64), feature_map="hedgehog")
    with pytest.raises(ArgumentError, match="`student` must have the teacher's architecture, 'llama', got 'gpt2'"):
        go(settings, teacher, tokenizer, data, student=other)
    with pytest.raises(ArgumentError, match=r"`tokenizer` must have at most the models' 100 tokens, got 259"):
        go(settings, tiny_teacher(vocab_size=100), tokenizer, data)
    with pytest.raises(ArgumentError, match="`model` must be a folder or hub name, got None"):
        distill(settings, tokenizer=tokenizer, data=data)


def test_recomputed_activations_train_alike(settings, teacher, tokenizer, data):
    plain = go(settings, teacher, tokenizer, data)
    recomputed = go(settings.with_changes(gradient_checkpointing=True), teacher, tokenizer, data)
    expected = [record["loss_nats"] for record in plain.history]
    assert [record["loss_nats"] for record in recomputed.history] == pytest.approx(expected, rel=1e-5)


def test_a_student_has_the_checkpoints_dtype_whatever_the_teachers(settings, teacher, tokenizer, data, tmp_path):
    teacher.save_pretrained(tmp_path)
    settings = settings.with_changes(model=str(tmp_path), teacher_dtype="bfloat16", transfer_steps=0, distill_steps=1)
    seen = []
    settings = settings.with_changes(distill_lr=1e-30, map_lr=1e-30, heldout_rows=2)
    result = distill(settings, tokenizer=tokenizer, data=data, on_step=seen.append)
    assert len(seen) == 1
    state = result.student.state_dict()
    assert all(torch.equal(state[name], x) for name, x in teacher.state_dict().items())
    assert result.metrics["teacher"]["loss_nats"] != heldout_loss(teacher, data[1], 2, 16)["loss_nats"]


def test_a_teacher_that_nobody_asks_is_not_kept(settings, teacher, tokenizer, data, tmp_path, monkeypatch):
    teacher.save_pretrained(tmp_path)
    settings = settings.with_changes(model=str(tmp_path), distill_loss="ce")
    monkeypatch.setattr("hf_linear_attn.distill.models.load_teacher", None)
    assert "teacher" not in distill(settings, tokenizer=tokenizer, data=data).metrics


def test_mixed_precision_keeps_fp32_weights(settings, teacher, tokenizer, data):
    # Adam's first steps go by the sign of a gradient, which rounding may turn: small steps, to compare losses.
    settings = settings.with_changes(map_lr=1e-2)
    plain = go(settings, teacher, tokenizer, data)
    mixed = go(settings.with_changes(mixed_precision="bf16"), teacher, tokenizer, data)
    assert {p.dtype for p in mixed.student.parameters()} == {torch.float32}
    expected = [record["loss_nats"] for record in plain.history]
    # bf16 rounds to 3 digits; the tiny model's large weights amplify that.
    assert [record["loss_nats"] for record in mixed.history] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("stage", "tolerance"), [("distill", 1e-5), ("transfer", 0.05)])
def test_accumulation_is_a_larger_batch(settings, teacher, tokenizer, data, stage, tolerance):
    # Nearly so in transfer, whose loss is over the variance of each forward's outputs. In fp64: Adam's first steps go
    # by the sign of a gradient, so where it is zero but for rounding, fp32 drifts apart.
    settings = settings.with_changes(length_factors=[1, 2], stages=[stage])
    teacher = teacher.double()
    large = go(settings.with_changes(rows=4), teacher, tokenizer, data)
    split = go(settings.with_changes(rows=2, accumulation=2), teacher, tokenizer, data)
    expected = [record["loss_nats"] for record in large.history]
    assert [record["loss_nats"] for record in split.history] == pytest.approx(expected, rel=tolerance)


def test_a_batch_leaves_nothing_for_the_next(settings, teacher, tokenizer, data, monkeypatch):
    losses, compute = [], Distill.loss

    def loss(stage, batch):
        assert all(found() is None for found in losses)
        found = compute(stage, batch)
        losses.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Distill, "loss", loss)
    go(settings.with_changes(accumulation=2, stages=["distill"], distill_steps=2), teacher, tokenizer, data)
    assert len(losses) == 4


def test_packing_needs_positions(settings, teacher, tokenizer, data, monkeypatch):
    def forward(input_ids=None, use_cache=None):
        raise NotImplementedError

    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    monkeypatch.setattr(student, "forward", forward)
    settings = settings.with_changes(sinks=0)
    with pytest.raises(ArgumentError, match="`pack` must be False for LlamaForCausalLM, got True"):
        distill(settings, teacher, student, tokenizer, data=data)


def test_sequences_stay_within_the_models_positions(settings, tokenizer, data, tmp_path, caplog):
    settings = settings.with_changes(rows=4, length_factors=None, output_dir=str(tmp_path))
    with caplog.at_level(logging.INFO), pytest.raises(StoppedError):
        go(settings, tiny_gpt2(positions=40), tokenizer, data, on_step=stop_at(4))
    assert "the model has 40 positions, so the longest sequences have 32 tokens" in caplog.text
    # Going on, the run has the lengths that it began with.
    result = go(settings, tiny_gpt2(positions=40), tokenizer, data)
    assert result.settings.length_factors == [1, 2]
    assert result.student.config.linear_attention["trained_length"] == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length_factors": [1, 4]}, r"`length_factors` must {}, got \[1, 4\]. Lower it, or `bl"),
        ({"block_tokens": 48}, r"`block_tokens` must {}, got 48. Lower it."),
        ({"stages": ["extend"], "extend_factor": 3}, r"`extend_factor` must {}, got 3. Lower it, or `bl"),
    ],
)
def test_longer_sequences_than_positions_are_refused_before_data_are_read(settings, tokenizer, changes, message):
    message = message.format("keep sequences within the model's 40 positions")
    settings = settings.with_changes(rows=4, dataset="missing/texts", **changes)
    with pytest.raises(ArgumentError, match=message):
        distill(settings, teacher=tiny_gpt2(positions=40), tokenizer=tokenizer)


def test_lengths_that_no_stage_reads_do_not_matter(settings, tokenizer, data):
    settings = settings.with_changes(rows=4, length_factors=[4], stages=["extend"], extend_factor=2, extend_steps=1)
    assert go(settings, tiny_gpt2(positions=40), tokenizer, data).tokens == 4 * 32


def test_a_student_is_not_taken_for_its_teacher_nor_a_teacher_for_a_student(
    settings, teacher, tokenizer, data, tmp_path
):
    teacher.save_pretrained(tmp_path / "softmax")
    patch_model(teacher, feature_map="hedgehog", window=4).save_pretrained(tmp_path / "patched")
    message = r"`model` must be a softmax model, and this one is patched, got .*Pass it as `student`"
    with pytest.raises(ArgumentError, match=message):
        distill(settings.with_changes(model=str(tmp_path / "patched")), tokenizer=tokenizer, data=data)
    message = r"`student` must be a patched model, and this one is softmax, got .*Pass it as `model`"
    with pytest.raises(ArgumentError, match=message):
        distill(
            settings.with_changes(student=str(tmp_path / "softmax"), distill_loss="ce"), tokenizer=tokenizer, data=data
        )


def test_a_student_keeps_its_own_conversion_and_the_run_records_it(settings, teacher, tokenizer, data, tmp_path):
    options = {"num_features": 8}
    patch_model(teacher, feature_map="hedgehog", feature_map_options=options, window=6, layers=[1], mix="gate")
    teacher.save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    given = {name: getattr(settings, name) for name in settings.given - {"window", "sinks"}}
    given |= {"student": str(tmp_path / "student"), "stages": ["extend"], "extend_steps": 2}
    others = {"feature_map": "norm_preserving", "feature_map_options": {}, "window": 64, "sinks": 4, "mix": "key"}
    for name, value in (others | {"layers": [0, 1], "softmax_budget": 0.5}).items():
        with pytest.raises(ArgumentError, match=f"`{name}` must be the student's own, .*Leave it out, or convert"):
            distill(DistillationSettings(**given, **{name: value}), data=data)
    asked = {"window": 6, "layers": [1], "feature_map_options": {"num_features": "head_dim"}}
    settings = DistillationSettings(**given, **asked, output_dir=str(tmp_path / "run"))
    with pytest.raises(StoppedError):
        distill(settings, data=data, on_step=stop_at(2, "extend"))
    result = distill(settings, data=data)
    recorded = json.loads((tmp_path / "run" / "distillation.json").read_text())["settings"]
    for found in (recorded, result.settings.to_dict()):
        own = {name: found[name] for name in ("feature_map", "window", "sinks", "mix", "layers")}
        assert own == {"feature_map": "hedgehog", "window": 6, "sinks": 0, "mix": "gate", "layers": [1]}
        assert found["feature_map_options"] == options


def test_a_window_alone_skips_transfer(settings, teacher, tokenizer, data):
    result = go(settings.with_changes(mix="window"), teacher, tokenizer, data)
    assert {record["stage"] for record in result.history} == {"distill"}
    student = patch_model(copy.deepcopy(teacher), window=4, sinks=1, mix="window")
    assert go(settings, teacher, tokenizer, data, student=student).settings.stages == ["distill"]
    with pytest.raises(ArgumentError, match="`stages` must be without `transfer`: a window alone"):
        go(settings.with_changes(stages=["transfer", "distill"]), teacher, tokenizer, data, student=student)


def test_the_language_model_of_a_multimodal_model_is_distilled(settings, tokenizer, data, tmp_path):
    settings = settings.with_changes(output_dir=str(tmp_path), heldout_rows=2)
    settings = settings.with_changes(feature_map="hedgehog", feature_map_options={"num_features": "head_dim"})
    result = go(settings, tiny_multimodal(), tokenizer, data)
    assert result.student.config.linear_attention["feature_map_options"] == {"num_features": 8}
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(from_pretrained(tmp_path)(ids).logits, result.student(ids).logits)
    smaller = tiny_multimodal()
    smaller.config.text_config.vocab_size = 200
    with pytest.raises(ArgumentError, match="`tokenizer` must have at most the models' 200 tokens, got 259"):
        go(settings.with_changes(output_dir=None), smaller, tokenizer, data)


def test_models_without_attention_are_refused(settings, tokenizer, data):
    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=259))
    with pytest.raises(ArgumentError, match="`model` must have attention to convert, got 'MambaConfig'"):
        go(settings, model, tokenizer, data)
