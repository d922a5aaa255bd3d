"""Forwards in pieces with the cache carried between them, and batched generation from shared prefixes."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_linear_attn.errors import UnsupportedError
from hf_linear_attn.patching import cache_argument, returned_cache


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out, on an accelerator or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


Found = TypeVar("Found")


def unless_out_of_memory(call: Callable[..., Found], *arguments: Any) -> Found | None:
    """Return what a call gives, or None where memory runs out in it."""
    try:
        return call(*arguments)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of the model's input."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return weight.device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode within a ``with`` block, and then as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def accepts(model: PreTrainedModel, argument: str) -> bool:
    """Tell whether the model's forward has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters


def forward(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: Any,
    *,
    all_logits: bool = True,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Run one forward that reads and extends the cache.

    Args:
        model: A causal language model.
        input_ids: The new tokens, `[B, T]`.
        cache: What the last call returned, None at the start.
        all_logits: Whether to compute logits for all T tokens or for the last alone.
        attention_mask: `[B, past + T]`, 1 for real tokens; like position_ids, `[B, T]`, None where nothing is padded.
        position_ids: Places of the new tokens.

    Returns:
        Logits `[B, T or 1, vocabulary]` in the model's dtype, and the cache.

    Raises:
        UnsupportedError: If the model returns no cache.
    """
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not all_logits and accepts(model, "logits_to_keep"):
        options["logits_to_keep"] = 1
    output = model(input_ids=input_ids, use_cache=True, **cache_argument(model, cache), **options)
    cache = returned_cache(output)
    if cache is None:
        raise UnsupportedError(
            "model", "return a cache", type(model).__name__, "Evaluate a model that generates with a cache."
        )
    logits: Tensor = output.logits
    return (logits if all_logits else logits[:, -1:]), cache


def prefill(
    model: PreTrainedModel, input_ids: Tensor, cache: Any, chunk: int, attention_mask: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Read `[B, T]` tokens `chunk` at a time and return the logits of the last, `[B, 1, vocabulary]`, and the cache."""
    stop = 0
    padding: dict[str, Tensor] = {}
    for ids in torch.split(input_ids, chunk, dim=1):
        start, stop = stop, stop + ids.shape[1]
        if attention_mask is not None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            padding = {"attention_mask": attention_mask[:, :stop], "position_ids": position_ids[:, start:stop]}
        logits, cache = forward(model, ids, cache, all_logits=False, **padding)
    return logits, cache


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a generation: those of the generation configuration and the tokenizer's EOS."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    declared = declared if isinstance(declared, list) else [declared]
    return frozenset(token for token in [*declared, tokenizer.eos_token_id] if token is not None)


def drawn(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token of each row by the inverse of its cumulative distribution, in the order of the token ids.

    Args:
        logits: `[B, vocabulary]`.
        uniforms: `[B]`, in [0, 1).

    Returns:
        Token ids `[B]`: models that agree draw the same ones from the same numbers.

    Example:
        >>> drawn(torch.tensor([[0.25, 0.5, 0.25]]).log().repeat(3, 1), torch.tensor([0.2, 0.3, 0.8])).tolist()
        [0, 1, 2]
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    # The sum is 1 but for rounding; the first token beyond the number has some probability.
    at = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def continue_rows(
    model: PreTrainedModel,
    logits: Tensor,
    cache: Any,
    max_new_tokens: int,
    ends: frozenset[int],
    attention_mask: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> list[list[int]]:
    """Extend every row by its most likely tokens, or by drawn ones, up to an end token or `max_new_tokens`.

    Args:
        model: A causal language model.
        logits: Of the last prompt token, `[B, 1, vocabulary]`.
        cache: The cache of the prompts; it is consumed.
        max_new_tokens: Budget of each row.
        ends: Ids that end a row; they are not returned.
        attention_mask: Of the prompts, `[B, T]`; None where nothing is padded.
        uniforms: `[B, max_new_tokens]` in [0, 1), to draw each token by; None for the most likely ones.

    Returns:
        The new tokens of each row.
    """
    rows: list[list[int]] = [[] for _ in range(logits.shape[0])]
    running = set(range(len(rows)))
    for step in range(max_new_tokens):
        last = logits[:, -1].float()
        tokens = last.argmax(-1) if uniforms is None else drawn(last, uniforms[:, step])
        for row, token in enumerate(tokens.tolist()):
            if token in ends:
                running.discard(row)
            elif row in running:
                rows[row].append(token)
        if not running or step == max_new_tokens - 1:
            break
        position_ids = None
        if attention_mask is not None:
            position_ids = attention_mask.sum(-1, keepdim=True)
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(rows), 1)], dim=-1)
        padding = {"attention_mask": attention_mask, "position_ids": position_ids}
        logits, cache = forward(model, tokens[:, None], cache, all_logits=False, **padding)
    return rows


def shared_prefix(prompts: Sequence[Tensor]) -> int:
    """Return how many leading tokens of 1-D prompts are worth reading once for all: at least half of them, or none.

    After a cached prefix softmax attention needs an explicit mask, which takes more than twice as long as the causal
    kernel: what a short prefix saves, the rest of the prompt pays for. The last token stays, to predict from.
    """
    shortest = min(len(prompt) for prompt in prompts)
    stack = torch.stack([prompt[: shortest - 1] for prompt in prompts])
    differs = (stack != stack[:1]).any(0).nonzero()
    shared = int(differs[0]) if len(differs) else shortest - 1
    return shared if 2 * shared >= shortest else 0


class PrefixReader:
    """Reads batches of prompts in order and computes what consecutive batches share only once.

    Needle prompts of one task and length begin alike up to the shallower needle. A trunk is the cache, at batch 1, of
    the tokens that a batch shares with the next one. Where the pieces begin and end depends on the prompts alone, so
    a resumed run that skips finished batches computes the same figures.

    Args:
        model: A causal language model in evaluation mode.
        chunk: Most tokens in one forward.
        pad_id: Any token id, for the left padding of unequal prompts.
    """

    def __init__(self, model: PreTrainedModel, chunk: int, pad_id: int) -> None:
        self._model = model
        self._chunk = chunk
        self._pad_id = pad_id
        self._device = device_of(model)
        # The last two: needles that happen to begin alike make a trunk too long for the batch after next.
        self._trunks: list[tuple[int, Any]] = []

    def advance(self, batch: Sequence[Tensor], following: Sequence[Tensor] | None) -> None:
        """Move the trunk to the tokens that the batch shares with the following one."""
        if len({len(prompt) for prompt in batch}) > 1:
            return
        shared = shared_prefix([*batch, *(following or ())])
        while self._trunks and self._trunks[-1][0] > shared:
            self._trunks.pop()
        if shared > (self._trunks[-1][0] if self._trunks else 0):
            self._trunks = [*self._trunks[-1:], self._grown(batch[0], shared)]

    def _grown(self, prompt: Tensor, shared: int) -> tuple[int, Any]:
        """Return a copy of the trunk that goes on to a prompt's first `shared` tokens, if it has fewer."""
        at, cache = copy.deepcopy(self._trunks[-1]) if self._trunks else (0, None)
        if shared > at:
            _, cache = prefill(self._model, prompt[None, at:shared].to(self._device), cache, self._chunk)
        return max(at, shared), cache

    def read(self, batch: Sequence[Tensor]) -> tuple[Tensor, Any, Tensor | None]:
        """Read the prompts of a batch and return their last logits, their cache and, if they are padded, the mask."""
        if len({len(prompt) for prompt in batch}) > 1:
            return self._read_padded(batch)
        at, cache = self._grown(batch[0], shared_prefix(batch) if len(batch) > 1 else 0)
        if len(batch) > 1 and cache is not None:
            cache.reorder_cache(torch.zeros(len(batch), dtype=torch.long, device=self._device))
        rest = torch.stack([prompt[at:] for prompt in batch]).to(self._device)
        return *prefill(self._model, rest, cache, self._chunk), None

    def _read_padded(self, batch: Sequence[Tensor]) -> tuple[Tensor, Any, Tensor]:
        if not accepts(self._model, "position_ids"):
            rule, remedy = "be 1 for a model that takes no position_ids", "Prompts of unequal length need left padding."
            raise UnsupportedError("batch_size", rule, len(batch), remedy, where=type(self._model).__name__)
        prompts = [prompt.to(self._device) for prompt in batch]
        left: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
        ids = pad_sequence(prompts, **left, padding_value=self._pad_id)
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], **left)
        return *prefill(self._model, ids, None, self._chunk, mask), mask
