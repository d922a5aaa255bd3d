"""Answers of a softmax model, alone and with a converted one that drafts them: rounds, times and bytes held."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from hf_linear_attn.evaluation.meters import cache_bytes
from hf_linear_attn.patching import returned_cache


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Args:
        tokens: Its tokens.
        rounds: How many of them came at once, round by round: with drafts, those accepted and one more.
        first_ms: Time to the end of the first round, in which prompts are read.
        rest_ms: Time of the other rounds.
    """

    tokens: list[int]
    rounds: list[int]
    first_ms: float
    rest_ms: float


class _Rounds(BaseStreamer):
    """Notes how many tokens come at once, and when; the prompt comes first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.times = [time.perf_counter()]

    @override
    def put(self, value: Tensor) -> None:
        self.sizes.append(value.numel())
        self.times.append(time.perf_counter())

    @override
    def end(self) -> None:
        pass


def answer(
    teacher: PreTrainedModel, prompt: Tensor, new_tokens: int, student: PreTrainedModel | None = None, drafted: int = 0
) -> Answer:
    """Let a model answer greedily, with drafts of another one if it is given.

    No token ends an answer, so that all are of one length; every round drafts as many tokens, but for the last ones.

    Args:
        teacher: A causal language model.
        prompt: Token ids `[1, T]`.
        new_tokens: Length of the answer, at least 1.
        student: A model with the same vocabulary that drafts.
        drafted: Tokens that it drafts in a round.
    """
    rounds = _Rounds()
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": new_tokens, "eos_token_id": None}
    # None is padded: without a mask, a padding token in the prompt would be taken for some.
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "streamer": rounds}
    if student is None:
        found = teacher.generate(prompt, **options)  # type: ignore[operator]
    else:
        with drafts_of(student, drafted):
            found = teacher.generate(prompt, assistant_model=student, **options)  # type: ignore[operator]
    first, last = rounds.times[2], rounds.times[-1]
    return Answer(
        found[0, prompt.shape[1] :].tolist(),
        rounds.sizes[1:],
        1000 * (first - rounds.times[0]),
        1000 * (last - first),
    )


@contextmanager
def drafts_of(student: PreTrainedModel, drafted: int) -> Iterator[None]:
    """Let a model draft that many tokens in every round of a ``with`` block, however sure it is of them."""
    settings: dict[str, Any] = {
        "num_assistant_tokens": drafted,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
        "eos_token_id": None,
    }
    config: Any = student.generation_config
    before = {name: getattr(config, name) for name in settings}
    vars(config).update(settings)
    try:
        yield
    finally:
        vars(config).update(before)


@contextmanager
def watched_caches(*models: PreTrainedModel) -> Iterator[list[int]]:
    """Yield the most bytes that each model's cache has held since the ``with`` block began, counted after forwards."""
    most = [0] * len(models)

    def look(at: int, model: nn.Module, args: Any, output: Any) -> None:
        cache = returned_cache(output)
        most[at] = max(most[at], 0 if cache is None else cache_bytes(cache))

    with ExitStack() as hooks:
        for at, model in enumerate(models):
            hooks.enter_context(model.register_forward_hook(partial(look, at)))
        yield most
