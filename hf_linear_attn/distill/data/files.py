"""Local files: their kinds, how they are grouped, and whether they are whole."""

import csv
import json
import lzma
import zlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec
import pyarrow.parquet
import zstandard

from hf_linear_attn.errors import ArgumentError, first_line

KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".py": "text",
}
"""Readers of files, by suffix."""

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes that may follow."""

ABOUT = ("readme", "license", "dataset_info", "dataset_infos", "dataset_dict", "state")
"""Stems of files that describe a dataset and are none of it."""

BROKEN = (
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    csv.Error,
    pyarrow.ArrowException,
)
"""What reading a damaged file raises."""

AT_ONCE = 1 << 20
"""Bytes read at once."""


class Group(NamedTuple):
    """Files that are read as one table."""

    kind: str
    """Name of the reader in `datasets`."""
    files: tuple[str, ...]
    options: dict[str, Any]
    """What the reader is told."""
    columns: tuple[str, ...]
    """Their columns, none where only reading them tells."""


def kind_of(path: Path) -> str | None:
    """Return which reader a file needs, or None."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return KINDS.get(path.suffix.lower())


def find_files(path: Path) -> list[Path]:
    """Return a file, or the readable ones in a folder and its subfolders, in order; refuse where there is none."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and kind_of(p))
        shown = [p for p in files if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        files = [p for p in shown if p.name.partition(".")[0].lower() not in ABOUT]
    if not files or not kind_of(files[0]):
        rule = "be a file that can be read, or a folder of such"
        remedy = f"Convert it; each may be compressed ({', '.join(COMPRESSED)})"
        raise ArgumentError("dataset", rule, str(path), remedy, available=KINDS)
    return files


def group_files(files: Iterable[Path]) -> list[Group]:
    """Return files in groups of one kind and the same columns: a folder may mix them."""
    groups: dict[tuple[str, str, tuple[str, ...] | Path], list[str]] = {}
    for path in files:
        kind = str(kind_of(path))
        columns = columns_of(path, kind) if path.stat().st_size else None
        if columns is not None:
            separator = "\t" if ".tsv" in path.suffixes else ""
            groups.setdefault((kind, separator, columns), []).append(str(path))
    return [
        Group(
            kind,
            tuple(names),
            {"sample_by": "document"} if kind == "text" else {"sep": sep} if sep else {},
            columns if isinstance(columns, tuple) else (),
        )
        for (kind, sep, columns), names in groups.items()
    ]


def load_files(group: Group, *, streaming: bool) -> Any:
    """Return files as a dataset of `datasets`."""
    from datasets import load_dataset

    files = {"data_files": list(group.files), "split": "train"}
    return load_dataset(group.kind, streaming=streaming, **files, **group.options)


def columns_of(path: Path, kind: str) -> tuple[str, ...] | Path | None:
    """Return the columns in a file's first row, or the file itself where that does not tell; None without rows."""
    try:
        if path.suffix.lower() == ".zst" and not zst_is_whole(path):
            raise EOFError("it ends too early")
        if kind == "text":
            return ("text",)
        if kind == "parquet":
            return tuple(sorted(pyarrow.parquet.read_schema(path).names))
        with opened(path) as file:
            lines = list(islice((line for line in file if line.strip()), 2))
        if len(lines) < (2 if kind == "csv" else 1):
            return None
        if kind == "csv":
            separator = "\t" if ".tsv" in path.suffixes else ","
            # Imported here, since it takes a fifth of a second, which other commands need not wait.
            import pandas

            # Where the first row is longer than the header, pandas would take its first fields for names of rows.
            pandas.read_csv(path, sep=separator, header=None, nrows=2)
            return tuple(sorted(next(csv.reader(lines, delimiter=separator), [])))
        row = json.loads(lines[0])
        return tuple(sorted(row)) if isinstance(row, dict) else path
    except json.JSONDecodeError:
        # One that is laid out over several lines is read by itself.
        return path
    except BROKEN as error:
        raise damaged(path, error) from error


def opened(path: Path) -> IO[str]:
    """Open a text file, compressed or not."""
    return fsspec.open(str(path), "rt", encoding="utf-8", compression="infer").open()  # type: ignore[no-any-return]


def check_whole(files: Iterable[Path]) -> None:
    """Read files to their end, one by one; only needed where reading has failed, to say which one is damaged."""
    for path in files:
        try:
            if path.suffix.lower() in COMPRESSED:
                with fsspec.open(str(path), "rb", compression="infer") as file:
                    while file.read(AT_ONCE):
                        pass
            for group in group_files([path]):
                for _ in load_files(group, streaming=True).with_format("arrow").iter(1000):
                    pass
        except ArgumentError:
            raise
        except BROKEN as error:
            raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ArgumentError:
    """Return the error of a file that cannot be read."""
    from pandas.errors import ParserError

    remedy = "Copy or compress it again" if path.suffix.lower() in COMPRESSED else "Correct it, or copy it again"
    if isinstance(error, ParserError):
        remedy = "Put texts that hold commas or line breaks in quotes"
    return ArgumentError("dataset", "consist of files that are whole", str(path), f"{remedy}: {first_line(error)}.")


def zst_is_whole(path: Path) -> bool:
    """Tell whether a .zst file ends where a frame ends; its decompressor would not mind.

    Only the headers of frames and blocks are read (RFC 8878, 3.1).
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        while file.tell() < size:
            start, head = file.tell(), file.read(18)
            magic = int.from_bytes(head[:4], "little")
            if magic & 0xFFFFFFF0 == 0x184D2A50:  # a frame that is skipped
                file.seek(start + 8 + int.from_bytes(head[4:8], "little"))
                continue
            frame = zstandard.get_frame_parameters(head)
            file.seek(start + zstandard.frame_header_size(head))
            last = 0
            while not last:
                block = int.from_bytes(file.read(3).ljust(3, b"\xff"), "little")
                last, kind = block & 1, block >> 1 & 3
                # A block of one repeated byte holds that byte alone.
                file.seek(1 if kind == 1 else block >> 3, 1)
            file.seek(4 * frame.has_checksum, 1)
        return file.tell() == size
