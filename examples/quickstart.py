"""Convert a small softmax Llama to linear attention, distil it, and see what was gained and what it cost.

With no argument it takes the teacher that ships beside this file and finishes within minutes on two CPU cores. Any
other causal language model, a folder or a hub name, takes its place with --model.
"""

import copy
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser
from transformers.utils import logging

from hf_linear_attn import patch_model
from hf_linear_attn.distill import DistillationSettings, distill, load_data
from hf_linear_attn.distill.baseline import equal_cache_window
from hf_linear_attn.distill.models import load_teacher
from hf_linear_attn.distill.settings import RECOMMENDED
from hf_linear_attn.errors import ArgumentError, one_line_errors
from hf_linear_attn.evaluation import EvaluationSettings, check_evaluation, evaluate, write_report
from hf_linear_attn.evaluation.settings import accept_none
from hf_linear_attn.loading import load_tokenizer, make_folder

TEACHER = Path(__file__).parent / "teacher"


@dataclass
class Arguments:
    """What to convert, how long to distil, and what to measure."""

    model: str = field(default=str(TEACHER), metadata={"help": "Softmax checkpoint: a folder or a hub name."})
    output_dir: str = field(default="runs/quickstart", metadata={"help": "Where report, results and student go."})
    overwrite: bool = field(default=False, metadata={"help": "Replace what an earlier run left there."})
    feature_map: str = field(default=RECOMMENDED.feature_map, metadata={"help": "See `hf-linear-attn maps`."})
    window: int | None = field(
        default=RECOMMENDED.window, metadata={"help": "Last tokens that are attended to exactly."}
    )
    sinks: int = field(default=RECOMMENDED.sinks, metadata={"help": "First tokens that are attended to exactly."})
    transfer_steps: int = field(default=60, metadata={"help": "Steps of attention transfer."})
    distill_steps: int = field(default=480, metadata={"help": "Steps of logit distillation."})
    rows: int = field(default=4, metadata={"help": "Sequences of that length per step; longer ones are fewer."})
    block_tokens: int = field(default=512, metadata={"help": "Tokens of the shortest sequences."})
    lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048], metadata={"help": "Context lengths to evaluate."}
    )
    samples: int = field(default=10, metadata={"help": "Retrieval samples per length and depth."})
    seed: int = field(default=0, metadata={"help": "Of everything random."})


def main() -> None:
    """Run the four steps: load, distil, distil the baseline, evaluate."""
    parser = HfArgumentParser(Arguments, description=__doc__)
    accept_none(parser, Arguments)
    arguments: Arguments = parser.parse_args_into_dataclasses()[0]
    logging.disable_progress_bar()
    folder = make_folder(arguments.output_dir)
    if any(folder.iterdir()) and not arguments.overwrite:
        raise ArgumentError("output_dir", "be new or empty", str(folder), "Choose another, or pass --overwrite.")
    conversion = {"feature_map": arguments.feature_map, "window": arguments.window, "sinks": arguments.sinks}
    settings = DistillationSettings(
        **conversion,
        model=arguments.model,
        block_tokens=arguments.block_tokens,
        rows=arguments.rows,
        transfer_steps=arguments.transfer_steps,
        distill_steps=arguments.distill_steps,
        heldout_rows=16,
        seed=arguments.seed,
    )
    teacher = load_teacher(settings).eval()
    tokenizer = load_tokenizer(arguments.model)
    patched = patch_model(copy.deepcopy(teacher), **conversion)
    # The earlier report is whole until this one is ready to take its place.
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    evaluation = EvaluationSettings(
        tasks=("passkey", "kv_recall"),
        lengths=tuple(arguments.lengths),
        num_samples=arguments.samples,
        batch_size=8,
        max_text_tokens=16384,
        repeats=3,
        decode_tokens=16,
        seed=arguments.seed,
        output_dir=str(fresh),
    )
    check_evaluation(evaluation, model=patched, tokenizer=tokenizer, teacher=teacher)
    data = load_data(settings, tokenizer)

    print("1/3 Distilling the linear-attention student", flush=True)
    distilled = distill(settings, teacher=teacher, student=copy.deepcopy(patched), tokenizer=tokenizer, data=data)
    student, measured = distilled.student, distilled.metrics["student"]

    window = equal_cache_window(patched)
    print(f"2/3 Distilling the baseline: a window of {window} tokens alone, the same cache bytes", flush=True)
    # It has no feature maps to transfer; so many tokens more go into its distillation.
    steps = arguments.transfer_steps + arguments.distill_steps
    local = settings.with_changes(
        mix="window", window=window, stages=["distill"], distill_steps=steps, window_dropout=0.0, heldout_rows=0
    )
    baseline = distill(local, teacher=teacher, tokenizer=tokenizer, data=data).student

    print("3/3 Evaluating all of them beside the teacher", flush=True)
    results = evaluate(
        evaluation,
        model=student,
        tokenizer=tokenizer,
        teacher=teacher,
        baselines={"merely patched": patched, f"window {window} alone": baseline},
        extras={
            "linear_branch_off_nats": measured["linear_off"]["late_loss_nats"] - measured["late_loss_nats"],
        },
    )
    write_report(results, fresh)
    student.save_pretrained(fresh / "student")
    tokenizer.save_pretrained(fresh / "student")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    print(f"Read {folder / 'report.html'}; the student is in {folder / 'student'}.")


if __name__ == "__main__":
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    with one_line_errors("quickstart.py"):
        main()
