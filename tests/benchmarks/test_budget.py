"""What was compiled when the budget was written is not compiled again, and all that has changed since is."""

import importlib
import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.jit import JITFunction

FOLDER = Path(__file__).parents[2] / "benchmarks"

KERNEL = '''
from triton import language as tl
FACTOR = tl.constexpr(2)

def scaled(x):
    """Scale."""
    return x * FACTOR

def kernel(x, BT: tl.constexpr):
    tl.store(x + tl.arange(0, BT), scaled(1.0))
'''


def source(check: ModuleType, file: Path, text: str) -> str:
    """Return what a kernel in a file of that text is made of, as JIT functions that no interpreter takes."""
    file.write_text(text)
    linecache.checkcache(str(file))
    names = {"__name__": "kernels"}
    exec(compile(text, file, "exec"), names)
    names |= {name: JITFunction(names[name]) for name in ("scaled", "kernel")}
    return check.source_of(names["kernel"])


def test_a_digest_is_of_all_that_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check, file = importlib.import_module("compile_check"), tmp_path / "kernels.py"
    first = source(check, file, KERNEL)
    assert "FACTOR = 2" in first
    assert source(check, file, "# Lower.\n" + KERNEL.replace("x * FACTOR", "x * FACTOR  # twice")) == first
    for old, new in (("constexpr(2)", "constexpr(3)"), ("x * FACTOR", "x + FACTOR"), ("scaled(1.0)", "scaled(2.0)")):
        assert source(check, file, KERNEL.replace(old, new)) != first


CHECKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import compile_check as check

check.BUDGET = Path(sys.argv[1])
every = check.launches
check.configs = lambda full: [check.Config("sm_80", "bf16", 64, 64, 1)]
check.launches = lambda config: (launch for launch in every(config) if launch.role in ("delta", "decode"))

def run(*flags, **changes):
    text = json.loads(check.BUDGET.read_text()) if check.BUDGET.exists() else {}
    text |= {name: value for name, value in changes.items() if name == "triton"}
    if "row" in changes:
        text["kernels"]["sm_80/bf16/D64/V64/g1/elu/delta"] |= changes["row"]
    if text:
        check.BUDGET.write_text(json.dumps(text))
    sys.argv = ["compile_check.py", "--jobs", "1", *flags]
    print("== run", flush=True)
    print("rc", check.main(), flush=True)

run("--update")
run()
run("--all")
run(row={"shared": -1})
run(row={"digest": "another"})
run("--update")
run(triton="2.0.0")
run("--update")
run()
run(triton="99.0.0")
run("--update")
run()
"""


BOTH, DELTA, NOTHING = ["decode", "delta"], ["delta"], []
WANTED = [BOTH, NOTHING, BOTH, NOTHING, DELTA, DELTA, BOTH, BOTH, NOTHING, BOTH, BOTH, NOTHING]
"""What each run compiles, in the order of the launches."""


@pytest.mark.slow
def test_only_what_has_changed_is_compiled(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    budget = tmp_path / "budget.json"
    command = [sys.executable, "-c", CHECKS, str(budget), str(FOLDER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    runs = [[line for line in part.splitlines() if "size" not in line] for part in done.stdout.split("== run\n")[1:]]
    compiled = [
        [line.split()[0].rpartition("/")[2] for line in lines if line.startswith("sm_80/") and "FAIL" not in line]
        for lines in runs
    ]
    assert compiled == WANTED
    assert [lines[-1] for lines in runs] == [f"rc {int(n == 4)}" for n in range(len(WANTED))]
    assert "left out, as they were when the budget was written: 2 kernels" in runs[1]
    assert any("budget -1" in line for line in runs[4])
    assert any("only limits are held" in line for line in runs[6])
    found = json.loads(budget.read_text())
    digests = {key: row["digest"] for key, row in found["kernels"].items()}
    assert all(digests.values())
    assert found["triton"] == "99.0.0"
    assert list(found["older"].values()) == [digests]
