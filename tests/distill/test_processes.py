import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_linear_attn import from_pretrained
from tests.distill.workers import run

ROOT = Path(__file__).parents[2]


def launch(folder, kind):
    """Run two processes; return the losses they saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distill.workers", str(folder), kind],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()[-3000:]
    return [float(line) for line in (folder / "losses.txt").read_text().split()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return folder, [record["loss_nats"] for record in run(str(folder), accumulation=2).history]


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_are_one_with_twice_the_accumulation(one_process, tmp_path, kind):
    folder, expected = one_process
    # fp32 sums in another order, over eight steps of Adam.
    assert launch(tmp_path, kind) == pytest.approx(expected, rel=1e-4)
    ids = torch.arange(3, 40)[None]
    one, two = (from_pretrained(path)(ids).logits for path in (folder, tmp_path))
    torch.testing.assert_close(two, one, rtol=1e-2, atol=1e-2)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
