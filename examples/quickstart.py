"""Convert a small softmax Llama to a memory of constant size, teach it what to keep, and see what it gained and cost.

Beside a window every layer keeps some keys exactly. How many of them each layer gets is measured: some need many, and
most need few. Which ones, a small net of each key head learns from the teacher's attention. Then all weights learn
to do with what is kept, and go most of the way back; --distill-steps 0 leaves them. With no argument it takes the
teacher that ships beside this file and finishes within minutes on two CPU cores. Any other causal language model, a
folder or a hub name, takes its place with --model. With --linear-steps a student with linear attention of the same
cache bytes is distilled and stands beside it.
"""

import copy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_linear_attn import patch_model
from hf_linear_attn.arguments import CommandLine, settings_of
from hf_linear_attn.distill import DistillationSettings, distill, load_data
from hf_linear_attn.distill.baseline import window_alone
from hf_linear_attn.distill.models import load_teacher
from hf_linear_attn.distill.settings import RECOMMENDED
from hf_linear_attn.evaluation import EvaluationSettings, check_evaluation, evaluate, write_report
from hf_linear_attn.evaluation.report import headlines
from hf_linear_attn.files import output_folder, remove
from hf_linear_attn.loading import load_tokenizer
from hf_linear_attn.shell import next_step, shell

TEACHER = Path(__file__).parent / "teacher"
EXAMPLE = """
python examples/quickstart.py
python examples/quickstart.py --model your/model --window 128 --lengths 512,2048 --output-dir runs/mine
"""


@dataclass(frozen=True)
class Arguments:
    """What to convert, how long to distil, and what to measure.

    Args:
        model: Softmax checkpoint: a folder or a hub name.
        output_dir: Where report, results and student go.
        overwrite: Replace what an earlier run left there; files of other names stay.
        window: Last tokens that are attended to exactly, in the mean over layers.
        sinks: First tokens that are attended to exactly.
        kept: Keys that each key head keeps of those that have left the window, likewise.
        retain_steps: Steps in which it learns which.
        distill_steps: Steps of logit distillation, with what is kept chosen as it will be; 0 leaves the weights.
        linear_steps: Steps of logit distillation of a student with linear attention; 0 leaves it out.
        feature_map: That one's, of those that `hf-linear-attn maps` lists.
        rows: Sequences of that length per step; longer ones are fewer.
        block_tokens: Tokens of the shortest sequences.
        lengths: Context lengths to evaluate.
        speed_lengths: Context lengths to time, one prompt at a time.
        samples: Retrieval samples per length and depth.
        seed: Of everything random.
    """

    model: str = str(TEACHER)
    output_dir: str = "runs/quickstart"
    overwrite: bool = False
    window: int = 64
    sinks: int = RECOMMENDED.sinks
    kept: int = 64
    retain_steps: int = 300
    distill_steps: int = 120
    linear_steps: int = 0
    feature_map: str = RECOMMENDED.feature_map
    rows: int = 4
    block_tokens: int = 512
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    speed_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    samples: int = 5
    seed: int = 0


def read_arguments() -> Arguments:
    """Read the flags."""
    line = CommandLine("quickstart.py", str(__doc__), example=EXAMPLE, positional="config")
    line.add("settings", settings_of(Arguments))
    return Arguments(**line.read(sys.argv[1:]).values)


def main() -> None:
    """Make student and report, and put them where they are to be."""
    arguments = read_arguments()
    logging.disable_progress_bar()
    folder = output_folder(arguments.output_dir, inputs={"model": [arguments.model]}, overwrite=arguments.overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    # The earlier report is whole until this one is ready to take its place.
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as fresh:
        results = run(arguments, Path(fresh))
        for path in Path(fresh).iterdir():
            remove(folder, [path.name])
            path.rename(folder / path.name)
    for one in headlines(results):
        print(one)
    print(f"Report: {folder / 'report.html'}\nStudent: {folder / 'student'}")
    next_step("open the report; `python examples/long_context_eval.py` measures the student at longer context.")


def run(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Teach the student, make the baselines and evaluate; return the results."""
    common: dict[str, Any] = {
        "model": arguments.model,
        "window": arguments.window,
        "sinks": arguments.sinks,
        "block_tokens": arguments.block_tokens,
        "rows": arguments.rows,
        "seed": arguments.seed,
        # The evaluation has all of them write their answers.
        "heldout_answers": 0,
    }
    settings = DistillationSettings.from_preset(
        "kept_keys",
        **common,
        kept=arguments.kept,
        stages=["retain", "distill"] if arguments.distill_steps else ["retain"],
        retain_steps=arguments.retain_steps,
        distill_steps=arguments.distill_steps,
        heldout_rows=0,
    )
    linear = DistillationSettings(
        **common,
        feature_map=arguments.feature_map,
        transfer_steps=arguments.linear_steps // 4,
        distill_steps=max(arguments.linear_steps, 1),
        heldout_rows=0,
    )
    teacher = load_teacher(settings).eval()
    tokenizer = load_tokenizer(arguments.model)
    evaluation = evaluation_settings(arguments, folder)
    # What cannot be done is refused before anything is learned.
    student, _ = (one.convert(copy.deepcopy(teacher)) for one in (settings, linear))
    check_evaluation(evaluation, model=student, tokenizer=tokenizer, teacher=teacher)
    parts = 3 if arguments.linear_steps else 2
    print(f"1/{parts} Learning which keys to keep, and to do with them", flush=True)
    data = load_data(settings, tokenizer)
    student = distill(settings, teacher=teacher, tokenizer=tokenizer, data=data).student
    alone = window_alone(student)
    kept = {
        "window": arguments.window,
        "kept": arguments.kept,
        "per_layer": student.config.linear_attention.get("per_layer"),
    }
    baselines = {
        f"window {alone['window']} alone": patch_model(copy.deepcopy(teacher), **alone),
        f"{arguments.kept} keys kept by redundancy": patch_model(copy.deepcopy(teacher), **alone | kept),
    }
    if arguments.linear_steps:
        print(f"2/{parts} Distilling linear attention", flush=True)
        data = load_data(linear, tokenizer)
        baselines["linear attention"] = distill(linear, teacher=teacher, tokenizer=tokenizer, data=data).student

    print(f"{parts}/{parts} Evaluating all of them beside the teacher", flush=True)
    results = evaluate(evaluation, model=student, tokenizer=tokenizer, teacher=teacher, baselines=baselines)
    write_report(results, folder)
    student.save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")
    return results


def evaluation_settings(arguments: Arguments, folder: Path) -> EvaluationSettings:
    """Return what is measured: quality in batches at lengths that the teacher knows, speed one prompt at a time."""
    return EvaluationSettings(
        # A form that training never has, in real text; then two that it has, in noise.
        tasks=("capital", "kv_recall:haystack=noise", "passkey:haystack=noise"),
        # What stands right before the question is in every window.
        depths=(0.0, 25.0, 50.0, 75.0),
        lengths=arguments.lengths,
        num_samples=arguments.samples,
        batch_size=8,
        max_text_tokens=16384,
        # In one forward, as `generate` reads: softmax attention after a cached piece takes a slower way.
        prefill_chunk=max(*arguments.lengths, *arguments.speed_lengths),
        latency_lengths=arguments.speed_lengths,
        latency_batch_size=1,
        warmups=1,
        repeats=3,
        decode_tokens=16,
        seed=arguments.seed,
        output_dir=str(folder),
    )


if __name__ == "__main__":
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    with shell("quickstart.py", interrupted="Nothing of an earlier run was changed."):
        main()
