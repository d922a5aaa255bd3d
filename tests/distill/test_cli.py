import runpy
import sys
from pathlib import Path

import pytest

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.distill.cli import main, teacher_logits
from hf_linear_attn.errors import ArgumentError
from tests.distill.tiny import save_files, tiny_gpt2, tiny_teacher

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMON = ["--block-tokens", "16", "--rows", "2", "--heldout-rows", "0", "--no-progress", "--log-every", "1"]


@pytest.fixture
def files(tmp_path):
    return save_files(tmp_path)


def test_distil_then_finetune_from_the_command_line(files, monkeypatch):
    flags = [*COMMON, "--dataset", str(files / "texts")]
    conversion = ["--window", "4", "--sinks", "1", "--transfer-steps", "2", "--distill-steps", "2"]
    paths = ["--model", str(files / "teacher"), "--output-dir", str(files / "student")]
    distilled = main([*flags, *paths, *conversion])
    assert [record["stage"] for record in distilled.history] == ["transfer"] * 2 + ["distill"] * 2
    # The script for finetuning, which has no teacher.
    arguments = [*flags, "--student", str(files / "student"), "--output-dir", str(files / "tuned")]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *arguments, "--extend-steps", "3", "--distill-lr", "0.01"])
    runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")
    tuned, before = from_pretrained(files / "tuned"), from_pretrained(files / "student")
    assert tuned.config.linear_attention == before.config.linear_attention
    assert not (tuned.lm_head.weight == before.lm_head.weight).all()


def test_a_run_whose_student_would_be_lost_is_refused(files):
    with pytest.raises(ArgumentError, match=r"`output_dir` must be the folder to write, got None. Pass --output-dir."):
        main(["--model", str(files / "teacher")])


def test_teacher_logits_from_the_command_line(files):
    flags = [*COMMON, "--dataset", str(files / "texts"), "--model", str(files / "teacher"), "--window", "4"]
    flags += ["--transfer-steps", "1", "--distill-steps", "3"]
    logits = ["--teacher-logits", str(files / "logits")]
    teacher_logits([*flags, *logits, "--top-k", "259", "--processes", "1"])
    live = main([*flags, "--output-dir", str(files / "live")])
    stored = main([*flags, *logits, "--output-dir", str(files / "stored")])
    for a, b in zip(live.history, stored.history, strict=True):
        # Log-probabilities are stored in fp16.
        assert a["loss_nats"] == pytest.approx(b["loss_nats"], rel=5e-3)
    with pytest.raises(ArgumentError, match=r"`teacher_logits` must be the folder to write, got None. Pass"):
        teacher_logits(flags)
    with pytest.raises(ArgumentError, match=r"`model` must be a folder or hub name, got None. Name a softmax"):
        teacher_logits(logits)
    patch_model(tiny_teacher(), feature_map="elu").save_pretrained(files / "student")
    with pytest.raises(ArgumentError, match=r"`model` must be a softmax model, and this one is patched"):
        teacher_logits([*flags, *logits, "--model", str(files / "student")])
    tiny_gpt2(positions=16).save_pretrained(files / "teacher")
    with pytest.raises(ArgumentError, match=r"`length_factors` must keep sequences within the model's 16 positions"):
        teacher_logits([*flags, *logits, "--length-factors", "2"])
    with pytest.raises(ArgumentError, match=r"`processes` must be at least 1, got 0"):
        teacher_logits([*flags, *logits, "--processes", "0"])


@pytest.mark.parametrize("script", ["distill.py", "finetune.py"])
def test_help_describes_every_setting(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "python examples/" in shown
    assert "--window-dropout" in shown
    assert "what stands far back than it costs text" in " ".join(shown.split())
