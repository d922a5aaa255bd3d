"""Names of flags, read off the source: a typo is answered before what a command runs is imported, which takes seconds.

What a setting is and what values it takes, :mod:`hf_linear_attn.arguments` knows. This knows no more than names.
"""

import ast
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_linear_attn.errors import ArgumentError

_PACKAGE = Path(__file__).parent
_ELSEWHERE = ("config", "preset", "help")
_USERS = "suite_file"
"""A flag that brings others, of a file of the user's."""


def check_flags(argv: Sequence[str], program: str, sources: Iterable[str]) -> None:
    """Refuse a flag that no setting has: dataclasses in files of the package, by their patterns, declare those."""
    names = [flag_name(word) for word in argv if word.startswith("--") and word != "--"]
    if _USERS in names:
        return
    known = set(_ELSEWHERE).union(*(_declared(path) for pattern in sources for path in _PACKAGE.glob(pattern)))
    for name in names:
        if name not in known and name.removeprefix("no_") not in known:
            raise unknown_flag(name, known, program)


def flag_name(word: str) -> str:
    """Return the name of the setting that a flag is of: ``--no-plots``, ``--lengths=512`` and ``--top_k`` are flags."""
    return word[2:].partition("=")[0].replace("-", "_")


def unknown_flag(name: str, known: Iterable[str], program: str) -> ArgumentError:
    """Return the error of a flag that is none."""
    remedy = meant(name, known, "--") or f"`{program} --help` lists them."
    return ArgumentError("arguments", "be known flags", f"--{name.replace('_', '-')}", remedy)


def meant(name: str, known: Iterable[str], prefix: str = "") -> str | None:
    """Ask whether a similar name is meant, if there is one."""
    near = difflib.get_close_matches(name, sorted(known), 1)
    if not near:
        return None
    return f"Did you mean {prefix}{near[0].replace('_', '-') if prefix else near[0]}?"


def _declared(path: Path) -> set[str]:
    return {
        field.target.id
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(one, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in one.decorator_list)
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
