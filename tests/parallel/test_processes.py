import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(size, module, *arguments, timeout=240):
    """Run processes that find each other; return what they wrote, and the seconds taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        for rank in range(size)
    ]
    found = []
    for process in processes:
        output, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, errors.decode()[-3000:]
        found.append(output.decode())
    return found, time.monotonic() - started


def test_two_and_four_processes_are_one_and_a_dead_one_is_named():
    found, _ = launch(4, "tests.parallel.workers")
    assert found == ["all is well", "all is well", "", "all is well"]
