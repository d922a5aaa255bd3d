"""Which layers to keep softmax: measured, one layer at a time, then greedily."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts, next_tokens, weighted
from hf_linear_attn.distill.softmax import as_softmax
from hf_linear_attn.distill.teacher import Divergence, Teacher
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.files import write_atomic


@dataclass(frozen=True)
class Selection:
    """Layers to keep softmax, and what that is based on.

    Args:
        ranking: ``layer``, ``name`` and ``kl_nats`` with that layer alone restored, best first; layers are counted
            among the converted ones.
        curve: ``softmax_layers`` (their number), ``layer`` (the one added, None at 0) and ``kl_nats``, along the
            greedy path.
        chosen: The layers to keep softmax, ascending.
    """

    ranking: list[dict[str, Any]]
    curve: list[dict[str, Any]]
    chosen: list[int]

    def save(self, path: Path) -> None:
        """Write the selection as JSON."""
        write_atomic(path, json.dumps({"ranking": self.ranking, "curve": self.curve, "chosen": self.chosen}, indent=2))

    @classmethod
    def load(cls, path: Path) -> "Selection":
        """Read what :meth:`save` wrote."""
        return cls(**json.loads(path.read_text()))

    def table(self) -> str:
        """Return ranking and curve as Markdown tables."""
        lines = ["| layer restored alone | KL, nats per token |", "| --- | --- |"]
        lines += [f"| {entry['name']} | {entry['kl_nats']:.4f} |" for entry in self.ranking]
        lines += ["", "| softmax layers | layer added | KL, nats per token |", "| --- | --- | --- |"]
        for entry in self.curve:
            lines.append(f"| {entry['softmax_layers']} | {entry['name'] or '-'} | {entry['kl_nats']:.4f} |")
        return "\n".join(lines)


@torch.no_grad()
def mean_kl(student: nn.Module, batches: Iterable[Batch], divergences: Iterable[Divergence]) -> float:
    """Return the mean divergence from the teacher over the batches' weighted tokens."""
    predictor = Predictor(student)
    total = weight = 0.0
    for batch, divergence in zip(batches, divergences, strict=True):
        states, weights = weighted(batch, predictor.states(batch)), next_tokens(batch)[1]
        pieces = predictor.pieces(states)
        total += sum(divergence(predictor.logits(states[which]), weights[which], which).item() for which in pieces)
        weight += weights.sum().item()
    return total / weight


@torch.no_grad()
def select_layers(
    student: nn.Module, teacher: Teacher, batches: list[Batch], budget: float, *, progress: bool = False
) -> Selection:
    """Find the converted layers that are worth keeping softmax.

    Every layer is restored alone and the KL from the teacher measured; then layers are restored one after the other,
    always the one that lowers the KL most.

    Args:
        student: A patched model, best after attention transfer.
        teacher: The softmax model it was made from.
        batches: Held-out sequences.
        budget: Share of the converted layers to restore, 0..1; at least one layer where above 0.
        progress: Show a progress bar.

    Returns:
        The selection.

    Raises:
        ArgumentError: If the budget is out of range, or would leave no converted layer.
    """
    parts = linear_attention_parts(student)
    count = max(1, round(budget * len(parts))) if budget > 0 else 0
    if not 0 <= budget < 1 or count >= len(parts):
        raise ArgumentError(
            "softmax_budget",
            f"leave at least one of {len(parts)} converted layers",
            budget,
            "Lower it; with every layer softmax there is nothing to distil.",
        )
    expected = [teacher.divergence(batch) for batch in batches]
    training = student.training
    student.train(False)
    runs = 1 + sum(len(parts) - n for n in range(max(count, 1)))
    chosen: list[int] = []
    ranking: list[dict[str, Any]] = []
    with tqdm(total=runs, desc="layer selection", disable=not progress) as bar:

        def score(layers: list[int]) -> float:
            with as_softmax([parts[layer] for layer in layers]):
                found = mean_kl(student, batches, expected)
            bar.update()
            return found

        curve: list[dict[str, Any]] = [{"softmax_layers": 0, "layer": None, "name": None, "kl_nats": score([])}]
        for turn in range(max(count, 1)):
            tried = {layer: score([*chosen, layer]) for layer in range(len(parts)) if layer not in chosen}
            if turn == 0:
                ranking = [
                    {"layer": layer, "name": parts[layer].name, "kl_nats": kl}
                    for layer, kl in sorted(tried.items(), key=lambda item: item[1])
                ]
            if turn < count:
                best = min(tried, key=lambda layer: tried[layer])
                chosen.append(best)
                curve.append(
                    {
                        "softmax_layers": len(chosen),
                        "layer": best,
                        "name": parts[best].name,
                        "kl_nats": tried[best],
                    }
                )
    student.train(training)
    return Selection(ranking, curve, sorted(chosen))
