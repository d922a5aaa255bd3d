import runpy
import sys
from pathlib import Path

import pytest

from hf_linear_attn import from_pretrained
from hf_linear_attn.distill.cli import main
from tests.distill.tiny import byte_tokenizer, tiny_teacher

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMON = ["--block-tokens", "16", "--rows", "2", "--heldout-rows", "0", "--no-progress", "--log-every", "1"]


@pytest.fixture
def files(tmp_path):
    tiny_teacher().save_pretrained(tmp_path / "teacher")
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "texts").mkdir()
    for n in range(25):
        (tmp_path / "texts" / f"{n:02d}.txt").write_text(f"text number {n} " * 10)
    return tmp_path


def test_distil_then_finetune_from_the_command_line(files, monkeypatch):
    flags = [*COMMON, "--dataset", str(files / "texts")]
    distilled = main(
        [
            *flags,
            "--model",
            str(files / "teacher"),
            "--output-dir",
            str(files / "student"),
            "--window",
            "4",
            "--sinks",
            "1",
            "--transfer-steps",
            "2",
            "--distill-steps",
            "2",
        ]
    )
    assert [record["stage"] for record in distilled.history] == ["transfer"] * 2 + ["distill"] * 2
    # The script for finetuning, which has no teacher.
    arguments = [*flags, "--student", str(files / "student"), "--output-dir", str(files / "tuned")]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *arguments, "--extend-steps", "3", "--distill-lr", "0.01"])
    runpy.run_path(str(EXAMPLES / "finetune.py"), run_name="__main__")
    tuned, before = from_pretrained(files / "tuned"), from_pretrained(files / "student")
    assert tuned.config.linear_attention == before.config.linear_attention
    assert not (tuned.lm_head.weight == before.lm_head.weight).all()


@pytest.mark.parametrize("script", ["distill.py", "finetune.py"])
def test_help_describes_every_setting(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "python examples/" in shown
    assert "--window_dropout" in shown
    assert "chosen by measured KL" in " ".join(shown.split())
