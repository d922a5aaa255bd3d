"""``hf-linear-attn inspect``."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_linear_attn.arguments import CommandLine, settings_of
from hf_linear_attn.diagnostics.approximation import ApproximationSettings
from hf_linear_attn.diagnostics.inspection import inspect_model
from hf_linear_attn.diagnostics.report import can_draw, summary_table
from hf_linear_attn.encoders import is_encoder
from hf_linear_attn.errors import ArgumentError, renamed
from hf_linear_attn.feature_maps import available_feature_maps
from hf_linear_attn.files import output_folder, paths_read
from hf_linear_attn.loading import find_device, load_model, load_tokenizer, load_users_maps, read_text
from hf_linear_attn.patching import is_patched
from hf_linear_attn.shell import command, next_step


@dataclass(frozen=True)
class InspectSettings:
    """Settings of an inspection.

    Args:
        model: Folder or hub name of a causal language model, softmax or patched.
        text_file: UTF-8 text to look at.
        output_dir: Where the report goes.
        overwrite: Replace an earlier report there.
        maps: Feature maps to compare; all where it is left out.
        feature_map_file: Python file that registers feature maps of your own.
        max_tokens: Most tokens of the text; 1024, or the model's positions where they are fewer, where it is left out.
        window: Report attention beyond this many tokens.
        sinks: Report attention on this many first tokens.
        dtype: Dtype of the model.
        device: Device of the model.
    """

    model: str
    text_file: str
    output_dir: str = "inspection"
    overwrite: bool = False
    maps: tuple[str, ...] | None = None
    feature_map_file: str | None = None
    max_tokens: int | None = None
    window: int = ApproximationSettings.window
    sinks: int = ApproximationSettings.sinks
    dtype: str = "float32"
    device: str = "cpu"


def main(argv: Sequence[str]) -> None:
    """Inspect a model: how well feature maps stand in for its softmax, or what its branches do if it is patched.

    Args:
        argv: Arguments without the program's name.

    Raises:
        ArgumentError: If an argument does not fit.
        CheckpointError: If the model or its tokenizer cannot be loaded.
        UnsupportedError: If the model's attention cannot be observed.
    """
    settings = _settings(argv)
    load_users_maps(settings.feature_map_file)
    for name in settings.maps or ():
        if name not in available_feature_maps():
            raise ArgumentError("maps", "be registered names", name, "Use those", available=available_feature_maps())
    text = read_text(settings.text_file)
    dtype = getattr(torch, settings.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError("dtype", "be a floating dtype of torch", settings.dtype, "Use 'bfloat16'.")
    device = find_device(settings.device)
    read = paths_read(settings, ("model", "text_file", "feature_map_file"))
    folder = output_folder(settings.output_dir, inputs=read, overwrite=settings.overwrite)
    name = settings.model
    model = load_model(name, dtype=dtype)
    with renamed(text="text_file"):
        results = inspect_model(
            model.to(device),  # type: ignore[arg-type]
            load_tokenizer(name),
            text,
            folder,
            maps=settings.maps,
            overwrite=settings.overwrite,
            max_tokens=settings.max_tokens,
            settings=ApproximationSettings(window=settings.window, sinks=settings.sinks),
        )
    sys.stdout.write(f"{summary_table(results)}\nReport: {Path(folder, 'report.html')}\n")
    if not can_draw():
        sys.stderr.write("The report has tables alone: pip install 'hf_linear_attn[report]' brings its pictures.\n")
    encoder = is_encoder(model)
    if is_patched(model):
        suite = ["--suite", "embedding"] if encoder else []
        evaluation = command("evaluate", "--model", name, *suite, "--output-dir", "FOLDER")
        next_step(f"`{evaluation}` measures what that is worth{'' if encoder else ' at long context'}.")
    else:
        best = next(iter(results["summary"]["maps"]))
        preset = ["--preset", "encoder"] if encoder else []
        words = ["distill", *preset, "--model", name, "--feature-map", "MAP", "--output-dir", "FOLDER"]
        next_step(
            f"`{command(*words)}` trains one; {best} is nearest to softmax before training, learned maps get nearer."
        )


def _settings(argv: Sequence[str]) -> InspectSettings:
    line = CommandLine(
        "hf-linear-attn inspect",
        "See how well feature maps stand in for the softmax of a model, layer by layer, before any training. Of a "
        "patched model, see what window, sinks and linear branch contribute.",
        example="hf-linear-attn inspect your/model --text-file text.txt --maps elu,hedgehog",
        positional="model",
    )
    declared = {setting.name: setting for setting in settings_of(InspectSettings)}
    model = ("model", "feature_map_file", "dtype", "device")
    line.add("the model", (declared[name] for name in model))
    line.add("what is looked at", (setting for name, setting in declared.items() if name not in model))
    return line.settings_from(argv, InspectSettings)
