"""Which layers to keep softmax: measured, by the KL from the teacher or by what they retrieve."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_linear_attn.distill.data import Batch
from hf_linear_attn.distill.forward import Predictor, linear_attention_parts, next_tokens, weighted
from hf_linear_attn.distill.losses import ce_loss
from hf_linear_attn.distill.softmax import instead_of_forward, softmax_output
from hf_linear_attn.distill.teacher import Divergence, Teacher
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.generation import evaluating
from hf_linear_attn.files import write_atomic
from hf_linear_attn.layers import LinearAttention

LEAST_LOSS_NATS = 0.01
"""Rise of the text's loss below which a layer counts as this important to text: the rise itself may be noise."""


@dataclass(frozen=True)
class Saved:
    """What a run has measured and chosen, of plain values: kept as JSON for when it goes on."""

    FILE: ClassVar[str]
    """Its name in the run's folder."""

    @classmethod
    def of_run(cls, folder: str | None, measure: Callable[[], Self]) -> Self:
        """Return what a run has saved in its folder, or else measure it, and save it there where there is one."""
        if folder is None:
            return measure()
        path = Path(folder) / cls.FILE
        if not path.exists():
            measure().save(path)
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_atomic(path, json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what :meth:`save` wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Selection(Saved):
    """Layers to keep softmax, and what that is based on.

    Args:
        ranking: ``layer``, ``name`` and figures of each layer, best first; layers are counted among the converted ones.
            By KL the figure is ``kl_nats`` with that layer alone restored. By recall they are ``answer_nats`` and
            ``loss_nats`` with that layer alone converted, and the ``score`` made of them.
        curve: ``softmax_layers`` (their number), ``layer`` and ``name`` (the one added, None at 0) and the figures, as
            layers are restored one after the other.
        chosen: The layers to keep softmax, ascending.
        by: ``kl`` or ``recall``.
    """

    FILE: ClassVar[str] = "layers.json"
    ranking: list[dict[str, Any]]
    curve: list[dict[str, Any]]
    chosen: list[int]
    by: str = "kl"


@torch.no_grad()
def mean_over_tokens(student: nn.Module, batches: Iterable[Batch], losses: Iterable[Divergence]) -> float:
    """Return the mean of a loss over the batches' weighted tokens.

    The loss on each batch is as a teacher's divergence or :func:`text_loss` returns it.
    """
    predictor = Predictor(student)
    total = weight = 0.0
    for batch, loss in zip(batches, losses, strict=True):
        states, weights = weighted(batch, predictor.states(batch)), next_tokens(batch)[1]
        pieces = predictor.pieces(states)
        total += sum(loss(predictor.logits(states[which]), weights[which], which).item() for which in pieces)
        weight += weights.sum().item()
    return total / weight


def text_loss(batch: Batch) -> Divergence:
    """Return the cross-entropy of a batch's next tokens."""
    targets, _ = next_tokens(batch)
    return lambda logits, weights, which: ce_loss(logits, targets[which], weights)


def layers_to_keep(parts: Sequence[LinearAttention], budget: float) -> int:
    """Return how many of the converted layers a budget restores; refuse one that would leave none."""
    count = max(1, round(budget * len(parts))) if budget > 0 else 0
    if not 0 <= budget < 1 or count >= len(parts):
        remedy = "Lower it; with every layer softmax there is nothing to distil."
        raise ArgumentError("softmax_budget", f"leave at least one of {len(parts)} converted layers", budget, remedy)
    return count


@contextmanager
def _trials(student: nn.Module, runs: int, progress: bool) -> Iterator[Callable[..., list[float]]]:
    """Yield a function that returns the mean of each loss with some layers softmax, the student being in evaluation."""
    parts = linear_attention_parts(student)
    with evaluating(student), tqdm(total=runs, desc="layer selection", disable=not progress) as bar:

        def mean(softmax: Iterable[int], *asked: tuple[list[Batch], list[Divergence]]) -> list[float]:
            with instead_of_forward([parts[layer] for layer in softmax], softmax_output):
                found = [mean_over_tokens(student, batches, losses) for batches, losses in asked]
            bar.update()
            return found

        yield mean


def _point(parts: Sequence[LinearAttention], chosen: Sequence[int], **figures: float) -> dict[str, Any]:
    """Return the point of the curve at which the last of some layers was added."""
    layer, name = (chosen[-1], parts[chosen[-1]].name) if chosen else (None, None)
    return {"softmax_layers": len(chosen), "layer": layer, "name": name, **figures}


@torch.no_grad()
def select_by_kl(
    student: nn.Module, teacher: Teacher, batches: list[Batch], budget: float, *, progress: bool = False
) -> Selection:
    """Find the converted layers that are worth keeping softmax, by the KL from the teacher.

    Every layer is restored alone and the KL from the teacher measured; then layers are restored one after the other,
    always the one that lowers the KL most. The student is best after attention transfer, and sequences are held out.
    The budget is the share of its converted layers to restore, 0..1; at least one layer where above 0.

    Raises:
        ArgumentError: If the budget is out of range, or would leave no converted layer.
    """
    parts = linear_attention_parts(student)
    count = layers_to_keep(parts, budget)
    with _trials(student, 1 + sum(len(parts) - k for k in range(max(count, 1))), progress) as mean:
        asked = batches, [teacher.divergence(batch) for batch in batches]
        chosen: list[int] = []
        ranking: list[dict[str, Any]] = []
        curve = [_point(parts, [], kl_nats=mean([], asked)[0])]
        for turn in range(max(count, 1)):
            left = [layer for layer in range(len(parts)) if layer not in chosen]
            tried = {layer: mean([*chosen, layer], asked)[0] for layer in left}
            best = sorted(tried, key=lambda layer: tried[layer])
            ranking = ranking or [{"layer": n, "name": parts[n].name, "kl_nats": tried[n]} for n in best]
            if turn < count:
                chosen.append(best[0])
                curve.append(_point(parts, chosen, kl_nats=tried[best[0]]))
    return Selection(ranking, curve, sorted(chosen))


@torch.no_grad()
def select_by_recall(
    student: nn.Module, text: list[Batch], answers: list[Batch], budget: float, *, progress: bool = False
) -> Selection:
    """Find the converted layers that are worth keeping softmax, by what they retrieve.

    Every layer is converted alone, all others softmax. Its score is by how much answers to questions about what stands
    far back get less likely, over by how much plain text does: a layer of a high score is there for recall, which a
    state of constant size does worst. (HALO, Chen et al., 2026, arXiv:2601.22156, takes falls in accuracy on benchmarks
    of both kinds and compares with the best layer; here both are nats, and compared with softmax throughout.)

    Of ``answers``, answers alone have a weight; the rest is as for :func:`select_by_kl`.
    """
    asked = [(batches, [text_loss(batch) for batch in batches]) for batches in (answers, text)]
    parts = linear_attention_parts(student)
    count = layers_to_keep(parts, budget)
    with _trials(student, 2 + len(parts) + count, progress) as mean:

        def figures(softmax: Iterable[int]) -> dict[str, float]:
            return dict(zip(("answer_nats", "loss_nats"), mean(softmax, *asked), strict=True))

        layers = range(len(parts))
        before = figures(layers)
        ranking: list[dict[str, Any]] = []
        for layer in layers:
            found = figures(other for other in layers if other != layer)
            rise = max(found["loss_nats"] - before["loss_nats"], LEAST_LOSS_NATS)
            score = (found["answer_nats"] - before["answer_nats"]) / rise
            ranking.append({"layer": layer, "name": parts[layer].name, **found, "score": score})
        ranking.sort(key=lambda entry: -entry["score"])
        chosen = [entry["layer"] for entry in ranking[:count]]
        curve = [_point(parts, chosen[:n], **figures(chosen[:n])) for n in range(count + 1)]
    return Selection(ranking, curve, sorted(chosen), by="recall")
