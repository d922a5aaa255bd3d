"""Files written so that a kill, or a full disk, never leaves a part of one."""

import os
from pathlib import Path


def write_atomic(path: str | Path, text: str) -> None:
    """Write a text file as UTF-8 so that readers find the old text or the new one, never a part."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: str | Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
