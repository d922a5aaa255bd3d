"""`hf-linear-attn check`: what is wrong is noticed and said, what is right passes."""

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_linear_attn.cli import main
from hf_linear_attn.diagnostics import check as command
from hf_linear_attn.ops.linear_attention import api
from tests.spread import spread

CPU = torch.device("cpu")
SMALL = command.Sizes(tokens=70, long=80, D=16, odd=24)


def parts(**settings: Any) -> dict[str, command.Part]:
    return {part.name: part for part in command.parts(CPU, torch.float32, SMALL, **settings)}


def test_pytorch_on_a_cpu_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--device", "cpu", "--backend", "torch"])
    lines = capsys.readouterr().out.splitlines()
    names = ("hf_linear_attn", "torch", "triton", "numba", "transformers")
    versions = ", ".join(name + r" \S+" for name in names)
    assert re.match(rf"versions: {versions}, Python 3", lines[0])
    assert re.match(
        r"tested with: torch 2\.\d+ to 2\.\d+, triton 3\.\d+ to 3\.\d+, transformers 5\.17 to 5\.\d+", lines[1]
    )
    assert "device: cpu" in lines[2]
    assert any(line.startswith("backend: `auto` takes torch: ") for line in lines)
    told = [line for line in lines if line.startswith("right ")]
    assert len(told) == len(list(command.parts(CPU, torch.float32, SMALL)))
    assert re.match(rf"verdict: PyTorch's backend on the CPU: all {len(told)} parts right, in \d+ s", lines[-1])


def test_the_versions_that_are_tested_are_those_of_the_project() -> None:
    """The oldest are what pyproject.toml asks for; no pinned one is newer than the newest."""
    root = Path(__file__).parents[2]
    asked, pinned = (root / "pyproject.toml").read_text(), (root / "constraints.txt").read_text()
    for name, (oldest, newest) in command.TESTED.items():
        assert re.search(rf'"{name}>={re.escape(oldest)}[",;]', asked)
        found = re.search(rf"^{name}==(\d+)\.(\d+)", pinned, re.MULTILINE)
        assert found
        assert [int(found[1]), int(found[2])] <= [int(part) for part in newest.split(".")]


@pytest.mark.parametrize(
    ("here", "said"), [("5.16.2", "5.16.2 is older"), ("5.99.0", "5.99.0 is newer"), ("5.17.1", "")]
)
def test_a_version_that_was_not_tested_is_named(monkeypatch: pytest.MonkeyPatch, here: str, said: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: here if name == "transformers" else real(name))
    line = next(line for line in command.facts(CPU) if line.startswith("tested with: "))
    assert ("; not with what is here: " in line) == bool(said)
    assert said in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where a GPU is there")
@pytest.mark.parametrize(
    "name",
    spread(
        ["steps of generation", "packed sequences", "norm-preserving features of k", "a layer of the recommended"], 3
    ),
)
def test_interpreted_kernels_are_right(name: str) -> None:
    part = next(part for key, part in parts().items() if key.startswith(name))
    outcome = command.check(part, "triton")
    assert outcome.right, str(outcome)
    assert set(outcome.errors) >= set(part.compute(part.inputs, "reference"))


@pytest.mark.parametrize(
    "dtype", [pytest.param(one, marks=pytest.mark.slow if one == torch.bfloat16 else ()) for one in command.TOLERANCE]
)
def test_all_parts_are_right_in_every_dtype(dtype: torch.dtype) -> None:
    for part in command.parts(CPU, dtype, SMALL, full=True):
        for backend in ("torch", "numba"):
            outcome = command.check(part, backend)
            assert outcome.right, str(outcome)
        # Gradients are compared, too, but those of steps, which have none.
        assert part.backward == any(name.startswith("d") for name in outcome.errors)


def broken(by: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return PyTorch's backend with an output that is changed."""
    right = api.linear_attention_chunked

    def attend(*arguments: Any, **settings: Any) -> Any:
        o, state = right(*arguments, **settings)
        return by(o), state

    return attend


def unwritten(o: torch.Tensor) -> torch.Tensor:
    return torch.cat([o[:, :, :-1], torch.empty_like(o[:, :, -1:])], 2)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (lambda o: o * 1.001, ", at most 1.0e-04; beyond it: o"),
        (unwritten, "worst error nan (o), at most 1.0e-04; beyond it: o"),
        (lambda o: o[99], "IndexError: index 99 is out of bounds"),
    ],
    ids=["wrong", "unwritten", "raises"],
)
def test_what_is_wrong_is_said(
    by: Callable[[torch.Tensor], torch.Tensor],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(api, "linear_attention_chunked", broken(by))
    monkeypatch.setattr(command, "ON_CPU", SMALL)
    monkeypatch.setattr(command, "INTERPRETED", SMALL)
    with pytest.raises(SystemExit) as stop:
        main(["check", "--device", "cpu", "--backend", "torch"])
    assert stop.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG ")]
    assert wrong
    assert all(any(word in line for word in ("linear attention", "sequence", "steps", "a layer")) for line in wrong)
    assert all(said in line for line in wrong)
    assert re.match(rf"verdict: .*: {len(wrong)} of 8 parts WRONG", lines[-1])


def test_other_bits_the_second_time_are_noticed() -> None:
    part = command.Part("noise", {"x": torch.ones(3)}, lambda x, backend: {"o": x["x"] + 1e-6 * torch.rand(3)})
    outcome = command.check(part, "triton")
    assert outcome.unsteady == ("o",)
    assert str(outcome).startswith("WRONG  noise, float32: ")
    assert "other bits the second time: o" in str(outcome)
    # Nothing promises them of libraries.
    assert command.check(part, "torch").right


def test_kernels_that_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["check", "--device", "cpu", "--backend", "triton"])
    assert stop.value.code == 2
    assert "the tensors are on the CPU" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["check", "--device", "tpu"])
    assert stop.value.code == 2
