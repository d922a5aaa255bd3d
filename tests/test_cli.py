"""The command line, as a user would call it."""

import pytest

from hf_linear_attn import available_feature_maps
from hf_linear_attn.cli import COMMANDS, main


def test_maps_are_listed(capsys):
    assert main(["maps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(available_feature_maps())


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_an_unknown_command_is_refused_with_the_list(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["transmogrify"])
    assert stop.value.code == 2
    assert "evaluate" in capsys.readouterr().err


def test_errors_are_one_line_and_status_2(capsys, tmp_path):
    assert main(["evaluate", "--model", str(tmp_path / "absent"), "--output-dir", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "absent" in err
    assert "Traceback" not in err
