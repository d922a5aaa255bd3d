"""What a run reads: its datasets, mixed with generated recall tasks.

Every sequence is a function of the seed and its number alone: a run that resumes, or that is spread over more
processes, reads the same ones.
"""

import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.distill.data.blocks import Blocking, Blocks, DocumentBlocks, MixedBlocks, StreamBlocks
from hf_linear_attn.distill.data.chat import Rendered, Span, has_text
from hf_linear_attn.distill.data.passages import InText, passages_of
from hf_linear_attn.distill.data.recall import RecallRows
from hf_linear_attn.distill.data.rows import Batch, Document, Row, collate
from hf_linear_attn.distill.data.source import Source, Texts
from hf_linear_attn.distill.data.steps import numbers_before, tokens_read
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.encoders import Frame
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.evaluation.tasks.base import bos_ids
from hf_linear_attn.loading import read_text

HELDOUT_ONE_IN = 20
"""One document in so many is held out where a dataset has no split of its own for it."""

ENCODED_AT_ONCE = 64
"""Texts per call of the tokenizer: fast ones spread them over threads."""


@dataclass(eq=False)
class Data:
    """The sequences of a run.

    Args:
        blocks: Text.
        recall: Recall sequences.
        recall_share: Share of the latter, 0..1.
        answer_weight: Weight of an answer token.
        pad: Token that fills up short rows.
        crop: Whether a batch is as long as its longest row, in place of as long as asked for.
    """

    blocks: Blocks
    recall: RecallRows
    _: KW_ONLY
    recall_share: float
    answer_weight: float
    pad: int
    crop: bool = False

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
        if self.crop:
            length = max(len(row.input_ids) for row in rows)
        return collate(rows, length, self.pad)


def mark(spans: Sequence[Span], answers: Sequence[Span]) -> bytes:
    """Return a byte for each token, 1 where it has a character of an answer; both in order.

    Example:
        >>> list(mark([(0, 3), (3, 5), (5, 9)], [(4, 6)]))
        [0, 1, 1]
    """
    flags = bytearray(len(spans))
    place = 0
    for index, (start, end) in enumerate(spans):
        while place < len(answers) and answers[place][1] <= start:
            place += 1
        flags[index] = place < len(answers) and start < end and end > answers[place][0]
    return bytes(flags)


Parts = tuple[Blocks, Blocks]
"""The blocks of a dataset for training, and those that are held out."""


class Loader:
    """Loads the datasets of a run, whose rows so many processes share."""

    def __init__(self, settings: DistillationSettings, tokenizer: PreTrainedTokenizerBase, processes: int) -> None:
        self.settings, self.tokenizer, self.processes = settings, tokenizer, processes
        # What ends a document, unless it is a conversation.
        self.end: list[int] = []
        self.encoder = settings.encoder
        if self.encoder:
            # Every row is one text, between the tokens that its embedding is made with, however short.
            begin, close = Frame.of(tokenizer)
            self.blocking = Blocking(begin, 0, False, close)
        else:
            self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            self.blocking = Blocking(bos_ids(tokenizer), settings.block_tokens, settings.pack)

    def load(self) -> Parts:
        """Return the blocks of all datasets, each with its share."""
        settings = self.settings
        needed = tokens_read(settings, self.processes)
        if settings.dataset is None:
            longest = max(settings.factors()) if settings.encoder else 1
            heldout = (settings.heldout_rows + 1) * settings.block_tokens * longest
            training = self._encode_stdlib("train", needed)
            return self._blocks(training, self.blocking.shortest), self._blocks(self._encode_stdlib("heldout", heldout))
        opened = [source.open(self.tokenizer, streaming=settings.streaming) for source in sources_of(settings)]
        check_columns(settings, opened)
        weights = settings.dataset_weights or [1.0] * len(opened)
        if settings.streaming:
            parts = [self._stream(texts) for texts in opened]
        else:
            parts = [
                self._load(texts, needed * weight / sum(weights)) for texts, weight in zip(opened, weights, strict=True)
            ]
        if len(parts) == 1:
            return parts[0]
        return MixedBlocks([part[0] for part in parts], weights), MixedBlocks([part[1] for part in parts], weights)

    def _stream(self, texts: Texts) -> Parts:
        """Return the blocks of a dataset that is read as it is needed; its first texts are held out."""
        first = list(itertools.islice(texts.stream(), HELDOUT_ONE_IN))
        check_not_empty(texts.source, first)
        documents = _Streamed(texts, self.documents, skip=len(first))
        return StreamBlocks(documents, self.blocking), self._blocks(self.documents(first))

    def _load(self, texts: Texts, enough: float) -> Parts:
        """Return the blocks of a dataset of which so many tokens are needed."""
        found = self._encode(sum(len(table.rows) for table in texts.tables), texts.read, enough)
        check_not_empty(texts.source, found)
        if len(found) < HELDOUT_ONE_IN and all(document.taught is None for document in found):
            # So few texts that leaving whole ones out would hurt: their last twentieth is held out.
            cuts = [len(d.ids) - len(d.ids) // HELDOUT_ONE_IN for d in found]
            training = [d.part(0, cut) for d, cut in zip(found, cuts, strict=True)]
            heldout = [d.part(cut, len(d.ids)) for d, cut in zip(found, cuts, strict=True)]
        else:
            training = [d for n, d in enumerate(found) if n % HELDOUT_ONE_IN]
            heldout = found[::HELDOUT_ONE_IN]
        return self._blocks(training, self.blocking.shortest), self._blocks(heldout)

    def _encode_stdlib(self, part: Literal["train", "heldout"], enough: float) -> list[Document]:
        texts = load_stdlib_documents(part)
        return self._encode(
            len(texts), lambda numbers: (Rendered(texts[n]) for n in numbers if has_text(texts[n])), enough
        )

    def _encode(self, count: int, read: Callable[[Sequence[int]], Iterable[Rendered]], enough: float) -> list[Document]:
        """Tokenise texts in a fixed random order until they have ``enough`` tokens; others are not even read."""
        order = list(range(count))
        random.Random(self.settings.seed).shuffle(order)
        found: list[Document] = []
        tokens = 0
        for start in range(0, count, ENCODED_AT_ONCE):
            documents = self.documents(list(read(order[start : start + ENCODED_AT_ONCE])))
            tokens += sum(len(document.ids) for document in documents)
            found += documents
            if tokens >= enough:
                break
        return found

    def documents(self, texts: Sequence[Rendered]) -> list[Document]:
        """Return the tokens of texts, and which are learned."""
        if not texts:
            return []
        all_learned = self.encoder or self.settings.loss_on == "all"
        partly = not all_learned and any(text.answers is not None for text in texts)
        if partly and not self.tokenizer.is_fast:
            rule = "be `all` with a tokenizer that does not tell which characters a token has"
            remedy = "Use it, or a fast tokenizer."
            raise ArgumentError("loss_on", rule, "answers", remedy, where=type(self.tokenizer).__name__)
        # Documents are longer than a model's context; they are cut into blocks, so no warning is due.
        encoded = self.tokenizer(
            [text.text for text in texts], add_special_tokens=False, verbose=False, return_offsets_mapping=partly
        )
        found = []
        for number, (text, ids) in enumerate(zip(texts, encoded["input_ids"], strict=True)):
            taught = None
            if text.answers is not None and partly:
                taught = mark(encoded["offset_mapping"][number], text.answers) + b"\1" * (len(self.end) * text.eos)
            # A list would take nine times the memory.
            found.append(
                Document(array("i", [*ids, *(self.end if text.eos else [])]), taught, text.bos or self.encoder)
            )
        return found

    def _blocks(self, documents: Sequence[Document], shortest: int = 0) -> DocumentBlocks:
        return DocumentBlocks(documents, self.blocking._replace(shortest=shortest), self.settings.seed)


class _Streamed:
    """Iterable over a streamed dataset's documents; each iteration reads it from the start."""

    def __init__(self, texts: Texts, encode: Callable[[Sequence[Rendered]], list[Document]], skip: int) -> None:
        self.texts, self.encode, self.skip = texts, encode, skip

    def __iter__(self) -> Iterator[Document]:
        for text in itertools.islice(self.texts.stream(), self.skip, None):
            yield from self.encode([text])


def load_data(
    settings: DistillationSettings, tokenizer: PreTrainedTokenizerBase, *, processes: int = 1
) -> tuple[Data, Data]:
    """Load what a run reads.

    Args:
        settings: The settings.
        tokenizer: The model's tokenizer; it gets the settings' chat template, if they name one.
        processes: Number of processes that share the rows.

    Returns:
        Training and held-out data.

    Raises:
        ArgumentError: If a dataset, its columns, its conversations or its documents do not fit the settings.
        TrainingError: If reading a dataset breaks off.
    """
    if settings.chat_template is not None:
        tokenizer.chat_template = read_text(settings.chat_template, "chat_template")
    training, heldout = Loader(settings, tokenizer, processes).load()
    if isinstance(training, DocumentBlocks):
        count = len(training.places(settings.block_tokens))
        if count < processes * settings.rows:
            rule = f"leave every one of {processes} processes a row of the dataset's {count} blocks"
            remedy = "Use fewer processes or rows, shorter blocks, or a larger dataset."
            raise ArgumentError("rows", rule, settings.rows, remedy)
    in_text = text_of_recall(settings, tokenizer, training, processes) if settings.recall_text else None
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    shares: dict[str, Any] = {"recall_share": settings.recall_share, "answer_weight": settings.answer_weight}
    shares |= {"pad": pad, "crop": settings.encoder}
    return (
        Data(training, RecallRows(tokenizer, settings.seed, in_text=in_text), **shares),
        Data(heldout, RecallRows(tokenizer, settings.seed + 1), **shares),
    )


def text_of_recall(
    settings: DistillationSettings, tokenizer: PreTrainedTokenizerBase, training: Blocks, processes: int
) -> InText:
    """Return which recall sequences are set into text of the training data, never into what is held out."""
    passages = passages_of(training, tokenizer)
    if (held := len(passages.ids)) < (longest := settings.trained_length()):
        rule = f"be 0 where the training text, of {held} tokens, is shorter than the longest sequences, of {longest}"
        remedy = "Use a larger dataset, or shorter sequences."
        raise ArgumentError("recall_text", rule, settings.recall_text, remedy)
    before = numbers_before(settings, processes, settings.recall_text_from)
    first = {length: int(number * settings.recall_share) for length, number in before.items()}
    return InText(passages, settings.recall_text, first)


def sources_of(settings: DistillationSettings) -> list[Source]:
    """Return the datasets that the settings name."""
    paths = settings.dataset or []
    columns = tuple((name, column) for name, _, column in (text.partition("=") for text in settings.columns))
    return [
        Source(path, config, split, columns)
        for path, config, split in zip(
            paths,
            one_each(settings.dataset_config or [None], len(paths)),
            one_each(settings.dataset_split, len(paths)),
            strict=True,
        )
    ]


def one_each(values: Sequence[Any], count: int) -> Sequence[Any]:
    """Return one value for each dataset."""
    return values if len(values) == count else [values[0]] * count


def check_columns(settings: DistillationSettings, opened: Iterable[Texts]) -> None:
    """Refuse columns that the settings name and no dataset has."""
    used = {pair for texts in opened for table in texts.tables for pair in table.columns.items()}
    for text in settings.columns:
        name, _, column = text.partition("=")
        if (name, column) not in used:
            rule = "name columns of a dataset that its form has"
            remedy = "Remove it, or name one of those that are read"
            raise ArgumentError("columns", rule, text, remedy, available=sorted({column for _, column in used}))


def check_not_empty(source: Source, found: Sequence[Any]) -> None:
    """Raise an ArgumentError if nothing was found."""
    if not found:
        remedy = "It is empty: check the path, the split and the columns."
        raise ArgumentError("dataset", "hold text", source.path, remedy)
