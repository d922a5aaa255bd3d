"""How rules and mixes are found: each is one file with one class, imported when the package is."""

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hf_linear_attn.errors import ArgumentError

PartT = TypeVar("PartT")


def discover(package: str, path: Iterable[str], base: type[PartT]) -> dict[str, type[PartT]]:
    """Import every module of a package, and return the subclasses of ``base`` that they define, by name."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
    found: dict[str, Any] = {}
    pending = list(base.__subclasses__())
    while pending:
        cls: Any = pending.pop()
        pending += cls.__subclasses__()
        if "name" in vars(cls):
            found[cls.name] = cls
    return dict(sorted(found.items()))


def lookup(argument: str, name: str, known: Mapping[str, type[PartT]]) -> type[PartT]:
    """Return the class of that name.

    Raises:
        ArgumentError: If there is none; the message lists those there are.
    """
    if name not in known:
        raise ArgumentError(argument, "be a known rule", name, "Use one of those", available=known)
    return known[name]
