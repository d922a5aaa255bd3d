"""Exit statuses and last lines of commands."""

import errno

import pytest

from hf_linear_attn.errors import ArgumentError, CheckpointError, TrainingError
from hf_linear_attn.files import write_atomic
from hf_linear_attn.shell import shell


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ArgumentError("two\nlines"), 2, "tool: two lines\n"),
        (CheckpointError("gone"), 2, "tool: gone\n"),
        (TrainingError("it diverged"), 1, "tool: it diverged\n"),
        (KeyboardInterrupt(), 130, "tool: stopped. The same command goes on where it was.\n"),
        (KeyboardInterrupt("Pass --resume."), 130, "tool: stopped. Pass --resume.\n"),
        (OSError(errno.ENOSPC, "No space left on device", "f"), 1,
         "tool: [Errno 28] No space left on device: 'f'. Make room; the same command goes on where it was.\n"),
    ],
)  # fmt: skip
def test_a_command_ends_in_one_line_and_a_status(error, status, line, capsys):
    with pytest.raises(SystemExit) as stop, shell("tool"):
        raise error
    assert stop.value.code == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("bug", [ValueError("x"), FileNotFoundError(errno.ENOENT, "x")])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug)), shell("tool"):
        raise bug


def test_a_full_disk_is_told_with_the_file_that_did_not_fit(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SystemExit), shell("tool", interrupted=""):
        write_atomic(tmp_path / "table.md", "text")
    line = f"tool: [Errno 28] No space left on device: '{tmp_path / 'table.md'}'. Make room, and run it again.\n"
    assert capsys.readouterr().err == line
    assert not list(tmp_path.iterdir())
