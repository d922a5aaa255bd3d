"""Convert a small softmax Llama to linear attention, distil it, and see what was gained and what it cost.

With no argument it takes the teacher that ships beside this file and finishes within minutes on two CPU cores. Any
other causal language model, a folder or a hub name, takes its place with --model.
"""

import copy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_linear_attn.arguments import CommandLine, settings_of
from hf_linear_attn.distill import DistillationSettings, distill, load_data
from hf_linear_attn.distill.baseline import equal_cache_window
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
        feature_map: One of those that `hf-linear-attn maps` lists.
        window: Last tokens that are attended to exactly.
        sinks: First tokens that are attended to exactly.
        transfer_steps: Steps of attention transfer.
        distill_steps: Steps of logit distillation.
        retain_steps: Steps in which a baseline with kept keys learns which to keep.
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
    feature_map: str = RECOMMENDED.feature_map
    window: int | None = RECOMMENDED.window
    sinks: int = RECOMMENDED.sinks
    transfer_steps: int = 60
    distill_steps: int = 260
    retain_steps: int = 100
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
    """Distil, train the baselines and evaluate; return the results."""
    common: dict[str, Any] = {
        "model": arguments.model,
        "sinks": arguments.sinks,
        "block_tokens": arguments.block_tokens,
        "rows": arguments.rows,
        "seed": arguments.seed,
        # The evaluation has both write their answers.
        "heldout_answers": 0,
    }
    settings = DistillationSettings(
        **common,
        feature_map=arguments.feature_map,
        window=arguments.window,
        transfer_steps=arguments.transfer_steps,
        distill_steps=arguments.distill_steps,
        heldout_rows=16,
    )
    teacher = load_teacher(settings).eval()
    tokenizer = load_tokenizer(arguments.model)
    patched = settings.convert(copy.deepcopy(teacher))
    evaluation = evaluation_settings(arguments, folder)
    check_evaluation(evaluation, model=patched, tokenizer=tokenizer, teacher=teacher)
    # It keeps as many keys as its window has tokens: what the smaller window leaves of the same bytes.
    kept = arguments.window or RECOMMENDED.window
    keeping = DistillationSettings.from_preset(
        "kept_keys", **common, window=kept, kept=kept, retain_steps=arguments.retain_steps, heldout_rows=0
    )
    data = load_data(settings, tokenizer)

    print("1/4 Distilling the linear-attention student", flush=True)
    distilled = distill(settings, teacher=teacher, student=copy.deepcopy(patched), tokenizer=tokenizer, data=data)
    student, measured = distilled.student, distilled.metrics["student"]

    window = equal_cache_window(patched)
    print(f"2/4 Distilling the baseline: a window of {window} tokens alone, the same cache bytes", flush=True)
    # It has no feature maps to transfer; so many tokens more go into its distillation.
    steps = arguments.transfer_steps + arguments.distill_steps
    local = settings.with_changes(
        mix="window", window=window, stages=["distill"], distill_steps=steps, window_dropout=0.0, heldout_rows=0
    )
    baseline = distill(local, teacher=teacher, tokenizer=tokenizer, data=data).student

    print(f"3/4 Learning which {kept} keys to keep beyond a window, with every weight as it was", flush=True)
    data = load_data(keeping, tokenizer)
    keeper = distill(keeping, teacher=teacher, tokenizer=tokenizer, data=data).student

    print("4/4 Evaluating all of them beside the teacher", flush=True)
    results = evaluate(
        evaluation,
        model=student,
        tokenizer=tokenizer,
        teacher=teacher,
        baselines={
            "merely patched": patched,
            f"window {window} alone": baseline,
            f"window {kept} and {kept} kept keys": keeper,
        },
        extras={
            "linear_branch_off_nats": measured["linear_off"]["late_loss_nats"] - measured["late_loss_nats"],
        },
    )
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
