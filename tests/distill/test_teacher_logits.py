import pytest
import torch
from safetensors import SafetensorError

from hf_linear_attn.distill.forward import predictions
from hf_linear_attn.distill.losses import kl_loss
from hf_linear_attn.distill.teacher_logits import TeacherLogits, write_teacher_logits
from hf_linear_attn.errors import ArgumentError, CheckpointError
from hf_linear_attn.files import locked


def test_the_loss_over_the_top_classes_is_a_lower_bound(settings, teacher, data, tmp_path):
    settings = settings.with_changes(stages=["distill"])
    write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=8)
    batch = data[0].batch([0, 1], 16)
    _, weights, logits = predictions(teacher, batch)
    student = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    full = kl_loss(student, logits, weights)
    divergence = TeacherLogits(tmp_path).divergence(batch)
    everything = slice(None)
    assert 0.2 * full < divergence(student, weights, everything) < full
    assert divergence(logits, weights, everything) < 1e-3 * full


def test_sequences_are_the_same_however_many_go_at_once(settings, teacher, data, tmp_path):
    write_teacher_logits(settings.with_changes(length_factors=[1]), teacher, data[0], tmp_path / "many", top_k=4)
    batch = data[0].batch(range(8), 16)
    stored = TeacherLogits(tmp_path / "many")
    log_p = predictions(teacher, batch)[2].log_softmax(-1)
    counts = (batch.weights[:, 1:] > 0).sum(1).tolist()
    first = settings.transfer_steps * settings.rows
    for number, expected in list(zip(range(8), log_p.split(counts), strict=True))[first:]:
        tokens, found = stored.row(number, batch.rows(number, number + 1))
        torch.testing.assert_close(found, expected.gather(-1, tokens), atol=2e-3, rtol=2e-3)
        assert torch.equal(found.argsort(descending=True), torch.arange(4).expand(len(found), -1))


def test_a_run_that_was_stopped_goes_on(settings, teacher, data, tmp_path):
    settings = settings.with_changes(stages=["distill"], length_factors=[1])
    calls = []
    hook = teacher.register_forward_hook(lambda *_: calls.append(1))
    write_teacher_logits(settings, teacher, data[0], tmp_path)
    assert len(calls) == settings.distill_steps
    write_teacher_logits(settings, teacher, data[0], tmp_path)
    assert len(calls) == settings.distill_steps
    # A longer run reads more sequences than the last file has.
    longer = settings.with_changes(distill_steps=6)
    write_teacher_logits(longer, teacher, data[0], tmp_path)
    assert len(calls) == settings.distill_steps + longer.distill_steps
    TeacherLogits(tmp_path).row(11, data[0].batch([11], 16))
    hook.remove()


def test_folders_with_something_else_are_refused(settings, teacher, data, tmp_path):
    settings = settings.with_changes(stages=["distill"], length_factors=[1])
    write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=4)
    with pytest.raises(ArgumentError, match=r"`top_k` must be that of the folder, 4, got 8 .*another folder"):
        write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=8)
    with pytest.raises(ArgumentError, match=r"`top_k` must be at least 1, got 0"):
        write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=0)
    with pytest.raises(CheckpointError, match=r"`teacher_logits` must come from the same data.*Sequence 0 differs"):
        write_teacher_logits(settings, teacher, data[1], tmp_path, top_k=4)
    with locked(tmp_path), pytest.raises(CheckpointError, match=r"`teacher_logits` must not be in use"):
        write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=4)


def test_a_full_disk_leaves_no_half_written_file(settings, teacher, data, tmp_path, monkeypatch):
    def fills_up(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("hf_linear_attn.distill.teacher_logits.save_file", fills_up)
    with pytest.raises(CheckpointError, match=r"`teacher_logits` must have room"):
        write_teacher_logits(settings, teacher, data[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


def test_other_data_and_incomplete_folders_are_refused(settings, teacher, data, tmp_path):
    with pytest.raises(CheckpointError, match="`teacher_logits` must be a folder of precomputed logits"):
        TeacherLogits(tmp_path)
    write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=4)
    batch = data[0].batch([0], 16)
    with pytest.raises(CheckpointError, match=r"`teacher_logits` must come from the same data.*Sequence 6 differs"):
        TeacherLogits(tmp_path).row(6, batch)
    with pytest.raises(CheckpointError, match="`teacher_logits` must hold sequence 500"):
        TeacherLogits(tmp_path).row(500, batch)
