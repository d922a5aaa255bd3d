"""Finetune a patched model on your own text, all weights or LoRA, with cross-entropy.

With no argument, the student that `python examples/distill.py` left in runs/distill is finetuned on the source text of
Python's standard library, into runs/finetune. A run that was stopped goes on where it was when the same command is
given again.

    python examples/finetune.py --student runs/gpt2 --dataset my.jsonl --text-column body
    python examples/finetune.py --student runs/gpt2 --dataset texts/ --trainable lora --output-dir runs/merged
    python examples/finetune.py --student runs/gpt2 --trainable lora --no-merge-lora --output-dir runs/adapter
"""

from hf_linear_attn.distill.cli import main

if __name__ == "__main__":
    main(
        description=__doc__,
        defaults={"student": "runs/distill", "output_dir": "runs/finetune"},
        start="finetune",
    )
