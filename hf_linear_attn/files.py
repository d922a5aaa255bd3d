"""Files written so that a kill, or a full disk, never leaves a part of one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hf_linear_attn.errors import CheckpointError


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


@contextmanager
def whole_folder(folder: str | Path, argument: str = "output_dir") -> Iterator[Path]:
    """Write a model's files so that a folder gets all of them or none.

    Args:
        folder: Where they are to be; other files in it stay.
        argument: Its name in messages.

    Yields:
        A folder to write them to; they are moved when all are on the disk, what names the others last.

    Raises:
        CheckpointError: If writing fails, as on a full disk; nothing has changed then.
    """
    folder = Path(folder)
    temporary = folder / ".saving.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        # A folder without a config is no model yet.
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)
        sync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        # A full disk shows as RuntimeError from torch and as SafetensorError from safetensors.
        if isinstance(error, CheckpointError):
            raise
        free_mib = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 2**20
        raise CheckpointError(
            argument,
            "have room for the model",
            f"{free_mib:.0f} MiB free",
            f"Writing failed ({error}); make room and run again.",
            where=str(folder),
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: str | Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
