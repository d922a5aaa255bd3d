import pytest
import torch

from hf_linear_attn.distill import distill
from hf_linear_attn.distill.losses import kl_loss
from hf_linear_attn.distill.stages import predictions
from hf_linear_attn.distill.teacher_logits import TeacherLogits, write_teacher_logits
from hf_linear_attn.errors import CheckpointError


def test_the_whole_vocabulary_on_disk_trains_as_the_teacher_does(settings, teacher, tokenizer, data, tmp_path):
    write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=259)
    live = distill(settings, teacher=teacher, tokenizer=tokenizer, data=data)
    stored = distill(settings.with_changes(teacher_logits=str(tmp_path)), teacher, None, tokenizer, data=data)
    # Log-probabilities are stored in fp16.
    for a, b in zip(live.history, stored.history, strict=True):
        assert a["loss_nats"] == pytest.approx(b["loss_nats"], rel=5e-3)


def test_the_loss_over_the_top_classes_is_a_lower_bound(settings, teacher, data, tmp_path):
    settings = settings.with_changes(stages=["distill"])
    write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=8)
    batch = data[0].batch([0, 1], 16)
    _, weights, logits = predictions(teacher, batch)
    student = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    stored = TeacherLogits(tmp_path)
    full = kl_loss(student, logits, weights)
    assert 0.2 * full < stored.loss(student, batch, [0, 1], weights) < full
    assert stored.loss(logits, batch, [0, 1], weights) < 1e-3 * full


def test_other_data_and_incomplete_folders_are_refused(settings, teacher, tokenizer, data, tmp_path):
    with pytest.raises(CheckpointError, match="`teacher_logits` must be a folder of precomputed logits"):
        TeacherLogits(tmp_path)
    write_teacher_logits(settings, teacher, data[0], tmp_path, top_k=4)
    batch = data[0].batch([0], 16)
    with pytest.raises(CheckpointError, match=r"`teacher_logits` must come from the same data.*Sequence 6 differs"):
        TeacherLogits(tmp_path).row(6, batch)
    with pytest.raises(CheckpointError, match="`teacher_logits` must hold sequence 500"):
        TeacherLogits(tmp_path).row(500, batch)
