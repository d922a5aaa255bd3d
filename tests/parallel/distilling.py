"""A distillation whose long sequences are split over processes; started with torch's environment variables."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hf_linear_attn import patch_model
from hf_linear_attn.distill import distill
from tests.distill.tiny import byte_tokenizer, tiny_teacher
from tests.distill.workers import make_data, settings
from tests.processes import leave_group


def go(folder, processes, on_step=None, **changes):
    """Distil the tiny teacher in three stages, of which two split their sequences."""
    torch.set_num_threads(1)
    student = patch_model(tiny_teacher(), feature_map="hedgehog", window=4, sinks=1)
    chosen = settings(str(folder), 2).with_changes(
        stages=["transfer", "distill", "extend"], extend_steps=3, extend_factor=2, context_parallel=processes, **changes
    )
    return distill(
        chosen, teacher=tiny_teacher(), student=student, tokenizer=byte_tokenizer(), data=make_data(), on_step=on_step
    )


def main(folder, kind):
    dist.init_process_group("gloo")

    def stop(record):
        if (record["stage"], record["step"]) == ("extend", 2):
            os._exit(9)

    if kind == "killed":
        go(folder, 2, stop)
    result = go(folder, 2)
    if kind == "whole":
        go(folder.with_name("resumed"), 2)
        go(folder.with_name("sharded"), 2, shard=True)
    if dist.get_rank() == 0:
        losses = [record["loss_nats"] for record in result.history]
        (folder / "losses.txt").write_text("\n".join(map(repr, losses)))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
