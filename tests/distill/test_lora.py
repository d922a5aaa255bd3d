import copy
import logging
import re

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.distill.lora import add_lora
from hf_linear_attn.errors import UnsupportedError

IDS = torch.arange(3, 27)[None]


def run(settings, teacher, tokenizer, data, **changes):
    changes = {"trainable": "lora", "distill_lr": 1e-2, "lora_rank": 2, **changes}
    return distill(settings.with_changes(**changes), teacher=teacher, tokenizer=tokenizer, data=data)


def test_only_adapters_and_feature_maps_train(settings, teacher, tokenizer, data, caplog):
    with caplog.at_level(logging.INFO):
        result = run(settings, teacher, tokenizer, data, merge_lora=False)
    assert isinstance(result.student, PeftModel)
    # Rank 2 on q (16 -> 32), k, v (16 -> 16), o (32 -> 16), in two layers.
    adapters = 2 * 2 * ((16 + 32) + 2 * (16 + 16) + (32 + 16))
    maps = sum(p.numel() for name, p in result.student.named_parameters() if "modules_to_save" in name)
    assert result.trainable_parameters["trained"] == adapters + maps
    assert result.trainable_parameters["feature_maps"] == maps
    assert f"LoRA trains {adapters + maps:,} of" in caplog.text
    base = teacher.state_dict()
    for name, x in result.student.get_base_model().state_dict().items():
        name = name.replace(".base_layer", "")
        if name in base:
            assert torch.equal(x, base[name]), name


def test_frozen_maps_stay_as_transfer_left_them(settings, teacher, tokenizer, data):
    transferred = run(settings, teacher, tokenizer, data, stages=["transfer"]).student
    student = run(settings, teacher, tokenizer, data, train_feature_maps=False).student
    before = transferred.state_dict()
    for name, x in student.state_dict().items():
        changed = any(f"{p}_proj" in name for p in "qkvo")
        assert torch.equal(x, before[name]) is not changed, name


def test_adapters_are_weakened_when_training_has_ended(settings, teacher, tokenizer, data):
    learned = run(settings, teacher, tokenizer, data).student.state_dict()
    found = run(settings, teacher, tokenizer, data, teacher_share=0.25).student
    own, moved = dict(teacher.named_parameters()), 0
    for name, x in found.named_parameters():
        expected = torch.lerp(learned[name], own[name], 0.25) if name in own else learned[name]
        torch.testing.assert_close(x, expected, msg=name)
        moved += name in own and not torch.equal(x, learned[name])
    assert moved


def test_merged_and_unmerged_students_are_equal(settings, teacher, tokenizer, data, tmp_path):
    unmerged = run(settings, teacher, tokenizer, data, merge_lora=False).student
    merged = run(settings, teacher, tokenizer, data, output_dir=str(tmp_path)).student
    expected = unmerged(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(from_pretrained(tmp_path)(IDS).logits, merged(IDS).logits)
    patched = patch_model(copy.deepcopy(teacher), feature_map="hedgehog", window=4, sinks=1)
    assert not torch.allclose(patched(IDS).logits, expected, atol=1e-2)


@pytest.mark.parametrize("start", ["model", "student"])
@pytest.mark.parametrize("merge_lora", [True, False])
@pytest.mark.parametrize("feature_map", ["norm_preserving", "performer"])
def test_the_card_says_how_to_load_the_folder(
    settings, teacher, tokenizer, data, tmp_path, start, merge_lora, feature_map
):
    if start == "student":
        patch_model(teacher, feature_map=feature_map, window=6, layers=[1])
        settings = DistillationSettings(
            **{name: getattr(settings, name) for name in settings.given - {"window", "sinks"}}
        )
    else:
        settings = settings.with_changes(feature_map=feature_map, softmax_budget=0.5)
    teacher.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    changes = {start: str(tmp_path / "base"), "stages": ["extend"], "extend_steps": 2, "extend_lr": 1e-2}
    settings = settings.with_changes(
        trainable="lora", merge_lora=merge_lora, output_dir=str(tmp_path / "run"), **changes
    )
    student = distill(settings, data=data).student
    code = re.search("```python\n(.*?)```", (tmp_path / "run" / "README.md").read_text(), re.DOTALL).group(1)
    found = {}
    exec(code.replace("this/folder", str(tmp_path / "run")), found)
    assert isinstance(found["model"], PeftModel) is not merge_lora
    loaded, options = found["model"].eval(), {"max_new_tokens": 5, "do_sample": False}
    torch.testing.assert_close(loaded(IDS).logits, student(IDS).logits)
    assert torch.equal(loaded.generate(IDS, **options), student.generate(IDS, **options))


def test_projections_are_found_where_names_are_ambiguous():
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=99))
    patch_model(model, feature_map="hedgehog")
    student = add_lora(model, rank=2, alpha=4)
    targets = {f"transformer.h.{n}.attn.{name}" for n in (0, 1) for name in ("c_attn", "c_proj")}
    assert student.peft_config["default"].target_modules == targets
    trained = {name.split(".lora_")[0] for name, p in student.named_parameters() if p.requires_grad and "lora" in name}
    assert all(".attn." in name for name in trained)


def test_models_that_are_not_patched_are_refused(teacher):
    with pytest.raises(UnsupportedError, match="`model` must be patched and have attention projections"):
        add_lora(teacher, rank=2, alpha=4)


def test_lolcats_runs_end_to_end(teacher, tokenizer, data):
    settings = DistillationSettings.from_preset(
        "lolcats", window=4, block_tokens=16, rows=2, transfer_steps=2, distill_steps=2, heldout_rows=0, progress=False
    )
    student = distill(settings, teacher=teacher, tokenizer=tokenizer, data=data).student
    assert student.config.linear_attention["feature_map_options"] == {"num_features": 8}
