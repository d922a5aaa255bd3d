"""A frozen base that student and teacher share, and one that is quantised."""

import copy

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.forward import linear_attention_parts
from hf_linear_attn.distill.lora import add_lora
from hf_linear_attn.distill.models import is_quantised
from hf_linear_attn.distill.teacher import SharedTeacher
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.patching import softmax, teacher_of
from tests.distill.tiny import byte_tokenizer, kill_at, killed, same, save_files, tiny_settings


@pytest.fixture
def saved(tmp_path):
    return save_files(tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)


def settings_in(folder, **changes):
    paths = {"model": f"{folder}/teacher", "dataset": f"{folder}/texts", "output_dir": f"{folder}/run"}
    steps = {"transfer_steps": 2, "distill_steps": 4, "heldout_rows": 2, "checkpoint_every": 2}
    return tiny_settings("single_gpu", **(paths | steps | changes))


def test_the_student_itself_is_the_teacher_while_its_adapters_and_patch_are_off(teacher, data):
    student = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4)
    shared, batch = SharedTeacher(student), data[0].batch(range(4), 16)
    peft = add_lora(student, rank=2, alpha=4.0)
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_B" in name or "linear_attention" in name:
                p.normal_(generator=torch.Generator().manual_seed(0))
    peft.requires_grad_(False).train()
    before = student(batch.input_ids).logits
    with shared.running() as model:
        assert torch.equal(model(batch.input_ids).logits, teacher(batch.input_ids).logits)
        assert not model.training
    assert peft.training
    assert torch.equal(student(batch.input_ids).logits, before)
    assert not torch.allclose(before, teacher(batch.input_ids).logits, atol=1e-2)
    assert not any(p.requires_grad for p in peft.parameters())
    assert all(part.feature_map is not None for part in linear_attention_parts(peft))


def test_one_copy_of_the_base_trains_as_two_do(saved, monkeypatch):
    # In fp32, where the two compute alike up to rounding.
    two = settings_in(saved, model_dtype="float32", output_dir=None)
    teacher = AutoModelForCausalLM.from_pretrained(saved / "teacher")
    expected = distill(two, teacher=teacher)
    monkeypatch.setattr("hf_linear_attn.distill.models.load_teacher", None)
    found = distill(two)
    losses = [record["loss_nats"] for record in expected.history]
    assert [record["loss_nats"] for record in found.history] == pytest.approx(losses, rel=1e-3)
    figures = [result.metrics["teacher"]["loss_nats"] for result in (expected, found)]
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)
    assert found.metrics["teacher"]["linear_off"] is None


def test_the_preset_keeps_a_frozen_bf16_base(saved, monkeypatch):
    made, seen = [], {}
    monkeypatch.setattr(
        "hf_linear_attn.distill.run.add_lora", lambda *a, **options: made.append(add_lora(*a, **options)) or made[0]
    )

    def look(record):
        if record["stage"] == "distill" and not seen:
            seen.update({name: (p.dtype, p.requires_grad) for name, p in made[0].named_parameters()})

    result = distill(settings_in(saved), on_step=look)
    assert seen
    for name, (dtype, trained) in seen.items():
        new = "lora_" in name or "modules_to_save" in name
        assert trained == new, name
        assert dtype == (torch.float32 if new or "linear_attention" in name else torch.bfloat16), name
    assert {p.dtype for p in result.student.parameters()} == {torch.bfloat16}
    assert same(from_pretrained(saved / "run"), result.student)


def test_a_student_with_its_adapters_apart_is_its_teacher_and_drafts_for_it(saved):
    student = distill(settings_in(saved, merge_lora=False)).student.eval()
    teacher = AutoModelForCausalLM.from_pretrained(saved / "teacher", dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), softmax(student) as inside:
        assert torch.equal(inside(ids).logits, teacher(ids).logits)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    # In bf16, several tokens at once are rounded otherwise than one by one: both read what is drafted.
    found, expected = (
        model.generate(ids[:1], assistant_model=student.get_base_model(), **options)
        for model in (teacher_of(student), teacher)
    )
    assert torch.equal(found, expected)


def test_a_quantised_base_needs_adapters_and_the_package(saved, monkeypatch):
    with pytest.raises(ArgumentError, match=r"`model_dtype` must be no quantisation where all weights are tr.*'int8'"):
        DistillationSettings(model_dtype="int8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="`model_dtype` must be a dtype where torchao is not installed"):
        distill(settings_in(saved, model_dtype="int4"))


def killed_run(folder, dtype, step):
    """Train on a quantised base, and kill the process at a step (0: never)."""
    torch.set_num_threads(1)

    settings = settings_in(folder, model_dtype=dtype)
    return distill(settings, on_step=kill_at(step), tokenizer=byte_tokenizer())


@pytest.mark.optional
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", ["int8", "int4", "nf4"])
def test_a_quantised_base_trains_resumes_and_loads(saved, dtype):
    pytest.importorskip("bitsandbytes" if dtype == "nf4" else "torchao")
    whole = distill(settings_in(saved, model_dtype=dtype, output_dir=None))
    killed("tests.distill.test_single_gpu", str(saved), dtype, 3)
    resumed = killed_run(saved, dtype, 0)
    trained = {name: p for name, p in resumed.student.named_parameters() if "lora_" in name or "to_save" in name}
    expected = dict(whole.student.named_parameters())
    assert trained
    assert all(torch.equal(p, expected[name]) for name, p in trained.items())
    steps = [(record["stage"], record["step"], record["loss_nats"]) for record in resumed.history]
    assert steps == [(record["stage"], record["step"], record["loss_nats"]) for record in whole.history]
    assert is_quantised(resumed.student.get_base_model())
    # The adapter loads on a quantised base, and merges on one that is not.
    ids = torch.arange(3, 20)[None]
    options = {"feature_map": "norm_preserving", "window": 4, "sinks": 1}
    base = patch_model(AutoModelForCausalLM.from_pretrained(saved / "teacher", dtype=torch.bfloat16), **options)
    merged = PeftModel.from_pretrained(base, saved / "run").merge_and_unload()
    assert torch.isfinite(merged(ids).logits).all()
    message = r"`merge_lora` must be False for a quantised model: merged weights would be rounded again"
    with pytest.raises(ArgumentError, match=message):
        distill(settings_in(saved, model_dtype=dtype, merge_lora=True, output_dir=None))
    message = "`mixed_precision` must be 'auto' or 'bf16' for a quantised model, got 'no'"
    with pytest.raises(ArgumentError, match=message):
        distill(settings_in(saved, model_dtype=dtype, mixed_precision="no", output_dir=None))
