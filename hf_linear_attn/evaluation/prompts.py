"""The prompts of the retrieval suite: what each sample is, and a chat template around it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks import Sample, Task, sample_rng
from hf_linear_attn.evaluation.tasks.base import bos_ids

_TEMPLATE_MARK = "\u241e"

Slot = tuple[float | None, int]
"""Depth and index of a sample."""


@dataclass(frozen=True)
class Template:
    """Token ids that a chat template puts before and after a prompt; both empty without one."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def cost(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Return the tokens it adds to a prompt, whose own BOS it replaces."""
        return len(self.before) + len(self.after) - (len(bos_ids(tokenizer)) if self.before else 0)


@dataclass(frozen=True)
class Group:
    """The samples of one task and length, by depth: what can share prefixes.

    Args:
        task: The task.
        length: Asked length in tokens.
        depths: Depths in percent, ascending; `(None,)` where the task has none.
        part: The part of the results that its cells belong to: `cells`, `capacity`, or `floors`, where the asked
            needles are cut out, to see what can be guessed without them.
    """

    task: Task
    length: int
    depths: tuple[float | None, ...]
    part: str = "cells"

    def slots(self, samples: int) -> list[Slot]:
        """Return depth and index of every sample, in order, where each depth has so many."""
        return [(depth, index) for depth in self.depths for index in range(samples)]

    def sample_id(self, subject: str, depth: float | None, index: int) -> str:
        """Return the name of a sample, unique within a run; it changes with the text that needles are hidden in."""
        task = self.task.label + (self.task.haystack.digest if self.task.has_haystack else "")
        return f"retrieval/{self.part.removesuffix('s')}/{subject}/{task}/{self.length}/{depth}/{index}"


def make_template(tokenizer: PreTrainedTokenizerBase) -> Template:
    """Split the tokenizer's chat template around a prompt.

    Raises:
        ArgumentError: If the tokenizer has none.
    """
    if not tokenizer.chat_template:
        rule = "be left out for a tokenizer without one"
        raise ArgumentError("chat_template", rule, True, "Set tokenizer.chat_template.", where=type(tokenizer).__name__)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _TEMPLATE_MARK}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(text).partition(_TEMPLATE_MARK)
    return Template(
        tuple(tokenizer(before, add_special_tokens=False)["input_ids"]),
        tuple(tokenizer(after, add_special_tokens=False)["input_ids"]),
    )


def build_prompt(
    group: Group,
    depth: float | None,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    seed: int,
) -> tuple[Sample, Tensor]:
    """Build a sample and its prompt as a 1-D tensor of token ids."""
    at = 0.0 if depth is None else depth
    rng = sample_rng(seed, group.task.spec, group.length, at, index)
    sample = group.task.build(tokenizer, group.length - template.cost(tokenizer), at, rng)
    ids = list(sample.input_ids)
    if group.part == "floors":
        for start, stop in sorted(sample.meta["needle_spans"], reverse=True):
            del ids[start:stop]
    if template.before:
        ids = ids[len(bos_ids(tokenizer)) :]
    return sample, torch.tensor([*template.before, *ids, *template.after])
