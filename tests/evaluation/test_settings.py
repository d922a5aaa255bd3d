"""Settings from Python, flags and files, and what is wrong with them."""

import json

import pytest

from hf_linear_attn.errors import ArgumentError, HFLinearAttnError
from hf_linear_attn.evaluation.settings import EvaluationSettings, command_line, parse_arguments


def test_flags_yaml_and_json_mean_the_same(tmp_path):
    expected = EvaluationSettings(
        model="m", suite=("retrieval", "latency"), lengths=(512, 4096), depths=(0.0, 12.5), stride=64, plots=False,
        text_file="t.txt", resume=True,
    )  # fmt: skip
    flags = "--model m --suite retrieval,latency --lengths 4096 512 --depths 0,12.5 --stride 64 --no-plots"
    assert parse_arguments([*flags.split(), "--text-file", "t.txt", "--resume"]) == expected
    values = {
        "model": "m", "suite": ["retrieval", "latency"], "lengths": [4096, 512], "depths": "0,12.5", "stride": 64,
        "plots": False, "text_file": "t.txt", "resume": True,
    }  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(values))
    (tmp_path / "s.yaml").write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items()))
    for name in ("s.json", "s.yaml"):
        assert parse_arguments([str(tmp_path / name)]) == expected
        assert parse_arguments([str(tmp_path / name), "--seed", "4"]).seed == 4


def test_no_flags_give_the_defaults_and_defaults_can_be_replaced():
    assert parse_arguments([]) == EvaluationSettings()
    assert EvaluationSettings().suite == ("retrieval", "perplexity", "latency")
    found = parse_arguments(["--seed", "3"], defaults={"lengths": (64, 128), "seed": 5})
    assert (found.lengths, found.seed) == ((64, 128), 3)


def test_help_names_every_setting_of_every_suite(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], prog="evaluate")
    text = capsys.readouterr().out
    names = command_line("evaluate").settings
    assert {
        "model",
        "suite",
        "num_samples",
        "stride",
        "continuations",
        "repeats",
        "lm_eval_tasks",
        "config",
    } <= names.keys()
    for name in names.keys() - {"config"}:
        flag = name.replace("_", "-")
        assert f"--{flag} " in text or f"--[no-]{flag} " in text
    assert all(setting.help for setting in names.values())


def test_where_results_go_does_not_change_what_they_are():
    one, two = (
        EvaluationSettings(output_dir=name, resume=name == "a", progress=name == "b", plots=name == "a")
        for name in "ab"
    )
    assert one.digest() == two.digest() != EvaluationSettings(seed=1).digest()


def test_settings_of_suites_that_do_not_run_change_nothing():
    chosen = {"suite": ("perplexity",)}
    assert EvaluationSettings(**chosen, repeats=3).digest() == EvaluationSettings(**chosen).digest()
    assert EvaluationSettings(**chosen, stride=3).digest() != EvaluationSettings(**chosen).digest()


def test_a_suite_is_known_by_dashes_and_by_underscores():
    assert EvaluationSettings(suite=("lm_eval",)).suite == ("lm-eval",)


BAD = [
    (
        {"suite": "speed"},
        r"`suite` must be a suite, got 'speed'. Use one of those; available: drafts, embedding, generation, lat",
    ),
    ({"tasks": "passkeys"}, r"`tasks` must be a registered task, got 'passkeys'"),
    ({"tasks": "passkey:pairs=2"}, r"`tasks` must name settings that the task has, got 'passkey:pairs=2'"),
    ({"tasks": "kv_recall:pairs=two"}, r"`tasks` must be written name:setting=integer"),
    ({"lengths": "512,many"}, r"`lengths` must be a list of whole numbers, got '512,many'"),
    ({"lengths": []}, r"`lengths` must hold at least one value"),
    ({"lengths": "512,512"}, r"`lengths` must hold no value twice"),
    ({"lengths": "1"}, r"`lengths` must be at least 2, got 1"),
    ({"lengths": 2.5}, r"`lengths` must be a list of whole numbers, got \(2.5,\)"),
    ({"depths": "0,101"}, r"`depths` must lie in 0..100, got 101.0"),
    ({"num_samples": 0}, r"`num_samples` must be at least 1, got 0"),
    ({"warmups": -1}, r"`warmups` must be at least 0, got -1"),
    ({"stride": 0}, r"`stride` must be at least 1, got 0"),
    ({"attn": "sparse"}, r"`attn` must be a known choice, got 'sparse'. Use one of those; available: auto, linear"),
    ({"dtype": "int8"}, r"`dtype` must be a known choice, got 'int8'"),
    ({"resume": True, "overwrite": True}, r"`resume` must not be combined with `overwrite`"),
    ({"length": 512}, r"`config` must hold known settings only, got 'length'. Did you mean lengths\?"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_a_bad_value_in_a_file_is_named(values, message, tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(values))
    with pytest.raises(HFLinearAttnError, match=message):
        parse_arguments([str(tmp_path / "s.json")])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suite": "latency"}, r"`suite` must be a sequence, got 'latency'. Pass a tuple"),
        ({"lengths": (512.0,)}, r"`lengths` must be a whole number, got 512.0"),
        ({"batch_size": True}, r"`batch_size` must be a whole number, got True"),
        ({"dtype": "int8"}, r"`dtype` must be a known choice, got 'int8'"),
        ({"length": 512}, r"`settings` must be known, got 'length'. Use one of those; available: attn, batch_size"),
    ],
)
def test_a_bad_value_in_python_is_named(values, message):
    with pytest.raises(HFLinearAttnError, match=message):
        EvaluationSettings(**values)


def test_flags_are_refused_as_files_are():
    with pytest.raises(ArgumentError, match=r"`suite` must be a suite, got 'speed'"):
        parse_arguments(["--suite", "speed"])
