"""How well a feature map stands in for softmax, on the queries, keys and values of one attention layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.diagnostics.capture import AttentionInputs
from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.feature_maps import FeatureMap
from hf_linear_attn.ops.linear_attention.reference import guarded

TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class ApproximationSettings:
    """Say what is measured, and how much memory that may take.

    Args:
        window: Attention mass is reported beyond this many tokens, >= 1.
        sinks: Attention mass is reported on this many first tokens, >= 1.
        queries: Most queries per sequence, spread evenly over it, >= 1; all where there are fewer.
        ranked_queries: Most queries for which the order of weights is compared with that of scores, >= 1.
        matrix_tokens: Tokens at the start of the sequence for effective ranks and heat maps, >= 2.
        block_mib: About the size of the largest temporary tensor, > 0; blocks of queries are chosen to fit.
        eps: Added to the normaliser, > 0.

    Raises:
        ArgumentError: If a value is out of range.
    """

    window: int = 64
    sinks: int = 4
    queries: int = 256
    ranked_queries: int = 16
    matrix_tokens: int = 256
    block_mib: float = 64.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        smallest = {"window": 1, "sinks": 1, "queries": 1, "ranked_queries": 1, "matrix_tokens": 2}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ArgumentError(name, f"be at least {least}", getattr(self, name), "Leave it out for the default.")
        for name in ("block_mib", "eps"):
            if not getattr(self, name) > 0:
                raise ArgumentError(name, "be greater than 0", getattr(self, name), "Leave it out for the default.")


class Attention:
    """The attention of one layer and one sequence, row by row: softmax's, or that of a feature map.

    Args:
        inputs: The layer's queries, keys and values; the first sequence of the batch counts.
        feature_map: The map; None for softmax.
        settings: What is measured.
    """

    def __init__(
        self, inputs: AttentionInputs, feature_map: FeatureMap | None, settings: ApproximationSettings
    ) -> None:
        self.q, self.k, self.v = inputs.q[0].float(), inputs.k[0].float(), inputs.v[0].float()
        self.scaling, self.causal = inputs.scaling, inputs.causal
        self.feature_map, self.settings = feature_map, settings
        self.heads, self.tokens = self.q.shape[:2]
        self.kv_heads = self.k.shape[0]
        self.positions = torch.arange(self.tokens, device=self.q.device)
        features = self.k.shape[-1] if feature_map is None else feature_map.feature_dim
        self._key_block = self._fitting(self.kv_heads * features)
        self.query_block = self._fitting(self.heads * max(features, self.tokens))
        whole = feature_map is not None and self._key_block >= self.tokens
        self._phi_k = self._keys(0, self.tokens) if whole else None

    def _fitting(self, floats_per_row: int) -> int:
        return max(1, int(self.settings.block_mib * 2**20 / 4 / floats_per_row))

    def _keys(self, a: int, b: int) -> Tensor:
        if self.feature_map is None:
            return self.k[:, a:b]
        return self.feature_map.phi_k(self.k[None, :, a:b], self.positions[None, a:b])[0]

    def scores(self, rows: Tensor) -> Tensor:
        """Return ``scaling q.k`` of some queries, ``[H, rows, T]``."""
        return self._products(self.q[:, rows], self.k) * self.scaling

    def _products(self, q: Tensor, k: Tensor) -> Tensor:
        grouped = q.reshape(self.kv_heads, -1, q.shape[-1])
        return (grouped @ k.mT).view(self.heads, q.shape[1], k.shape[1])

    def visible(self, rows: Tensor) -> Tensor:
        """Return which keys those queries see, ``[rows, T]``."""
        if not self.causal:
            return torch.ones(len(rows), self.tokens, dtype=torch.bool, device=rows.device)
        return self.positions[None] <= rows[:, None]

    def weights(self, rows: Tensor) -> Tensor:
        """Return the normalised weights of some queries, ``[H, rows, T]``, rows that sum to 1."""
        visible = self.visible(rows)
        if self.feature_map is None:
            return self.scores(rows).masked_fill(~visible, -torch.inf).softmax(-1)
        phi_q = self.feature_map.phi_q(self.q[None, :, rows], rows[None])[0]
        if self._phi_k is not None:
            products = self._products(phi_q, self._phi_k)
        else:
            # Too many features to keep for all keys: made anew for each block of queries.
            blocks = range(0, self.tokens, self._key_block)
            products = torch.cat([self._products(phi_q, self._keys(a, a + self._key_block)) for a in blocks], dim=-1)
        products = products.masked_fill(~visible, 0)
        return products / guarded(products.sum(-1, keepdim=True), self.settings.eps)

    def outputs(self, weights: Tensor) -> Tensor:
        """Return the weights times the values, ``[H, rows, V]``."""
        grouped = weights.reshape(self.kv_heads, -1, self.tokens)
        return (grouped @ self.v).view(self.heads, weights.shape[1], -1)


def spread(tokens: int, number: int, device: torch.device) -> Tensor:
    """Return at most ``number`` of the positions 0 ... tokens - 1, evenly spread, the last one included."""
    if tokens <= number:
        return torch.arange(tokens, device=device)
    steps = torch.arange(1, number + 1, device=device, dtype=torch.float64)
    return (steps * tokens / number).round().long() - 1


def length_edges(tokens: int) -> list[int]:
    """Return the ends of the ranges of positions over which errors are averaged: 16, 32, ... up to ``tokens``."""
    edges = []
    edge = 16
    while edge < tokens:
        edges.append(edge)
        edge *= 2
    return [*edges, tokens]


@torch.no_grad()
def measure_layer(
    inputs: AttentionInputs, maps: Mapping[str, FeatureMap], settings: ApproximationSettings
) -> dict[str, Any]:
    """Compare feature maps with one layer's softmax, by head.

    Args:
        inputs: The layer's queries, keys and values; the first sequence of the batch counts.
        maps: Feature maps made for the layer's sizes and scaling, by name.
        settings: What is measured.

    Returns:
        ``index``, ``name``, ``exact`` (softmax's own statistics, see :func:`describe`), and ``maps`` with these
        statistics and, per head, ``weights_error`` (``|A' - A| / |A|``, Frobenius), ``output_error`` (the
        same of the attention's output), ``output_error_by_length`` (for queries up to each of
        :func:`length_edges`, past the one before), ``negative_share`` (of the weights' absolute sum),
        ``rank_correlation`` (Spearman's, of weights and scores over the keys of a query; 1 = monotone) and
        ``feature_dim``.
    """
    softmax = Attention(inputs, None, settings)
    rows = spread(softmax.tokens, settings.queries, inputs.q.device)
    report: dict[str, Any] = {
        "index": inputs.index,
        "name": inputs.name,
        "head_dim": inputs.q.shape[-1],
        "length_edges": length_edges(softmax.tokens),
        "exact": describe(softmax, rows, settings),
        "maps": {},
    }
    for name, feature_map in maps.items():
        attention = Attention(inputs, feature_map, settings)
        report["maps"][name] = {
            "feature_dim": feature_map.feature_dim,
            **describe(attention, rows, settings),
            **_errors(softmax, attention, rows),
            "rank_correlation": _rank_correlation(attention, settings),
        }
    return report


def describe(attention: Attention, rows: Tensor, settings: ApproximationSettings) -> dict[str, list[float]]:
    """Return statistics of attention weights by head, over some queries.

    Returns:
        ``entropy_nats`` (mean over queries; negative weights count as 0), ``mass_beyond_window``,
        ``mass_on_first_tokens`` (where they are beyond the window too) and ``effective_rank`` (exp of the
        entropy of the singular values, Roy and Vetterli, 2007) of the first ``matrix_tokens`` tokens' matrix.
    """
    sums = torch.zeros(3, attention.heads, dtype=torch.float64, device=rows.device)
    for block in torch.split(rows, attention.query_block):
        weights = attention.weights(block)
        distance = block[:, None] - attention.positions[None]
        beyond = distance.abs() >= settings.window
        first = attention.positions[None] < settings.sinks
        positive = weights.clamp(min=0)
        positive = positive / (positive.sum(-1, keepdim=True) + TINY)
        sums[0] -= torch.special.xlogy(positive, positive).sum((1, 2))
        sums[1] += (weights * beyond).sum((1, 2))
        sums[2] += (weights * (beyond & first)).sum((1, 2))
    means = sums / len(rows)
    return {
        "entropy_nats": means[0].tolist(),
        "mass_beyond_window": means[1].tolist(),
        "mass_on_first_tokens": means[2].tolist(),
        "effective_rank": list(map(effective_rank, first_matrices(attention, settings.matrix_tokens))),
    }


def first_matrices(attention: Attention, tokens: int) -> Tensor:
    """Return each head's weights among the first tokens, ``[H, n, n]``, n = min(tokens, T)."""
    rows = attention.positions[:tokens]
    blocks = torch.split(rows, attention.query_block)
    return torch.cat([attention.weights(block)[..., : len(rows)] for block in blocks], dim=1)


def effective_rank(matrix: Tensor) -> float:
    """Return exp of the entropy of the normalised singular values (Roy and Vetterli, 2007).

    Example:
        >>> round(effective_rank(torch.eye(5)), 4), round(effective_rank(torch.ones(5, 5)), 4)
        (5.0, 1.0)
    """
    values = torch.linalg.svdvals(matrix)
    p = values / (values.sum() + TINY)
    return float(torch.special.xlogy(p, p).sum().neg().exp())


def _errors(exact: Attention, approximate: Attention, rows: Tensor) -> dict[str, Any]:
    edges = length_edges(exact.tokens)
    heads = exact.heads
    weights = torch.zeros(2, heads, dtype=torch.float64, device=rows.device)
    outputs = torch.zeros(2, heads, len(edges), dtype=torch.float64, device=rows.device)
    signs = torch.zeros(2, heads, dtype=torch.float64, device=rows.device)
    for block in torch.split(rows, min(exact.query_block, approximate.query_block)):
        want, got = exact.weights(block), approximate.weights(block)
        weights[0] += (got - want).double().square().sum((1, 2))
        weights[1] += want.double().square().sum((1, 2))
        signs[0] += got.clamp(max=0).double().abs().sum((1, 2))
        signs[1] += got.double().abs().sum((1, 2))
        o, o_hat = exact.outputs(want), exact.outputs(got)
        bucket = torch.bucketize(block, torch.tensor(edges, device=block.device), right=True)
        outputs[0].index_add_(1, bucket, (o_hat - o).double().square().sum(-1))
        outputs[1].index_add_(1, bucket, o.double().square().sum(-1))
    by_length = (outputs[0] / (outputs[1] + TINY)).sqrt()
    return {
        "weights_error": (weights[0] / (weights[1] + TINY)).sqrt().tolist(),
        "output_error": (outputs[0].sum(1) / (outputs[1].sum(1) + TINY)).sqrt().tolist(),
        # A range that holds no query has no error, which is not the same as an error of 0.
        "output_error_by_length": [
            [e if n > 0 else None for e, n in zip(es, ns, strict=True)]
            for es, ns in zip(by_length.tolist(), outputs[1].tolist(), strict=True)
        ],
        "negative_share": (signs[0] / (signs[1] + TINY)).tolist(),
    }


def _rank_correlation(attention: Attention, settings: ApproximationSettings) -> list[float]:
    least = 8
    first = min(least, attention.tokens) - 1 if attention.causal else 0
    rows = first + spread(attention.tokens - first, settings.ranked_queries, attention.q.device)
    total = torch.zeros(attention.heads, dtype=torch.float64, device=rows.device)
    for row in rows:
        seen = int(row) + 1 if attention.causal else attention.tokens
        scores = attention.scores(row[None])[:, 0, :seen]
        weights = attention.weights(row[None])[:, 0, :seen]
        total += correlation(ranks(scores), ranks(weights))
    return (total / len(rows)).tolist()


def ranks(x: Tensor) -> Tensor:
    """Return the ranks of the entries of each row of ``x [..., n]``, ties sharing their mean rank.

    Example:
        >>> ranks(torch.tensor([[0.0, 5.0, 0.0, 7.0]])).tolist()
        [[0.5, 2.0, 0.5, 3.0]]
    """
    x = x.contiguous()
    ordered = x.sort(-1).values
    below = torch.searchsorted(ordered, x, right=False)
    up_to = torch.searchsorted(ordered, x, right=True)
    return (below + up_to - 1).double() / 2


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Return Pearson's correlation of each row of ``x`` and ``y``, 0 where one of them is constant."""
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    return (x * y).sum(-1) / ((x.square().sum(-1) * y.square().sum(-1)).sqrt() + TINY)
