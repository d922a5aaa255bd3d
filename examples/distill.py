"""Turn a softmax model into a linear-attention model, and teach it what the original knew.

With no argument, the small teacher in this folder is distilled on the source text of Python's standard library, into
runs/distill. A run that was stopped goes on where it was when the same command is given again.
"""

from pathlib import Path

from hf_linear_attn.distill.cli import main
from hf_linear_attn.shell import shell

EXAMPLE = """
python examples/distill.py
python examples/distill.py --model gpt2 --feature-map norm_preserving --window 64 --sinks 4 --output-dir runs/gpt2
python examples/distill.py --preset lolcats --model gpt2 --dataset my.jsonl --output-dir runs/lolcats
accelerate launch examples/distill.py recipe.yaml
"""

if __name__ == "__main__":
    with shell("distill.py"):
        main(
            description=__doc__,
            example=EXAMPLE,
            defaults={"model": str(Path(__file__).parent / "teacher"), "output_dir": "runs/distill"},
        )
