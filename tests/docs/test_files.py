"""Recipes, workflows and release files hold what they promise."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from transformers import LlamaConfig

from hf_linear_attn import LinearAttentionConfig
from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.plan import plan
from tools import release

ROOT = release.ROOT
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# As wide as Llama-3-8B, and as deep as a plan needs.
WIDE = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
)


def test_there_is_a_recipe_for_each_common_case():
    names = {path.stem for path in RECIPES}
    assert names >= {"small-cpu", "1b", "8b-lora-one-gpu", "8b-full-eight-gpus", "lolcats", "text-only"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_and_explained(path):
    settings = DistillationSettings.from_file(path)
    assert isinstance(settings.conversion, LinearAttentionConfig)
    text = path.read_text()
    # It begins with what it is for and the command that runs it, and every block of settings says why.
    comment = text.split("\npreset:")[0]
    assert f"--config recipes/{path.name} " in comment
    assert "measured" in text.lower() or "not run yet" in text.lower() or "small teacher" in text
    assert "preset" in yaml.safe_load(text)
    assert path.name in "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))


# PEFT reads an attribute that Transformers renames.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_can_be_planned(path):
    found = plan(WIDE, DistillationSettings.from_file(path), gpus=8)
    assert [stage.stage for stage in found.stages] == list(DistillationSettings.from_file(path).stages)
    assert all(stage.total_gib > 0 for stage in found.stages)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_versions_and_limits(path):
    work = yaml.safe_load(path.read_text())
    assert work["permissions"] == {"contents": "read"}
    for job in work["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)


def test_workflows_test_what_the_package_promises():
    work = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    pythons = work["pinned"]["strategy"]["matrix"]["python"]
    promised = [name.split(" :: ")[-1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert pythons == promised
    assert f">={pythons[0]}" == PROJECT["requires-python"]
    needs = {need.name: need.specifier for need in map(Requirement, PROJECT["dependencies"])}
    assert any(step.get("run", "").startswith("make oldest") for step in work["oldest"]["steps"])
    assert any(step.get("run", "").startswith("make kernels-check-oldest") for step in work["kernels"]["steps"])
    makefile = (ROOT / "Makefile").read_text()
    for name in ("torch", "transformers", "triton"):
        oldest = next(one.version for one in needs[name] if one.operator == ">=")
        assert re.search(rf"^OLDEST_{name.upper()} := {re.escape(oldest)}\.0$", makefile, re.M)
    newest = work["newest"]
    assert newest["continue-on-error"]
    assert any(step.get("run", "").startswith("make newest") for step in newest["steps"])


def test_the_version_has_one_place():
    assert "version" in PROJECT["dynamic"]
    assert release.check_words(None) == []
    assert release.check_words("v9.9.9")[0].startswith(f"The tag must be v{release.version()}")


def test_a_bad_wheel_is_refused(tmp_path):
    wheel = tmp_path / "hf_linear_attn-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hf_linear_attn/py.typed", "")
        archive.writestr("tests/test_it.py", "")
        archive.writestr("hf_linear_attn/big", bytes(release.MOST_KIB * 1024))
    wrong = " ".join(release.check_wheel(wheel))
    assert f"at most {release.MOST_KIB} KiB" in wrong
    assert "must hold hf_linear_attn/evaluation/report.css" in wrong
    assert "must not hold tests" in wrong
    assert "must not hold hf_linear_attn/big, which the repository has not" in wrong
    assert "py.typed" not in wrong
    with pytest.raises(SystemExit, match="must hold one wheel and one source"):
        release.main([str(tmp_path)])


def test_a_wheel_is_all_in_the_table_of_its_sizes(tmp_path):
    wheel = tmp_path / "hf_linear_attn-0-py3-none-any.whl"
    documented = ROOT / "hf_linear_attn/errors.py"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(documented, "hf_linear_attn/errors.py")
        archive.writestr("hf_linear_attn/ops/step/api.py", "def step():\n    return 1\n")
        archive.writestr("hf_linear_attn-0.dist-info/RECORD", "a list\n" * 99)
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in release.sizes(wheel).splitlines()[2:]}
    assert rows.keys() == {"modules beside them", "ops/step", "recipes, licence and list of files", "**all**"}
    assert float(rows["modules beside them"][2]) > 0.3 * float(rows["modules beside them"][1])
    assert float(rows["ops/step"][2]) == 0.0
    # But for the 22 bytes at its end.
    assert float(rows["**all**"][4].rstrip(" |")) == pytest.approx(wheel.stat().st_size / 1024, abs=0.1)


def test_optional_extras_are_pinned():
    pinned = {
        re.split("==", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for extra in ("dev", "report", "docs", "release", "quantised", "peers"):
        for need in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if need.name != "hf_linear_attn":
                assert need.name.lower().replace("_", "-") in pinned, f"{extra}: {need.name}"


def test_links_of_root_pages_lead_somewhere():
    for page in ROOT.glob("*.md"):
        for target, anchor in re.findall(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)", page.read_text()):
            if not target.startswith(("http", "mailto")):
                assert Path(ROOT, target).exists(), f"{page.name}: {target}"
                heads = re.findall(r"^#+ (.+)$", Path(ROOT, target).read_text(), re.MULTILINE) if anchor else []
                anchors = [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]
                assert not anchor or anchor in anchors, f"{page.name}: {target}#{anchor}"
