"""The tests that fill fresh memory with NaN leave nothing behind."""

import subprocess
import sys

PROGRAM = """
import pytest, torch
from tests.ops.oracle import poison

with pytest.MonkeyPatch.context() as patch:
    poison(patch)
    with torch.device("meta"):
        torch.zeros(1)
with torch.device("meta"):
    print(torch.empty(1).device)
"""


def test_poisoned_memory_leaves_devices_as_they_were():
    # In a process of its own: PyTorch remembers for good what it sees at the first use of a device's context.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta"]
