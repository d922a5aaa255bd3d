"""The command line, as a user would call it."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

import hf_linear_attn
from hf_linear_attn import available_feature_maps, patch_model
from hf_linear_attn.cli import COMMANDS, main
from hf_linear_attn.distill.cli import command_line, settings_from
from hf_linear_attn.evaluation.settings import parse_arguments
from hf_linear_attn.feature_maps import base as registry
from hf_linear_attn.flags import check_flags
from tests.distill.tiny import byte_tokenizer, tiny_teacher
from tests.distill.tiny_encoders import framing_tokenizer, tiny_masked_lm


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
    short = "--stages distill --distill-steps 2 --block-tokens 16 --rows 1 --heldout-rows 0"
    paths = ["--model", str(tmp_path / "teacher"), "--dataset", str(tmp_path / "text.txt")]
    paths += ["--output-dir", str(tmp_path / "student")]
    main(["distill", *mine, *paths, *short.split(), "--feature-map", "cubed", "--window", "4", "--no-progress"])
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


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_flag_is_known_before_its_command_is_imported(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    flags = re.findall(r"^ +--(?:\[(no-)\])?([a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE)
    assert flags
    words = [word for no, name in flags for word in (f"--{name}=x", *([f"--{no}{name}"] if no else []))]
    check_flags(words, command, COMMANDS[command].settings)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_typo_in_a_flag_is_answered_at_once(command):
    script = "import sys, hf_linear_attn.cli as cli\ntry: cli.main(sys.argv[1:])\nfinally: print(*sys.modules)"
    words = [sys.executable, "-c", script, command, "--fature-map-file", "x", "--no-progres"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1
    assert "`arguments` must be known flags, got '--fature-map-file'" in found.stderr
    # What takes seconds to import.
    assert not {"torch", "transformers", "numpy"} & set(found.stdout.split())


def test_help_lists_the_commands(capsys):
    main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_an_unknown_command_is_refused_with_the_list(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["transmogrify"])
    assert stop.value.code == 2
    assert "evaluate" in capsys.readouterr().err


def test_the_version_is_told(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"hf-linear-attn {hf_linear_attn.__version__}\n"


def test_commands_take_underscores_and_a_slip_is_understood(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["teacher_logits", "--help"])
    assert stop.value.code == 0
    with pytest.raises(SystemExit):
        main(["evalaute"])
    assert "Did you mean evaluate?" in capsys.readouterr().err


GOES_ON = "The same command goes on where it was."


@pytest.mark.parametrize(("command", "said"), [("distill", GOES_ON), ("evaluate", GOES_ON), ("maps", "")])
def test_ctrl_c_is_one_line_and_status_130(command, said, monkeypatch, capsys):
    def stopped(argv):
        raise KeyboardInterrupt

    for name in ("distill.cli.main", "evaluation.cli.main", "cli.list_maps"):
        monkeypatch.setattr(f"hf_linear_attn.{name}", stopped)
    with pytest.raises(SystemExit) as stop:
        main([command])
    assert stop.value.code == 130
    assert capsys.readouterr().err == f"hf-linear-attn {command}: stopped. {said}".strip() + "\n"


def test_errors_are_one_line_and_status_2(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--model", str(tmp_path / "absent"), "--output-dir", str(tmp_path / "out")])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "absent" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write what a user may name, right and wrong."""
    folder = tmp_path_factory.mktemp("files")
    tiny_teacher().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("one two three four " * 60)
    (folder / "empty.txt").write_text("")
    (folder / "binary").write_bytes(b"\x7fELF\xff\xfe")
    (folder / "script.sh").write_text("exit 0\n")
    (folder / "maps.py").write_text("import torch\n\ndef phi(x:\n")
    (folder / "fails.py").write_text("import torch\n\ntorch.nothing\n")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "numbers.jsonl").write_text('{"text": 5}\n{"text": 6}\n')
    (folder / "recipe.yaml").write_text("window: [\n  4\nsinks: 3")
    return folder


def with_paths(text, files, folder):
    """Put paths in place of the names in braces: of what is written, in a folder, and else of the user's files."""
    return re.sub(r"{([\w.]+)}", lambda match: str((folder if match[1] == "out" else files) / match[1]), text)


DISTILL = "distill --model {model} --dataset {text.txt} --block-tokens 16 --rows 1 --window 4 --output-dir {out}"
LOGITS = "teacher-logits --model {model} --dataset {text.txt} --block-tokens 16 --rows 1 --teacher-logits {out}"
INSPECT = "inspect {model} --text-file {text.txt} --output-dir {out}"
EVALUATE = "evaluate --model {model} --suite perplexity --lengths 32 --text-file {text.txt} --output-dir {out}"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("inspect /nope --text-file {text.txt}", "`model` must be a folder or hub name with a model's config.json"),
        ("inspect {empty} --text-file {text.txt}", "`model` must be a folder or hub name with a model's config.json"),
        ("inspect {model} --text-file {binary}", "`text_file` must be a readable UTF-8 text"),
        (f"{INSPECT} --text-file {{empty.txt}}", "`text_file` must have at least 2 tokens, got ''"),
        (f"{INSPECT} --device cuda", "`device` must be a device that can be used here, got 'cuda'"),
        (f"{INSPECT} --device banana", "`device` must be a device that can be used here, got 'banana'"),
        (f"{INSPECT} --output-dir /proc/x", "`output_dir` must be a folder that can be written, got '/proc/x'"),
        (f"{INSPECT} --feature-map-file {{maps.py}}", "`feature_map_file` must run without an error"),
        ("maps --feature-map-file {maps.py}", "SyntaxError in line 3"),
        ("maps --feature-map-file {fails.py}", "AttributeError in line 3: module 'torch' has no attribute 'nothing'"),
        ("plan /nope", "`model` must be a folder or hub name with a model's config.json, got '/nope'"),
        ("plan {empty}", "`model` must be a folder or hub name with a model's config.json"),
        ("plan {script.sh}", "`model` must be a folder or hub name with a model's config.json"),
        (f"{EVALUATE} --device cuda", "`device` must be a device that can be used here, got 'cuda'"),
        (f"{EVALUATE} --device banana", "`device` must be a device that can be used here, got 'banana'"),
        (f"{EVALUATE} --output-dir /proc/x", "`output_dir` must be a folder that can be written, got '/proc/x'"),
        (f"{EVALUATE} --output-dir {{text.txt}}", "`output_dir` must be apart from `text_file`"),
        (f"{EVALUATE} --draft-file {{script.sh}} --output-dir {{script.sh}}", "must be apart from `draft_file`"),
        (
            f"{EVALUATE} --continuation-file {{script.sh}} --output-dir {{script.sh}}",
            "must be apart from `continuation_file`",
        ),
        (f"{EVALUATE} --teacher /nope", "`teacher` must be a folder or hub name"),
        (f"{EVALUATE} --feature-map-file {{maps.py}}", "`feature_map_file` must run without an error"),
        (f"{DISTILL} --model /nope", "`model` must be a folder or hub name"),
        (f"{DISTILL} --student /nope", "`student` must be a folder or hub name"),
        (f"{DISTILL} --output-dir /proc/x", "`output_dir` must be a folder that can be written, got '/proc/x'"),
        (f"{DISTILL} --output-dir {{text.txt}}", "`output_dir` must be apart from `dataset`"),
        (f"{DISTILL} --output-dir {{script.sh}}", "`output_dir` must be a folder that can be written"),
        (f"{DISTILL} --feature-map-file {{maps.py}}", "`feature_map_file` must run without an error"),
        (f"{DISTILL} --betas 0.9", "`betas` must be two numbers from 0 to below 1, got [0.9]"),
        (f"{DISTILL} --betas 2 3", "`betas` must be two numbers from 0 to below 1, got [2.0, 3.0]"),
        (f"{DISTILL} --trackers nope", "`trackers` must be trackers that Accelerate knows and that are installed"),
        (f"{DISTILL} --shard", "`shard` must be False for a process alone"),
        (f"{DISTILL} --dataset {{broken.jsonl}}", "Correct it, or copy it again: JSON parse error"),
        (f"{DISTILL} --dataset {{broken.jsonl}} --streaming", "Correct it, or copy it again: JSON parse error"),
        (f"{DISTILL} --dataset {{numbers.jsonl}}", "`columns` must name texts, got 5 (row 1 of "),
        (f"{DISTILL} --dataset {{numbers.jsonl}} --streaming", "`columns` must name texts, got 5 (row 1 of "),
        (f"{DISTILL} --window 0", "`window` must be at least 1 token, or None"),
        ("distill --config {recipe.yaml}", "`config` must be a readable YAML or JSON file"),
        (f"{LOGITS} --teacher-logits /proc/x", "`teacher_logits` must be a folder that can be written, got '/proc/x'"),
    ],
)  # fmt: skip
def test_what_a_user_gets_wrong_is_said_in_one_line(files, tmp_path, capsys, command, message):
    with pytest.raises(SystemExit) as stop:
        main(with_paths(command, files, tmp_path).split())
    assert stop.value.code == 2
    # Data sets and progress bars have lines of their own.
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-linear-attn ")]
    assert len(said) == 1
    assert said[0].startswith(f"hf-linear-attn {command.split()[0]}: `")
    assert message in said[0]


def test_what_is_not_the_users_fault_keeps_its_traceback(monkeypatch, files):
    monkeypatch.setattr("hf_linear_attn.distill.cli.compute_plan", None)
    with pytest.raises(TypeError):
        main(["plan", str(files / "model")])


def test_flags_of_optional_settings_take_none():
    flags = ["--window", "none", "--sinks", "0", "--layers", "none", "--map-lr", "None"]
    line = command_line("distill", "", "")
    settings = settings_from(line.read(flags), {"output_dir": "x"})
    assert (settings.window, settings.layers, settings.map_lr, settings.output_dir) == (None, None, None, "x")
    assert settings.given == {"window", "sinks", "layers", "map_lr", "output_dir"}
    assert settings_from(line.read(["--layers", "0", "2"])).layers == (0, 2)
    found = parse_arguments(["--stride", "none", "--device", "none", "--model", "m"], defaults={"stride": 3})
    assert (found.stride, found.device, found.model) == (None, None, "m")


def test_help_says_which_flags_take_none(capsys):
    with pytest.raises(SystemExit):
        main(["distill", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "none" in shown.split("--window ")[-1].split(" --")[0]
    for command in ("distill --window", "evaluate --stride"):
        with pytest.raises(SystemExit):
            main([*command.split(), "wide"])
        assert "wide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (f"{DISTILL} --stages distill --distill-steps 1 --heldout-rows 0", {"out", "model"}),
        (f"{EVALUATE} --no-plots --final-windows 0", {"out"}),
        (f"{INSPECT} --maps elu --max-tokens 16", {"model"}),
        (f"{LOGITS} --window 4 --stages distill --distill-steps 1", {"out"}),
    ],
)  # fmt: skip
def test_a_command_to_copy_is_quoted_for_a_shell(command, named, files, tmp_path, capsys):
    folder = tmp_path / "it's $one; a folder"
    shutil.copytree(files, folder)
    main([with_paths(word, folder, folder) for word in command.split()])
    words = shlex.split(re.findall("`([^`]*)`", capsys.readouterr().err.splitlines()[-1])[-1])
    assert {str(folder / name) for name in named} <= set(words)


@pytest.fixture(scope="module")
def encoders(files):
    """Write an encoder, softmax and converted."""
    for name, model in (("bert", tiny_masked_lm()), ("student", patch_model(tiny_masked_lm(), "elu"))):
        model.save_pretrained(files / name)
        framing_tokenizer().save_pretrained(files / name)
    return files


OF_AN_ENCODER = "--preset encoder --rows 8 --transfer-steps 1 --distill-steps 1 --heldout-rows 0"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{INSPECT} --model {{bert}} --max-tokens 16 --maps elu", "distill --preset encoder --model {bert} "),
        (f"{INSPECT} --model {{student}} --max-tokens 16", "evaluate --model {student} --suite embedding "),
        (f"distill --model {{bert}} --dataset {{text.txt}} --output-dir {{out}} {OF_AN_ENCODER} --block-tokens 16",
         "evaluate --model {out} --teacher {bert} --suite embedding "),
        (f"{DISTILL} --stages distill --distill-steps 1 --heldout-rows 0 --trainable lora --no-merge-lora",
         "Next: {out}/README.md says how to load the adapters on {model}."),
    ],
)  # fmt: skip
def test_what_comes_next_can_be_done(command, said, encoders, tmp_path, capsys):
    main(with_paths(command.replace("inspect {model}", "inspect"), encoders, tmp_path).split())
    assert with_paths(said, encoders, tmp_path) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [
        f"{DISTILL} --stages distill --distill-steps 1 --heldout-rows 0",
        f"{EVALUATE} --no-plots --final-windows 0",
        f"{LOGITS} --window 4 --stages distill --distill-steps 1",
    ],
)
def test_no_progress_shows_no_bar_of_other_libraries(command, files, tmp_path, capfd):
    # What `datasets` has read before, it does not read again.
    text = tmp_path / "text.txt"
    text.write_text(f"{tmp_path} one two three four " * 60)
    words = with_paths(command.replace("{text.txt}", str(text)), files, tmp_path).split()
    main([*words, "--no-progress"])
    assert "%|" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{DISTILL} --model {{bert}} --window 64", "`stages` must be an encoder's, `transfer` and `embed`"),
        (f"{LOGITS} --model {{bert}}", "`stages` must be an encoder's, `transfer` and `embed`"),
        ("plan {bert}", "`model` must be a causal language model for a plan"),
        ("plan {bert} --preset encoder", "Distil an encoder without a plan"),
        ("export {student} --format torch", "`model` must be a causal language model, got 'BertForMaskedLM'"),
        (f"{EVALUATE} --model {{student}}", "Use the suite `embedding` for an encoder."),
    ],
)  # fmt: skip
def test_what_an_encoder_cannot_do_is_said_in_one_line(encoders, tmp_path, capsys, command, message):
    test_what_a_user_gets_wrong_is_said_in_one_line(encoders, tmp_path, capsys, command, message)
