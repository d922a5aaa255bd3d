"""Generated sequences that ask for what stands far back.

Local text alone does not tell a linear branch from none, since a window predicts it nearly as well. So a share of the
sequences are these.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_linear_attn.distill.data.passages import InText
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks import Task, available_tasks, get_task
from hf_linear_attn.evaluation.tasks.base import NOISE, bos_ids
from hf_linear_attn.evaluation.tasks.haystack import Haystack, RealText
from hf_linear_attn.evaluation.tasks.pairs import KVRecall
from hf_linear_attn.evaluation.tasks.words import ADJECTIVES, NOUNS

NEEDLES = ("passkey", "niah_single", "niah_multikey")
MOST_PAIRS = 16
CONTEXT_SHARE = 0.7
"""Most of a recall sequence that its pairs and their filler take up; questions follow."""
NEAR_SHARE = 0.1
"""Share of the questions that follow right after their pair."""
SEGMENT_TOKENS = (8, 32)
"""Fewest and most tokens of a repeated segment."""

Asked = tuple[list[int], list[bool]]
"""A sequence's tokens, and which of them answer a question."""


def training_task(name: str, *, haystack: Haystack | None = None, **settings: Any) -> Task:
    """Make a task, as `get_task` does, whose samples may be trained on.

    Raises:
        ArgumentError: If its form is held out of training, or no task has the name.
    """
    task = get_task(name, haystack=haystack, **settings)
    if task.held_out:
        remedy = "Scores on its form are to say what was never rehearsed. Use another"
        others = available_tasks(held_out=False)
        raise ArgumentError("task", "not be held out of training", name, remedy, available=others)
    return task


class RecallRows:
    """Generated sequences with answers that stand far back: key-value recall, needles, and repetition.

    Args:
        tokenizer: The tokenizer.
        seed: Of everything in them.
        in_text: Which of the sequences are set into text, and into which; None for noise alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, in_text: InText | None = None) -> None:
        self.tokenizer, self.seed, self.in_text = tokenizer, seed, in_text
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        special = set(tokenizer.all_special_ids)
        self.words = [token for token in range(len(tokenizer)) if token not in special]
        self.bos = bos_ids(tokenizer)

    def row(self, number: int, length: int) -> Asked:
        """Return at most ``length`` tokens, and which of them answer a question."""
        rng = random.Random(f"{self.seed}/recall/{number}/{length}")
        make = rng.choices((self._pairs, self._needle, self._repeat), (0.7, 0.15, 0.15))[0]
        haystack = None if self.in_text is None else self.in_text.haystack(number, length)
        # Where pairs or a needle do not fit, a repetition does.
        return make(length, rng, haystack) or self._repeat(length, rng, haystack)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _pairs(self, length: int, rng: random.Random, haystack: RealText | None = None) -> Asked | None:
        count = rng.randint(2, MOST_PAIRS)
        while count > 1:
            task = training_task("kv_recall", haystack=haystack, pairs=count)
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
            said = KVRecall.pair.format(key=key, value=value) if near else ""
            question_ids = self._ids("\n" + said + KVRecall.question.format(key=key))

    def _needle(self, length: int, rng: random.Random, haystack: RealText | None) -> Asked | None:
        task = training_task(rng.choice(NEEDLES), haystack=haystack)
        shortest = task.min_length(self.tokenizer)
        if shortest > length:
            return None
        sample = task.build(self.tokenizer, rng.randint(shortest, length), rng.uniform(0, 100), rng)
        answer = self._ids(" " + ", ".join(sample.references) + ".") + self.end
        row = [*sample.input_ids, *answer][:length]
        return row, [index >= len(sample.input_ids) for index in range(len(row))]

    def _repeat(self, length: int, rng: random.Random, haystack: RealText | None = None) -> Asked:
        # So few tokens that a state can hold them word for word, and that they come again in a short sequence too.
        segment = rng.choices(self.words, k=min(rng.randint(*SEGMENT_TOKENS), max(2, length // 3)))
        lines = NOISE.lines(self.tokenizer)
        row, asked = [*self.bos, *segment], [False] * (len(self.bos) + len(segment))
        while len(row) < length:
            gap = rng.randint(0, length // 2 - 1)
            if haystack is None:
                filler = list(itertools.islice(itertools.chain.from_iterable(lines), gap))
            else:
                filler = list(haystack.stretch(self.tokenizer, gap, rng))
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
