"""What to evaluate and how: settings that all suites share, and each suite's own, from Python, flags or a file."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from hf_linear_attn.arguments import CommandLine, settings_of
from hf_linear_attn.checks import check_type, choices_of
from hf_linear_attn.errors import ArgumentError

# Settings that cannot change a figure: a run may be resumed with other values of these.
_FREE = frozenset({"output_dir", "resume", "overwrite", "plots", "progress", "feature_map_file", "suite_file"})

_Own = TypeVar("_Own")


SUITES: dict[str, Any] = {}
"""The registered suites by name, in the order of the report; `suite.register_suite` fills it."""


def check_settings(settings: Any, **least: float) -> None:
    """Check the types of a dataclass of settings, and that its lists hold something once and its numbers are enough.

    Args:
        settings: An instance of a frozen dataclass; lists become tuples.
        **least: Smallest value by setting.

    Raises:
        ArgumentTypeError: If a value has another type than its setting.
        ArgumentError: If a value is out of range.
    """
    for setting in settings_of(type(settings)):
        name, value = setting.name, getattr(settings, setting.name)
        if setting.is_list and value is not None:
            value = _sequence(name, value, get_args(setting.kinds[0])[0])
        value = check_type(name, value, setting.kind)
        choices = choices_of(setting.kind)
        if choices and value not in choices:
            raise ArgumentError(name, "be a known choice", value, "Use one of those", available=choices)
        for one in value if isinstance(value, tuple) else () if value is None else (value,):
            if name in least and one < least[name]:
                raise ArgumentError(name, f"be at least {least[name]}", one, "Raise it, or leave it out.")
        object.__setattr__(settings, name, value)


def _sequence(name: str, value: Any, kind: Any) -> tuple[Any, ...]:
    """Return a list's values as a tuple, checked."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ArgumentError(name, "be a sequence", value, "Pass a tuple, as in (512, 1024).")
    values = tuple(check_type(name, one, kind) for one in value)
    if not values:
        raise ArgumentError(name, "hold at least one value", value, "Name one.")
    if len(set(values)) != len(values):
        raise ArgumentError(name, "hold no value twice", value, "Drop the repeated ones.")
    return values


@dataclass(frozen=True, init=False)
class EvaluationSettings:
    """Settings of one evaluation run.

    Every suite adds its own, by name, as if they stood here: `EvaluationSettings(suite=("latency",), repeats=5)`.
    `hf-linear-attn evaluate --help` lists them all.

    Args:
        model: Folder or hub name of the model under test, softmax or patched.
        teacher: Folder or hub name of the softmax model to stand beside it.
        dtype: Dtype of models loaded from a path.
        device: Device of models loaded from a path; the accelerator if there is one.
        attn: ``linear`` aborts unless the model is patched, ``softmax`` undoes the patch, ``auto`` takes the model as
            it is.
        feature_map_file: Python file that registers the feature maps of your own models.
        suite: Which suites to run.
        suite_file: Python file that registers suites of your own.
        lengths: Context lengths in tokens, generation budget included.
        batch_size: Prompts or windows run together.
        prefill_chunk: Most tokens in one forward; the cache carries the rest.
        seed: Seed of everything drawn.
        output_dir: Folder for samples.jsonl, results.json and the reports.
        resume: Go on with a run of the same settings and models even where it has finished.
        overwrite: Delete the results of an earlier run in the output folder.
        offline: Never reach for a network; what needs one is refused.
        plots: Draw the pictures.
        progress: Show progress bars and the estimated cost.

    Raises:
        ArgumentTypeError: If a value has another type than its setting.
        ArgumentError: If a setting is unknown, or a value cannot be used.

    Example:
        >>> EvaluationSettings(lengths=(64, 32)).lengths
        (32, 64)
    """

    model: str | None = None
    teacher: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str | None = None
    attn: Literal["auto", "linear", "softmax"] = "auto"
    feature_map_file: str | None = None
    suite: tuple[str, ...] = ()
    suite_file: str | None = None
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    batch_size: int = 1
    prefill_chunk: int = 2048
    seed: int = 0
    output_dir: str | None = None
    resume: bool = False
    overwrite: bool = False
    offline: bool = False
    plots: bool = True
    progress: bool = True
    own: tuple[Any, ...] = dataclasses.field(init=False)

    def __init__(self, **values: Any) -> None:
        """Check every setting once."""
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.init}
        defaults["suite"] = tuple(name for name, suite in SUITES.items() if suite.by_default)
        for name, default in defaults.items():
            object.__setattr__(self, name, values.pop(name, default))
        check_settings(self, batch_size=1, prefill_chunk=1, lengths=2)
        own = []
        for suite in SUITES.values():
            names = [field.name for field in dataclasses.fields(suite.Settings)]
            own.append(suite.Settings(**{name: values.pop(name) for name in names if name in values}))
            for name in names:
                object.__setattr__(self, name, getattr(own[-1], name))
        object.__setattr__(self, "own", tuple(own))
        for name in values:
            raise ArgumentError("settings", "be known", name, "Use one of those", available=_names())
        suites = tuple(name.replace("_", "-") if name not in SUITES else name for name in self.suite)
        for name in suites:
            if name not in SUITES:
                raise ArgumentError("suite", "be a suite", name, "Use one of those", available=SUITES)
        if self.resume and self.overwrite:
            raise ArgumentError("resume", "not be combined with `overwrite`", True, "Choose one of the two.")
        object.__setattr__(self, "suite", suites)
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))

    def of(self, settings: type[_Own]) -> _Own:
        """Return the settings of a suite's own, by their class."""
        return next(one for one in self.own if type(one) is settings)

    def identity(self) -> dict[str, Any]:
        """Return the settings that can change a figure of the suites to run, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        for suite in self.suite:
            values |= dataclasses.asdict(self.of(SUITES[suite].Settings))
        return dict(json.loads(json.dumps({name: value for name, value in values.items() if name not in _FREE})))

    def digest(self) -> str:
        """Return a hash of `identity()`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


_MODELS = ("model", "teacher", "dtype", "device", "attn", "feature_map_file")
_WORK = ("suite", "suite_file", "lengths", "batch_size", "prefill_chunk", "seed")


def _names() -> list[str]:
    classes = [EvaluationSettings, *(suite.Settings for suite in SUITES.values())]
    return [setting.name for cls in classes for setting in settings_of(cls)]


def command_line(program: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> CommandLine:
    """Return what the command takes: the settings in groups, each suite's own in one."""
    line = CommandLine(
        program,
        "Evaluate a causal language model at long context, beside its softmax teacher: what was kept, what was gained. "
        "Writes report.html, report.md and results.json.",
        example="hf-linear-attn evaluate --model runs/student --teacher your/model --output-dir runs/evaluation\n"
        "hf-linear-attn evaluate settings.yaml --lengths 4096,16384",
        positional="config",
    )
    shown = {"suite": EvaluationSettings().suite, **defaults}
    shared = settings_of(EvaluationSettings, shown)
    suites = f"Which suites to run, of {', '.join(SUITES)}."
    shared = [dataclasses.replace(one, help=suites) if one.name == "suite" else one for one in shared]
    line.add("models", (one for one in shared if one.name in _MODELS))
    line.add("what is measured", (one for one in shared if one.name in _WORK))
    for suite in SUITES.values():
        line.add(suite.title, settings_of(suite.Settings, defaults))
    line.add("the run", (one for one in shared if one.name not in (*_MODELS, *_WORK)))
    return line


def parse_arguments(
    argv: Sequence[str],
    *,
    prog: str = "hf-linear-attn evaluate",
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> EvaluationSettings:
    """Read flags, and a YAML or JSON file if one is named, into settings.

    Args:
        argv: The command line without the program's name.
        prog: The program's name in the help text.
        defaults: Defaults that differ from those of `EvaluationSettings`.

    Raises:
        ArgumentError: If a file cannot be read, or a setting cannot be used.
    """
    return EvaluationSettings(**{**defaults, **command_line(prog, defaults).read(argv).values})
