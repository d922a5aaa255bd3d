"""No command writes to what it reads, nor over files that are no run's: it is refused, and nothing on disk changes."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.cli import main
from hf_linear_attn.diagnostics import inspect_model
from hf_linear_attn.distill import DistillationSettings, distill
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation import EvaluationSettings, compare, evaluate
from tests.distill.tiny import byte_tokenizer, tiny_teacher

SHORT = "--dataset {0}/texts --block-tokens 16 --rows 1 --window 4 --heldout-rows 0 --no-progress"
WINDOWS = "--suite perplexity --lengths 32 --text-file {0}/words/text.txt --final-windows 0 --no-progress --no-plots"
COMMANDS = {
    "distill": f"distill --model {{0}}/model --stages distill --distill-steps 2 {SHORT} --output-dir",
    "finetune": f"distill --preset finetune --student {{0}}/student --extend-steps 1 {SHORT} --output-dir",
    "stored": "distill --teacher-logits {0}/logits --model {0}/model --stages distill --distill-steps 2 "
    f"{SHORT} --output-dir",
    "teacher-logits": f"teacher-logits --model {{0}}/model --stages distill --distill-steps 2 {SHORT} --teacher-logits",
    "evaluate": f"evaluate --model {{0}}/student --teacher {{0}}/model {WINDOWS} --output-dir",
    "compare": "compare {0}/report {0}/again/results.json --no-plots --output-dir",
    "inspect": "inspect {0}/model --text-file {0}/words/text.txt --maps elu --max-tokens 16 --output-dir",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with all that commands read, each made by a command where one makes it."""
    folder = tmp_path_factory.mktemp("finished")
    for name, model in (("model", tiny_teacher()), ("student", patch_model(tiny_teacher(), window=4))):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    for name in ("texts", "words", "project"):
        (folder / name).mkdir()
    for n in range(25):
        (folder / "texts" / f"{n:02d}.txt").write_text(f"text number {n} " * 10)
    (folder / "words" / "text.txt").write_text("one two three four " * 60)
    for name in ("README.md", "config.json", "report.md", "report.html", "table.md"):
        (folder / "project" / name).write_text(f"my own {name}")
    run(folder, "teacher-logits", "logits")
    run(folder, "evaluate", "report")
    shutil.copytree(folder / "report", folder / "again")
    return folder


@pytest.fixture
def files(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "files")
    return tmp_path / "files"


def run(files, name, output, *more):
    words = COMMANDS[name].format(files).split()
    main([*words, str(files / output if output != Path() else output), *more])


def tree(folder):
    """Return what is in a folder, by path: links, and what files hold."""
    found = {}
    for path in sorted(folder.rglob("*")):
        said = os.readlink(path) if path.is_symlink() else ""
        if path.is_file():
            said += hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = said
    return found


def refused(capsys, files, name, output, *more):
    """Return the one line with which a command refuses a folder; nothing on disk has changed."""
    before = tree(files)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(files, name, output, *more)
    assert stop.value.code == 2
    assert tree(files) == before
    lines = capsys.readouterr().err.splitlines()
    return lines[-1]


READ = [
    ("distill", "model", "model"),
    ("distill", "dataset", "texts"),
    ("finetune", "student", "student"),
    ("stored", "teacher_logits", "logits"),
    ("teacher-logits", "model", "model"),
    ("teacher-logits", "dataset", "texts"),
    ("evaluate", "model", "student"),
    ("evaluate", "teacher", "model"),
    ("evaluate", "text_file", "words"),
    ("compare", "results", "report"),
    ("compare", "results", "again"),
    ("inspect", "model", "model"),
    ("inspect", "text_file", "words"),
]


@pytest.mark.parametrize("more", [[], ["--overwrite"]], ids=["", "overwrite"])
@pytest.mark.parametrize(("name", "argument", "place"), READ)
def test_no_command_writes_to_what_it_reads(name, argument, place, more, files, capsys):
    output = "teacher_logits" if name == "teacher-logits" else "output_dir"
    places = [place, "", f"project/../{place}", "link", "holder"]
    if argument != "text_file" and place != "again":  # a folder, and not a file in one
        places += [f"{place}/new/folder", "link/new"]
    (files / "link").symlink_to(place, target_is_directory=True)
    (files / "holder").mkdir()
    name_of_one = (
        "results.json" if argument == "results" else next(one for one in tree(files / place) if "/" not in one)
    )
    os.link(files / place / name_of_one, files / "holder" / "hard")
    for where in places:
        line = refused(capsys, files, name, where, *more)
        assert f"`{output}` must be apart from `" in line, where
        assert "Choose another folder" in line
    assert f"`{argument}`" in refused(capsys, files, name, place, *more)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_writes_over_files_that_are_no_run_s_unasked(name, files, capsys, monkeypatch):
    monkeypatch.chdir(files / "project")
    for where in (files / "project", Path()):
        assert "it holds README.md, config.json, " in refused(capsys, files, name, where)
    # Names that a run's begin like, too, and what lies where it links to.
    for path in (
        "samples_mine.jsonl",
        "checkpoints/step-mine/notes",
        "checkpoints/step-best",
        "elsewhere/step-00000001",
    ):
        (files / "project" / path).parent.mkdir(parents=True, exist_ok=True)
        (files / "project" / path).write_text("mine")
    (files / "theirs").mkdir()
    (files / "theirs" / "paper.svg").write_text("theirs")
    (files / "project" / "figures").symlink_to(files / "theirs")
    before = tree(files)
    run(files, name, "project", "--overwrite")
    changed = {path for path, said in before.items() if tree(files).get(path) != said}
    written = {
        "compare": {"report.md", "report.html"},
        "evaluate": {"report.md", "report.html"},
        "inspect": {"report.html", "table.md"},
        "teacher-logits": set(),
    }.get(name, {"README.md", "config.json"})
    assert changed == {f"project/{path}" for path in written}


@pytest.mark.parametrize("name", ["compare", "inspect"])
def test_an_earlier_report_is_replaced_when_that_is_asked_for(name, files, capsys):
    run(files, name, "new")
    assert "must be new or empty" in refused(capsys, files, name, "new")
    run(files, name, "new", "--overwrite")


@pytest.mark.parametrize("name", ["distill", "teacher-logits"])
def test_a_run_goes_on_in_its_own_folder_and_begins_anew_when_that_is_asked_for(name, files, capsys):
    run(files, name, "new")
    made = tree(files / "new")
    (files / "new" / "notes.txt").write_text("my own")
    run(files, name, "new")
    run(files, name, "new", "--overwrite", "--seed", "1")
    assert (files / "new" / "notes.txt").read_text() == "my own"
    assert tree(files / "new").keys() - {"notes.txt"} == made.keys()


def test_what_a_folder_links_to_is_not_a_run_s(files, capsys):
    run(files, "distill", "new")
    (files / "new" / "checkpoints").rename(files / "theirs")
    (files / "new" / "checkpoints").symlink_to(files / "theirs")
    theirs = tree(files / "theirs")
    assert theirs
    assert "`output_dir` must hold no checkpoints elsewhere" in refused(capsys, files, "distill", "new", "--overwrite")
    assert tree(files / "theirs") == theirs


def test_no_picture_is_written_to_what_a_folder_links_to(files):
    theirs = files / "project"
    before = tree(theirs)
    (files / "new").mkdir()
    (files / "new" / "figures").symlink_to(theirs)
    run(files, "compare", "new", "--plots", "--overwrite")
    assert tree(theirs) == before
    assert list((files / "new" / "figures").glob("*.svg"))


# PEFT reads an attribute that Transformers renames.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_student_of_the_other_kind_is_replaced_whole(files, capsys):
    adapters = "--trainable", "lora", "--no-merge-lora"
    for more, there, gone in (
        (adapters, "adapter_config.json", "config.json"),
        ((), "config.json", "adapter_config.json"),
        (adapters, "adapter_config.json", "config.json"),
    ):
        run(files, "distill", "new", "--overwrite", *more)
        assert (files / "new" / there).exists()
        assert not (files / "new" / gone).exists()


@pytest.mark.parametrize(
    ("name", "first"),
    [("distill", "distillation.json"), ("evaluate", "run.json"), ("teacher-logits", "rows-0-1.safetensors")],
    ids=["distill", "evaluate", "teacher-logits"],
)
def test_a_run_goes_on_that_was_killed_before_it_had_written_a_whole_file(name, first, files, capsys):
    (files / "new").mkdir()
    (files / "new" / f".{first}.tmp").write_text("{")
    run(files, name, "new")
    (files / "other").mkdir()
    (files / "other" / ".mine.tmp").write_text("my own")
    assert "it holds .mine.tmp" in refused(capsys, files, name, "other")


def test_what_python_loads_is_not_written_to(files):
    model, tokenizer = tiny_teacher().from_pretrained(files / "model"), byte_tokenizer()
    student, folder = from_pretrained(files / "student"), str(files / "model")
    before = tree(files)
    settings = DistillationSettings(output_dir=folder, overwrite=True)
    with pytest.raises(ArgumentError, match="`output_dir` must be apart from `teacher`"):
        distill(settings, model, tokenizer=tokenizer)
    with pytest.raises(ArgumentError, match="`output_dir` must be apart from `teacher`"):
        evaluate(EvaluationSettings(output_dir=folder, overwrite=True), model=student, teacher=model)
    with pytest.raises(ArgumentError, match="`output_dir` must be apart from `model`"):
        inspect_model(model, tokenizer, "some text", folder, overwrite=True)
    with pytest.raises(ArgumentError, match="`output_dir` must be apart from `results`"):
        compare([files / "report", files / "again"], files / "again", overwrite=True)
    assert tree(files) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_refused_for_another_reason_leaves_no_folder(name, files, capsys):
    argument = {"compare": "--no-such", "inspect": "--max-tokens=1", "evaluate": "--lengths=1000000"}.get(
        name, "--dataset=no"
    )
    assert refused(capsys, files, name, "new/folder", argument)


def test_a_link_to_nothing_is_no_folder(files, capsys):
    (files / "dangling").symlink_to("nothing")
    assert "must be a folder that can be written" in refused(capsys, files, "distill", "dangling")
    assert "must be a folder that can be written" in refused(capsys, files, "distill", "words/text.txt/new")
