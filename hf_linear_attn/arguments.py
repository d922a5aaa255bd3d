"""Settings from flags and files: one dialect for every command.

A setting is a field of a dataclass. Its annotation is its type, its entry in the docstring's ``Args`` is its help, and
a flag means what the same words mean in a YAML or JSON file: ``--lengths 512,1024``, ``--lengths 512 1024`` and
``lengths: [512, 1024]`` are one.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml

from hf_linear_attn.checks import NAMES, PLURALS, check_type, choices_of, members_of
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.flags import flag_name, meant, unknown_flag

T = TypeVar("T")

TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
NOTE = "A list takes commas or spaces. Names take dashes or underscores."
FILE_NOTE = "Settings may also stand in a YAML or JSON file, FILE or --config FILE. A flag wins over the file."


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a command.

    Args:
        name: Its name in Python and in files; the flag has dashes for its underscores.
        kind: Its type, as annotations write it.
        default: Its default, for the help.
        help: What it is, in a sentence or two.
    """

    name: str
    kind: Any
    default: Any = None
    help: str = ""

    @property
    def flag(self) -> str:
        """Its flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def kinds(self) -> list[Any]:
        """Its type, or those of a union but for None."""
        return [member for member in members_of(self.kind) if member is not type(None)]

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, so that its flag needs no value."""
        return self.kinds == [bool]

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return any(get_origin(kind) in (list, tuple) for kind in self.kinds)

    @property
    def takes_none(self) -> bool:
        """Whether it may be None."""
        return type(None) in (*members_of(self.kind), *map(type, choices_of(self.kind)))

    def read(self, value: Any) -> Any:
        """Return the value that words of a command line or a file stand for.

        Raises:
            ArgumentError: If they stand for none of this setting.
            ArgumentTypeError: If a file has a value of another type.
        """
        alone = value[0] if isinstance(value, list) and len(value) == 1 else value
        if alone is None or (isinstance(alone, str) and alone.lower() in NONE and self.takes_none):
            if self.takes_none:
                return None
            raise ArgumentError(self.name, f"be {_wanted(self.kinds[0])}", None, "Leave it out for the default.")
        for kind in self.kinds:
            try:
                found = _from_words(value, kind)
            except (TypeError, ValueError):
                continue
            if get_origin(kind) is Literal and found not in get_args(kind):
                named = [str(choice) for choice in get_args(kind) if choice is not None]
                raise ArgumentError(self.name, "be a known choice", value, "Use one of those", available=named)
            return check_type(self.name, found, self.kind)
        wanted = " or ".join(_wanted(kind) for kind in self.kinds)
        raise ArgumentError(self.name, f"be {wanted}", alone, "Correct it, or leave it out.")


def _wanted(kind: Any) -> str:
    """Name a type for a message."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        return f"a list of {PLURALS.get(inner[0], 'values')}"
    if dict in (origin, kind) or Mapping in (origin, kind):
        return "a JSON object"
    return "true or false" if kind is bool else NAMES.get(kind, "a text")


def _from_words(value: Any, kind: Any) -> Any:
    """Turn words into what they stand for, if they can; what is no word stays as it is."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        items = list(value) if isinstance(value, list | tuple) else [value]
        parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
        words = [part.strip() if isinstance(part, str) else part for part in parts]
        return origin(_from_words(word, inner[0]) for word in words if word != "")
    if dict in (origin, kind) or Mapping in (origin, kind):
        found = json.loads(value) if isinstance(value, str) else value
        if not isinstance(found, Mapping):
            raise TypeError(value)
        return dict(found)
    if not isinstance(value, str):
        return value
    if kind is bool:
        if value.lower() not in (*TRUE, *FALSE):
            raise ValueError(value)
        return value.lower() in TRUE
    return kind(value) if kind in (int, float, Path) else value


def settings_of(cls: type, defaults: Mapping[str, Any] | None = None) -> list[Setting]:
    """Return the settings that a dataclass declares, with its docstring's help, and with other defaults where given."""
    documented = _documented(cls)
    hints = get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        if field.init:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = (defaults or {}).get(field.name, default)
            found.append(Setting(field.name, hints[field.name], default, documented.get(field.name, "")))
    return found


def _documented(cls: type) -> dict[str, str]:
    """Read the settings' descriptions off a class's docstring, their one place."""
    found: dict[str, str] = {}
    _, _, section = (inspect.getdoc(cls) or "").partition("Args:\n")
    name = ""
    for line in section.split("\n\n")[0].splitlines():
        entry = re.match(r" {4}(\w+): (.*)", line)
        if entry:
            name, found[entry[1]] = entry[1], entry[2]
        elif name:
            found[name] += " " + line.strip()
    return {key: re.sub(r":\w+:`", "`", text.replace("``", "`")) for key, text in found.items()}


class _Yaml(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose words mean what they say: `no` is a word, and 1e-3 is a number; and no key stands there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; PyYAML would keep the last of two values without a word."""
        seen = set[str]()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"`{key.value}` stands there twice", problem_mark=key.start_mark)
            seen.add(name)
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


_Yaml.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rsplit(":", 1)[-1] not in ("bool", "float", "timestamp")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$", re.IGNORECASE), list("tTfF"))
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)


def read_settings_file(path: str | Path, settings: Iterable[Setting]) -> dict[str, Any]:
    """Read what a YAML or JSON file has for some settings.

    Raises:
        ArgumentError: If the file cannot be read, a name is unknown, or a value cannot be used.
        ArgumentTypeError: If a value has another type than its setting.
    """
    try:
        found = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Yaml)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ArgumentError(
            "config", "be a readable YAML or JSON file", str(path), f"Check the file: {' '.join(str(error).split())}."
        ) from error
    if not isinstance(found, dict):
        raise ArgumentError("config", "hold `name: value` lines", str(path), "Write one setting per line.")
    known = {setting.name: setting for setting in settings}
    values = {str(name).replace("-", "_"): value for name, value in found.items()}
    for name in values:
        if name not in known:
            remedy = meant(name, known) or "Remove it, or use one of those"
            raise ArgumentError("config", "hold known settings only", name, remedy, available=known)
    return {name: known[name].read(value) for name, value in values.items()}


class Given(NamedTuple):
    """What a user named: settings that are not here keep their defaults."""

    file: dict[str, Any]
    flags: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """The settings; flags win over the file."""
        return self.file | self.flags


class CommandLine:
    """The arguments of one command: what it takes, how its help reads, and what a user's words mean.

    Args:
        program: The command, such as ``hf-linear-attn evaluate``.
        summary: What it does.
        example: Commands to begin with, shown first.
        positional: The setting that may be given without its flag; ``config`` stands for a file of settings.
        config: Whether settings may stand in a file.
    """

    def __init__(
        self, program: str, summary: str, *, example: str, positional: str | None = None, config: bool = True
    ) -> None:
        self.program, self.summary, self.example = program, " ".join(summary.split()), example
        self.positional = positional
        self.groups: dict[str, list[Setting]] = {}
        self._config = Setting("config", str | None, None, "YAML or JSON file of settings.") if config else None

    def add(self, title: str, settings: Iterable[Setting]) -> None:
        """Add settings under a heading of the help."""
        self.groups.setdefault(title, []).extend(settings)

    @property
    def settings(self) -> dict[str, Setting]:
        """All settings by name."""
        found = {setting.name: setting for settings in self.groups.values() for setting in settings}
        return found | ({"config": self._config} if self._config else {})

    def read(self, argv: Sequence[str]) -> Given:
        """Read the words of a command line after the program's name; ``--help`` prints the help and ends the program.

        Raises:
            ArgumentError: If a flag is unknown, a value cannot be used, or a file cannot be read.
        """
        if any(word in ("-h", "--help") for word in argv):
            sys.stdout.write(self.help())
            raise SystemExit(0)
        settings = self.settings
        words = self._words(argv)
        flags = {name: settings[name].read(value) for name, value in words.items()}
        path = flags.pop("config", None)
        declared = [setting for setting in settings.values() if setting is not self._config]
        return Given({} if path is None else read_settings_file(path, declared), flags)

    def _words(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the words that each setting was given."""
        settings = self.settings
        left, found, loose = list(argv), dict[str, Any](), list[str]()
        while left:
            word = left.pop(0)
            if not word.startswith("--") or word == "--":
                loose.append(word)
                continue
            name, (_, equals, value) = flag_name(word), word.partition("=")
            negated = (
                settings.get(name.removeprefix("no_")) if name.startswith("no_") and name not in settings else None
            )
            if negated is not None and negated.is_switch and not equals:
                found[negated.name] = "false"
            elif name not in settings:
                raise unknown_flag(name, settings, self.program)
            else:
                found[name] = value if equals else _take(settings[name], left)
        return found | self._loose(loose, found)

    def _loose(self, words: list[str], found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was given without a flag: the positional setting, and a file of settings."""
        given: dict[str, Any] = {}
        if self._config is not None and self.positional != "config":
            files = [word for word in words if word.endswith((".yaml", ".yml"))]
            given |= {"config": files[0]} if len(files) == 1 and "config" not in found else {}
            words = [word for word in words if word not in given.values()]
        if not words:
            return given
        name = self.positional
        if name is None or name in found or (len(words) > 1 and not self.settings[name].is_list):
            remedy = f"`{self.program} --help` lists the flags."
            raise ArgumentError("arguments", "be flags and their values", words[0 if name is None else -1], remedy)
        return given | {name: words if self.settings[name].is_list else words[0]}

    def settings_from(self, argv: Sequence[str], cls: type[T], **defaults: Any) -> T:
        """Read a command line of which a dataclass declares all settings; those without a default have to be given.

        Raises:
            ArgumentError: As :meth:`read`, and if a setting is left out.
        """
        declared = settings_of(cls, defaults)
        if not self.groups:
            self.add("settings", declared)
        values = self.read(argv).values
        for setting in declared:
            if setting.default is dataclasses.MISSING and setting.name not in values:
                raise ArgumentError(setting.name, "be given", None, f"`{self.example}` is an example.")
        return cls(**values)

    def help(self) -> str:
        """Return the help: an example first, then the settings in groups."""
        width = min(shutil.get_terminal_size((100, 24)).columns, 110)
        word = {None: "", "config": "[FILE] "}.get(self.positional, f"{(self.positional or '').upper()} ")
        parts = [f"usage: {self.program} {word}[--setting value ...]", textwrap.fill(self.summary, width)]
        parts.append("example:\n" + textwrap.indent(textwrap.dedent(self.example).strip(), "  "))
        for title, settings in self.groups.items():
            parts.append(f"{title}:\n" + "\n".join(_entry(setting, width) for setting in settings))
        notes = [NOTE, *([FILE_NOTE] if self._config else [])]
        return "\n\n".join([*parts, textwrap.fill(" ".join(notes), width)]) + "\n"


def _take(setting: Setting, left: list[str]) -> Any:
    """Take a flag's value from the words that follow it."""
    if setting.is_switch:
        return left.pop(0) if left and left[0].lower() in (*TRUE, *FALSE) else "true"
    words: list[str] = []
    while left and not left[0].startswith("--") and (setting.is_list or not words):
        words.append(left.pop(0))
    if not words:
        raise ArgumentError(setting.name, "be followed by a value", setting.flag, f"Write {setting.flag} VALUE.")
    return words if setting.is_list else words[0]


def _entry(setting: Setting, width: int) -> str:
    """Lay out a setting's flag and help."""
    if setting.is_switch:
        head = f"--[no-]{setting.flag[2:]}"
    else:
        choices = [str(choice) for choice in choices_of(setting.kind) if choice is not None]
        kind = setting.kinds[0]
        inner = get_args(kind)[0] if setting.is_list else kind
        one = "|".join(choices) or {int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(inner, "JSON")
        head = f"{setting.flag} {one}" + (f",{one},..." if setting.is_list else "")
    text = " ".join(filter(None, [setting.help, _default(setting)]))
    body = textwrap.wrap(text, width - 28) or [""]
    lines = [f"  {head:<24}  {body[0]}"] if len(head) <= 24 else [f"  {head}", " " * 28 + body[0]]
    return "\n".join([*lines, *(" " * 28 + line for line in body[1:])]).rstrip()


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(setting: Setting) -> str:
    default = setting.default
    if setting.is_switch or default is dataclasses.MISSING or default in (None, "", (), [], {}):
        shown = "on" if setting.is_switch and default is True else None
    else:
        shown = ",".join(map(_short, default)) if isinstance(default, list | tuple) else _short(default)
    none = "`none` for none." if setting.takes_none and default not in (None, dataclasses.MISSING) else ""
    return " ".join(filter(None, [f"Default: {shown}." if shown else "", none]))
