"""What softmax attention will want of a key once it has left the window: what scores of kept keys are learned from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_linear_attn.distill.data import Batch, Data
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts
from hf_linear_attn.distill.limits import least_to_rank
from hf_linear_attn.distill.registry import stage_class
from hf_linear_attn.distill.settings import DistillationSettings
from hf_linear_attn.distill.softmax import instead_of_forward, softmax_output
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.layers import Call, LinearAttention
from hf_linear_attn.layers.retention.learned import Learned
from hf_linear_attn.layers.window import Tokens
from hf_linear_attn.ops.kept import at_age
from hf_linear_attn.patching.rotation import has_values

LOOKS = 4
"""Steps on whose texts it is measured what is usual."""

AT_ONCE = 128
"""Queries whose attention is computed at once: what they pay to all keys of a text stays near the processor."""


class Text(NamedTuple):
    """What one layer sees of one text.

    Attributes:
        q: ``[H, T, D]``.
        k: ``[HKV, T, D]``.
        inputs: What scores are made of ``[T - W, I]``: of all keys that leave the window before the last query.
    """

    q: Tensor
    k: Tensor
    inputs: Tensor


def learners(model: nn.Module) -> dict[LinearAttention, Learned]:
    """Return the layers of a model that learn what to keep, with their rules."""
    kept = {part: part.kept.retention for part in linear_attention_parts(model) if part.kept is not None}
    return {part: rule for part, rule in kept.items() if isinstance(rule, Learned)}


def texts_of(
    part: LinearAttention, rule: Learned, real: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call
) -> Iterator[Text]:
    """Take the texts of a call apart, of rows or packed, without padding; those too short are left out.

    ``real [B, T]`` bool, as of the batch, is False in padding; the call is of ``q [B, H, T, D]``, ``k [B, HKV, T, D]``
    and ``v [B, HKV, T, V]``.
    """
    # Behind the last token of a row padding hides nothing, so that a call may have no mask. Packed rows lie end to end.
    real = real.view(len(q), -1)
    bounds = [0, q.shape[2]] if call.cu_seqlens is None else call.cu_seqlens.tolist()
    for b, (start, end) in ((b, piece) for b in range(len(q)) for piece in pairwise(bounds)):
        index = torch.arange(start, end, device=q.device)
        # In a plan, which has no numbers, all are.
        index = index[real[b, start:end]] if has_values(real) else index
        count = len(index) - rule.window - part.settings.sinks
        if len(index) < least_to_rank(part.settings):
            continue
        rotation = None
        if part.undoes and call.rotation is not None:
            row = call.rotation.row(b)
            rotation = row.of_others(row.turns[:, index[part.settings.sinks :]])
        own_q, own_k, own_v = (x[b, :, index] for x in (q, k, v))
        left = slice(part.settings.sinks, None)
        tokens = Tokens(own_k[None, :, left], own_v[None, :, left], None, None, rotation)
        yield Text(own_q, own_k, rule.inputs(tokens, count, part.settings.backend)[0])


@torch.no_grad()
def look(
    model: nn.Module,
    rules: Mapping[LinearAttention, Learned],
    batch: Batch,
    see: Callable[[LinearAttention, int, Text, float], None],
) -> None:
    """Run a patched model with softmax attention, and show what the layers with those rules see.

    ``see`` gets a layer, the number of a text of the batch, what the layer sees of it, and the factor on ``q.k``.
    """

    def compute(part: LinearAttention, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if part in rules:
            for number, text in enumerate(texts_of(part, rules[part], batch.real, q, k, v, call)):
                see(part, number, text, part.scaling(call))
        return softmax_output(part, q, k, v, call)

    with instead_of_forward(linear_attention_parts(model), compute):
        Predictor(model).states(batch)


def attention_to_come(text: Text, keys: Tensor, times: Sequence[int], scaling: float) -> Tensor:
    """Return the most attention that any query from a moment on pays to a key, ``[HKV, n, times]`` fp32.

    Given are the numbers of n keys and of queries, rising, in the text, and the factor on ``q.k``.
    """
    heads, count, _ = text.k.shape
    q, k = torch.unflatten(text.q.float(), 0, (heads, -1)), text.k.float()
    found = []
    for first, last in pairwise([*times, count]):
        most = k.new_zeros(heads, len(keys))
        for start in range(first, last, AT_ONCE):
            end = min(start + AT_ONCE, last)
            scores = scaling * q[:, :, start:end] @ k[:, None, :end].mT
            later = torch.ones(end - start, end - start, dtype=torch.bool, device=k.device).triu(1)
            scores[..., start:].masked_fill_(later, -torch.inf)
            paid = scores.softmax(-1).amax((1, 2))[:, keys.clamp(max=end - 1)]
            most = torch.maximum(most, paid.masked_fill(keys >= end, 0))
        found.append(most)
    return torch.stack(found, -1).flip(-1).cummax(-1).values.flip(-1)


def ranking_loss(scores: Tensor, targets: Tensor, keys: Tensor, times: Tensor, window: int) -> Tensor:
    """Return how far the order of scores is from that of the attention to come, a mean over heads and moments.

    At each moment: the cross-entropy between the softmax of all keys' scores for their ages and their targets, divided
    by their sum. Of the targets' roots, keys that are looked up once stood less apart and were lost more often
    (docs/results/notebook.md). Scores are ``[HKV, n, 6]``, targets ``[HKV, n, times]``, and ``keys [n]`` their
    numbers in the text; those younger than the window are not ranked.
    """
    age = times - keys[:, None]
    ranked = (age >= window).expand_as(targets)
    at = at_age(scores[:, :, None].expand(-1, -1, len(times), -1), age.expand_as(targets), window)
    logits = at.masked_fill(~ranked, -torch.inf).log_softmax(1).masked_fill(~ranked, 0)
    wanted = targets.masked_fill(~ranked, 0)
    return -(wanted / wanted.sum(1, keepdim=True).clamp(min=1e-20) * logits).sum(1).mean()


@torch.no_grad()
def start_scores(settings: DistillationSettings, model: nn.Module, data: Data) -> None:
    """Set the usual mean and deviation of what scores are made of, from the first texts of the stage ``retain``.

    The model is merely patched: each layer is fed the teacher's hidden states.

    Raises:
        ArgumentError: If they are too short.
    """
    # Of this process alone: each of several looks at the same texts.
    step = stage_class("retain").sequences(settings, 0, settings.rows * settings.accumulation)
    device = next(model.parameters()).device
    rules = learners(model)
    found: dict[LinearAttention, list[Tensor]] = {part: [] for part in rules}
    for start in range(0, LOOKS * len(step.numbers), step.at_once):
        batch = data.batch(range(start, start + step.at_once), step.length).to(device)
        look(model, rules, batch, lambda part, number, text, scaling: found[part].append(text.inputs))
    for part in rules:
        if not found[part]:
            wanted = f"give `retain` texts of {least_to_rank(part.settings)} tokens"
            remedy = "Raise it or `length_factors`, or leave the stage `retain` out."
            raise ArgumentError("block_tokens", wanted, "shorter ones", remedy)
        deviation, mean = torch.std_mean(torch.cat(found[part]), 0)
        weights = part.weights("retention")
        weights["mean"].copy_(mean)
        # What hardly changes says nothing.
        weights["deviation"].copy_(deviation + 0.01 * deviation.mean())
