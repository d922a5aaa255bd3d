"""The page about feature maps, and the suite that measures them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attn import available_feature_maps
from hf_linear_attn.feature_maps import load_feature_maps
from tools.catalogue import page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "feature-maps.json"


def test_the_page_is_not_stale():
    # A process of its own: other tests of this one register maps.
    measured = [str(RESULTS)] if RESULTS.exists() else []
    command = [sys.executable, "-m", "tools.catalogue", *measured]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert made.stdout == (ROOT / "docs" / "feature-maps.md").read_text()


def test_the_page_shows_every_map_and_those_of_the_user(users_map):
    load_feature_maps(users_map)
    text = page()
    for name in available_feature_maps():
        assert f"| `{name}` |" in text
    assert "| `cubed` | `max(x, 0)^3` | a file of mine | before them | >= 0 | 64 | 128 | - |" in text


@pytest.mark.slow
def test_the_suite_measures_a_map_of_the_user(users_map, llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(
        "".join(f"Cat {n} sat on mat {n * n}, and dog {7 * n} on it.\n" for n in range(60))
    )
    command = [
        *[sys.executable, "benchmarks/run.py", "--suite", "maps", "--teacher", str(tmp_path / "teacher")],
        *["--dataset", str(tmp_path / "text.txt"), "--feature-map-file", str(users_map), "--maps", "elu", "cubed"],
        *["--seeds", "0", "1", "--transfer-steps", "1", "--distill-steps", "1", "--block-tokens", "48", "--rows", "2"],
        *["--heldout-rows", "2", "--repeats", "0", "--work-dir", str(tmp_path / "work")],
        *["--output", str(tmp_path / "out.json")],
    ]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results["rows"]) == {"elu", "cubed"}
    teacher = results["teacher"]["text"]
    blind = sum(run["text"] for run in results["maps"]["own token only"]["distilled"]) / 2
    for name, row in results["rows"].items():
        losses = [run["text"] for run in results["maps"][name]["distilled"]]
        gaps = [1 - (loss - teacher) / (blind - teacher) for loss in losses]
        assert row["distilled"]["mean"] == pytest.approx(sum(gaps) / 2)
        assert row["distilled"]["sd"] > 0
    text = page(results)
    assert f"distilled {blind:.3f} (answers" in " ".join(text.split())
    before = (tmp_path / "out.json").stat().st_mtime_ns
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert "distilled" not in done.stdout  # finished runs are not repeated
    assert (tmp_path / "out.json").stat().st_mtime_ns > before
