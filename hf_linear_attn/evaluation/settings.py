"""What to evaluate and how: one frozen dataclass, from Python, flags or a YAML or JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from transformers import HfArgumentParser

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks import Task, get_task

SUITES = ("retrieval", "perplexity", "latency", "lm-eval")
ATTENTION_KINDS = ("auto", "linear", "softmax")
DTYPES = ("auto", "bfloat16", "float16", "float32")
DOCUMENT_RULES = ("separate", "joined")

# Settings that cannot change a figure: a run may be resumed with other values of these.
_FREE_SETTINGS = frozenset({"output_dir", "resume", "overwrite", "plots", "progress", "feature_map_file"})


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of one evaluation run.

    Every field is also a command-line flag; a sequence is written there with commas.
    """

    model: str | None = _option(None, "Folder or hub name of the model under test, softmax or patched.")
    teacher: str | None = _option(None, "Folder or hub name of the softmax model to stand beside it.")
    suite: tuple[str, ...] = _option(SUITES[:3], f"Which suites to run, of {', '.join(SUITES)}.")
    tasks: tuple[str, ...] = _option(
        ("passkey", "niah_single", "kv_recall"),
        "Retrieval tasks; settings follow a colon, as in kv_recall:pairs=8.",
    )
    lengths: tuple[int, ...] = _option(
        (512, 1024, 2048, 4096), "Context lengths in tokens, generation budget included."
    )
    depths: tuple[float, ...] = _option(
        (0, 25, 50, 75, 100), "Where the asked needle stands, in percent of the haystack."
    )
    num_samples: int = _option(50, "Samples per retrieval cell.")
    batch_size: int = _option(1, "Prompts or windows run together.")
    dtype: str = _option("auto", f"Dtype of models loaded from a path, of {', '.join(DTYPES)}.")
    device: str | None = _option(None, "Device of models loaded from a path; the accelerator if there is one.")
    attn: str = _option(
        "auto",
        "linear aborts unless the model is patched, softmax undoes the patch, auto takes the model as it is.",
    )
    feature_map_file: str | None = _option(None, "Python file that registers the feature maps of your own models.")
    text_file: str | None = _option(
        None, "UTF-8 text for the perplexity suite; without it, held-out source of the standard library."
    )
    documents: str = _option("separate", "joined reads all documents as one text, separate starts afresh at each.")
    max_text_tokens: int = _option(65536, "Tokens of text to score, 0 for all of it.")
    stride: int | None = _option(None, "Tokens between perplexity windows; without it, windows do not overlap.")
    final_tokens: int = _option(128, "Final tokens that are scored under growing context.")
    final_windows: int = _option(16, "Places in the text where growing context is measured, 0 for none.")
    prefill_chunk: int = _option(2048, "Most tokens in one forward; the cache carries the rest.")
    decode_tokens: int = _option(64, "Forced tokens per decode measurement.")
    warmups: int = _option(3, "Discarded runs of each shape before timing.")
    repeats: int = _option(10, "Timed runs of each shape.")
    lm_eval_tasks: tuple[str, ...] = _option(
        ("niah_single_1", "ruler_vt", "ruler_cwe", "ruler_fwe"), "Tasks of lm-evaluation-harness."
    )
    lm_eval_samples: int = _option(50, "Samples per lm-eval task and length.")
    seed: int = _option(0, "Seed of everything drawn.")
    output_dir: str | None = _option(None, "Folder for samples.jsonl, results.json and the reports.")
    resume: bool = _option(False, "Go on where a run of the same settings and models was cut off.")
    overwrite: bool = _option(False, "Delete the results of an earlier run in the output folder.")
    chat_template: bool = _option(False, "Put each retrieval prompt into the tokenizer's chat template.")
    offline: bool = _option(False, "Never reach for a network; what needs one is refused.")
    plots: bool = _option(True, "Draw the pictures.")
    progress: bool = _option(True, "Show progress bars and the estimated cost.")

    def __post_init__(self) -> None:
        """Check every setting once."""
        for name, kind in _sequence_fields().items():
            value = getattr(self, name)
            if isinstance(value, str):
                raise ArgumentError(name, "be a sequence", value, "Pass a tuple, as in (512, 1024).")
            values = tuple(kind(item) for item in value)
            object.__setattr__(self, name, values)
            if not values:
                raise ArgumentError(name, "hold at least one value", value, "Name one.")
            if len(set(values)) != len(values):
                raise ArgumentError(name, "hold no value twice", value, "Drop the repeated ones.")
        for suite in self.suite:
            if suite not in SUITES:
                raise ArgumentError("suite", "be a suite", suite, "Use one of those.", available=SUITES)
        for name, allowed in (("attn", ATTENTION_KINDS), ("dtype", DTYPES), ("documents", DOCUMENT_RULES)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    name, "be a known choice", getattr(self, name), "Use one of those.", available=allowed
                )
        for name in (
            "num_samples", "batch_size", "final_tokens", "prefill_chunk",
            "decode_tokens", "repeats", "lm_eval_samples",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ArgumentError(name, "be at least 1", getattr(self, name), "Raise it.")
        for name in ("warmups", "max_text_tokens", "final_windows"):
            if getattr(self, name) < 0:
                raise ArgumentError(name, "be at least 0", getattr(self, name), "Raise it.")
        if self.stride is not None and self.stride < 1:
            raise ArgumentError("stride", "be at least 1", self.stride, "Raise it or leave it out.")
        for length in self.lengths:
            if length < 2:
                raise ArgumentError("lengths", "be at least 2 tokens", length, "Raise it.")
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ArgumentError("depths", "lie in 0..100", depth, "Pass it in percent.")
        if self.resume and self.overwrite:
            raise ArgumentError("resume", "not be combined with `overwrite`", True, "Choose one of the two.")
        if "retrieval" in self.suite:
            for task in self.tasks:
                parse_task(task)
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))
        object.__setattr__(self, "depths", tuple(sorted(self.depths)))

    def identity(self) -> dict[str, Any]:
        """Return the settings that can change a figure, ready for JSON."""
        settings = {name: value for name, value in dataclasses.asdict(self).items() if name not in _FREE_SETTINGS}
        return dict(json.loads(json.dumps(settings)))

    def digest(self) -> str:
        """Return a hash of `identity()`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


def _sequence_fields() -> dict[str, type]:
    """Map each sequence field to the type of its items."""
    hints = get_type_hints(EvaluationSettings)
    return {name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) is tuple}


def parse_task(spec: str) -> Task:
    """Make the task that `name` or `name:setting=integer,...` describes.

    Raises:
        ArgumentError: If there is no such task, or it has no such setting.

    Example:
        >>> parse_task("kv_recall:pairs=8").pairs
        8
    """
    name, _, rest = spec.partition(":")
    values: dict[str, int] = {}
    for item in filter(None, rest.split(":")):
        key, _, value = item.partition("=")
        try:
            values[key] = int(value)
        except ValueError as error:
            raise ArgumentError(
                "tasks", "be written name:setting=integer", spec, "Write it as in kv_recall:pairs=8."
            ) from error
    try:
        return get_task(name, **values)
    except TypeError as error:
        raise ArgumentError(
            "tasks", "name settings that the task has", spec, "Leave the setting out.", where=str(error)
        ) from error


def _argument_class() -> type:
    """Derive the dataclass that HfArgumentParser reads: sequences become comma-separated text."""
    sequences = _sequence_fields()
    hints = get_type_hints(EvaluationSettings)
    fields: list[tuple[str, Any, Any]] = []
    for item in dataclasses.fields(EvaluationSettings):
        if item.name in sequences:
            default: Any = item.default
            text = ",".join(map(str, default))
            fields.append((item.name, str, field(default=text, metadata=dict(item.metadata))))
        else:
            fields.append((item.name, hints[item.name], field(default=item.default, metadata=dict(item.metadata))))
    return dataclasses.make_dataclass("EvaluationArguments", fields, namespace={"__doc__": EvaluationSettings.__doc__})


def settings_from_mapping(values: Mapping[str, Any]) -> EvaluationSettings:
    """Make settings from plain values, splitting comma-separated text where a sequence is meant.

    Raises:
        ArgumentError: If a name is unknown or a value cannot be used.
    """
    sequences = _sequence_fields()
    known = {item.name for item in dataclasses.fields(EvaluationSettings)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ArgumentError("settings", "be known", name, "Use one of those.", available=known)
        if name in sequences:
            items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
            items = [items] if not isinstance(items, Sequence) else items
            try:
                arguments[name] = tuple(sequences[name](item) for item in items)
            except ValueError as error:
                raise ArgumentError(name, "be a list of numbers", value, "Write it as in 512,1024.") from error
        else:
            arguments[name] = value
    return EvaluationSettings(**arguments)


def accept_none(parser: argparse.ArgumentParser, settings: type) -> None:
    """Let the flags of optional settings take the word `none`, as a file takes YAML's null, and say so in their help.

    Args:
        parser: A parser with a flag for each setting.
        settings: The dataclass of the settings.
    """
    for name, hint in get_type_hints(settings).items():
        if type(None) not in typing.get_args(hint):
            continue
        for action in parser._actions:
            if action.dest == name:
                action.type = _or_none(typing.cast(Callable[[str], Any], action.type or str))
                action.help = f"{action.help} Takes `none`."


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(kind, updated=())
    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    return read


def parse_arguments(
    argv: Sequence[str], *, prog: str | None = None, defaults: Mapping[str, Any] = types.MappingProxyType({})
) -> EvaluationSettings:
    """Parse flags, or the path of one YAML or JSON file, into settings.

    Args:
        argv: The command line without the program's name.
        prog: The program's name in the help text.
        defaults: Defaults that differ from those of `EvaluationSettings`.

    Raises:
        ArgumentError: If a file cannot be read, or a setting cannot be used.
    """
    if len(argv) == 1 and argv[0].endswith((".yaml", ".yml", ".json")):
        return settings_from_mapping({**defaults, **_read_settings_file(Path(argv[0]))})
    parser = HfArgumentParser(
        _argument_class(),  # type: ignore[arg-type]
        prog=prog,
        description="Evaluate a causal language model at long context: retrieval, perplexity, latency.",
        epilog="Instead of flags, give the path of one YAML or JSON file that holds them.",
    )
    accept_none(parser, EvaluationSettings)
    parser.set_defaults(
        **{
            name: ",".join(map(str, value)) if isinstance(value, tuple | list) else value
            for name, value in defaults.items()
        }
    )
    return settings_from_mapping(vars(parser.parse_args(list(argv))))


def _read_settings_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ArgumentError(
            "settings", "be a readable YAML or JSON file", str(path), f"Check the file: {error}."
        ) from error
    if not isinstance(values, dict):
        raise ArgumentError("settings", "be a file of name: value pairs", str(path), "Write one setting per line.")
    return values
