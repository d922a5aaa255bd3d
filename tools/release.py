"""Check a built release: one version everywhere, a dated changelog, a small wheel that works without the repository.

python -m build && python -m tools.release dist
python -m tools.release dist --tag v0.1.0     # what a release has to hold besides
python -m tools.release dist --sizes          # a table of what is in the wheel
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_KIB = 780
"""A wheel that grows beyond has to say why: docs/results/wheel.md says what is in it, and why it has 766 KiB."""
CARRIED = (
    "hf_linear_attn/py.typed",
    "hf_linear_attn/evaluation/results.schema.json",
    "hf_linear_attn/evaluation/report.css",
    "hf_linear_attn/evaluation/report.html",
    "hf_linear_attn/ops/triton/tiles.json",
    "data/share/hf_linear_attn/recipes/small-cpu.yaml",
)
"""Files besides code that the package reads, or a user does, by the end of their path in the wheel."""

# What a user does first, in a process that sees the wheel and not the repository.
FIRST_STEPS = """
import sys, torch
import hf_linear_attn
assert hf_linear_attn.__file__.startswith(sys.argv[1]), hf_linear_attn.__file__
from transformers import LlamaConfig, LlamaForCausalLM
from hf_linear_attn import from_pretrained, patch_model
from hf_linear_attn.evaluation import schema
sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = patch_model(LlamaForCausalLM(LlamaConfig(**sizes)), feature_map="norm_preserving", window=4, sinks=1)
ids = torch.arange(8)[None]
model.save_pretrained("student")
assert torch.equal(model(ids).logits, from_pretrained("student")(ids).logits)
assert schema()["properties"]
"""


def version() -> str:
    """Return the version that the package names, its one place."""
    tree = ast.parse((ROOT / "hf_linear_attn/__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("hf_linear_attn/__init__.py has no __version__.")


def check_words(tag: str | None) -> list[str]:
    """Return what is wrong with the version and the dates in the repository's files."""
    found, now = [], version()
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != now:
        found.append(f"CITATION.cff must name version {now}.")
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = r"\d+\.\d+\.\d+ \(\d{4}-\d{2}-\d{2}\)"
    if not heads or not heads[0].startswith(f"{now} ("):
        found.append(f"CHANGELOG.md must begin with version {now}.")
    found += [f"CHANGELOG.md: {head!r} must have a date." for head in heads[1:] if not re.fullmatch(dated, head)]
    if tag is not None:
        if tag != f"v{now}":
            found.append(f"The tag must be v{now}, got {tag}.")
        if not heads or not re.fullmatch(dated, heads[0]):
            found.append(f"CHANGELOG.md: {heads[:1]} must have a date.")
        if not (ROOT / "tests/golden" / now).is_dir():
            found.append(f"tests/golden/{now} must hold what this version saves: run `python -m tests.golden.make`.")
    return found


def check_wheel(wheel: Path) -> list[str]:
    """Return what is wrong with a wheel's size and contents."""
    found = []
    if (size := wheel.stat().st_size / 1024) > MOST_KIB:
        found.append(f"{wheel.name} must have at most {MOST_KIB} KiB, has {size:.0f}.")
    names = zipfile.ZipFile(wheel).namelist()
    found += [f"{wheel.name} must hold {name}." for name in CARRIED if not any(own.endswith(name) for own in names)]
    # What a folder of an earlier build left behind.
    stale = [name for name in names if name.startswith("hf_linear_attn/") and not (ROOT / name).is_file()]
    found += [f"{wheel.name} must not hold {name}, which the repository has not." for name in stale]
    strangers = {name.split("/")[0] for name in names} - {"hf_linear_attn"}
    found += [f"{wheel.name} must not hold {name}." for name in strangers if not name.startswith("hf_linear_attn-")]
    return found


def bare(source: str) -> str:
    """Return code without docstrings and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # Strings that stand alone, wherever: those below a name document it.
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def packed(data: bytes) -> int:
    """Return the bytes of data as a wheel keeps them."""
    squeeze = zlib.compressobj(wbits=-15)
    return len(squeeze.compress(data) + squeeze.flush())


def sizes(wheel: Path) -> str:
    """Return a table of what a wheel is made of."""
    rows: dict[str, list[float]] = {}
    archive = zipfile.ZipFile(wheel)
    for entry in archive.infolist():
        folders = entry.filename.split("/")[:-1]
        own = folders[:1] == ["hf_linear_attn"]
        name = "/".join(folders[1 : 3 if folders[1:2] == ["ops"] else 2]) or "modules beside them"
        data = archive.read(entry)
        code = packed(bare(data.decode()).encode()) if entry.filename.endswith(".py") else entry.compress_size
        # Twice its name: a wheel's directory stands at its end, and each entry has a head of its own.
        head = 30 + 46 + 2 * len(entry.filename)
        row = rows.setdefault(name if own else "recipes, licence and list of files", [0] * 4)
        rows[name if own else "recipes, licence and list of files"] = [
            a + b for a, b in zip(row, (1, code, entry.compress_size - code, head), strict=True)
        ]
    lines = [(name, *row) for name, row in sorted(rows.items(), key=lambda item: -sum(item[1][1:]))]
    lines.append(("**all**", *map(sum, zip(*rows.values(), strict=True))))
    table = ["| folder | files | code | docstrings, comments | names of files | together |", "| --- |" + " ---: |" * 5]
    for name, files, *parts in lines:
        cells = [f"{part / 1024:.1f}" for part in (*parts, sum(parts))]
        table.append(f"| {name} | {files} | {' | '.join(cells)} |")
    return "\n".join(table) + "\n"


def try_wheel(wheel: Path) -> None:
    """Take a user's first steps with the wheel alone; its dependencies are those of this interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "installed")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
        subprocess.run(install, check=True)
        environment = os.environ | {"PYTHONPATH": str(place), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-m", "hf_linear_attn.cli"]
        for run in (
            [sys.executable, "-c", FIRST_STEPS, str(place)],
            [*command, "--help"],
            [*command, "maps"],
            [*command, "distill", "--help"],
        ):
            done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"With the wheel alone, {run[1:4]} failed:\n{done.stderr}")


def main(argv: Sequence[str] | None = None) -> None:
    """Check the folder that ``python -m build`` wrote; status 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder with wheel and source")
    parser.add_argument("--tag", help="the tag that releases it, v1.2.3")
    parser.add_argument("--sizes", action="store_true", help="only say what the wheel is made of, KiB as it keeps it")
    arguments = parser.parse_args(argv)
    wheels, sources = list(arguments.dist.glob("*.whl")), list(arguments.dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        sys.exit(f"{arguments.dist} must hold one wheel and one source, has {len(wheels)} and {len(sources)}.")
    if arguments.sizes:
        sys.stdout.write(sizes(wheels[0]))
        return
    wrong = check_words(arguments.tag) + check_wheel(wheels[0])
    if wrong:
        sys.exit("\n".join(wrong))
    try_wheel(wheels[0])
    sys.stdout.write(f"{wheels[0].name}: {wheels[0].stat().st_size / 1024:.0f} KiB, works alone.\n")


if __name__ == "__main__":
    main()
