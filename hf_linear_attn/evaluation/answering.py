"""Answering the retrieval suite's prompts in batches, and what is written down of each answer."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.evaluation.generation import PrefixReader, continue_rows, end_tokens, unless_out_of_memory
from hf_linear_attn.evaluation.prompts import Group, Slot
from hf_linear_attn.evaluation.store import SampleStore
from hf_linear_attn.evaluation.subjects import Subject
from hf_linear_attn.evaluation.tasks import Sample, score

Built = tuple[Sample, Tensor]


class Answerer:
    """Answers prompts of one model.

    Args:
        subject: The model.
        tokenizer: Its tokenizer.
        batch_size: Prompts answered together.
        chunk: Most tokens in one forward.
    """

    def __init__(self, subject: Subject, tokenizer: PreTrainedTokenizerBase, batch_size: int, chunk: int) -> None:
        self._subject, self._tokenizer = subject, tokenizer
        self._size, self._chunk = batch_size, chunk
        special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id)
        self._pad = next(token for token in special if token is not None)

    def answer(
        self,
        group: Group,
        slots: Sequence[Slot],
        build: Callable[[Group, Slot], Built],
        store: SampleStore,
        advance: Callable[[int], Any],
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Answer the samples of a group that the store does not hold yet.

        Args:
            group: Task and length.
            slots: Its samples.
            build: Makes a sample and its prompt.
            store: Where the answers go.
            advance: Called with the tokens of each batch, done or not.
            rank: Number of this process, which takes every `world`-th batch.
            world: Number of processes.
        """
        batches = [slots[i : i + self._size] for i in range(0, len(slots), self._size)]
        name, mark = self._subject.name, self._subject.fingerprint
        keys = [[store.key(mark, group.sample_id(name, *slot)) for slot in batch] for batch in batches]
        pending = [b % world == rank and any(store.get(key) is None for key in keys[b]) for b in range(len(batches))]
        last = max((b for b in range(len(batches)) if pending[b]), default=-1)
        reader = PrefixReader(self._subject.model, self._chunk, pad_id=self._pad)
        following = [build(group, slot) for slot in batches[0]] if last >= 0 else []
        exhausted = False
        for b, batch in enumerate(batches):
            if b <= last:
                built = following
                following = [build(group, slot) for slot in batches[b + 1]] if b < last else []
                found = None if exhausted else unless_out_of_memory(self._read, reader, built, following, pending[b])
                exhausted = found is None
                answers: Sequence[list[int] | None] = found or [None] * len(batch)
                if pending[b]:
                    rows = zip(keys[b], batch, built, answers, strict=True)
                    store.add(self._record(group, *row) for row in rows)
            advance(group.length * len(batch))

    def _read(
        self, reader: PrefixReader, built: Sequence[Built], following: Sequence[Built], write: bool
    ) -> list[list[int]]:
        """Read a batch of prompts and write their answers, or read only what it shares with the next one."""
        prompts = [prompt for _, prompt in built]
        with torch.inference_mode():
            reader.advance(prompts, [prompt for _, prompt in following] or None)
            if not write:
                return []
            logits, cache, mask = reader.read(prompts)
            ends = end_tokens(self._subject.model, self._tokenizer)
            return continue_rows(self._subject.model, logits, cache, built[0][0].max_new_tokens, ends, mask)

    def _record(self, group: Group, key: str, slot: Slot, built: Built, answer: list[int] | None) -> dict[str, Any]:
        sample, prompt = built
        text = None if answer is None else str(self._tokenizer.decode(answer, skip_special_tokens=True))
        return {
            "key": key,
            "id": group.sample_id(self._subject.name, *slot),
            "text": text,
            "references": list(sample.references),
            "score": None if text is None else score(sample, text),
            "measured_tokens": len(prompt) + sample.max_new_tokens,
            "prompt_sha256": hashlib.sha256(prompt.numpy().tobytes()).hexdigest(),
            "status": "out-of-memory" if text is None else "ok",
        }
