"""Flags, YAML and JSON mean the same, and what they cannot mean is said in one line."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from hf_linear_attn.arguments import CommandLine, settings_of
from hf_linear_attn.errors import ArgumentError, HFLinearAttnError


@dataclass
class Sample:
    """Settings of every kind.

    Args:
        model: Folder or
            hub name.
        lengths: Lengths in tokens.
        window: Exact tokens.
        share: A share.
        precision: Which ``dtype``.
        options: Further ones.
        progress: Show a bar.
        overwrite: Replace.
        layers: Which layers.
        path: Where.

    Raises:
        Nothing: at all.
    """

    model: str | None = None
    lengths: tuple[int, ...] = (512, 1024)
    window: int | None = 64
    share: float = 0.5
    precision: Literal["no", "bf16"] = "no"
    options: dict[str, Any] = field(default_factory=dict)
    progress: bool = True
    overwrite: bool = False
    layers: list[int] | None = None
    path: Path = Path("out")


def line(**options):
    command = CommandLine("tool do", "Do it.", example="tool do --model m", **{"positional": "config", **options})
    command.add("all", settings_of(Sample))
    return command


EXPECTED = {
    "model": "m", "lengths": (1, 2, 3), "window": None, "share": 1e-3, "precision": "no", "options": {"a": 1},
    "progress": False, "overwrite": True, "layers": [0, 2], "path": Path("x_y"),
}  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        "--model m --lengths 1,2,3 --window none --share 1e-3 --precision no --options {\"a\":1} --no-progress "
        "--overwrite --layers 0,2 --path x_y",
        "--model=m --lengths 1 2 3 --window=None --share=0.001 --precision=no --options={\"a\":1} --no_progress "
        "--overwrite true --layers 0 2 --path=x_y",
        "--model m --lengths=1,2 --lengths 1, 2, 3 --window NONE --share .001 --precision no --options {\"a\":1} "
        "--progress false --overwrite=yes --layers 0, 2 --path x_y",
    ],
)  # fmt: skip
def test_flags_mean_the_same_however_they_are_written(flags):
    assert line().read(flags.split()).values == EXPECTED


def test_files_mean_what_flags_mean_and_flags_win(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "model: m\nlengths: 1, 2, 3\nwindow: null\nshare: 1e-3\nprecision: no\noptions: {a: 1}\nprogress: no\n"
        "overwrite: true\nlayers: [0, 2]\npath: x_y\n"
    )
    values = EXPECTED | {"lengths": [1, 2, 3], "path": "x_y"}
    (tmp_path / "s.json").write_text(json.dumps(values))
    for name in ("s.yaml", "s.json"):
        assert line().read([str(tmp_path / name)]).values == EXPECTED
        assert line().read(["--config", str(tmp_path / name)]).values == EXPECTED
        found = line().read([str(tmp_path / name), "--window", "8", "--no-overwrite"])
        assert found.values == EXPECTED | {"window": 8, "overwrite": False}
        assert found.flags == {"window": 8, "overwrite": False}


def test_what_nobody_names_is_not_there():
    assert line().read([]).values == {}
    assert line().read(["--layers", "none"]).values == {"layers": None}


def test_names_take_dashes_in_files_too(tmp_path):
    @dataclass
    class Long:
        """Args:
        text_file: A text.
        """

        text_file: str | None = None

    command = CommandLine("t", "T.", example="t", positional="config")
    command.add("all", settings_of(Long))
    (tmp_path / "s.yaml").write_text("text-file: a-b_c\n")
    assert command.read([str(tmp_path / "s.yaml")]).values == {"text_file": "a-b_c"}
    assert command.read(["--text_file", "a-b_c"]).values == {"text_file": "a-b_c"}


def test_a_setting_may_be_given_without_its_flag():
    assert line(positional="model").read(["m", "--window", "3"]).values == {"model": "m", "window": 3}
    assert line(positional="model").read(["--overwrite", "m"]).values == {"model": "m", "overwrite": True}
    assert line(positional="lengths").read(["1", "--window", "3", "2"]).values == {"lengths": (1, 2), "window": 3}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lenghts 5", r"`arguments` must be known flags, got '--lenghts'. Did you mean --lengths\?"),
        ("--zzz=5", r"must be known flags, got '--zzz'. `tool do --help` lists them."),
        ("--no-window", r"must be known flags, got '--no-window'"),
        ("--lengths 5,many", r"`lengths` must be a list of whole numbers, got '5,many'"),
        ("--lengths none", r"`lengths` must be a list of whole numbers, got 'none'"),
        ("--window wide", r"`window` must be a whole number, got 'wide'"),
        ("--window 2.5", r"`window` must be a whole number, got '2.5'"),
        ("--window", r"`window` must be followed by a value, got '--window'. Write --window VALUE."),
        ("--window --share 3", r"`window` must be followed by a value"),
        ("--share x", r"`share` must be a number, got 'x'"),
        ("--precision fp8", r"`precision` must be a known choice, got 'fp8'. Use one of those; available: bf16, no\."),
        ("--options [1]", r"`options` must be a JSON object, got '\[1\]'"),
        ("--progress=maybe", r"`progress` must be true or false, got 'maybe'"),
        ("a.yaml b.yaml", r"`arguments` must be flags and their values, got 'b.yaml'"),
        ("absent.yaml", r"`config` must be a readable YAML or JSON file, got 'absent.yaml'. Check the file: "),
    ],
)
def test_what_a_flag_cannot_mean_is_refused(flags, message):
    with pytest.raises(ArgumentError, match=message) as refused:
        line().read(flags.split())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: 3", r"`config` must hold known settings only, got 'rows'"),
        ("lenght: 3", r"got 'lenght'. Did you mean lengths\?"),
        ("window: 2.5", r"`window` must be a whole number or None, got 2.5"),
        ("window: true", r"`window` must be a whole number or None, got True"),
        ("model: 3", r"`model` must be a text or None, got 3"),
        ("share: null", r"`share` must be a number, got None. Leave it out for the default."),
        ("lengths: {a: 1}", r"`lengths` must be a list of whole numbers"),
        ("- 1", r"`config` must hold `name: value` lines"),
        ("window: 3\nshare: 1\nwindow: 4", r"`config` must be .* `window` stands there twice .* line 3"),
        ("top-p: 1\ntop_p: 2", r"`config` must be .* got '.*s.yaml'. .* `top_p` stands there twice"),
        ('{"options": {"a": 1, "a": 2}}', r"`config` must be .* `a` stands there twice"),
        ("a: [", r"`config` must be a readable YAML or JSON file"),
        ("a: !!python/object:os.system {}", r"`config` must be a readable YAML or JSON file"),
    ],
)
def test_what_a_file_cannot_mean_is_refused(text, message, tmp_path):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(HFLinearAttnError, match=message) as refused:
        line().read([str(tmp_path / "s.yaml")])
    assert "\n" not in str(refused.value)


def test_help_begins_with_an_example_and_says_everything(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        line().read(["--window", "3", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: tool do [FILE] [--setting value ...]\n\nDo it.\n\nexample:\n  tool do --model m\n")
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "all: --model TEXT Folder or hub name." in words
    assert "--lengths N,N,... Lengths in tokens. Default: 512,1024." in words
    assert "--window N Exact tokens. Default: 64. `none` for none." in words
    assert "--precision no|bf16 Which `dtype`. Default: no." in words
    assert "--[no-]progress Show a bar. Default: on." in words
    assert "Nothing" not in text
