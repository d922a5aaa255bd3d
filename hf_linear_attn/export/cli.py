"""The command line of exports: `hf-linear-attn export`."""

import sys
from collections.abc import Sequence

from hf_linear_attn.arguments import CommandLine
from hf_linear_attn.export.run import Exported, ExportSettings, export_model
from hf_linear_attn.shell import next_step


def main(argv: Sequence[str]) -> Exported:
    """Write a converted model as a graph that runs without this package, with its tokenizer and an example."""
    line = CommandLine(
        "hf-linear-attn export",
        "Write a converted model as a graph that runs without this package, with its tokenizer and an example.",
        example="hf-linear-attn export runs/student --format onnx",
        positional="model",
    )
    found = export_model(line.settings_from(argv, ExportSettings))
    sys.stdout.write(
        f"{found.folder}: {found.size_mib:.1f} MiB, logits of {found.tokens} tokens within {found.difference:.1e} of "
        "the model's\n"
    )
    prompt = "'a prompt'" if found.tokenizer else "1 2 3"
    next_step(f"`python {found.folder / 'example.py'} {prompt}` writes on from it.")
    return found
