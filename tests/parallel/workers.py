"""What the processes of a test run, on a CPU over gloo; started with torch's environment variables."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig

from hf_linear_attn.errors import ArgumentError, TrainingError
from hf_linear_attn.parallel import context_parallel
from tests.parallel.cases import RECOMMENDED, batch_of, compare, model_of, packed, padded, run, run_part

TOLERANCE = 1e-5

PATIENCE = timedelta(minutes=10)
"""How long processes wait for each other where none is lost: on a busy machine one may start a minute after another."""

PLAIN = batch_of(2, 150)
BATCHES = {
    "plain": (PLAIN, True),
    "padded": (padded(PLAIN, [(50, 0), (0, 70)]), True),
    "packed": (packed(PLAIN, [[60, 80, 10], [150]]), False),
}
PATCHES = [{"feature_map": "elu"}, RECOMMENDED, RECOMMENDED | {"update_rule": "gated_delta"}]
PATCHES += [RECOMMENDED | {"kept": 5, "mix": "window"}, RECOMMENDED | {"kept": 5, "retention": "learned"}]


def same(group, lengths):
    """Compare the ranks of a group with what one process does."""
    for patch in PATCHES:
        model = model_of(**patch)
        for batch, use_cache in BATCHES.values():
            one = run(model, batch, use_cache=use_cache)
            with context_parallel(model, group) as context:
                part = run_part(context, batch, lengths[context.size], use_cache=use_cache)
                compare(one, part, context, batch, lengths[context.size], TOLERANCE)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    even, uneven = dict.fromkeys((2, 4)), {2: [31, 119], 4: [3, 100, 40, 7]}
    for lengths in (even, uneven):
        same(None, lengths)
    # As Accelerate lays processes out.
    mesh = ParallelismConfig(dp_shard_size=2, cp_size=2).build_device_mesh("cpu")
    with pytest.raises(ArgumentError, match="be a mesh of one dimension"), context_parallel(model_of(), mesh):
        pass
    same(mesh["cp"], uneven)
    outside = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ArgumentError, match="hold this process"), context_parallel(model_of(), outside):
            pass
    model = model_of(**RECOMMENDED)
    # Together, since the group's making has no more time than its exchanges.
    dist.barrier()
    with context_parallel(model, dist.new_group(timeout=timedelta(seconds=4))) as context:
        part = context.split(PLAIN)
        # Together, so that rank 1 alone is behind.
        dist.barrier()
        if rank == 1:
            # Asked for now and then: to wait in the store would keep the pulse from it.
            while not store.check(["blamed by 0", "blamed by 2", "blamed by 3"]):
                time.sleep(0.1)
        else:
            with pytest.raises(TrainingError, match="`group` must be alive and in step, got 'rank 1 of 4 behind'"):
                model(**part, use_cache=False)
            store.set(f"blamed by {rank}", "")
    with context_parallel(model) as context:
        part = context.split(PLAIN)
        dist.barrier()
        if rank == 2:
            os._exit(0)
        with pytest.raises(TrainingError, match="`group` must be alive and in step, got 'rank 2 of 4 gone'"):
            model(**part, use_cache=False)
    sys.stdout.write("all is well")
    sys.stdout.flush()
    # Without a goodbye: one is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
