"""The source text of the Python standard library, split by file: real text of several MB, no download."""

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hf_linear_attn.errors import ArgumentError

# Tests, tables and installed packages: either not the standard library or not code that reads like text.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
_SPLITS = ("heldout", "train")
_HELDOUT_ONE_IN = 20


def _is_heldout(relative_path: str) -> bool:
    """Tell whether a file is held out, from a hash of its path: the same on every machine."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELDOUT_ONE_IN == 0


def _source_files(root: Path) -> Iterator[str]:
    """Yield the path of every source file relative to the library's folder, never entering a skipped folder."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        yield from ((Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py"))


def load_stdlib_documents(split: Literal["train", "heldout"]) -> list[str]:
    """Load the source files of the running interpreter's standard library, one document per file.

    One file in twenty, chosen by the SHA-256 hash of its path relative to the library's folder, is held out.
    Test suites, codec tables, pydoc's topic data and installed packages are left out, as are empty files.

    Args:
        split: `"train"` or `"heldout"`; the two never share a file.

    Returns:
        The documents, ordered by relative path.

    Raises:
        ArgumentError: If `split` is not one of the two.
        FileNotFoundError: If the interpreter ships without the source of its standard library.
    """
    if split not in _SPLITS:
        raise ArgumentError("split", "be a split", split, "Use one of those.", available=_SPLITS)
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for relative in sorted(_source_files(root)):
        if _is_heldout(relative) != (split == "heldout"):
            continue
        with tokenize.open(root / relative) as file:
            text = file.read()
        if text.strip():
            documents.append(text)
    if not documents:
        raise FileNotFoundError(
            f"no {split} source files of the standard library under {root}. Use an interpreter that ships its source."
        )
    return documents
