"""Settings from Python, flags and files, and what is wrong with them."""

import json

import pytest

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.settings import EvaluationSettings, parse_arguments, settings_from_mapping


def test_flags_yaml_and_json_mean_the_same(tmp_path):
    expected = EvaluationSettings(
        model="m", suite=("retrieval", "latency"), lengths=(512, 4096), depths=(0.0, 12.5), stride=64, plots=False,
        text_file="t.txt", resume=True,
    )  # fmt: skip
    flags = "--model m --suite retrieval,latency --lengths 4096,512 --depths 0,12.5 --stride 64 --no-plots"
    assert parse_arguments([*flags.split(), "--text-file", "t.txt", "--resume"]) == expected
    values = {
        "model": "m", "suite": ["retrieval", "latency"], "lengths": [4096, 512], "depths": "0,12.5", "stride": 64,
        "plots": False, "text_file": "t.txt", "resume": True,
    }  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(values))
    (tmp_path / "s.yaml").write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items()))
    for name in ("s.json", "s.yaml"):
        assert parse_arguments([str(tmp_path / name)]) == expected


def test_no_flags_give_the_defaults_and_defaults_can_be_replaced():
    assert parse_arguments([]) == EvaluationSettings()
    found = parse_arguments(["--seed", "3"], defaults={"lengths": (64, 128), "seed": 5})
    assert (found.lengths, found.seed) == ((64, 128), 3)


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], prog="evaluate")
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in EvaluationSettings.__dataclass_fields__)


def test_where_results_go_does_not_change_what_they_are():
    one, two = (
        EvaluationSettings(output_dir=name, resume=name == "a", progress=name == "b", plots=name == "a")
        for name in "ab"
    )
    assert one.digest() == two.digest() != EvaluationSettings(seed=1).digest()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suite": "speed"}, r"`suite` must be a suite, got 'speed'. Use one of those; available: latency, lm-eval"),
        ({"tasks": "passkeys"}, r"`name` must be a registered task, got 'passkeys'"),
        ({"tasks": "passkey:pairs=2"}, r"`tasks` must name settings that the task has, got 'passkey:pairs=2'"),
        ({"tasks": "kv_recall:pairs=two"}, r"`tasks` must be written name:setting=integer"),
        ({"lengths": "512,many"}, r"`lengths` must be a list of numbers, got '512,many'"),
        ({"lengths": ""}, r"`lengths` must hold at least one value"),
        ({"lengths": "512,512"}, r"`lengths` must hold no value twice"),
        ({"lengths": "1"}, r"`lengths` must be at least 2 tokens, got 1"),
        ({"depths": "0,101"}, r"`depths` must lie in 0..100, got 101.0"),
        ({"num_samples": 0}, r"`num_samples` must be at least 1, got 0"),
        ({"warmups": -1}, r"`warmups` must be at least 0, got -1"),
        ({"stride": 0}, r"`stride` must be at least 1, got 0"),
        ({"attn": "sparse"}, r"`attn` must be a known choice, got 'sparse'. Use one of those; available: auto, linear"),
        ({"dtype": "int8"}, r"`dtype` must be a known choice, got 'int8'"),
        ({"resume": True, "overwrite": True}, r"`resume` must not be combined with `overwrite`"),
        ({"length": 512}, r"`settings` must be known, got 'length'. Use one of those; available: attn, batch_size"),
    ],
)
def test_a_bad_value_is_named(values, message):
    with pytest.raises(ArgumentError, match=message):
        settings_from_mapping(values)


def test_a_plain_string_is_no_sequence():
    with pytest.raises(ArgumentError, match=r"`suite` must be a sequence, got 'latency'. Pass a tuple"):
        EvaluationSettings(suite="latency")


@pytest.mark.parametrize("content", ["a: [", "just text", None])
def test_a_settings_file_must_hold_settings(tmp_path, content):
    path = tmp_path / "s.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArgumentError, match=r"`settings` must be a (readable YAML or JSON file|file of name: value)"):
        parse_arguments([str(path)])
