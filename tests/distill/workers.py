"""What the processes of a multi-process test run; started with torch's environment variables, on CPU over gloo."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hf_linear_attn import patch_model
from hf_linear_attn.distill import Data, DistillationSettings, DistillResult, distill
from hf_linear_attn.distill.sharding import full_tensors
from tests.distill.tiny import byte_tokenizer, tiny_data, tiny_settings, tiny_teacher
from tests.processes import leave_group


def make_data() -> tuple[Data, Data]:
    made = tiny_data()
    return made, made


def settings(folder: str, accumulation: int) -> DistillationSettings:
    steps = {"accumulation": accumulation, "transfer_steps": 3, "distill_steps": 5, "distill_lr": 1e-3}
    return tiny_settings(**steps, checkpoint_every=4, output_dir=folder)


def run(folder: str, accumulation: int, sharded: bool = False) -> DistillResult:
    """Distil the tiny teacher."""
    torch.set_num_threads(1)
    student = patch_model(tiny_teacher(), feature_map="hedgehog", window=4, sinks=1)
    return distill(
        settings(folder, accumulation).with_changes(shard=sharded),
        teacher=tiny_teacher(),
        student=student,
        tokenizer=byte_tokenizer(),
        data=make_data(),
    )


def main(folder: str, kind: str) -> None:
    """Distil as one of several processes, and write the losses."""
    result = run(folder, 1, sharded=kind == "sharded")
    first = dist.get_rank() == 0
    if kind == "sharded":
        # Only one process holds what is gathered: all of them together would need as many times the memory.
        names = [name for name, _ in result.student.named_parameters()]
        gathered = full_tensors(result.student, names, keep=first)
        kept = {name for name, x in gathered.items() if x is not None}
        maps = {name for name in names if "linear_attention" in name}
        assert kept == (set(names) if first else maps), kept
    if first:
        losses = [record["loss_nats"] for record in result.history]
        Path(folder, "losses.txt").write_text("\n".join(map(repr, losses)))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*sys.argv[1:])
    leave_group()
