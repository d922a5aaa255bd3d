"""Repeated launches: the same as those that Triton makes of all arguments, without Triton looking at them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_repeated_launches_are_those_that_triton_makes(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("direct_launches.py"))]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, object]] = {}
    for line in run.stdout.splitlines():
        found |= json.loads(line)
    # Two kinds of places where x begins, times 1, other numbers, multiples of 16, and those of more than 31 bits.
    assert found.pop("told apart") == {"same": True, "kernels": 8}
    for name, launches in (("masked", 3), ("unaligned", 3), ("step", 1), ("recommended step", 1)):
        assert found[name] == {"launches": launches, "same": True, "looks": [launches, 0]}, name
