"""A run that older code began."""

import json
import shutil
from pathlib import Path

import pytest

from hf_linear_attn.distill import distill
from hf_linear_attn.distill.checkpoint import checkpoints
from hf_linear_attn.errors import ArgumentError
from tests.distill.tiny import byte_tokenizer, tiny_settings, tiny_teacher

ROOT = Path(__file__).parents[2]
SAVED = Path("tests/distill/saved/killed")


def test_a_run_that_older_code_began_goes_on(tmp_path, monkeypatch):
    # Its settings hold the texts' path as it was written then.
    monkeypatch.chdir(ROOT)
    shutil.copytree(SAVED / "run", tmp_path / "run")
    steps = {"transfer_steps": 2, "distill_steps": 6, "checkpoint_every": 2}
    paths = {"dataset": str(SAVED / "texts"), "output_dir": str(tmp_path / "run")}
    settings = tiny_settings(rotary="keep", **steps, **paths)
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000006"]
    with pytest.raises(ArgumentError, match=r"Changed: rotary 'keep' -> 'auto'\. Restore them"):
        distill(settings.with_changes(rotary="auto"), teacher=tiny_teacher(), tokenizer=byte_tokenizer())
    result = distill(settings, teacher=tiny_teacher(), tokenizer=byte_tokenizer())
    # It was killed in its fifth step of `distill`, whose loss it had logged.
    logged = [json.loads(line) for line in (SAVED / "run" / "log.jsonl").read_text().splitlines()]
    assert result.history[:6] == logged[:6]
    assert [(record["stage"], record["step"]) for record in result.history[6:]] == [("distill", 5), ("distill", 6)]
    assert result.history[6]["loss_nats"] == pytest.approx(logged[6]["loss_nats"], rel=1e-5)
