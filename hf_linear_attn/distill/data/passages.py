"""Text of the training data as a haystack, so that recall sequences are of text, too."""

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from hf_linear_attn.distill.data.blocks import Blocks, DocumentBlocks, MixedBlocks, StreamBlocks
from hf_linear_attn.evaluation.tasks.haystack import RealText, encode, line_starts

MOST_TOKENS = 2**22
"""Tokens of the training text that needles are hidden in: the first ones, where there are more."""


class Passages(RealText):
    """Tokens of training text as a haystack."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
        self.ids, self.breaks = ids, line_starts(tokenizer, ids)

    @property
    @override
    def name(self) -> str:
        return "training text"

    @override
    def stream(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Sequence[int], Sequence[int]]:
        return self.ids, self.breaks


class InText(NamedTuple):
    """Which recall sequences are set into text.

    Attributes:
        passages: The text.
        share: Share of the recall sequences, 0..1; it holds in any run of them as nearly as whole ones allow.
        first: The number of the first one that may be, by length; 0 for a length that it does not name.
    """

    passages: RealText
    share: float
    first: Mapping[int, int]

    def haystack(self, number: int, length: int) -> RealText | None:
        """Return what a recall sequence is set into, None for noise."""
        since = number - self.first.get(length, 0)
        chosen = since >= 0 and int((since + 1) * self.share) > int(since * self.share)
        return self.passages if chosen else None


def passages_of(blocks: Blocks, tokenizer: PreTrainedTokenizerBase, most: int = MOST_TOKENS) -> Passages:
    """Return the text of training blocks, of each dataset as large a part as it is read of, without special tokens."""
    return Passages(tokenizer, array("i", _tokens(blocks, tokenizer, most)))


def _tokens(blocks: Blocks, tokenizer: PreTrainedTokenizerBase, most: int) -> Iterable[int]:
    if isinstance(blocks, MixedBlocks):
        whole = sum(blocks.weights)
        parts = zip(blocks.parts, blocks.weights, strict=True)
        return itertools.chain.from_iterable(
            _tokens(part, tokenizer, int(most * weight / whole)) for part, weight in parts
        )
    if not isinstance(blocks, (DocumentBlocks, StreamBlocks)):
        raise TypeError(f"no documents in {type(blocks).__name__}")
    between, special = encode(tokenizer, "\n"), set(tokenizer.all_special_ids)
    texts = ((*(token for token in document.ids if token not in special), *between) for document in blocks.documents)
    return itertools.islice(itertools.chain.from_iterable(texts), most)
