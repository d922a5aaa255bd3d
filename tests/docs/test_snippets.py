"""Every code block of README and site runs here, on tiny models, or says why it does not."""

import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from hf_linear_attn.cli import main
from hf_linear_attn.distill.measure import measure
from hf_linear_attn.distill.settings import DistillationSettings
from tools import snippets

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "sh", "yaml", "json", "text"}
TUTORIAL = ROOT / "docs/tutorial.md"

# A minute's work in a second: fewer and smaller steps, nothing else.
SHORT = {
    "distill": "--retain-steps 1 --transfer-steps 1 --distill-steps 1 --extend-steps 1 --block-tokens 32 --rows 4 "
    "--accumulation 1 --heldout-rows 2 --heldout-answers 1 --checkpoint-every 1 --no-progress",
    "evaluate": "--lengths 512 --num-samples 1 --depths 50 --max-text-tokens 1024 "
    "--final-windows 0 --decode-tokens 2 --warmups 0 --repeats 1 --no-plots --no-progress --batch-size 8 "
    "--draft-prompts 1 --draft-answer 4 --drafted 2",
}
SHORT["finetune"] = SHORT["teacher-logits"] = SHORT["distill"]
FEWER = {
    r"\b(transfer_steps|distill_steps)=\d+": r"\1=1",
    r"\bheldout_rows=\d+": "heldout_rows=2",
    r"\b(num_samples|samples)=\d+": r"\1=1",
    r"\brows=16\b": "rows=2",
    r"\blengths=\([\d, ]+\)": "lengths=(512,)",
    r'model="examples/teacher", (?=window)': 'model="examples/teacher", dataset="your.txt", ',
    r"DistillationSettings\((?!\n)": "DistillationSettings(transfer_steps=1, distill_steps=1, block_tokens=32, "
    "rows=4, heldout_rows=2, heldout_answers=1, progress=False, dataset='your.txt', ",
    r"EvaluationSettings\((?!\n)": "EvaluationSettings(suite=('retrieval', 'latency'), depths=(50,), decode_tokens=2, "
    "warmups=0, repeats=1, progress=False, ",
}


def fewer(code):
    for pattern, replacement in FEWER.items():
        code = re.sub(pattern, replacement, code)
    return code


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    """Let a distillation measure itself by fewer questions than the 64 that it asks."""
    monkeypatch.setattr("hf_linear_attn.distill.run.measure", partial(measure, samples=4))


def with_language(language):
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if any(block.language in language and block.reason is None for block in snippets.blocks(page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_of_a_kind_that_is_checked(page):
    found = snippets.blocks(page)
    # A fence that the reader of blocks does not see would not be checked either.
    assert 2 * len(found) == len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE))
    for block in found:
        assert block.language in LANGUAGES, str(block)
        assert "not run" not in block.comment or block.reason, f"{block}: say why"


@pytest.mark.parametrize("page", with_language({"python"}))
def test_python_runs(page, desk, models):
    if page == TUTORIAL:
        (desk / "your.txt").write_text("def read(self, path):\n    return self.files[path]\n" * 200)
    found = snippets.blocks(page)
    printed = snippets.run(found, fewer)
    # Of the tutorial, what comes before the first figure that takes long.
    whole = page in (README, TUTORIAL)
    for number, text in printed.items():
        shown = snippets.output_of(found, number)
        assert bool(text) == bool(shown), f"{found[number]}: what it prints stands below it, and nothing else"
        whole = whole and fewer(found[number].code) == found[number].code
        if whole and shown:
            assert but_for_times(text) == but_for_times(shown.code)


def but_for_times(text):
    return re.sub(r"\d+\.\d+ s", "_ s", text)


def commands():
    for page in PAGES:
        for block in snippets.blocks(page):
            if block.language in ("bash", "sh") and block.reason is None:
                for line in block.code.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    if words:
                        yield page, words


# PEFT asks for an old name of Transformers'.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", with_language({"bash", "sh"}))
def test_commands_run(page, desk, monkeypatch, capsys):
    for words in [words for where, words in commands() if where == page]:
        name = words[1] if words[0] == "hf-linear-attn" else Path(words[1]).stem
        words += shlex.split(SHORT.get(name, ""))
        if name in ("distill", "teacher-logits", "finetune") and "--dataset" not in words:
            words += ["--dataset", "your.txt"]
        words = adapted(name, words)
        if words[0] == "hf-linear-attn":
            main(words[1:])
        else:
            assert words[0] == "python", words
            monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
        capsys.readouterr()


def adapted(name, words):
    """Leave out what a machine without an accelerator refuses; the tiny model has no half precision to win by."""
    if name in ("distill", "teacher-logits") and "recipes/8b-lora-one-gpu.yaml" in words:
        words += ["--mixed-precision", "no"]
    if name == "distill":
        words += ["--overwrite"]  # `runs/student` is there, for the pages that only read it
    if "encoder" in words:
        words += ["--length-factors", "1"]
    if "embedding" in words:
        words += ["--embedding-lengths", "32", "--embedding-texts", "4"]
    if name == "inspect":
        words += ["--max-tokens", "64"]
    return words


def test_recipes_on_pages_are_files():
    for page in PAGES:
        for block in snippets.blocks(page):
            if block.language == "yaml" and block.reason is None:
                name = re.fullmatch(r'--8<-- "(recipes/[\w-]+\.yaml)"\n', block.code)
                assert name, f"{block}: include a recipe"
                DistillationSettings.from_file(ROOT / name[1])
