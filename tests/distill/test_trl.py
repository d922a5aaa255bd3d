"""TRL trains a converted model: on its own answers by its teacher's distribution, and on packed texts."""

import copy
import logging

import pytest
import torch
from datasets import Dataset

from hf_linear_attn import patch_model
from hf_linear_attn.distill.lora import add_lora
from hf_linear_attn.patching import is_patched, teacher_of

from .tiny import byte_tokenizer, tiny_teacher

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("default")]
WORDS = ["one two three four", "two three four five six", "three", "four five six seven eight nine"]


def student_of(teacher):
    return patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4, sinks=1)


def options(folder, **changes):
    return {
        "output_dir": str(folder),
        "max_steps": 40,
        "lr_scheduler_type": "constant",
        "logging_steps": 10,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        **changes,
    }


def distil(model, teacher, folder):
    from trl import DistillationConfig, DistillationTrainer

    trainer = DistillationTrainer(
        model=model,
        teacher_model=teacher,
        args=DistillationConfig(**options(folder, max_completion_length=24)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in WORDS * 12]),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("shared", [False, True], ids=["two models", "one set of weights"])
def test_a_student_learns_on_its_own_answers(shared, tmp_path):
    plain = tiny_teacher()
    model = student_of(plain)
    if shared:
        model = add_lora(model, rank=4, alpha=8.0)
    teacher = teacher_of(model) if shared else copy.deepcopy(plain)
    trainer = distil(model, teacher, tmp_path)
    assert is_patched(model.get_base_model() if shared else trainer.model)
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.8 * losses[0]
    # The teacher stays what it was, also where it has the student's weights.
    ids = torch.arange(3, 250)[None]
    with torch.no_grad():
        assert torch.equal(teacher(ids).logits, plain(ids).logits)


def fine_tuned(model, folder, caplog, **changes):
    from trl import SFTConfig, SFTTrainer

    caplog.clear()
    given = {"max_length": 64, "learning_rate": 0.0, "max_steps": 1, **changes}
    settings = SFTConfig(**options(folder, **given))
    data = Dataset.from_list([{"text": text} for text in WORDS])
    with caplog.at_level(logging.WARNING):
        trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=byte_tokenizer())
        trainer.train()
    return trainer.state.log_history[-1]["train_loss"]


@pytest.mark.parametrize("packed", [{"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_packed_texts_do_not_touch_each_other_and_nothing_warns_of_it(packed, tmp_path, caplog, recwarn):
    model = student_of(tiny_teacher())
    padded = fine_tuned(model, tmp_path / "padded", caplog)
    loss = fine_tuned(model, tmp_path / "packed", caplog, **packed)
    said = " ".join([record.getMessage() for record in caplog.records] + [str(w.message) for w in recwarn])
    assert "attention implementation" not in said
    assert "flash" not in said.lower()
    assert loss == pytest.approx(padded, rel=1e-5)
