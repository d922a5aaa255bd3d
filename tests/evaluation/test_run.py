"""A run from end to end: what it writes, how it resumes, what it refuses, and several runs in one report."""

import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import torch

from hf_linear_attn.cli import main as run_command
from hf_linear_attn.errors import ArgumentError, CheckpointError, UnsupportedError
from hf_linear_attn.evaluation import (
    EvaluationSettings,
    compare,
    estimate_cost,
    evaluate,
    read_results,
    schema,
    without_times,
)
from hf_linear_attn.evaluation import cost as cost_module
from hf_linear_attn.evaluation.cli import compare as compare_command
from hf_linear_attn.evaluation.cli import main
from hf_linear_attn.evaluation.results import write_results
from hf_linear_attn.evaluation.run import check_evaluation
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.suites.latency import Latency
from hf_linear_attn.files import locked
from tests.evaluation.helpers import ScriptedModel, byte_tokenizer, subject, tiny_gpt2, tiny_linear, tiny_llama
from tests.evaluation.workers import LM_EVAL, run, settings
from tests.processes import launch

ROOT = Path(__file__).parents[2]

# Children that import everything anew take their time on a busy machine.
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, run(folder)


def child(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.evaluation.workers", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )


def comparable(path):
    """Return the bytes of a results.json without times and without where it was written."""
    results = without_times(read_results(path))
    del results["args"]
    return json.dumps(results).encode()


def test_results_follow_the_published_schema(uninterrupted):
    folder, results = uninterrupted
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads((folder / "results.json").read_text()), schema())
    assert read_results(folder) == json.loads(json.dumps(results))


def test_results_say_what_was_measured(uninterrupted):
    _, results = uninterrupted
    assert results["timing"]["command"] == shlex.join(sys.argv)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    # None where the tests do not run from a checkout.
    assert commit.startswith((results["timing"]["commit"] or "").removesuffix("-dirty"))
    assert bool(results["timing"]["commit"]) == bool(commit)
    assert results["model"]["attention"] == "linear"
    assert results["model"]["feature_map"] == "elu"
    assert results["model"]["patched_layers"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [m["role"] for m in results["references"]] == ["teacher"]
    assert results["references"][0]["patched_layers"] == []
    # 2 models, 2 lengths, 2 depths; a floor for each model.
    assert (len(results["cells"]), len(results["floors"])) == (8, 2)
    assert {cell["n"] for cell in results["cells"]} == {3}
    assert len(results["latency"]) == len(results["perplexity"]["windows"]) == 4
    assert {row["length"] for row in results["paired"]} == {300, 320}
    caches = {cell["length"]: cell["cache_bytes"] for cell in results["latency"] if cell["model"] == "model"}
    assert caches[300] == caches[320]
    assert all(sentence.endswith(".") for part in results["summary"].values() for sentence in part)


def test_the_estimate_counts_the_tokens_that_are_read(monkeypatch):
    """For a model that takes a second per token, whether it reads or writes, seconds are tokens."""
    rows = 2
    monkeypatch.setattr(cost_module, "trial", lambda subject, settings, tokens: (1.0, float(rows)))
    # It never ends an answer, so that every budget is used up.
    model = ScriptedModel(lambda ids: ord("a"))
    model.config._attn_implementation = "sdpa"
    chosen = settings(
        None, output_dir=None, tasks=("passkey", "kv_recall"), lengths=(300, 500), depths=(0, 75), num_samples=4,
        batch_size=rows, final_windows=2, repeats=2, warmups=1, max_text_tokens=1200,
    )  # fmt: skip
    results = evaluate(chosen, model=model, tokenizer=byte_tokenizer())
    assert results["timing"]["estimated_s"] == pytest.approx(model.tokens_read, rel=0.05)


def test_the_estimate_follows_a_cost_that_grows_with_the_square_of_the_length(monkeypatch):
    def trial(subject, settings, tokens):
        return (2.0 + 0.5 * tokens, 3.0 + 0.25 * tokens)

    monkeypatch.setattr(cost_module, "trial", trial)
    model = subject(tiny_linear())
    chosen = settings(None, output_dir=None, suite=("latency",), lengths=(8000,), decode_tokens=100, batch_size=4)
    cost = estimate_cost(chosen, [model], [Latency(chosen, [model], byte_tokenizer())])
    # One timed run and one for the memory.
    read, step = 2.0 * 7900 + 0.5 * 7900**2, 3.0 + 0.25 * 8000
    assert cost.seconds == pytest.approx(2 * (4 * read + 100 * step))
    assert cost.plans["latency"].tokens == 2 * 4 * 8000


def test_the_estimate_does_with_a_short_trial_where_memory_ends(monkeypatch):
    def trial(subject, settings, tokens):
        if tokens > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (1.0, 0.0)

    monkeypatch.setattr(cost_module, "trial", trial)
    chosen = settings(None, output_dir=None, suite=("latency",), lengths=(8000,), decode_tokens=100)
    model = subject(tiny_linear())
    suites = [Latency(chosen, [model], byte_tokenizer())]
    assert estimate_cost(chosen, [model], suites).seconds == 2 * 2 * 7900


@pytest.mark.slow
def test_killed_in_every_suite_and_resumed_the_results_are_byte_identical(uninterrupted, tmp_path):
    for suite, count in (("latency", 2), ("retrieval", 11), ("perplexity", 3)):
        process = child(tmp_path, "die", suite, count)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors.decode()[-2000:]
        assert not (tmp_path / "results.json").exists()
        # What a process killed while writing leaves behind.
        with (tmp_path / "samples.jsonl").open("a") as file:
            file.write('{"key": "torn')
    kept = len((tmp_path / "samples.jsonl").read_text().splitlines())
    run(tmp_path, resume=True)
    assert comparable(tmp_path) == comparable(uninterrupted[0])
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len((uninterrupted[0] / "samples.jsonl").read_text().splitlines())
    assert len(lines) > kept


@pytest.mark.optional
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-evaluation-harness")
def test_killed_in_the_harness_and_resumed_the_results_are_byte_identical(tmp_path):
    pytest.importorskip("lm_eval.tasks.ruler.niah_utils")
    whole = run(tmp_path / "whole", **LM_EVAL)
    assert {row["model"] for row in whole["lm_eval"]} == {"model", "teacher"}
    process = child(tmp_path / "killed", "die", "lm-eval", 1)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()[-2000:]
    assert not (tmp_path / "killed" / "results.json").exists()
    run(tmp_path / "killed", resume=True, **LM_EVAL)
    assert comparable(tmp_path / "killed") == comparable(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_find_what_one_finds(uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch(2, "tests.evaluation.workers", tmp_path, "run")
    assert comparable(tmp_path) == comparable(uninterrupted[0])
    assert [path.name for path in tmp_path.glob("samples*")] == ["samples.jsonl"]


def test_lengths_beyond_the_trained_positions_are_named(caplog):
    chosen = EvaluationSettings(suite=("retrieval",), tasks=("passkey",), lengths=(256, 512))
    models = {"model": tiny_llama(max_position_embeddings=256), "teacher": tiny_llama(max_position_embeddings=512)}
    with caplog.at_level(logging.WARNING, "hf_linear_attn"):
        check_evaluation(chosen, **models, tokenizer=byte_tokenizer())
    assert [record.getMessage() for record in caplog.records] == [
        "lengths of up to 512 tokens reach beyond the 256 positions that model was trained on: what it says there is "
        "not to be trusted"
    ]


def test_a_finished_run_resumes_without_computing_anything(uninterrupted, tmp_path, monkeypatch):
    folder, _ = uninterrupted
    for name in ("run.json", "samples.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    monkeypatch.setattr("hf_linear_attn.evaluation.answering.continue_rows", None)
    monkeypatch.setattr("hf_linear_attn.evaluation.scoring.score_tokens", None)
    monkeypatch.setattr("hf_linear_attn.evaluation.suites.latency.Latency.measure", None)
    run(tmp_path, resume=True)
    assert comparable(tmp_path) == comparable(folder)


def test_a_folder_with_results_needs_a_decision(uninterrupted):
    with pytest.raises(CheckpointError, match=r"`output_dir` must be a folder without results, got .*Pass overwrite"):
        run(uninterrupted[0])


def test_a_run_that_was_cut_off_goes_on_when_the_same_command_is_given_again(uninterrupted, tmp_path):
    (tmp_path / "run.json").write_bytes((uninterrupted[0] / "run.json").read_bytes())
    lines = (uninterrupted[0] / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(lines[:5]))
    run(tmp_path)
    assert (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)[:5] == lines[:5]
    assert comparable(tmp_path) == comparable(uninterrupted[0])
    with pytest.raises(CheckpointError, match="without results"):
        run(tmp_path)


def test_results_of_other_settings_are_not_resumed(uninterrupted):
    with pytest.raises(CheckpointError, match=r"must hold a run of the same settings.*seed was 0 and is 1"):
        run(uninterrupted[0], resume=True, seed=1)


@pytest.mark.parametrize("text", ["", '{"settings": {', '{"settings": {}}', "[]"])
def test_a_damaged_run_is_not_resumed(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"`output_dir` must hold a run that can be gone on with.*damaged"):
        run(tmp_path, resume=True)


def test_results_of_other_weights_are_not_resumed(uninterrupted):
    other = tiny_linear()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-4
    with pytest.raises(CheckpointError, match=r"must hold a run of the same models.*model was '[0-9a-f]{64}' and is"):
        evaluate(settings(uninterrupted[0], resume=True), model=other, tokenizer=byte_tokenizer(), teacher=tiny_llama())


def test_the_fingerprint_sees_weights_and_patch_settings():
    prints = [
        subject(model).fingerprint for model in (tiny_linear(), tiny_linear(), tiny_linear(window=8), tiny_llama())
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_overwriting_deletes_what_a_run_made_and_nothing_else(tmp_path):
    mine = ["mine.txt", "samples_mine.jsonl", "figures/paper.svg"]
    (tmp_path / "figures").mkdir()
    for name in [*mine, "figures/score.svg"]:
        (tmp_path / name).write_text("kept")
    (tmp_path / "report.md").write_text("![Score](figures/score.svg)")
    SampleStore(tmp_path, {"seed": 0}, {}).add([{"key": "a"}])
    store = SampleStore(tmp_path, {"seed": 1}, {}, overwrite=True)
    assert store.get("a") is None
    assert all((tmp_path / name).read_text() == "kept" for name in mine)
    assert not any((tmp_path / name).exists() for name in ("samples.jsonl", "report.md", "figures/score.svg"))


def test_overwriting_deletes_nothing_where_a_folder_links_to(tmp_path):
    folder, theirs = tmp_path / "run", tmp_path / "theirs" / "score.svg"
    for one in (folder, theirs.parent):
        one.mkdir()
    theirs.write_text("theirs")
    (folder / "figures").symlink_to(theirs.parent)
    (folder / "report.md").write_text("![Score](figures/score.svg)")
    SampleStore(folder, {"seed": 1}, {}, overwrite=True)
    assert theirs.read_text() == "theirs"
    assert not (folder / "report.md").exists()


def test_two_runs_do_not_share_a_folder(tmp_path):
    settings = EvaluationSettings(**SMALL, output_dir=str(tmp_path))
    with locked(tmp_path), pytest.raises(CheckpointError, match=r"`output_dir` must not be in use, got .*Another run"):
        evaluate(settings, model=tiny_llama(), tokenizer=byte_tokenizer())
    assert not (tmp_path / "run.json").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<new {n}>" for n in range(tiny_llama().config.vocab_size)])
    with pytest.raises(ArgumentError, match=r"`tokenizer` must have at most the model's \d+ tokens, got \d+"):
        evaluate(EvaluationSettings(**SMALL), model=tiny_llama(), tokenizer=tokenizer)


def test_results_that_are_no_numbers_name_the_model(tmp_path):
    with pytest.raises(ArgumentError, match="`model` must compute finite numbers"):
        write_results({"nll_nats": float("nan")}, tmp_path)
    assert not (tmp_path / "results.json").exists()


SMALL = {
    "suite": ("retrieval",), "tasks": ("passkey",), "lengths": (320,), "depths": (50,), "num_samples": 1,
    "progress": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "models", "error", "message"),
    [
        (
            {"attn": "linear"},
            {"model": tiny_llama},
            UnsupportedError,
            r"`attn` must be 'softmax' or 'auto' for a model",
        ),
        (
            {"attn": "softmax"},
            {"model": tiny_linear},
            ArgumentError,
            r"`attn` must be 'linear' or 'auto' for a patched",
        ),
        ({}, {}, ArgumentError, r"`model` must be a model or a path, got None"),
        ({"model": "missing/folder", "offline": True}, {}, CheckpointError, r"`model` must be a folder or hub name"),
        (
            {},
            {"model": tiny_linear, "teacher": tiny_linear},
            ArgumentError,
            r"`teacher` must be a softmax model, and this one is patched, got 'LlamaForCausalLM'. Name",
        ),
        (
            {"teacher": "missing/folder", "offline": True},
            {"model": tiny_llama},
            CheckpointError,
            r"`teacher` must be a folder or hub name .*got 'missing/folder'",
        ),
        (
            {"lengths": (600,)},
            {"model": tiny_gpt2},
            ArgumentError,
            r"`lengths` must stay within the 320 learned positions, got 600 \(model\)",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(options, models, error, message):
    with pytest.raises(error, match=message):
        evaluate(
            EvaluationSettings(**{**SMALL, **options}),
            tokenizer=byte_tokenizer(),
            **{name: make() for name, make in models.items()},
        )


def test_one_object_cannot_be_student_and_teacher():
    model = tiny_linear()
    with pytest.raises(ArgumentError, match=r"`teacher` must be another object than `model`"):
        evaluate(EvaluationSettings(**SMALL), model=model, teacher=model, tokenizer=byte_tokenizer())


def test_a_tokenizer_without_special_tokens_is_refused():
    tokenizer = byte_tokenizer(bos=False)
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token = None
    with pytest.raises(ArgumentError, match=r"`tokenizer` must have an EOS, BOS or padding token"):
        evaluate(EvaluationSettings(**SMALL), model=tiny_llama(), tokenizer=tokenizer)


@pytest.mark.parametrize("kept", ["eos_token", "bos_token", "pad_token"])
def test_one_special_token_is_enough(kept):
    tokenizer = byte_tokenizer(bos=False)
    for name in {"eos_token", "bos_token", "pad_token"} - {kept}:
        setattr(tokenizer, name, None)
    chosen = EvaluationSettings(
        **{**SMALL, "suite": ("retrieval", "perplexity"), "num_samples": 2, "batch_size": 2, "max_text_tokens": 400}
    )
    results = evaluate(chosen, model=tiny_llama(), tokenizer=tokenizer)
    assert [cell["status"] for cell in [*results["cells"], *results["floors"]]] == ["ok", "ok"]
    assert results["perplexity"]["windows"][0]["tokens"] == 399


def test_models_and_tokenizer_load_from_folders(models, tmp_path, capsys):
    flags = "--suite retrieval --tasks passkey --lengths 320 --depths 50 --num-samples 1 --progress false --no-plots"
    arguments = [*models, *flags.split(), "--output_dir", str(tmp_path / "out")]
    results = main(["--attn", "linear", *arguments])
    assert results["model"]["feature_map"] == "elu"
    assert results["model"]["fingerprint"] == subject(tiny_linear()).fingerprint
    shown = capsys.readouterr()
    assert shown.out.endswith(f"Report: {tmp_path / 'out' / 'report.html'}\n")
    assert shown.err.splitlines()[-1].startswith("Next: open the report")
    undone = main(["--attn", "softmax", "--overwrite", *arguments])
    assert undone["model"]["attention"] == "softmax"
    assert undone["model"]["fingerprint"] == undone["references"][0]["fingerprint"]


def test_baselines_stand_beside_and_say_how_much_of_the_gap_is_closed(tmp_path):
    chosen = EvaluationSettings(suite=("perplexity",), lengths=(64,), max_text_tokens=400, progress=False)
    results = evaluate(
        chosen,
        model=tiny_linear(),
        tokenizer=byte_tokenizer(),
        teacher=tiny_llama(),
        baselines={"window alone": tiny_linear(mix="window")},
        extras={"linear_branch_off_nats": 0.25},
    )
    loss = {row["model"]: row["nll_nats"] for row in results["perplexity"]["windows"]}
    if loss["window alone"] > loss["teacher"]:
        (row,) = results["gap_closed"]
        expected = (loss["window alone"] - loss["model"]) / (loss["window alone"] - loss["teacher"])
        assert row["gap_closed"] == pytest.approx(expected)
    else:
        assert results["gap_closed"] == []
    assert (
        "Switching the linear branch off costs 0.25 nats per token beyond the window." in results["summary"]["quality"]
    )
    assert results["references"][1]["feature_map"] is None


def test_compare_puts_runs_side_by_side_and_shares_what_they_share(uninterrupted, tmp_path, capsys):
    folder, results = uninterrupted
    other = tmp_path / "other"
    evaluate(settings(other), model=tiny_linear(window=8), tokenizer=byte_tokenizer(), teacher=tiny_llama())
    found = compare_command([str(folder), str(other / "results.json"), "--output-dir", str(tmp_path / "both")])
    names = [found["model"]["name"], *(model["name"] for model in found["references"])]
    assert names == [folder.name, "teacher", "other"]
    assert len(found["cells"]) == 12
    assert {(row["model"], row["other"]) for row in found["paired"]} == {
        (folder.name, "teacher"),
        (folder.name, "other"),
    }
    jsonschema.validate(read_results(tmp_path / "both"), schema())
    mine = [cell["score"] for cell in found["cells"] if cell["model"] == folder.name]
    assert mine == [cell["score"] for cell in results["cells"] if cell["model"] == "model"]
    assert (tmp_path / "both" / "report.html").stat().st_size > 10_000
    assert "Report: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"`paths` must be results of an evaluation"),
        ("{", r"`paths` must be results of an evaluation"),
        ('{"schema_version": 99}', r"`schema_version` must be 1, got 99"),
    ],
)
def test_compare_refuses_what_is_not_a_result(uninterrupted, tmp_path, content, message):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        compare([uninterrupted[0], tmp_path], tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"`paths` must be at least two results"):
        compare([uninterrupted[0]], tmp_path / "out")


GONE = object()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("cells", 0, "score"), 7.5),
        (("cells", 1, "score"), "abc"),
        (("cells", 0, "score"), None),
        (("cells", 0, "score"), math.nan),
        (("cells", 3, "length"), -3),
        (("cells", 2, "scores", 1), -1),
        (("cells", 0, "n"), GONE),
        (("cells",), GONE),
        (("cells",), "abc"),
        (("model", "name"), GONE),
        (("references", 0, "role"), "abc"),
        (("perplexity", "windows", 0, "nll_nats"), "abc"),
        (("latency", 0, "ttft_ms"), -1.0),
        (("summary",), GONE),
    ],
)
def test_compare_names_file_and_place_of_a_result_that_cannot_be(uninterrupted, tmp_path, capsys, place, value):
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    results = json.loads((uninterrupted[0] / "results.json").read_text())
    for folder in (whole, changed):
        folder.mkdir()
    (whole / "results.json").write_text(json.dumps(results))
    owner = results
    for name in place[:-1]:
        owner = owner[name]
    if value is GONE:
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    (changed / "results.json").write_text(json.dumps(results))
    for pair in ([whole, changed], [changed, whole]):
        with pytest.raises(SystemExit) as stop:
            run_command(["compare", *map(str, pair), "--output-dir", str(tmp_path / "out"), "--no-plots"])
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"`results` must be results of an evaluation, got {str(changed / 'results.json')!r}" in line
        where = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in place)[1:]
        if value is GONE:
            assert f"{place[-1]!r} is a required property" in line
        elif value == value:
            assert f"({where})" in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[: len(line) // 2] + "\n",
        lambda line: line.replace('"key"', '"kez"'),
        lambda line: line.replace("1", "7", 1),
        lambda line: "[1]\n",
        lambda line: "\n",
        lambda line: "\udcff" + line,
    ],
    ids=["cut", "key", "digit", "list", "empty", "bytes"],
)
def test_a_damaged_line_inside_the_samples_is_named(uninterrupted, tmp_path, damage):
    for name in ("run.json", "samples.jsonl"):
        (tmp_path / name).write_bytes((uninterrupted[0] / name).read_bytes())
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    lines[2] = damage(lines[2])
    damaged = "".join(lines).encode(errors="surrogateescape")
    (tmp_path / "samples.jsonl").write_bytes(damaged)
    with pytest.raises(
        CheckpointError, match=r"`output_dir` must hold a run .*samples.jsonl' \(line 3\)\. It is damaged"
    ):
        run(tmp_path, resume=True)
    assert (tmp_path / "samples.jsonl").read_bytes() == damaged


def test_samples_of_earlier_versions_have_no_checksum(uninterrupted, tmp_path):
    (tmp_path / "run.json").write_bytes((uninterrupted[0] / "run.json").read_bytes())
    records = [json.loads(line) for line in (uninterrupted[0] / "samples.jsonl").read_text().splitlines()]
    old = "".join(json.dumps({name: x for name, x in one.items() if name != "crc32"}) + "\n" for one in records)
    (tmp_path / "samples.jsonl").write_text(old)
    run(tmp_path)
    assert comparable(tmp_path) == comparable(uninterrupted[0])
    assert (tmp_path / "samples.jsonl").read_text() == old
