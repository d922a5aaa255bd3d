"""`samples.jsonl`: one line per finished piece of work, so that a run cut off at any point goes on where it was."""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_linear_attn.errors import CheckpointError
from hf_linear_attn.files import named_in_errors, remove, write_atomic

RUN_FILE = "run.json"
_SUM = "crc32"
_SAMPLES = "samples.jsonl", "samples.[0-9]*.jsonl"
"""Files of the first process and of others."""
_REPORT = "report.md"
_MADE_BY_US = (*_SAMPLES, RUN_FILE, "results.json", "report.html", _REPORT)


class SampleStore:
    """Finished records by key, kept in memory and, given a folder, appended to a file and flushed.

    A record's key is a hash of the settings, the fingerprint of the model and the sample's id: other settings or
    other weights find nothing. Every process writes a file of its own and reads all of them.

    Args:
        folder: Where to keep the records; None keeps them in memory only.
        settings: The settings that can change a figure.
        fingerprints: Fingerprint of every model by name.
        resume: Use the records in the folder even where that run has finished; those of one that was cut off are used
            anyway.
        overwrite: Delete what an earlier run left in the folder.
        rank: Number of this process; the first one alone looks at what an earlier run left.

    Raises:
        CheckpointError: If the folder holds a finished run and neither `resume` nor `overwrite` is set, or a run of
            other settings or models.
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Mapping[str, Any],
        fingerprints: Mapping[str, str],
        *,
        resume: bool = False,
        overwrite: bool = False,
        rank: int = 0,
    ) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self._prefix = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self._folder = folder
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / ("samples.jsonl" if rank == 0 else f"samples.{rank}.jsonl")
        run = {"settings": dict(settings), "fingerprints": dict(fingerprints)}
        if rank == 0:
            self._open_run(folder, run, resume=resume, overwrite=overwrite)
        self.reload()

    def _open_run(self, folder: Path, run: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        if overwrite:
            remove(folder, [*_pictures(folder), *_MADE_BY_US])
        run_path = folder / RUN_FILE
        if run_path.exists():
            if not resume and (folder / "results.json").exists():
                remedy = "Pass overwrite to replace that run, or resume to report on it anew."
                raise CheckpointError("output_dir", "be a folder without results", str(folder), remedy)
            self._check_same(self._read_run(run_path), run, folder)
        else:
            write_atomic(run_path, json.dumps(run, indent=2) + "\n")
        for path in _files(folder):
            _drop_torn_line(path)

    @staticmethod
    def _read_run(path: Path) -> dict[str, Any]:
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            return {part: dict(run[part]) for part in ("settings", "fingerprints")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = f"It is damaged ({error!r}): pass overwrite, or choose another folder."
            raise CheckpointError("output_dir", "hold a run that can be gone on with", str(path), remedy) from error

    @staticmethod
    def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
        for part, what in (("settings", "settings"), ("fingerprints", "models")):
            names = sorted(set(old[part]) | set(new[part]))
            changed = [name for name in names if old[part].get(name) != new[part].get(name)]
            if changed:
                listed = "; ".join(
                    f"{name} was {old[part].get(name)!r} and is {new[part].get(name)!r}" for name in changed
                )
                remedy = "Choose another folder, or pass overwrite."
                raise CheckpointError("output_dir", f"hold a run of the same {what}", str(folder), remedy, where=listed)

    def reload(self) -> None:
        """Read the records that all processes have written.

        Raises:
            CheckpointError: If a line is damaged.
        """
        if self._folder is None:
            return
        for path in _files(self._folder):
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
                try:
                    record = _record(line)
                    self._records[record["key"]] = record
                except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
                    rule = "hold a run that can be gone on with"
                    remedy = f"It is damaged ({error!r}): remove that line, which is measured anew, or pass overwrite."
                    raise CheckpointError("output_dir", rule, str(path), remedy, where=f"line {number}") from error

    def key(self, fingerprint: str, sample_id: str) -> str:
        """Return the key of a sample under this run's settings."""
        return hashlib.sha256(f"{self._prefix}/{fingerprint}/{sample_id}".encode()).hexdigest()[:32]

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the record with that key, or None."""
        return self._records.get(key)

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Keep records and write them through to the disk."""
        records = list(records)
        for record in records:
            self._records[record["key"]] = record
        if self._folder is not None:
            with named_in_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_line, records)))

    def merge_files(self) -> None:
        """Put the records of all processes into `samples.jsonl`."""
        others = [] if self._folder is None else list(self._folder.glob(_SAMPLES[1]))
        if not others:
            return
        self.reload()
        write_atomic(self._path, "".join(map(_line, self._records.values())))
        for path in others:
            path.unlink()


def _files(folder: Path) -> list[Path]:
    """Return the files of samples that are in a folder."""
    return sorted(path for pattern in _SAMPLES for path in folder.glob(pattern))


def _pictures(folder: Path) -> list[str]:
    """Return the pictures that the report in a folder shows, by which an earlier run's are known."""
    try:
        report = (folder / _REPORT).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    return re.findall(r"\]\((figures/[\w.-]+\.svg)\)", report)


def _line(record: Mapping[str, Any]) -> str:
    """Return a record as a line, under a checksum."""
    return json.dumps({**record, _SUM: zlib.crc32(json.dumps(record).encode())}) + "\n"


def _record(line: bytes) -> dict[str, Any]:
    """Return the record of a line; those of earlier versions have no checksum.

    Raises:
        ValueError: If it is no JSON, or not what was written. What is JSON and no record raises others.
    """
    record: dict[str, Any] = json.loads(line)
    expected = record.pop(_SUM, None)
    if expected is not None and expected != zlib.crc32(json.dumps(record).encode()):
        raise ValueError("its checksum differs")
    return record


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed process left of its last line."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        os.truncate(path, len(whole))
