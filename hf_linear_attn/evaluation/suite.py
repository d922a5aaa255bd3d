"""What a suite is: one kind of measurement, from its check to its part of the report; and the registry of suites.

A suite is one file with a class decorated by `register_suite`. An object of it measures; its class methods read results
alone, so that a saved `results.json` is reported, compared and combined without a model.
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.cost import Pace
from hf_linear_attn.evaluation.settings import SUITES, EvaluationSettings
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.view import Headline, Results, Section, Table
from hf_linear_attn.files import run_file
from hf_linear_attn.loading import Kind, users_code


@dataclass(frozen=True)
class NoSettings:
    """A suite that needs no settings of its own."""


@dataclass(frozen=True)
class Plan:
    """What a suite has to do.

    Args:
        total: Length of its progress bar.
        tokens: Tokens that models read.
        seconds: How long that takes.
    """

    total: int
    tokens: int = 0
    seconds: float = 0.0


class Suite(ABC):
    """One kind of measurement.

    Args:
        settings: What to run.
        subjects: The models, the one under test first.
        tokenizer: Their tokenizer.

    Attributes:
        name: What `--suite` calls it.
        title: Heading of its settings in the help.
        kind: The kind of model that it measures.
        Settings: Dataclass of its own settings; every field is a flag too.
        parts: The keys of `results.json` that it fills, with what stands there where it did not run.
        row_key: Names that tell the rows of its parts apart.
        place: Where it stands in the report; the smallest is first.
        by_default: Whether it runs where no suite is named.
        goes_first: Whether it runs before the others.
        alone: Whether the first process does it alone, where there are several.
        unit: Unit of its progress bar.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kind: ClassVar[Kind] = "causal"
    Settings: ClassVar[type] = NoSettings
    parts: ClassVar[Mapping[str, Any]]
    row_key: ClassVar[Sequence[str]] = ("model", "task", "length")
    place: ClassVar[int] = 100
    by_default: ClassVar[bool] = False
    goes_first: ClassVar[bool] = False
    alone: ClassVar[bool] = True
    unit: ClassVar[str] = "tok"

    def __init__(
        self, settings: EvaluationSettings, subjects: Sequence[Subject], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.settings, self.subjects, self.tokenizer = settings, subjects, tokenizer
        self.own: Any = settings.of(self.Settings)

    @cached_property
    def teacher(self) -> Subject | None:
        """The softmax model that stands beside the one under test, if one does."""
        return next((subject for subject in self.subjects if subject.role == "teacher"), None)

    def able(self, length: int) -> list[Subject]:
        """Return the models that can read so many tokens."""
        return [subject for subject in self.subjects if subject.refusal(length) is None]

    def record(self, store: SampleStore, subject: Subject, what: object) -> dict[str, Any] | None:
        """Return what :meth:`keep` put into a store, if it did."""
        return store.get(store.key(subject.fingerprint, f"{self.name}/{subject.name}/{what}"))

    def keep(self, store: SampleStore, subject: Subject, what: object, **values: Any) -> None:
        """Put values of a model into a store, under a name of their own."""
        name = f"{self.name}/{subject.name}/{what}"
        store.add([{"key": store.key(subject.fingerprint, name), "id": name, **values}])

    @abstractmethod
    def check(self) -> None:
        """Refuse at once, with an error of this package, what cannot work."""

    @abstractmethod
    def plan(self, paces: Mapping[str, Pace]) -> Plan:
        """Say what there is to do, from how fast each model is; one that can read no length is not among them."""

    @abstractmethod
    def run(self, store: SampleStore, advance: Callable[[int], Any], *, rank: int = 0, world: int = 1) -> None:
        """Measure what the store does not hold yet, and put it there.

        Args:
            store: Where the records go.
            advance: Moves the progress bar.
            rank: Number of this process.
            world: Number of processes that share the work.
        """

    @abstractmethod
    def collect(self, store: SampleStore) -> dict[str, Any]:
        """Turn the store's records into the suite's parts of `results.json`."""

    @classmethod
    def conclude(cls, results: Results) -> dict[str, Any]:
        """Return what follows from the parts: further keys of `results.json`."""
        return {}

    @classmethod
    def quality(cls, results: Results) -> list[str]:
        """Say in sentences what was measured."""
        return []

    @classmethod
    def speed(cls, results: Results) -> list[str]:
        """Say in sentences what depends on a clock."""
        return []

    @classmethod
    def headlines(cls, results: Results) -> list[Headline]:
        """Return the figures for the report's first screen."""
        return []

    @classmethod
    def pictures(cls, results: Results) -> list[Section]:
        """Draw the pictures."""
        return []

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Return the tables."""
        return []

    @classmethod
    def without_times(cls, results: dict[str, Any]) -> dict[str, Any]:
        """Return results without what a clock decides; they may be changed."""
        return results

    @classmethod
    def merge(cls, merged: dict[str, Any], run: Results, lead: Results, label: str) -> str | None:
        """Add a run's parts to those of other runs; the default joins lists of rows, each row once.

        Args:
            merged: The parts so far; of no run at first, as in `parts`.
            run: A run's results.
            lead: Those of the first run.
            label: The run's name.

        Returns:
            What a reader has to know, if anything.
        """
        for part, empty in cls.parts.items():
            if isinstance(empty, list):
                extend(merged[part], run.get(part, []), cls.row_key)
        return None


def extend(rows: list[dict[str, Any]], more: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
    """Add rows that are not there yet."""
    have = {tuple(row.get(name) for name in key) for row in rows}
    rows.extend(dict(row) for row in more if tuple(row.get(name) for name in key) not in have)


_SuiteType = TypeVar("_SuiteType", bound=type[Suite])


def register_suite(cls: _SuiteType) -> _SuiteType:
    """Register a suite under its `name`, with its settings; usable as a decorator.

    Raises:
        ArgumentError: If another class holds the name, or a setting has the name of another.
    """
    held = SUITES.get(cls.name, cls)
    if (held.__module__, held.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ArgumentError("name", "be new", cls.name, "Choose another one.", where=cls.__qualname__)
    others = [suite for suite in suites() if suite.name != cls.name]
    # They become attributes beside those of all suites.
    of_all = {"own", *dir(EvaluationSettings)}
    for name, taken in [("all suites", of_all), *((suite.name, _names(suite.Settings)) for suite in others)]:
        clash = sorted(_names(cls.Settings) & taken)
        if clash:
            remedy = f"They belong to {name}."
            raise ArgumentError("Settings", "have names of their own", clash, remedy, where=cls.name)
    ordered: list[type[Suite]] = sorted([*others, cls], key=lambda suite: (suite.place, suite.name))
    SUITES.clear()
    SUITES.update({suite.name: suite for suite in ordered})
    return cls


def _names(settings: type) -> set[str]:
    return {field.name for field in dataclasses.fields(settings)}


def suites() -> list[type[Suite]]:
    """Return the registered suites in the order of the report."""
    return list(SUITES.values())


def suites_of(settings: EvaluationSettings) -> list[type[Suite]]:
    """Return the suites to run, in that order."""
    chosen = [suite for suite in suites() if suite.name in settings.suite]
    return sorted(chosen, key=lambda suite: not suite.goes_first)


def load_users_suites(file: str | Path) -> None:
    """Run the Python file that `--suite-file` names.

    Raises:
        ArgumentError: If it fails, or registers no suite.
    """
    with users_code(file, "suite_file"):
        name = run_file(file, "suite_file", "suites_of_")
    if not any(suite.__module__ == name for suite in suites()):
        raise ArgumentError("suite_file", "register a suite", str(file), "Decorate its class with @register_suite.")


def with_parts(results: Results) -> dict[str, Any]:
    """Return results in which every suite has its parts: a run knows nothing of suites that came later."""
    parts = {name: copy.deepcopy(empty) for suite in suites() for name, empty in suite.parts.items()}
    return {**parts, **results}
