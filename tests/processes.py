"""Processes of a test that find each other, as torch's launchers start them."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch

ROOT = Path(__file__).parents[1]


def leave_group() -> NoReturn:
    """End a process of a test whose work with others is done.

    Caches of torch's keep the group of a parallel or sharded model, and gloo's threads with it. A thread that lets go
    of its last tensors while the interpreter ends is stopped there, which aborts the process: so it does not end.
    """
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(size: int, module: str, *arguments: object, may_fail: bool = False) -> list[str]:
    """Run processes of a module together; return what each of them wrote.

    They may take any time, since they share the cores with whatever else runs: what hangs is ended with the test.
    """
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, arguments)],
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=ROOT,
                )
            )
            for rank in range(size)
        ]
        for process in processes:
            # Before they are waited for.
            stack.callback(process.kill)
        found = [process.communicate() for process in processes]
    failed = [
        errors.decode()[-3000:] for process, (_, errors) in zip(processes, found, strict=True) if process.returncode
    ]
    assert may_fail or not failed, "\n".join(failed)
    return [output.decode() for output, _ in found]
