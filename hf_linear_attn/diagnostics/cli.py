"""``hf-linear-attn inspect``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_linear_attn.diagnostics.approximation import ApproximationSettings
from hf_linear_attn.diagnostics.inspection import inspect_model
from hf_linear_attn.diagnostics.report import summary_table
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps import available_feature_maps
from hf_linear_attn.loading import (
    find_device,
    load_model,
    load_tokenizer,
    load_users_maps,
    make_folder,
    read_text,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Inspect a model: how well feature maps stand in for its softmax, or what its branches do if it is patched.

    Args:
        argv: Arguments without the program's name; those of the process where None.

    Raises:
        ArgumentError: If an argument does not fit.
        CheckpointError: If the model or its tokenizer cannot be loaded.
        UnsupportedError: If the model's attention cannot be observed, or matplotlib is missing.
    """
    defaults = ApproximationSettings()
    parser = argparse.ArgumentParser(
        prog="hf-linear-attn inspect",
        description="See how well feature maps stand in for the softmax of a model, layer by layer, before any "
        "training. Of a patched model, see what window, sinks and linear branch contribute.",
    )
    parser.add_argument("model", help="folder or hub name of a causal language model, softmax or patched")
    parser.add_argument("--text-file", type=Path, required=True, help="UTF-8 text to look at")
    parser.add_argument("--output-dir", type=Path, default=Path("inspection"), help="where the report goes")
    parser.add_argument("--maps", nargs="+", metavar="NAME", help="feature maps to compare; all by default")
    parser.add_argument("--feature-map-file", type=Path, help="Python file that registers feature maps of your own")
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of the text (%(default)s)")
    parser.add_argument(
        "--window", type=int, default=defaults.window, help="report attention beyond this many tokens (%(default)s)"
    )
    parser.add_argument(
        "--sinks", type=int, default=defaults.sinks, help="report attention on this many first tokens (%(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="dtype of the model (%(default)s)")
    parser.add_argument("--device", default="cpu", help="device of the model (%(default)s)")
    arguments = parser.parse_args(argv)

    if arguments.feature_map_file is not None:
        load_users_maps(arguments.feature_map_file)
    for name in arguments.maps or ():
        if name not in available_feature_maps():
            raise ArgumentError("--maps", "be registered names", name, "Use those", available=available_feature_maps())
    text = read_text(arguments.text_file, "--text-file")
    dtype = getattr(torch, arguments.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError("--dtype", "be a floating dtype of torch", arguments.dtype, "Use 'bfloat16'.")
    device = find_device(arguments.device, "--device")
    make_folder(arguments.output_dir, "--output-dir")
    results = inspect_model(
        load_model(arguments.model, dtype=dtype).to(device),  # type: ignore[arg-type]
        load_tokenizer(arguments.model),
        text,
        arguments.output_dir,
        maps=arguments.maps,
        max_tokens=arguments.max_tokens,
        settings=ApproximationSettings(window=arguments.window, sinks=arguments.sinks),
    )
    sys.stdout.write(f"{summary_table(results)}\nReport: {arguments.output_dir / 'report.html'}\n")
