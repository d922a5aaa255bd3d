"""A text split over processes: memory, time and bytes of a training step of the demo's teacher, converted.

    python benchmarks/run.py --suite parallel

The teacher in examples/teacher is converted by the recommended recipe, and learns the next tokens of one text: forward,
loss, backward, gradients summed over the processes, and a step of AdamW, fp32. Every process has one thread; they talk
over gloo on one machine. One process reads the whole text as ever, without `context_parallel`.
"""

import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import facts_line, markdown, provenance, suite_parser, write
from transformers import AutoModelForCausalLM

from hf_linear_attn.distill import DistillationSettings
from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts
from hf_linear_attn.distill.stages.distill import next_token_loss
from hf_linear_attn.parallel import ContextParallel, bytes_sent, context_parallel

ROOT = Path(__file__).parents[2]
TEACHER = ROOT / "examples" / "teacher"
WARM = 2048
"""Tokens of the step before those that are measured."""


def peak_mib() -> float:
    """Return the most memory that this process held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def library_mib() -> float:
    """Return the pages of files that this process has in memory: libraries, which processes of a machine share."""
    with open("/proc/self/status") as status:
        return next(float(line.split()[1]) for line in status if line.startswith("RssFile")) / 2**10


def work(tokens: int, steps: int) -> dict[str, Any]:
    """Take steps as one of the processes; return what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = DistillationSettings()
    torch.manual_seed(0)
    model = settings.convert(AutoModelForCausalLM.from_pretrained(TEACHER)).train()
    predictor, optimizer = Predictor(model), torch.optim.AdamW(model.parameters(), 1e-4)
    ids = torch.randint(3, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"wall_s": [], "processor_s": []}

    def step(context: ContextParallel | None, length: int) -> float:
        weights = torch.ones(1, length)
        weights[:, 0] = 0
        batch = Batch(ids[:, :length], weights, torch.ones(1, length, dtype=torch.bool))
        if context is not None:
            lengths = context.lengths(length)
            start = sum(lengths[: context.rank])
            batch = batch.cut(start, start + lengths[context.rank])
        loss = next_token_loss(predictor, batch) / length
        loss.backward()
        if context is not None:
            context.sum_gradients()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach() if context is None else context.sum(loss))

    processes = dist.get_world_size()
    with context_parallel(model) if processes > 1 else nullcontext() as context:
        step(context, WARM)
        found["start_mib"] = peak_mib()
        for _ in range(steps):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            found["loss_nats"] = step(context, tokens)
            found["processor_s"].append(time.process_time() - processor)
            dist.barrier()
            found["wall_s"].append(time.perf_counter() - wall)
        found["peak_mib"], found["library_mib"] = peak_mib(), library_mib()
        sent = [bytes_sent(part, processes, tokens) for part in linear_attention_parts(model)]
    found |= {"states_bytes": sent[0].states, "keys_bytes": sent[0].keys}
    dist.destroy_process_group()
    return found


def launch(processes: int, tokens: int, steps: int) -> list[dict[str, Any]]:
    """Measure steps of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        # Else glibc keeps what is freed of tensors below 32 MiB, which are those of the parts alone.
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "suites.parallel", str(tokens), str(steps)],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process failed; its message is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def row(processes: int, runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Put together what runs of so many processes gave."""
    ranks = [rank for run in runs for rank in run]
    return {
        "processes": processes,
        "wall_s": min(second for run in runs for second in run[0]["wall_s"]),
        # The slowest process is the one that all wait for.
        "processor_s": statistics.median(
            max(rank["processor_s"][n] for rank in run) for run in runs for n in range(len(run[0]["processor_s"]))
        ),
        "peak_mib": max(rank["peak_mib"] for rank in ranks),
        "start_mib": max(rank["start_mib"] for rank in ranks),
        "library_mib": min(rank["library_mib"] for rank in ranks),
        "loss_nats": runs[0][0]["loss_nats"],
        "states_bytes": ranks[0]["states_bytes"],
        "keys_bytes": ranks[0]["keys_bytes"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite."""
    parser = suite_parser("parallel", __doc__)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of the text (%(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--steps", type=int, default=2, help="steps in a run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each number (%(default)s)")
    arguments = parser.parse_args(argv)
    facts = provenance("parallel", argv or [])
    found: dict[int, list[list[dict[str, Any]]]] = {number: [] for number in arguments.processes}
    for _ in range(arguments.rounds):
        for number in arguments.processes:
            found[number].append(launch(number, arguments.tokens, arguments.steps))
            print(row(number, found[number]), flush=True)
    rows = [row(number, runs) for number, runs in found.items()]
    one, most = rows[0], max(arguments.processes)
    alone = launch(1, arguments.tokens // most, arguments.steps)[0]
    for other in rows:
        other["step_mib"] = other["peak_mib"] - other["start_mib"]
        other["own_mib"] = other["peak_mib"] - other["library_mib"]
    for other in rows:
        for name in ("wall_s", "processor_s", "peak_mib", "own_mib", "step_mib"):
            other[f"{name.rpartition('_')[0]}, of one"] = other[name] / one[name]
    parts = [
        "# A text split over processes\n",
        facts_line(facts),
        " ".join((__doc__ or "").split("\n\n")[-1].split()),
        f"\n\nThe text has {arguments.tokens:,} tokens. Wall time is the shortest of {arguments.rounds} runs of "
        f"{arguments.steps} steps; processor time is the median of the busiest process's. Peak is the most memory that "
        "a process held, start what it held before with Python, torch, the model and a short step, and step what was "
        "added; library is pages of files, which the processes of a machine share, and own is the rest of the peak. "
        "Bytes are what a process sends for one layer in a forward, and what it would send if keys and values "
        "were handed round.\n",
        markdown(rows),
        f"\nNo split can do with less than what one process needs for a part alone. For {arguments.tokens // most:,} "
        f"tokens, a part of {most}, its peak is {alone['peak_mib']:.0f} MiB, {alone['peak_mib'] / one['peak_mib']:.3f} "
        f"of that for the whole; {alone['library_mib']:.0f} MiB of it are pages of libraries.\n",
    ]
    result = {"provenance": facts, "tokens": arguments.tokens, "rows": rows, "part_alone": alone}
    write(arguments.output, result, "\n".join(parts))
    print(f"wrote {arguments.output} and .md")


if __name__ == "__main__":
    print(json.dumps(work(int(sys.argv[1]), int(sys.argv[2]))))
