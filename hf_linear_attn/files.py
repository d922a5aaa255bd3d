"""Writing files so that a kill at any moment leaves whole ones only."""

import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Write a text file, in UTF-8, so that readers find the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync(path: Path) -> None:
    """Have what was written to a file or folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
