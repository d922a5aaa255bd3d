import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.distilling import go

ROOT = Path(__file__).parents[2]


def launch(size, module, *arguments, expected=0):
    """Run processes that find each other; return what they wrote."""
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
    try:
        found = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [
        errors.decode()[-3000:] for process, (_, errors) in zip(processes, found, strict=True) if process.returncode
    ]
    assert not failed or expected is None, "\n".join(failed)
    return [output.decode() for output, _ in found]


def test_two_and_four_processes_are_one_and_a_dead_one_is_named():
    found = launch(4, "tests.parallel.workers")
    assert found == ["all is well", "all is well", "", "all is well"]


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_distillation_is_one_process_and_goes_on_where_it_was_killed(tmp_path):
    alone = go(tmp_path / "alone", 1)
    # Rank 0 stops in the midst of a stage that splits; the other hears of it.
    launch(2, "tests.parallel.distilling", tmp_path / "resumed", "killed", expected=None)
    assert not (tmp_path / "resumed" / "model.safetensors").exists()
    assert list((tmp_path / "resumed" / "checkpoints").iterdir())
    launch(2, "tests.parallel.distilling", tmp_path / "whole", "whole")
    losses = [float(line) for line in (tmp_path / "whole" / "losses.txt").read_text().split()]
    assert losses == pytest.approx([record["loss_nats"] for record in alone.history], rel=1e-4)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    for name, x in whole.items():
        assert torch.equal(x, resumed[name]), name
    # fp32 sums in another order, over eleven steps of Adam.
    for other in ("alone", "sharded"):
        for name, x in weights(tmp_path / other).items():
            torch.testing.assert_close(x, whole[name], rtol=1e-2, atol=1e-2)
