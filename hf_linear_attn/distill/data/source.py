"""Datasets: opened by name or path, and read row by row as the texts of their form."""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.distill.data.chat import ChatTemplate, Rendered
from hf_linear_attn.distill.data.files import BROKEN, check_whole, find_files, group_files, load_files
from hf_linear_attn.distill.data.forms import Form, Template, form_of
from hf_linear_attn.errors import ArgumentError, TrainingError, first_line
from hf_linear_attn.evaluation.tasks.base import bos_ids


class Table(NamedTuple):
    """Rows of one form."""

    rows: Any
    """A dataset of `datasets`, with the columns of the form."""
    form: Form
    columns: Mapping[str, str]
    """What the form calls columns, and their names here."""
    template: Template

    def read(self, row: Mapping[str, Any], where: str) -> Rendered | None:
        """Return what a row says; ``where`` is what messages call it."""
        own = {called: row[column] for called, column in self.columns.items()}
        return self.form.read(own, self.template, where)


class Source(NamedTuple):
    """A dataset that the settings name."""

    path: str
    """Hub name, or path of a file or folder."""
    config: str | None = None
    split: str = "train"
    columns: tuple[tuple[str, str], ...] = ()
    """What columns stand for, and their names, in datasets that have them."""

    def open(self, tokenizer: PreTrainedTokenizerBase, *, streaming: bool = False) -> "Texts":
        """Open the dataset, whose rows are read as they are needed where it is streamed."""
        template = cache(lambda: ChatTemplate(tokenizer, bos_ids(tokenizer)))
        tables = []
        with self.reading():
            for rows, columns in self._load(streaming):
                # Where the columns are not known beforehand, the first row has them.
                columns = rows.column_names or columns or tuple(next(iter(rows), {}))
                if columns:
                    tables.append(self._table(rows, columns, template))
        return Texts(tables, self)

    def _table(self, rows: Any, columns: Sequence[str], template: Template) -> Table:
        named = {name: column for name, column in self.columns if column in columns}
        form = form_of([*named, *columns], named)
        names = {name: named.get(name, name) for name in (*form.needed, *form.optional)}
        chosen = {name: column for name, column in names.items() if column in columns}
        return Table(rows.select_columns(sorted(set(chosen.values()))), form, chosen, template)

    def _load(self, streaming: bool) -> Iterator[tuple[Any, Sequence[str]]]:
        """Yield the dataset's tables as `datasets` reads them, and their columns where they are known."""
        from datasets import DatasetDict, load_dataset, load_from_disk

        path = Path(self.path)
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            saved = load_from_disk(path)
            rows = saved[self.split] if isinstance(saved, DatasetDict) else saved
            yield rows.to_iterable_dataset() if streaming else rows, ()
        elif path.exists():
            for group in group_files(find_files(path)):
                yield load_files(group, streaming=streaming), group.columns
        else:
            yield load_dataset(self.path, name=self.config, split=self.split, streaming=streaming), ()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise an ArgumentError that says what went wrong in reading the dataset."""
        from datasets.exceptions import DatasetsError

        try:
            yield
        except ArgumentError:
            raise
        except (*BROKEN, KeyError, DatasetsError) as error:
            if Path(self.path).exists():
                check_whole(find_files(Path(self.path)))
            # "An error occurred" is all that the outer one says.
            reason = first_line(error.__cause__ or error)
            rule = "be a hub name that can be reached, or an existing path of whole files"
            raise ArgumentError("dataset", rule, self.path, f"Loading it failed: {reason}") from error


class Texts:
    """The texts of a dataset, in its tables; each is read when it is asked for."""

    def __init__(self, tables: Sequence[Table], source: Source) -> None:
        self.tables, self.source = tables, source

    def read(self, numbers: Sequence[int]) -> Iterator[Rendered]:
        """Yield the texts of rows by number, without those that are empty."""
        ends = list(itertools.accumulate(len(table.rows) for table in self.tables))
        for number in numbers:
            place = bisect.bisect_right(ends, number)
            table = self.tables[place]
            row = table.rows[number - (ends[place - 1] if place else 0)]
            if (text := table.read(row, f"row {number + 1} of {self.source.path}")) is not None:
                yield text

    def stream(self) -> Iterator[Rendered]:
        """Yield all texts in their order."""
        number = 0
        for table in self.tables:
            rows = iter(table.rows)
            while (row := self._next(rows)) is not None:
                number += 1
                if (text := table.read(row, f"row {number} of {self.source.path}")) is not None:
                    yield text

    def _next(self, rows: Iterator[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        with self.source.reading():
            try:
                return next(rows, None)
            except OSError as error:
                if Path(self.source.path).exists():
                    raise
                reason = f"Reading it broke off ({error})"
                remedy = f"{reason}; run the same command again to go on from the last checkpoint."
                raise TrainingError("dataset", "stay readable to the end", self.source.path, remedy) from error
