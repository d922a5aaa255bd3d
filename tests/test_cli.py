"""The command line, as a user would call it."""

import pytest

from hf_linear_attn import available_feature_maps
from hf_linear_attn.cli import COMMANDS, main
from hf_linear_attn.feature_maps import base as registry
from tests.distill.tiny import byte_tokenizer, tiny_teacher


def test_maps_are_listed(capsys):
    main(["maps"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(available_feature_maps())


def test_a_map_of_the_user_is_listed_distilled_and_evaluated(capsys, tmp_path, users_map):
    mine = ["--feature-map-file", str(users_map)]
    main(["maps", *mine])
    assert "cubed" in capsys.readouterr().out

    registry._REGISTRY.pop("cubed")
    tiny_teacher().save_pretrained(tmp_path / "teacher")
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("one two three four " * 60)
    short = [
        "--stages",
        "distill",
        "--distill-steps",
        "2",
        "--block-tokens",
        "16",
        "--rows",
        "1",
        "--heldout-rows",
        "0",
    ]
    paths = ["--model", str(tmp_path / "teacher"), "--dataset", str(tmp_path / "text.txt")]
    paths += ["--output-dir", str(tmp_path / "student")]
    main(["distill", *mine, *paths, *short, "--feature-map", "cubed", "--window", "4", "--no-progress"])
    registry._REGISTRY.pop("cubed")
    evaluation = ["--suite", "perplexity", "--lengths", "32", "--text-file", str(tmp_path / "text.txt"), "--no-plots"]
    evaluation += ["--final-windows", "0", "--no-progress", "--output-dir", str(tmp_path / "out")]
    main(["evaluate", *mine, "--model", str(tmp_path / "student"), *evaluation])
    assert (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: hf-linear-attn {command} " in capsys.readouterr().out


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
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--model", str(tmp_path / "absent"), "--output-dir", str(tmp_path / "out")])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "absent" in err
    assert "Traceback" not in err
