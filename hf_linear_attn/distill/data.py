"""Training sequences: pieces of documents, mixed with generated recall tasks.

Local text alone does not tell a linear branch from none, since a window predicts it nearly as well. So a share of the
sequences asks for what stands far back. Every sequence is a function of the seed and its number alone: a run that
resumes, or that is spread over more processes, reads the same ones.
"""

import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.errors import ArgumentError, TrainingError, first_line
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.evaluation.tasks import get_task
from hf_linear_attn.evaluation.tasks.base import bos_ids, noise_lines
from hf_linear_attn.evaluation.tasks.kv_recall import PAIR, QUESTION
from hf_linear_attn.evaluation.tasks.words import ADJECTIVES, NOUNS

logger = getLogger(__name__)

K = TypeVar("K")

HELDOUT_ONE_IN = 20
"""One document in so many is held out where a dataset has no split of its own for it."""

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text", ".md": "text", ".py": "text"}
"""Readers of local files, by suffix."""

ENCODED_AT_ONCE = 64
"""Texts per call of the tokenizer: fast ones spread them over threads."""

NEEDLES = ("passkey", "niah_single", "niah_multikey")
MOST_PAIRS = 16
CONTEXT_SHARE = 0.7
"""Most of a recall sequence that its pairs and their filler take up; questions follow."""
NEAR_SHARE = 0.1
"""Share of the questions that follow right after their pair."""
SEGMENT_TOKENS = (8, 32)
"""Fewest and most tokens of a repeated segment."""


class Batch(NamedTuple):
    """Sequences of a forward."""

    input_ids: Tensor
    """``[B, T]`` int64, padded on the right."""
    weights: Tensor
    """``[B, T]`` fp32: weight of the loss of predicting token t; 0 at t = 0, in padding, and for context."""
    real: Tensor
    """``[B, T]`` bool, False in padding."""
    position_ids: Tensor | None = None
    """``[B, T]`` int64, from 0 in every document of a row; None where each row is one document."""
    numbers: tuple[int, ...] = ()
    """The rows' numbers among the sequences of their length."""

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        return self._each(lambda x: x.to(device))

    def rows(self, first: int, last: int) -> "Batch":
        """Return some of the sequences."""
        return self._each(lambda x: x[first:last])._replace(numbers=self.numbers[first:last])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.position_ids is None else change(self.position_ids)
        return Batch(change(self.input_ids), change(self.weights), change(self.real), positions, self.numbers)


class Row(NamedTuple):
    """One sequence."""

    input_ids: list[int]
    weights: list[float]
    """Weight of the loss of predicting each token."""
    starts: Sequence[int] = (0,)
    """Where its documents begin."""


class Blocks(Protocol):
    """Text sequences by number."""

    def block(self, number: int, length: int) -> Row:
        """Return at most ``length`` tokens of documents, BOS before each where the tokenizer has one."""


def lay_out(documents: Iterable[tuple[K, int]], length: int, bos: int, pack: bool) -> Iterator[list[tuple[K, int]]]:
    """Lay documents out in blocks.

    A long document fills blocks by itself, the last of which ends where it ends, so it may overlap the one before it.
    Documents that do not fill a block share one with those that follow, as many as fit whole.

    Args:
        documents: Documents, in any form, and their tokens.
        length: Tokens of a block.
        bos: Tokens that each document in a block begins with.
        pack: Whether documents may share a block.

    Yields:
        The documents of a block, each with the first token that it shows.
    """
    shared: list[tuple[K, int]] = []
    room = length
    for document, size in documents:
        if size >= length - bos:
            for start in range(0, size, length - bos):
                yield [(document, min(start, size - length + bos))]
            continue
        if shared and (not pack or size + bos > room):
            yield shared
            shared, room = [], length
        shared.append((document, 0))
        room -= size + bos
    if shared:
        yield shared


def fill(pieces: Iterable[tuple[Sequence[int], int]], length: int, bos: Sequence[int]) -> Row:
    """Return a block of documents, each from its first token shown on."""
    ids: list[int] = []
    weights: list[float] = []
    starts: list[int] = []
    for document, first in pieces:
        starts.append(len(ids))
        ids += bos
        ids += document[first : first + length - len(bos)]
        # The first token of a document is not told by the one before it.
        weights += [0.0] + [1.0] * (len(ids) - len(weights) - 1)
    return Row(ids, weights, starts)


class DocumentBlocks(Blocks):
    """Blocks of documents that are all in memory, in an order shuffled anew in every epoch.

    Args:
        documents: Token ids of each document.
        bos: What a document begins with in a block, one token or none.
        seed: Of the order.
        shortest: Tokens of the shortest blocks, which some document must fill.
        pack: Whether documents that do not fill a block share one.
    """

    def __init__(
        self, documents: Sequence[Sequence[int]], bos: Sequence[int], seed: int, shortest: int, *, pack: bool = True
    ) -> None:
        self.documents, self.bos, self.seed = documents, list(bos), seed
        self.shortest, self.pack = shortest, pack
        self._places: dict[int, list[list[tuple[int, int]]]] = {}
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def places(self, length: int) -> list[list[tuple[int, int]]]:
        """Return the documents and their first tokens of every block.

        Raises:
            ArgumentError: If every document is shorter than the shortest block.
        """
        if length not in self._places:
            sizes = [len(document) for document in self.documents]
            check_longest(max(sizes, default=0) + len(self.bos), min(length, self.shortest))
            self._places[length] = list(lay_out(enumerate(sizes), length, len(self.bos), self.pack))
        return self._places[length]

    @override
    def block(self, number: int, length: int) -> Row:
        places = self.places(length)
        epoch, index = divmod(number, len(places))
        of_epoch, order = self._orders.get(length, (-1, []))
        if of_epoch != epoch:
            order = list(range(len(places)))
            random.Random(f"{self.seed}/{length}/{epoch}").shuffle(order)
            # Steps take lengths in turn, so each keeps its own.
            self._orders[length] = epoch, order
        pieces = places[order[index]]
        return fill(((self.documents[document], first) for document, first in pieces), length, self.bos)


def check_longest(longest: int, shortest: int) -> None:
    """Refuse documents that are all shorter than the shortest block.

    Raises:
        ArgumentError: If they are.
    """
    if longest < shortest:
        raise ArgumentError(
            "block_tokens",
            f"be at most {longest}, the longest document's tokens",
            shortest,
            "What stands far back cannot be learned from such texts: lower it, or use a dataset of longer ones.",
        )


class StreamBlocks(Blocks):
    """Blocks of documents that come one by one, in their order; each length of blocks reads the stream by itself.

    Args:
        documents: Iterable over the documents' token ids, each time from the first one.
        bos: What a document begins with in a block.
        shortest: Tokens of the shortest blocks, which some document must fill.
        pack: Whether documents that do not fill a block share one.
    """

    def __init__(
        self, documents: Iterable[Sequence[int]], bos: Sequence[int], shortest: int, *, pack: bool = True
    ) -> None:
        self.documents, self.bos, self.shortest, self.pack = documents, list(bos), shortest, pack
        self._next: dict[int, int] = {}
        self._blocks: dict[int, Iterator[Row]] = {}

    def _read(self, length: int) -> Iterator[Row]:
        longest = 0

        def sized() -> Iterator[tuple[Sequence[int], int]]:
            nonlocal longest
            for document in self.documents:
                longest = max(longest, len(document) + len(self.bos))
                yield document, len(document)

        for epoch in itertools.count():
            for pieces in lay_out(sized(), length, len(self.bos), self.pack):
                yield fill(pieces, length, self.bos)
            check_longest(longest, min(length, self.shortest))
            logger.info("dataset read to its end %d times", epoch + 1)

    @override
    def block(self, number: int, length: int) -> Row:
        if number < self._next.get(length, number + 1):
            self._next[length], self._blocks[length] = 0, self._read(length)
        for _ in range(number - self._next[length]):
            next(self._blocks[length])
        self._next[length] = number + 1
        return next(self._blocks[length])


class Step(NamedTuple):
    """The sequences of an optimiser step.

    Attributes:
        length: Their tokens.
        numbers: Their numbers, over all processes.
        at_once: How many of them a forward takes.
    """

    length: int
    numbers: range
    at_once: int


def tokens_read(settings: DistillationSettings, processes: int) -> int:
    """Return how many text tokens a run reads."""
    rows = settings.rows * settings.accumulation * processes
    total = 0
    for stage in map(stage_class, settings.stages):
        # Every step of a stage reads as many tokens.
        of_a_step = stage.sequences(settings, 0, rows)
        total += stage.steps(settings) * len(of_a_step.numbers) * of_a_step.length
    return math.ceil(total * (1 - settings.recall_share))


class RecallRows:
    """Generated sequences with answers that stand far back: key-value recall, needles, and repetition.

    Args:
        tokenizer: The tokenizer.
        seed: Of everything in them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        special = set(tokenizer.all_special_ids)
        self.words = [token for token in range(len(tokenizer)) if token not in special]
        self.bos = bos_ids(tokenizer)

    def row(self, number: int, length: int) -> tuple[list[int], list[bool]]:
        """Return at most ``length`` tokens, and which of them answer a question."""
        rng = random.Random(f"{self.seed}/recall/{number}/{length}")
        kind = rng.choices(("pairs", "needle", "repeat"), (0.7, 0.15, 0.15))[0]
        if kind == "pairs":
            row = self._pairs(length, rng)
        elif kind == "needle":
            row = self._needle(length, rng)
        else:
            row = None
        return row or self._repeat(length, rng)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _pairs(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]] | None:
        count = rng.randint(2, MOST_PAIRS)
        while count > 1:
            task = get_task("kv_recall", pairs=count)
            shortest, longest = task.min_length(self.tokenizer), int(CONTEXT_SHARE * length)
            if shortest <= longest:
                break
            count -= 1
        else:
            return None
        # In a window a pair is found by another branch than beyond it, so both have their share of the questions.
        depth = 100.0 if rng.random() < NEAR_SHARE else rng.uniform(0, 100)
        sample = task.build(self.tokenizer, rng.randint(shortest, longest), depth, rng)
        row, asked = list(sample.input_ids), [False] * len(sample.input_ids)
        pairs = list(sample.meta["pairs"])
        new = _other_pairs(pairs, rng)
        # The sample's own question comes first; then others fill the row, for answers are all that is learned from.
        question_ids: list[int] = []
        _, value = pairs[0]
        while True:
            answer = self._ids(f" {value}.")
            if len(row) + len(question_ids) + len(answer) > length:
                return row, asked
            row += question_ids + answer
            asked += [False] * len(question_ids) + [True] * len(answer)
            near = bool(new) and rng.random() < NEAR_SHARE
            key, value = new.pop() if near else rng.choice(pairs)
            said = PAIR.format(key=key, value=value) if near else ""
            question_ids = self._ids("\n" + said + QUESTION.format(key=key))

    def _needle(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]] | None:
        task = get_task(rng.choice(NEEDLES))
        shortest = task.min_length(self.tokenizer)
        if shortest > length:
            return None
        sample = task.build(self.tokenizer, rng.randint(shortest, length), rng.uniform(0, 100), rng)
        answer = self._ids(" " + ", ".join(sample.references) + ".") + self.end
        row = [*sample.input_ids, *answer][:length]
        return row, [index >= len(sample.input_ids) for index in range(len(row))]

    def _repeat(self, length: int, rng: random.Random) -> tuple[list[int], list[bool]]:
        # So few tokens that a state can hold them word for word, and that they come again in a short sequence too.
        segment = rng.choices(self.words, k=min(rng.randint(*SEGMENT_TOKENS), max(2, length // 3)))
        lines = noise_lines(self.tokenizer)
        row, asked = [*self.bos, *segment], [False] * (len(self.bos) + len(segment))
        while len(row) < length:
            gap = rng.randint(0, length // 2 - 1)
            filler = list(itertools.islice(itertools.chain.from_iterable(lines), gap))
            row += filler + segment
            # Where it comes again cannot be known, only how it goes on.
            asked += [False] * (len(filler) + 1) + [True] * (len(segment) - 1)
        return row[:length], asked[:length]


def _other_pairs(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    """Return pairs of which neither word is in use, in random order."""
    used = {word for pair in pairs for word in pair}
    keys, values = ([word for word in words if word not in used] for words in (NOUNS, ADJECTIVES))
    rng.shuffle(keys)
    rng.shuffle(values)
    return list(zip(keys, values, strict=False))


class Data:
    """The sequences of a run.

    Args:
        blocks: Text.
        recall: Recall sequences.
        recall_share: Share of the latter, 0..1.
        answer_weight: Weight of an answer token.
        pad: Token that fills up short rows.
    """

    def __init__(
        self, blocks: Blocks, recall: RecallRows, *, recall_share: float, answer_weight: float, pad: int
    ) -> None:
        self.blocks, self.recall = blocks, recall
        self.recall_share, self.answer_weight, self.pad = recall_share, answer_weight, pad

    def batch(self, numbers: Iterable[int], length: int) -> Batch:
        """Return the sequences of those numbers, ``T = length``."""
        numbers = tuple(numbers)
        rows = []
        for number in numbers:
            # Shares hold in any run of rows as nearly as whole rows allow.
            before, after = int(number * self.recall_share), int((number + 1) * self.recall_share)
            if after > before:
                rows.append(self.recall_row(before, length))
            else:
                rows.append(self.text_row(number - before, length))
        return self.collate(rows, length)._replace(numbers=numbers)

    def text_row(self, number: int, length: int) -> Row:
        """Return a text sequence."""
        return self.blocks.block(number, length)

    def recall_row(self, number: int, length: int) -> Row:
        """Return a recall sequence."""
        ids, asked = self.recall.row(number, length)
        # However many answers it has, a row weighs no more than a row of text.
        weight = min(self.answer_weight, length / max(1, sum(asked)))
        return Row(ids, [weight * flag for flag in asked])

    def collate(self, rows: Sequence[Row], length: int) -> Batch:
        """Pad sequences to one length."""
        ids = torch.full((len(rows), length), self.pad)
        weights = torch.zeros(len(rows), length)
        real = torch.zeros(len(rows), length, dtype=torch.bool)
        positions = torch.arange(length).repeat(len(rows), 1)
        for index, row in enumerate(rows):
            ids[index, : len(row.input_ids)] = torch.tensor(row.input_ids)
            weights[index, : len(row.input_ids)] = torch.tensor(row.weights)
            real[index, : len(row.input_ids)] = True
            for start in row.starts:
                positions[index, start:] -= positions[index, start].item()
        packed = any(len(row.starts) > 1 for row in rows)
        return Batch(ids, weights, real, positions if packed else None)


def load_data(
    settings: DistillationSettings, tokenizer: PreTrainedTokenizerBase, *, processes: int = 1
) -> tuple[Data, Data]:
    """Load what a run reads.

    Args:
        settings: The settings.
        tokenizer: The model's tokenizer.
        processes: Number of processes that share the rows.

    Returns:
        Training and held-out data.

    Raises:
        ArgumentError: If the dataset, its column or its documents do not fit the settings.
        TrainingError: If reading the dataset breaks off.
    """
    bos, end = bos_ids(tokenizer), [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    needed = tokens_read(settings, processes)

    def encode(texts: Sequence[str], enough: float = math.inf) -> list[Sequence[int]]:
        """Tokenise texts in a fixed random order until they have ``enough`` tokens; others are not even read."""
        order = list(range(len(texts)))
        random.Random(settings.seed).shuffle(order)
        found: list[Sequence[int]] = []
        tokens = 0
        for start in range(0, len(order), ENCODED_AT_ONCE):
            part = [text for index in order[start : start + ENCODED_AT_ONCE] if has_words(text := texts[index])]
            # Documents are longer than a model's context; they are cut into blocks, so no warning is due.
            for ids in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] if part else []:
                # A list would take nine times the memory.
                found.append(array("i", [*ids, *end]))
                tokens += len(ids)
            if tokens >= enough:
                break
        return found

    def blocks(documents: Sequence[Sequence[int]], shortest: int = 0) -> DocumentBlocks:
        return DocumentBlocks(documents, bos, settings.seed, shortest, pack=settings.pack)

    shortest = settings.block_tokens
    training: Blocks
    if settings.dataset is None:
        training = blocks(encode(load_stdlib_documents("train"), needed), shortest)
        heldout = blocks(encode(load_stdlib_documents("heldout"), (settings.heldout_rows + 1) * shortest))
    elif settings.streaming:
        texts = _read_dataset(settings)
        first = list(itertools.islice(texts, HELDOUT_ONE_IN))
        check_not_empty(settings, first)
        heldout = blocks(encode(first))
        training = StreamBlocks(_Reread(settings, encode, skip=len(first)), bos, shortest, pack=settings.pack)
    else:
        documents = encode(open_texts(settings), needed)
        check_not_empty(settings, documents)
        if len(documents) < HELDOUT_ONE_IN:
            # So few documents that leaving whole ones out would hurt: their last twentieth is held out.
            cuts = [len(ids) - len(ids) // HELDOUT_ONE_IN for ids in documents]
            training = blocks([d[:c] for d, c in zip(documents, cuts, strict=True)], shortest)
            heldout = blocks([d[c:] for d, c in zip(documents, cuts, strict=True)])
        else:
            training = blocks([d for n, d in enumerate(documents) if n % HELDOUT_ONE_IN], shortest)
            heldout = blocks(documents[::HELDOUT_ONE_IN])
    if isinstance(training, DocumentBlocks):
        count = len(training.places(shortest))
        if count < processes * settings.rows:
            raise ArgumentError(
                "rows",
                f"leave every one of {processes} processes a row of the dataset's {count} blocks",
                settings.rows,
                "Use fewer processes or rows, shorter blocks, or a larger dataset.",
            )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    shares: dict[str, Any] = {
        "recall_share": settings.recall_share,
        "answer_weight": settings.answer_weight,
        "pad": pad,
    }
    return (
        Data(training, RecallRows(tokenizer, settings.seed), **shares),
        Data(heldout, RecallRows(tokenizer, settings.seed + 1), **shares),
    )


def has_words(text: object) -> bool:
    """Tell whether there is anything to read.

    Raises:
        ArgumentError: If it is no text at all.
    """
    if text is not None and not isinstance(text, str):
        raise ArgumentError("text_column", "hold texts", text, "Name the column that does.")
    return bool(text) and not str(text).isspace()


def check_not_empty(settings: DistillationSettings, found: Sequence[Any]) -> None:
    """Raise an ArgumentError if nothing was found."""
    if not found:
        raise ArgumentError(
            "dataset",
            f"hold text in the column {settings.text_column!r}",
            settings.dataset,
            "It is empty: check the path, the split and the column.",
        )


class _Reread:
    """Iterable over a streamed dataset's documents; each iteration reads it from the start."""

    def __init__(self, settings: DistillationSettings, encode: Any, skip: int) -> None:
        self.settings, self.encode, self.skip = settings, encode, skip

    def __iter__(self) -> Iterator[Sequence[int]]:
        for text in itertools.islice(_read_dataset(self.settings), self.skip, None):
            yield from self.encode([text])


def open_texts(settings: DistillationSettings) -> Any:
    """Open the text column of the dataset that the settings name.

    Returns:
        A sequence whose texts are read when they are asked for, or, where the dataset streams, an iterable.

    Raises:
        ArgumentError: If there is no such dataset or column.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path = Path(settings.dataset or "")
    arguments: dict[str, Any] = {
        "path": settings.dataset,
        "name": settings.dataset_config,
        "split": settings.dataset_split,
    }
    column = settings.text_column
    if path.exists():
        files = sorted(p for p in path.rglob("*") if p.suffix in FORMATS) if path.is_dir() else [path]
        kinds = {FORMATS.get(p.suffix) for p in files}
        if len(kinds) != 1 or None in kinds:
            raise ArgumentError(
                "dataset",
                "be a file or folder of one kind of file",
                str(path),
                "Convert or separate the files",
                available=FORMATS,
            )
        if not any(p.stat().st_size for p in files):
            check_not_empty(settings, [])
        kind = kinds.pop()
        arguments = {"path": kind, "data_files": [str(p) for p in files], "split": "train"}
        if kind == "text":
            arguments["sample_by"], column = "document", "text"
    try:
        dataset = load_dataset(**arguments, streaming=settings.streaming)
    except (OSError, ValueError, DatasetsError) as error:
        raise unreadable(settings, error) from error
    columns = dataset.column_names
    if columns is not None and column not in columns:
        raise ArgumentError("text_column", "be a column of the dataset", column, "Use one of those", available=columns)
    return dataset[column]


def unreadable(settings: DistillationSettings, error: Exception) -> ArgumentError:
    """Return the error of a dataset that is not there, or not what it should be."""
    # "An error occurred" is all that the outer one says.
    reason = first_line(error.__cause__ or error)
    rule = "be a hub name that can be reached, or an existing path of whole files"
    return ArgumentError("dataset", rule, settings.dataset, f"Loading it failed: {reason}")


def _read_dataset(settings: DistillationSettings) -> Iterator[str]:
    """Yield the texts of the dataset that the settings name, in their order."""
    try:
        for text in open_texts(settings):
            if has_words(text):
                yield text
    except ArgumentError:
        raise
    except ValueError as error:
        raise unreadable(settings, error) from error
    except (ConnectionError, OSError) as error:
        raise TrainingError(
            "dataset",
            "stay readable to the end",
            settings.dataset,
            f"Reading it broke off ({error}); run the same command again to go on from the last checkpoint.",
        ) from error
