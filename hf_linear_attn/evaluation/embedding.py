"""How near a student encoder's embeddings are to its teacher's, and how well each finds the other half of a text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hf_linear_attn.encoders import Frame, Pooling, embed
from hf_linear_attn.evaluation.generation import evaluating

LOW_PERCENT = 5
"""The percentile of cosines that is reported beside their mean."""


def embed_all(
    model: nn.Module, texts: Sequence[Sequence[int]], frame: Frame, pooling: Pooling, *, pad: int, batch: int = 32
) -> Tensor:
    """Return the embeddings of texts, of length 1.

    Args:
        model: An encoder in evaluation mode.
        texts: Tokens of each text, without special ones.
        frame: What goes around them.
        pooling: Makes an embedding of hidden states.
        pad: Token that fills up short rows.
        batch: Texts per forward; they go by length, so that little is padded.

    Returns:
        ``[len(texts), D]`` fp32, on the CPU.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        rows = [torch.tensor(frame.around(texts[n]), device=device) for n in chosen]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
        for number, x in zip(chosen, F.normalize(embed(model, ids, mask, pooling), dim=-1).cpu(), strict=True):
            found[number] = x
    return torch.stack(found)


def likeness(student: Tensor, teacher: Tensor) -> dict[str, float]:
    """Compare embeddings of the same texts.

    Args:
        student: ``[N, D]``, of length 1.
        teacher: The same of the teacher.

    Returns:
        Mean, low percentile and least of the cosines; beside them ``between_texts``, the mean cosine of the teacher's
        embeddings of different texts, which a constant would reach.
    """
    cosines = (student * teacher).sum(-1)
    others = (teacher @ teacher.T)[~torch.eye(len(teacher), dtype=torch.bool)]
    return {
        "cosine_mean": cosines.mean().item(),
        f"cosine_p{LOW_PERCENT:02d}": torch.quantile(cosines, LOW_PERCENT / 100).item(),
        "cosine_min": cosines.min().item(),
        "between_texts": others.mean().item(),
    }


def retrieval(queries: Tensor, candidates: Tensor) -> dict[str, float]:
    """Measure at which rank each query finds its own candidate among all.

    Args:
        queries: ``[N, D]``, of length 1.
        candidates: ``[N, D]``; query n looks for candidate n.

    Returns:
        ``mean_reciprocal_rank``, ``top1``, the share of queries that find it first, and ``median_rank``.

    Example:
        >>> retrieval(torch.eye(3), torch.eye(3))["top1"]
        1.0
    """
    scores = queries @ candidates.T
    own = scores.diagonal()[:, None]
    # Those that are as near come first: what cannot tell texts apart finds none.
    ranks = (scores >= own).sum(1).float()
    return {
        "mean_reciprocal_rank": (1 / ranks).mean().item(),
        "top1": (ranks == 1).float().mean().item(),
        "median_rank": ranks.median().item(),
    }


def compare_embeddings(
    models: Mapping[str, nn.Module], texts: Sequence[Sequence[int]], frame: Frame, pooling: Pooling, *, pad: int
) -> dict[str, Any]:
    """Measure encoders on held-out texts.

    Args:
        models: Encoders by name; the one named ``teacher``, if it is there, is what the others are compared with.
        texts: Tokens of each text, without special ones, at least 2.
        frame: What goes around them.
        pooling: Makes an embedding of hidden states.
        pad: Token that fills up short rows.

    Returns:
        By model, how well the first half of each text finds its second half among all (:func:`retrieval`), and how like
        its embeddings of whole texts are to the teacher's (:func:`likeness`).
    """
    whole: dict[str, Tensor] = {}
    found: dict[str, Any] = {}
    for name, model in models.items():
        with evaluating(model):
            whole[name] = embed_all(model, texts, frame, pooling, pad=pad)
            halves = [[text[: len(text) // 2] for text in texts], [text[len(text) // 2 :] for text in texts]]
            first, second = (embed_all(model, half, frame, pooling, pad=pad) for half in halves)
            found[name] = {"texts": len(texts), **retrieval(first, second)}
    for name in found:
        if name != "teacher" and "teacher" in whole:
            found[name] |= likeness(whole[name], whole["teacher"])
    return found
