"""The scripts as a newcomer runs them: what they refuse, and that they leave earlier results whole."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from hf_linear_attn import from_pretrained
from hf_linear_attn.patching import is_patched
from tests.distill.tiny import byte_tokenizer, tiny_teacher

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = ["--distill-steps=1", "--linear-steps", "1", "--rows", "1", "--block_tokens", "128", "--samples", "1"]
FEW += ["--retain-steps", "1", "--speed-lengths", "64,160"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return a function that runs a script in an empty folder; it returns what the script wrote."""
    monkeypatch.chdir(tmp_path)

    def run_script(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    def refused(script, *arguments):
        with pytest.raises(SystemExit) as stopped:
            run_script(script, *arguments)
        assert stopped.value.code == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(f"{script}: ")
        return message

    run_script.refused = refused
    return run_script


@pytest.fixture
def tiny(tmp_path):
    tiny_teacher().save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_demo_in_small(run, tmp_path):
    said = run("quickstart.py", *FEW, "--lengths", "160", "--window", "8", "--kept", "8").splitlines()
    assert said[-2:] == ["Report: runs/quickstart/report.html", "Student: runs/quickstart/student"]
    assert [line.split("(")[0].split()[-3:] for line in said[-5:-2]]
    folder = tmp_path / "runs" / "quickstart"
    results = json.loads((folder / "results.json").read_text())
    # How long the window is depends on how keys were divided.
    names = ["teacher", "window N alone", "8 keys kept by redundancy", "linear attention"]
    assert [re.sub(r"window \d+", "window N", x["name"]) for x in results["references"]] == names
    assert results["cells"]
    assert "<svg" in (folder / "report.html").read_text()
    assert is_patched(from_pretrained(folder / "student"))
    before = (folder / "results.json").read_bytes()
    message = run.refused("quickstart.py", *FEW)
    assert "`output_dir` must be new or empty, got 'runs/quickstart'" in message
    assert "--overwrite" in message
    assert (folder / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], r"`model` must"),
        (["--feature_map", "elo"], "`feature_map` must be a registered name, got 'elo'"),
        (["--window", "0"], "`window` must be at least 1"),
        (["--lengths", "16"], "`lengths`"),
        (["--block_tokens", "100000000", "--lengths", "400"], "`block_tokens` must be at most"),
    ],
)
def test_the_demo_refuses_before_it_trains_and_keeps_what_was_there(run, tiny, tmp_path, arguments, message):
    old = tmp_path / "runs" / "quickstart" / "results.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    arguments = arguments if "--model" in arguments else ["--model", tiny, *arguments]
    assert message in run.refused("quickstart.py", *FEW, *arguments, "--overwrite")
    assert [path.name for path in old.parent.iterdir()] == ["results.json"]
    assert old.read_text() == "{}"


def test_distillation_names_an_empty_dataset(run, tiny, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    message = run.refused("distill.py", "--model", tiny, "--dataset", tmp_path / "empty.txt", "--no-progress")
    assert "`dataset` must hold text" in message


def test_evaluation_and_finetuning_name_what_is_missing(run, tmp_path):
    assert "`model`" in run.refused("long_context_eval.py", "--model", tmp_path / "absent", "--output-dir", tmp_path)
    assert "Run `make demo` first" in run.refused("finetune.py")
