"""Learning which keys are worth keeping."""

import random
from collections import deque
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.limits import TIMES
from hf_linear_attn.distill.registry import register_stage
from hf_linear_attn.distill.retention import Text, attention_to_come, learners, look, ranking_loss
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.stages.base import Group, Stage
from hf_linear_attn.distill.teacher import Teacher
from hf_linear_attn.layers import LinearAttention
from hf_linear_attn.layers.retention.learned import Learned

MEASURED = ("mean", "deviation")
"""What is set before the first step, see :func:`start_scores`."""

KEYS = 512
"""Keys of a text that are ranked, drawn at random."""

REMEMBERED = 96
"""Texts, at most, that are learned from again in later steps: looking at one costs much more than learning from it."""

MEMORY = 2**31
"""Bytes, about, that these take at most; fewer of large models are remembered."""

AGAIN = 15
"""How many of those a step takes."""


class Ranked(NamedTuple):
    """What a layer learns from one text: of some keys, what scores are made of, and what they are to be like."""

    inputs: Tensor
    targets: Tensor
    keys: Tensor
    times: Tensor


@register_stage
class Retain(Stage):
    """Learn the scores of kept keys from the attention that softmax will pay to them; nothing else is trained.

    The student attends by softmax meanwhile, so what is learned is of its weights as they are. A step learns from the
    texts that it reads and from some of those before; these are forgotten where checkpoints are written, so that a run
    that goes on after one does what it would have done.
    """

    name: ClassVar[str] = "retain"
    place: ClassVar[int] = 5
    encoder: ClassVar[bool | None] = False
    recomputes: ClassVar[bool] = False
    idle: ClassVar[str] = "keys are kept by what is learned only where there are any, and retention='learned'"

    def __init__(self, settings: DistillationSettings, student: nn.Module, teacher: Teacher | None = None) -> None:
        self.rules = learners(student)
        super().__init__(settings, student, teacher)
        self.seen: deque[dict[LinearAttention, Ranked]] = deque(maxlen=REMEMBERED)
        self.step = 0

    @override
    @classmethod
    def steps(cls, settings: DistillationSettings) -> int:
        return settings.retain_steps

    @override
    @classmethod
    def lengths(cls, settings: DistillationSettings) -> list[int]:
        # What matters is what is asked for late.
        return [max(settings.factors()) * settings.block_tokens]

    @override
    @classmethod
    def serves(cls, settings: DistillationSettings) -> bool:
        return bool(settings.conversion.kept) and settings.conversion.retention == "learned"

    @override
    def trained(self) -> list[Group]:
        learned = [(name, x) for part in self.rules for name, x in part.weights("retention").items()]
        params = [x for name, x in learned if name not in MEASURED]
        return [{"params": params, "lr": self.settings.retain_lr}]

    @override
    def begin_step(self, step: int) -> None:
        self.step = step
        if step % self.settings.checkpoint_every == 0:
            self.seen.clear()

    @override
    def end(self) -> None:
        self.seen.clear()

    @override
    def weight(self, batch: Batch) -> Tensor:
        return batch.real.sum()

    @override
    def loss(self, batch: Batch) -> Tensor:
        new = self._look(batch)
        drawn = random.Random(f"{self.settings.seed} {self.step} {batch.numbers}")
        again = drawn.sample(list(self.seen), min(AGAIN, len(self.seen)))
        self.seen.extend({part: Ranked(*(x.cpu() for x in of)) for part, of in text.items()} for text in new)
        largest = max((sum(x.nbytes for of in text.values() for x in of) for text in self.seen), default=1)
        while len(self.seen) * largest > MEMORY and len(self.seen) > 1:
            self.seen.popleft()
        self.losses = []
        weight = batch.real.sum() / len(self.rules)
        for part, rule in self.rules.items():
            weights, found = part.weights("retention"), []
            for text in (text[part] for text in [*new, *again] if part in text):
                inputs, targets, keys, times = (x.to(batch.input_ids.device) for x in text)
                scores = rule.scores_of(inputs[None].float(), weights)[0]
                found.append(ranking_loss(scores, targets, keys, times, rule.window))
            if found:
                loss = torch.stack(found).mean()
                self.learn(loss * weight)
                self.losses.append((part.name, loss.detach()))
        return sum((loss for _, loss in self.losses), torch.zeros((), device=weight.device)) * weight

    def _look(self, batch: Batch) -> list[dict[LinearAttention, Ranked]]:
        """Return what the layers learn from each text of a batch."""
        found: list[dict[LinearAttention, Ranked]] = []

        def see(part: LinearAttention, number: int, text: Text, scaling: float) -> None:
            if number == len(found):
                found.append({})
            found[number][part] = self._ranked(part, self.rules[part], text, scaling)

        look(self.student, self.rules, batch, see)
        return found

    def _ranked(self, part: LinearAttention, rule: Learned, text: Text, scaling: float) -> Ranked:
        # From when the first key has left the window, to when a quarter of the text is still to come.
        first, last = rule.window + part.settings.sinks, text.k.shape[1] * 3 // 4
        times = [first + n * (last - first) // TIMES for n in range(1, TIMES + 1)]
        generator = torch.Generator().manual_seed(self.settings.seed + self.step)
        chosen = torch.randperm(last - first, generator=generator)[:KEYS].sort().values.to(text.k.device)
        keys = chosen + part.settings.sinks
        targets = attention_to_come(text, keys, times, scaling)
        return Ranked(text.inputs[chosen].to(torch.float16), targets, keys, torch.tensor(times))
