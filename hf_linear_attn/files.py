"""Files written so that no file of the user's is lost, and that a kill or a full disk never leaves a part of one."""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hf_linear_attn.errors import ArgumentError, CheckpointError

LOCK = ".lock"
"""What keeps other runs out of a folder; a folder that holds nothing else is empty."""

_MOST_NAMES = 5
"""Entries of a folder that a message lists."""


def output_folder(
    path: str | Path,
    argument: str = "output_dir",
    *,
    inputs: Mapping[str, Iterable[object]],
    marks: Iterable[str] = (),
    overwrite: bool = False,
) -> Path:
    """See that a folder can be written, and that no file of the user's is lost there; nothing on disk changes.

    It is refused where it is the folder of an input, lies inside of one, or holds one, by whatever path or link; and
    where it has files that are no earlier run's. The caller creates it, once nothing else is to be refused.

    Args:
        path: The folder.
        argument: Its name in messages.
        inputs: Paths that the run reads, by argument; what is no path that exists, such as a hub name or None, is
            passed over.
        marks: Patterns of files by which a run tells its own folder, so that it goes on there.
        overwrite: Whether files of others may be there; those of other names than a run's stay. Inputs may not.

    Returns:
        The folder.

    Raises:
        ArgumentError: If it is refused, or cannot be written.
    """
    folder = Path(path)
    for name, sources in inputs.items():
        for source in sources:
            if isinstance(source, str | Path) and source != "" and _shares(folder, Path(source)):
                remedy = "Choose another folder: no run writes to what it reads."
                raise ArgumentError(argument, f"be apart from `{name}`, {str(source)!r}", str(path), remedy)
    if not overwrite:
        _check_empty(folder, argument, marks)
    try:
        with tempfile.TemporaryFile(dir=next(place for place in (folder, *folder.parents) if os.path.lexists(place))):
            pass
    except OSError as error:
        raise ArgumentError(
            argument, "be a folder that can be written", str(path), f"Choose another: {error.strerror}."
        ) from error
    return folder


def paths_read(settings: object, names: Iterable[str], **loaded: object) -> dict[str, list[object]]:
    """Return what a run reads, by argument, for :func:`output_folder`: settings of those names hold a path or several.

    What models and tokenizers in memory were loaded from is read, too.
    """
    found: dict[str, list[object]] = {}
    for name in names:
        given = getattr(settings, name, None)
        found[name] = [*given] if isinstance(given, list | tuple) else [given]
    for name, one in loaded.items():
        found.setdefault(name, []).append(getattr(one, "name_or_path", None))
    return found


def _shares(folder: Path, source: Path) -> bool:
    """Tell whether a folder is an input, lies inside of it, holds it, or has a link to a file of it."""
    own = _inode(source)
    if own is None:
        return False
    real_folder, real_source = Path(os.path.realpath(folder)), Path(os.path.realpath(source))
    above = {_inode(place) for place in (real_folder, *real_folder.parents)}
    below = {_inode(place) for place in (real_source, *real_source.parents)}
    read = {own, *_entries(source)}
    return own in above or _inode(folder) in below - {None} or not read.isdisjoint(_entries(folder))


def _entries(folder: Path) -> set[tuple[int, int] | None]:
    """Return what a folder's entries are, through links."""
    try:
        return {_inode(entry) for entry in folder.iterdir()} - {None}
    except OSError:
        return set()


def _inode(path: Path) -> tuple[int, int] | None:
    """Return what tells a file or folder from all others, by whatever path; None where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _check_empty(folder: Path, argument: str, marks: Iterable[str]) -> None:
    """Refuse a folder with files that are no run's."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)
    except OSError:  # there is none, or it is none: making it says so
        return
    # A run that is killed before it has a mark leaves what was to become one.
    known = [pattern for mark in marks for pattern in (mark, f".{mark}.tmp")]
    if names and not found_in(folder, known):
        listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        rule = "be new, empty or of a run that goes on" if marks else "be new or empty"
        remedy = "Choose another, or pass --overwrite (overwrite=True), which replaces files of the same names."
        raise ArgumentError(argument, rule, str(folder), remedy, where=f"it holds {listed}")


def found_in(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return what a folder holds of names that any of the patterns has."""
    return [path for pattern in patterns for path in folder.glob(pattern)]


def remove(folder: Path, patterns: Iterable[str]) -> None:
    """Remove what a run has made in a folder, by patterns of names; nothing in folders that it links to."""
    for path in found_in(folder, patterns):
        between = path.relative_to(folder).parents
        if any((folder / part).is_symlink() for part in between if part.parts):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def locked(folder: Path | None, argument: str = "output_dir") -> Iterator[None]:
    """Keep other runs out of a folder, made if need be; the lock goes with the process, however it ends.

    Raises:
        CheckpointError: If another run holds it.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(folder / LOCK).acquire(timeout=0)
    except Timeout as error:
        remedy = "Another run writes to it; choose another folder."
        raise CheckpointError(argument, "not be in use", str(folder), remedy) from error
    with held:
        yield


def write_atomic(path: str | Path, text: str) -> None:
    """Write a text file as UTF-8 so that readers find the old text or the new one, never a part."""
    with named_in_errors(Path(path)), whole_file(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file to, which takes the place of another once all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Have an error of writing say to which file: one of a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """Write a model's files so that a folder gets all of them or none; other files in it stay.

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
        rule, remedy = "have room for the model", f"Writing failed ({error}); make room and run again."
        raise CheckpointError("output_dir", rule, f"{free_mib:.0f} MiB free", remedy, where=str(folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def run_file(file: str | Path, argument: str, prefix: str) -> str:
    """Import a Python file of the user's, and return its module's name, which begins with ``prefix``.

    Raises:
        ArgumentError: If there is no such Python file.
    """
    path = Path(file).resolve()
    # Named by the whole path: two files called maps.py are two modules, one file loaded twice is one.
    name = prefix + "".join(c if c.isalnum() else "_" for c in str(path))
    if path.suffix != ".py" or not path.is_file():
        raise ArgumentError(argument, "be a Python file", str(file), "Check the path.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(argument, "be importable", str(file), "Check the path.")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return name


def sync(path: str | Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
