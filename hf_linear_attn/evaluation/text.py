"""The text that perplexity is measured on: documents, their tokens and the windows that score each token once."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.stdlib_text import load_stdlib_documents
from hf_linear_attn.evaluation.tasks.base import bos_ids
from hf_linear_attn.loading import read_text

STDLIB_SOURCE = "held-out source files of the Python standard library"


@dataclass(frozen=True)
class Document:
    """A tokenised document.

    Args:
        ids: Its tokens, without BOS.
        scored_bytes: UTF-8 bytes of the tokens that are scored.
    """

    ids: tuple[int, ...]
    scored_bytes: int


@dataclass(frozen=True)
class Corpus:
    """The evaluation text.

    Args:
        documents: Tokenised documents.
        bos: The BOS token in a tuple, put before every window; empty where the tokenizer adds none, and then the first
            token of each document is not scored.
        source: Where the text came from, for the report.
    """

    documents: tuple[Document, ...]
    bos: tuple[int, ...]
    source: str

    def facts(self) -> dict[str, Any]:
        """Return the provenance of the text, ready for JSON."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(str(document.ids).encode())
        skipped = 0 if self.bos else 1
        return {
            "source": self.source,
            "documents": len(self.documents),
            "scored_tokens": sum(len(document.ids) - skipped for document in self.documents),
            "scored_bytes": sum(document.scored_bytes for document in self.documents),
            "longest_document": max(len(document.ids) for document in self.documents),
            "bos": bool(self.bos),
            "sha256": digest.hexdigest(),
        }


@dataclass(frozen=True)
class Window:
    """A stretch of a document that is read from a fresh state.

    Args:
        document: Index of the document.
        start: First token.
        stop: One past the last.
        score_from: First token that is scored here; those before it are context.
    """

    document: int
    start: int
    stop: int
    score_from: int


def load_corpus(
    tokenizer: PreTrainedTokenizerBase,
    text_file: str | None = None,
    *,
    joined: bool = False,
    max_tokens: int = 0,
    name: str = "text_file",
) -> Corpus:
    """Read and tokenise the evaluation text.

    Args:
        tokenizer: The tokenizer.
        text_file: UTF-8 text; held-out source of the standard library without it.
        joined: Read all documents as one text.
        max_tokens: Most tokens, 0 for all of them.
        name: The setting that named the file, for errors.

    Raises:
        ArgumentError: If the text file cannot be read as UTF-8 or holds too little text.
    """
    if text_file is None:
        texts, source = load_stdlib_documents("heldout"), STDLIB_SOURCE
        # Long files first, so that a budget of tokens buys long contexts.
        texts.sort(key=len, reverse=True)
    else:
        texts, source = [read_text(text_file, name)], Path(text_file).name
    if joined:
        texts = ["\n".join(texts)]
    bos = bos_ids(tokenizer)
    left = max_tokens or None
    documents = []
    for text in texts:
        if left is not None and left < 2:
            break
        document = _tokenise(tokenizer, text, left, skip_first=not bos)
        if len(document.ids) < 2:
            continue
        documents.append(document)
        if left is not None:
            left -= len(document.ids)
    if not documents:
        raise ArgumentError(name, "hold at least two tokens of text", text_file, "Choose a longer text.")
    return Corpus(tuple(documents), bos, source)


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str, limit: int | None, *, skip_first: bool) -> Document:
    """Tokenise a document, up to `limit` tokens, and count the bytes of what is scored."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoded["input_ids"][:limit], encoded["offset_mapping"][:limit]
        if len(ids) < 2:
            return Document(tuple(ids), 0)
        whole = len(ids) == len(encoded["input_ids"])
        scored = text[offsets[0][1] if skip_first else 0 : None if whole else offsets[-1][1]]
        return Document(tuple(ids), len(scored.encode()))
    every = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = every[:limit]
    scored = ids[1:] if skip_first else ids
    size = (
        len(text.encode()) if len(ids) == len(every) and not skip_first else len(str(tokenizer.decode(scored)).encode())
    )
    return Document(tuple(ids), size)


def plan_windows(corpus: Corpus, length: int, stride: int | None) -> list[Window]:
    """Cut every document into windows of at most `length` tokens, BOS included, that score each token once.

    Args:
        corpus: The text.
        length: Tokens a model reads from a fresh state, BOS included.
        stride: Tokens between the starts of two windows; None lets them follow one another without overlap.

    Raises:
        ArgumentError: If the stride leaves tokens out.
    """
    size = length - len(corpus.bos)
    # Without BOS the first token of a window is not predicted, so the next window begins one token early.
    longest_stride = size if corpus.bos else size - 1
    step = longest_stride if stride is None else stride
    if not 1 <= step <= longest_stride:
        raise ArgumentError(
            "stride", f"lie in 1..{longest_stride}", step, "A longer one would skip tokens.", where=f"{length} tokens"
        )
    windows = []
    for number, document in enumerate(corpus.documents):
        scored_to = 0 if corpus.bos else 1
        start = 0
        while scored_to < len(document.ids):
            stop = min(start + size, len(document.ids))
            windows.append(Window(number, start, stop, scored_to))
            scored_to = stop
            start += step
    return windows


def plan_final_windows(corpus: Corpus, context: int, longest: int, final: int, count: int) -> list[Window]:
    """Choose places where the same `final` tokens can be read under any context up to `longest` tokens.

    Args:
        corpus: The text.
        context: Tokens to read in each window, BOS and the final ones included.
        longest: The longest context of the run; the places depend on it, not on `context`.
        final: Tokens scored at the end of each window.
        count: Most places.

    Returns:
        The windows; empty where no document is long enough.
    """
    size, span = context - len(corpus.bos), longest - len(corpus.bos)
    ends = [
        (number, stop)
        for number, document in enumerate(corpus.documents)
        for stop in range(span, len(document.ids) + 1, max(final, span // 4))
    ]
    # Spread over all that is there rather than the first document.
    chosen = [ends[i * len(ends) // min(count, len(ends))] for i in range(min(count, len(ends)))]
    return [Window(number, stop - size, stop, stop - final) for number, stop in chosen]


def window_ids(corpus: Corpus, windows: Sequence[Window]) -> list[tuple[int, ...]]:
    """Return the tokens of each window, BOS included."""
    return [corpus.bos + corpus.documents[window.document].ids[window.start : window.stop] for window in windows]
