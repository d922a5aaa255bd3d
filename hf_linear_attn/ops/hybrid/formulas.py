"""What each update rule and each mix computes, of one key and of one token's queries, in float64.

A rule says how a key is folded into the state and how queries read it; a mix joins what they read of the state with
what they read exactly. The file of a new one adds its own to :data:`RULES`, :data:`MIXES` and :data:`GATES`. Where keys
are kept beyond the window, :func:`keep` says which.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from hf_linear_attn.ops.delta_rule.reference import unit
from hf_linear_attn.ops.hybrid.problem import HybridParams, Kept, Key, Sums
from hf_linear_attn.ops.linear_attention.reference import guarded

Weights = Mapping[str, Tensor]


class Query(NamedTuple):
    """The queries of one token and one group of G heads, and what they read.

    Attributes:
        q: The queries ``[G, D]``, as the model gives them.
        scores: ``scaling q.k`` of the P keys of sinks, kept and ring ``[G, P]``.
        values: Their values ``[P, V]``.
        num: What the state gives ``[G, V]``.
        den: Its normaliser ``[G]``; None of a rule without one.
        n: Keys that the state holds.
        key_sum: Their sum ``[D]``.
        scaling: Factor on ``q.k``.
        eps: Added to normalisers, away from 0.
    """

    q: Tensor
    scores: Tensor
    values: Tensor
    num: Tensor
    den: Tensor | None
    n: int
    key_sum: Tensor
    scaling: float
    eps: float

    def near(self) -> Tensor:
        """Return softmax attention to sinks, kept keys and ring."""
        return self.scores.softmax(-1) @ self.values

    def far(self) -> Tensor:
        """Return what the state gives, normalised."""
        return self.num if self.den is None else self.num / guarded(self.den, self.eps)[:, None]


def fold_sum(sums: Sums, key: Key) -> Sums:
    """Fold by ``S = a S + phi v^T`` and ``z = a z + phi``, where a = 1 without a decay."""
    a = key.gates.get("decay", 1)
    return {"kv": a * sums["kv"] + torch.outer(key.phi, key.v), "z": a * sums["z"] + key.phi}


def read_sum(sums: Sums, phi_q: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """Return ``phi_q^T S`` and ``phi_q^T z``."""
    return phi_q @ sums["kv"], phi_q @ sums["z"]


def fold_delta(sums: Sums, key: Key) -> Sums:
    """Fold by ``S = a S`` and then ``S += beta k (v - S^T k)^T``, with ``k = phi / |phi|``."""
    k, kv = unit(key.phi), key.gates.get("decay", 1) * sums["kv"]
    return sums | {"kv": kv + key.gates["beta"] * torch.outer(k, key.v - k @ kv)}


def read_delta(sums: Sums, phi_q: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """Return ``c S^T q`` with ``q = phi_q / |phi_q|``."""
    return weights["scale"][:, None] * (unit(phi_q) @ sums["kv"]), None


def join_key(x: Query, weights: Weights) -> Tensor:
    """Let the state's output be the value of one more key, whose score is ``log n + scaling q.m + a + u.q``."""
    n, mean = x.key_sum.new_tensor(float(x.n)), x.key_sum / max(x.n, 1)
    own = n.log() + x.scaling * x.q @ mean + weights["bias"] + (x.q * weights["weight"]).sum(-1)
    shares = torch.cat([x.scores, own[:, None]], 1).softmax(-1)
    return shares[:, :-1] @ x.values + shares[:, -1:] * x.far()


def join_gate(x: Query, weights: Weights) -> Tensor:
    """Return ``(1 - g) near + g far`` with ``g = sigmoid(a + u.q)``, 0 where the state holds no key."""
    g = (weights["bias"] + (x.q * weights["weight"]).sum(-1)).sigmoid()[:, None] * (x.n > 0)
    return (1 - g) * x.near() + g * x.far()


def join_shared(x: Query, weights: Weights) -> Tensor:
    """Divide by one denominator: exact weights are relative to the largest, and count ``sigmoid(a)`` times."""
    if x.den is None:
        raise RuntimeError("the rule has no normaliser to share")
    exact = weights["bias"].sigmoid()[:, None] * (x.scores - x.scores.amax(-1, keepdim=True)).exp()
    return (exact @ x.values + x.num) / guarded(exact.sum(-1) + x.den, x.eps)[:, None]


def distance(x: Tensor, y: Tensor) -> float:
    """Return ``|x - y|^2``, 0 where that is below ``(|x|^2 + |y|^2) / 1024``: rounding must not choose among equals."""
    x, y = x.detach(), y.detach()
    found = float((x - y) @ (x - y))
    return found if 1024 * found >= float(x @ x + y @ y) else 0.0


def by_redundancy(kept: list[Kept], key: Key, after: list[Key | None], params: HybridParams) -> list[Kept]:
    """Score by the least distance of a value to that of any key that has left the window later."""
    return [Kept(x.key, min(x.score, distance(x.key.v, key.v))) for x in kept] + [Kept(key, math.inf)]


def by_learned(kept: list[Kept], key: Key, after: list[Key | None], params: HybridParams) -> list[Kept]:
    """Score by what a net says of a key, and of the mean of the next ones, at its age in doublings of the window."""
    w, window = params.retention_weights, params.geometry.lag
    ahead = min(16, window)
    mean = sum((x.said for x in after[:ahead] if x is not None), torch.zeros_like(key.said)) / ahead
    x = (torch.cat([key.said, mean]) - w["mean"]) / w["deviation"]
    scores = silu(x @ w["in"] + w["in_bias"]) @ w["out"] + w["bias"]
    found = []
    for old in [*kept, Kept(key, 0, scores.tolist())]:
        point = min(math.log2((key.number - old.key.number + window) / window), 5)
        low = min(int(point), 4)
        score = old.scores[low] + (point - low) * (old.scores[low + 1] - old.scores[low])
        found.append(old._replace(score=score))
    return found


def keep(kept: list[Kept], key: Key, after: list[Key | None], params: HybridParams) -> tuple[list[Kept], Key | None]:
    """Keep a key that leaves the window, behind which those in ``after`` lie, None for padding.

    Returns:
        What is kept then, and the key that goes where there would be too many: that of the least score, the oldest of
        several.
    """
    kept = RETENTIONS[params.retention](kept, key, after, params)
    if len(kept) <= params.geometry.kept:
        return kept, None
    gone = min(kept, key=lambda x: x.score)
    return [x for x in kept if x is not gone], gone.key


Fold = Callable[[Sums, Key], Sums]
Read = Callable[[Sums, Tensor, Weights], tuple[Tensor, Tensor | None]]

RULES: dict[str, tuple[Fold, Read]] = {
    "additive": (fold_sum, read_sum),
    "decay": (fold_sum, read_sum),
    "delta": (fold_delta, read_delta),
    "gated_delta": (fold_delta, read_delta),
}
"""How a rule folds a key, and how queries read the state."""

MIXES: dict[str, Callable[[Query, Weights], Tensor]] = {
    "key": join_key,
    "gate": join_gate,
    "shared": join_shared,
    "window": lambda x, weights: x.near(),
}
"""How both branches become one output."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {"decay": lambda x: (-softplus(x)).exp(), "beta": torch.sigmoid}
"""What becomes of a key's score ``b + u.k + w.v``: what the key leaves of the state, and how much it replaces."""

RETENTIONS: dict[str, Callable[[list[Kept], Key, list[Key | None], HybridParams], list[Kept]]] = {
    "redundancy": by_redundancy,
    "learned": by_learned,
}
"""How kept keys are scored when another comes, that one last."""
