"""Checks of types and numbers that settings and operations share."""

import dataclasses
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from hf_linear_attn.errors import ArgumentError, ArgumentTypeError

SMALLEST_EPS, LARGEST_EPS = 1e-37, 1e37
"""Bounds of what is added to a normaliser: float32, in which it is added, has neither smaller nor larger ones."""

NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
LARGEST = 2**62
"""Largest whole number of a setting."""

PLURALS = {int: "whole numbers", float: "numbers", bool: "truth values", str: "texts"}


def check_type(argument: str, value: Any, kind: Any, *, where: str | None = None) -> Any:
    """Refuse a value of another type than a setting has, whatever Python, JSON or YAML brought.

    Args:
        argument: The setting's name.
        value: Its value.
        kind: A type as annotations write it: ``int``, ``float``, ``bool``, ``str``, ``Literal``, lists, tuples,
            mappings and unions of these. Others are not checked.
        where: For messages.

    Returns:
        The value; a whole number as a float where the setting is one.

    Raises:
        ArgumentTypeError: If the type is another one. True is no number, and 16.0 no whole one.

    Example:
        >>> check_type("eps", 1, float)
        1.0
        >>> check_type("window", "64", int | None)
        Traceback (most recent call last):
        hf_linear_attn.errors.ArgumentTypeError: `window` must be a whole number or None, got '64'. Correct its type.
    """
    # The most frequent case; a float may still be infinite.
    if type(value) is kind and kind is not float:
        return value
    if not _fits(value, kind):
        raise ArgumentTypeError(argument, f"be {_name(kind)}", value, "Correct its type.", where=where)
    takes_float = kind is float or (kind is not int and float in get_args(kind))
    return float(value) if takes_float and isinstance(value, int) and not isinstance(value, bool) else value


def check_path(argument: str, value: Any) -> Path:
    """Return a path, if a value is one.

    Raises:
        ArgumentTypeError: If it is neither a text nor a path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ArgumentTypeError(argument, "be a text or a path", value, "Name a file or folder.")
    return Path(value)


def check_types(settings: Any) -> None:
    """Refuse a dataclass's settings of other types than it declares, and whole numbers of more than 62 bits.

    Raises:
        ArgumentTypeError: If a type is another one.
        ArgumentError: If a value is none of a ``Literal``'s, or a whole number so large that no tensor could have that
            size.
    """
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = check_type(field.name, getattr(settings, field.name), hints[field.name])
        choices = choices_of(hints[field.name])
        if choices and value is not None and value not in choices:
            raise ArgumentError(field.name, "be a known choice", value, "Use one of those", available=choices)
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, int) and abs(number) > LARGEST:
                raise ArgumentError(field.name, "be a number below 2**62", number, "Lower it.")
        object.__setattr__(settings, field.name, value)


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the values of a ``Literal``, alone or beside None; nothing for other types."""
    return next((get_args(member) for member in members_of(kind) if get_origin(member) is Literal), ())


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union; another type stands alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def check_eps(eps: Any) -> float:
    """Return what is added to a normaliser, if it can be.

    Raises:
        ArgumentTypeError: If it is no number.
        ArgumentError: If float32 has no such number above 0.
    """
    found: float = check_type("eps", eps, float)
    if not found > 0:
        raise ArgumentError("eps", "be greater than 0", eps, "The default is 1e-6.")
    if not SMALLEST_EPS <= found <= LARGEST_EPS:
        raise ArgumentError("eps", f"lie in {SMALLEST_EPS}..{LARGEST_EPS}", eps, "The default is 1e-6.")
    return found


def _fits(value: Any, kind: Any) -> bool:
    # Plain types first: a compiler traces checks of numbers, and cannot take types apart.
    if kind is float:
        # NaN is none, and a whole number beyond the largest float cannot become one.
        return value == value if isinstance(value, float) else _fits(value, int) and abs(value) < 2**1000
    if kind is int:
        # What stands for a whole number while a graph is traced is one, too.
        return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if kind in (bool, str, type(None)):
        return isinstance(value, kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in inner)
    if origin is Literal:
        return any(type(value) is type(choice) for choice in inner)
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_fits(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(name, (str, inner[0])) for name in value)
    return True


def _name(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(member) for member in inner)
    if origin is Literal:
        return " or ".join(dict.fromkeys(_name(type(choice)) for choice in inner))
    if origin in (list, tuple):
        return f"a list of {PLURALS.get(inner[0], 'values')}"
    if origin is Mapping:
        return "a mapping of names to values"
    return NAMES.get(kind, getattr(kind, "__name__", str(kind)))
