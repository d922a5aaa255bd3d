"""The list of what is asked of a GPU: kept step by step, gone on with, and ended where it hangs."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_linear_attn.ops.triton import plan

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("gpu")


def python(code: str) -> str:
    """Return a step's words."""
    return f"{{python}} -c '{code}'"


def kept(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / "steps.json"
    return json.loads(path.read_text())["steps"] if path.exists() else {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_one_line(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    found = capsys.readouterr()
    assert found.err.count("\n") == 1
    assert "--dry-run" in found.err
    assert not found.out


def test_the_list_says_what_is_expected(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == [step.name for step in gpu.STEPS]
    assert lines[0].startswith("| repeats | parts whose bits differ at most 0 |")
    assert all(line.endswith(f"| {step.obstacle} |") for line, step in zip(lines, gpu.STEPS, strict=True))
    assert all(step.seconds <= 480 for step in gpu.STEPS)


def test_one_step_at_tiny_size(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "all.tar.gz"
    assert (
        gpu.main(["--dry-run", "--only", "tune-step", "--output", str(tmp_path / "at"), "--archive", str(archive)]) == 0
    )
    (entry,) = kept(tmp_path / "at").values()
    assert entry["held"] == "yes"
    assert "| tune-step | ends with status 0 |" in (tmp_path / "at" / "summary.md").read_text()
    assert archive.stat().st_size
    # Tiny sizes are no results.
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--output", str(tmp_path / "at")])
    assert "dry run" in capsys.readouterr().err


@pytest.mark.slow
def test_every_step_at_tiny_size(gpu: ModuleType, tmp_path: Path) -> None:
    gpu.main(["--dry-run", "--output", str(tmp_path)])
    found = kept(tmp_path)
    assert list(found) == [step.name for step in gpu.STEPS]
    assert {name: entry for name, entry in found.items() if entry["held"] == "no"} == {}
    asked = {name for name, entry in found.items() if entry["held"] == "yes"}
    assert asked >= {"repeats", "check", "tests", "kernels", "tune-step", "peers"}
    assert asked >= {"prefill", "prefill-compiled", "decode", "decode-64", "training", "training-recipe"}
    # Both recipes have been compared.
    assert asked >= {"study-10", "study-100", "teacher-86m", "study-86m"}
    assert "not measured" not in found["study-10"]["found"]
    assert json.loads((tmp_path / "repeats.json").read_text()) == {"parts": 8, "differ": []}


def test_what_hangs_is_ended_with_its_children(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    hangs = (
        f'import subprocess; p = subprocess.Popen(["sleep", "600"]); open("{child}", "w").write(str(p.pid)); p.wait()'
    )
    steps = [gpu.Step("hangs", python(hangs), seconds=3), gpu.Step("next", python("print(7)"))]
    steps.append(gpu.Step("absent", obstacle="no such thing"))
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert gpu.main(["--dry-run", "--output", str(tmp_path / "at")]) == 1
    found = kept(tmp_path / "at")
    assert {name: entry["held"] for name, entry in found.items()} == {
        "hangs": "no",
        "next": "yes",
        "absent": "not there",
    }
    assert found["hangs"]["found"] == "ended after 3 s"
    assert found["next"]["found"] == "7"
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_what_takes_hours_goes_on_when_it_is_asked_again(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    code = f'import pathlib, time; x = pathlib.Path("{begun}"); y = x.exists(); x.touch(); time.sleep(0 if y else 600)'
    monkeypatch.setattr(gpu, "STEPS", [gpu.Step("long", python(code), seconds=3, goes_on=True)])
    for expected in ("not yet", "yes", "yes"):
        assert gpu.main(["--dry-run", "--output", str(tmp_path / "at")]) == 0
        assert kept(tmp_path / "at")["long"]["held"] == expected


def test_figures_are_held_to_their_limits(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = gpu.Limit("figure", 2.0, lambda x: x["figure"])
    given = {"low": {"figure": 1.5}, "high": {"figure": 2.5}, "text": {"figure": "not installed"}, "none": {}}
    steps = []
    for name, result in given.items():
        (tmp_path / f"{name}.given").write_text(json.dumps(result))
        steps.append(gpu.Step(name, f"cp {tmp_path}/{name}.given {{result}}", limits=[most]))
    steps.append(gpu.Step("silent", python("0"), limits=[most]))
    monkeypatch.setattr(gpu, "STEPS", steps)
    # As on a GPU.
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "provenance", lambda *words: {"commit": "0" * 40, "gpu": "a GPU"})
    assert gpu.main(["--output", str(tmp_path)]) == 1
    found = {name: entry["held"] for name, entry in kept(tmp_path).items()}
    assert found == {"low": "yes", "high": "no", "text": "yes", "none": "no", "silent": "no"}
    # One is asked again, though it has a result; nothing else is.
    before = kept(tmp_path)
    gpu.main(["--output", str(tmp_path), "--again", "low", "--within", "500"])
    assert {name: entry for name, entry in kept(tmp_path).items() if name != "low"} == {
        name: entry for name, entry in before.items() if name != "low"
    }
    # Nothing is begun that may not end.
    gpu.main(["--output", str(tmp_path), "--again", "low", "--within", "400"])
    assert "low" not in kept(tmp_path)


def test_what_was_measured_on_an_h100_is_read(gpu: ModuleType) -> None:
    steps = {step.name: step for step in gpu.STEPS}
    result = json.loads((FOLDER.parent / "docs/results/kernels-h100.json").read_text())
    of_cudnn, of_flash, of_fla, helion, of_heads, of_host = (limit.value for limit in steps["peers"].limits)
    assert [round(f(result), 3) for f in (of_cudnn, of_flash, of_fla, of_heads)] == [0.107, 0.062, 0.414, 9.257]
    assert isinstance(helion(result), str)
    tuned = json.loads((FOLDER.parent / "docs/results/kernels-h100-tuned.json").read_text())
    assert of_host(tuned) == pytest.approx(272.8, abs=0.1)
    assert of_cudnn(tuned) == "not installed, or did not run"
    cell = {"variant": "recommended", "tokens": 8192, "median_ms": 200.0}
    assert steps["prefill"].limits[0].value({"cells": {"a": cell}}) == 200


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on(tmp_path: Path) -> None:
    asked, begun, program = tmp_path / "asked", tmp_path / "begun", tmp_path / "program.py"
    note = f'open("{asked}", "a").write("%s")'
    slow = f'import os, time; open("{begun}", "w").write(str(os.getpid())); '
    slow += f'time.sleep(600 * (not os.path.exists("{tmp_path}/fast"))); '
    program.write_text(f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import gpu
gpu.STEPS = [
    gpu.Step(name, "{{python}} -c '" + code + "'")
    for name, code in [("a", {note % "a"!r}), ("b", {slow + note % "b"!r}), ("c", {note % "c"!r})]
]
sys.exit(gpu.main(["--dry-run", "--output", {str(tmp_path / "at")!r}]))
""")
    with subprocess.Popen([sys.executable, program], stdout=subprocess.DEVNULL) as process:
        while not begun.exists() or not begun.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
    left = Path(f"/proc/{begun.read_text()}/cmdline")
    assert left.exists()
    assert list(kept(tmp_path / "at")) == ["a"]
    (tmp_path / "fast").touch()
    again = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert asked.read_text() == "abc"
    # What the killed run left is ended.
    assert not left.exists() or not left.read_bytes()
    assert list(kept(tmp_path / "at")) == ["a", "b", "c"]


@pytest.mark.parametrize("role", ["hybrid", "prefill", "window"])
def test_tiles_of_a_layers_kernels_can_be_timed(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    tune = importlib.import_module("tune")
    target = plan.target_of(torch.device("cpu"))
    sizes = {"tokens": 100, "heads": 2, "key_heads": 1, "device": "cpu"}
    launch = tune.launch_of(role, target, torch.float32, 64, 64, **sizes)
    assert launch.role == role
    launch.run()
