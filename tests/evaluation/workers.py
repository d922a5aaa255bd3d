"""What the child processes of a test run: a small evaluation, alone, killed in the middle, or as one of several."""

import os
import signal
import sys

import torch

from hf_linear_attn.evaluation import EvaluationSettings, evaluate
from hf_linear_attn.evaluation.store import SampleStore
from tests.evaluation.helpers import byte_tokenizer, tiny_linear, tiny_llama

LM_EVAL = {
    "suite": ("lm-eval",),
    "lengths": (700,),
    "lm_eval_tasks": ("niah_single_1",),
    "lm_eval_samples": 2,
    "offline": True,
}


def settings(folder, **options):
    chosen = {
        "suite": ("retrieval", "perplexity", "latency"),
        "tasks": ("passkey",),
        "lengths": (300, 320),
        "depths": (0, 100),
        "num_samples": 3,
        "batch_size": 2,
        "max_text_tokens": 700,
        "final_tokens": 16,
        "final_windows": 2,
        "decode_tokens": 2,
        "warmups": 0,
        "repeats": 1,
        "output_dir": str(folder),
        "progress": False,
    }
    return EvaluationSettings(**{**chosen, **options})


def run(folder, **options):
    """Evaluate on one thread: children and parent must add up in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return evaluate(
            settings(folder, **options), model=tiny_linear(), tokenizer=byte_tokenizer(), teacher=tiny_llama()
        )
    finally:
        torch.set_num_threads(threads)


def die_after(suite, count):
    """Kill this very process, as `kill -9` does, once so many records of a suite are on the disk."""
    add = SampleStore.add
    seen = 0

    def counting(self, records):
        nonlocal seen
        records = list(records)
        add(self, records)
        seen += sum(record["id"].startswith(suite) for record in records)
        if seen >= count:
            os.kill(os.getpid(), signal.SIGKILL)

    SampleStore.add = counting


if __name__ == "__main__":
    folder, mode = sys.argv[1:3]
    if mode == "die":
        die_after(sys.argv[3], int(sys.argv[4]))
    run(folder, resume=mode == "die", **(LM_EVAL if "lm-eval" in sys.argv else {}))
