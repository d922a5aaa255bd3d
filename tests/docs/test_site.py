"""The site holds every public name, and builds without a warning where MkDocs is installed."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = (
    "patching",
    "ops",
    "feature_maps",
    "distill",
    "evaluation",
    "evaluation.tasks",
    "diagnostics",
    "parallel",
    "serving.vllm",
)
REFERENCE = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))


def test_every_public_name_is_in_the_reference():
    shown = set(re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE))
    last = {name.rpartition(".")[2] for name in shown}
    package = importlib.import_module("hf_linear_attn")
    assert set(package.__all__) <= last
    for name in PUBLIC:
        module = importlib.import_module(f"hf_linear_attn.{name}")
        assert {f"hf_linear_attn.{name}.{public}" for public in module.__all__} <= shown
        assert all(getattr(module, public).__doc__ for public in module.__all__)
    for name in shown - {"hf_linear_attn.errors"}:
        place, _, public = name.rpartition(".")
        assert hasattr(importlib.import_module(place), public), f"{name} is gone"


def test_what_pages_import_is_in_the_reference():
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE)}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for names in re.findall(r"^ *from hf_linear_attn[\w.]* import ([\w, ]+)$", page.read_text(), re.MULTILINE):
            assert set(names.split(", ")) <= shown, page


def test_every_error_is_in_the_reference():
    errors = importlib.import_module("hf_linear_attn.errors")
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.HFLinearAttnError):
            assert re.search(rf"\b{name}\b", REFERENCE)


def test_every_page_is_in_the_menu():
    listed = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.skipif(
    not (importlib.util.find_spec("mkdocs") and importlib.util.find_spec("material")),
    reason="needs the extra `docs`; `make docs` builds the site",
)
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    shown = "".join(page.read_text() for page in (tmp_path / "site/reference").rglob("index.html"))
    assert not re.search(r":(class|func|meth):<code>", shown)
    index = (tmp_path / "site/search/search_index.json").read_text()
    assert "hf_linear_attn.patching.patch_model" in index
