"""Evaluate any causal language model at long context: retrieval, perplexity, latency and memory, and a report.

Without arguments: the student that `make demo` made, beside the small teacher that comes with the project, or that
teacher alone where there is no such student yet.

    python examples/long_context_eval.py
    python examples/long_context_eval.py --model DIR --teacher DIR --lengths 4096,16384 --output-dir runs/evaluation
    accelerate launch examples/long_context_eval.py settings.yaml
"""

import sys
from pathlib import Path
from typing import Any

from hf_linear_attn.evaluation.cli import main
from hf_linear_attn.shell import shell

TEACHER = Path(__file__).parent / "teacher"
STUDENT = Path("runs/quickstart/student")
# Small enough for two CPU cores and a few minutes.
SMALL_RUN = {
    # A form that training never has, in real text; then two that it has, in noise.
    "tasks": ("capital", "kv_recall:haystack=noise", "passkey:haystack=noise"),
    "lengths": (512, 1024, 2048, 4096),
    "num_samples": 10,
    "batch_size": 5,
    # In one forward, as `generate` reads: softmax attention after a cached piece takes a slower way.
    "prefill_chunk": 16384,
    "max_text_tokens": 16384,
    "latency_lengths": (1024, 4096, 16384),
    "latency_batch_size": 1,
    "repeats": 3,
    "warmups": 1,
    "output_dir": "runs/evaluation",
    "overwrite": True,
}


def small_models() -> dict[str, Any]:
    """Return the models of a run without arguments."""
    if STUDENT.is_dir():
        return {"model": str(STUDENT), "teacher": str(TEACHER)}
    return {"model": str(TEACHER)}


if __name__ == "__main__":
    arguments = sys.argv[1:]
    with shell("long_context_eval.py"):
        main(arguments, prog="long_context_eval.py", defaults={} if arguments else SMALL_RUN | small_models())
