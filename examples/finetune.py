"""Finetune a patched model on your own text, all weights or LoRA, with cross-entropy.

With no argument, the student that `python examples/distill.py` left in runs/distill, or else the one that `make demo`
left in runs/quickstart, is finetuned on the source text of Python's standard library, into runs/finetune. A run that
was stopped goes on where it was when the same command is given again.
"""

import sys
from pathlib import Path

from hf_linear_attn.distill.cli import main
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.shell import shell

EXAMPLE = """
python examples/finetune.py --student runs/gpt2 --dataset my.jsonl --columns text=body
python examples/finetune.py --student runs/gpt2 --dataset texts/ --trainable lora --output-dir runs/merged
python examples/finetune.py --student runs/gpt2 --trainable lora --no-merge-lora --output-dir runs/adapter
"""
STUDENTS = ("runs/distill", "runs/quickstart/student")

if __name__ == "__main__":
    student = next((path for path in STUDENTS if Path(path).is_dir()), None)
    with shell("finetune.py"):
        if student is None and not sys.argv[1:]:
            raise ArgumentError("student", "be given", None, "Run `make demo` first, or pass --student FOLDER.")
        main(
            description=__doc__,
            example=EXAMPLE,
            defaults={"student": student, "output_dir": "runs/finetune"},
            start="finetune",
        )
