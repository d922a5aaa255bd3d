"""What the perplexity suite makes of its records: sums over windows, and by position."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_linear_attn.evaluation.scoring import bucket_range
from hf_linear_attn.evaluation.statistics import bootstrap_ratio_interval

Record = Mapping[str, Any]


def nothing(status: str, reason: str | None) -> dict[str, Any]:
    """Return the row of a cell that has no figures."""
    figures = ("nll_nats", "perplexity", "perplexity_ci95", "bits_per_byte", "kl_nats", "agreement")
    return {"status": status, "reason": reason, "windows": 0, "tokens": 0, **dict.fromkeys(figures)}


def summarise(records: Sequence[Record], name: str, scored_bytes: int | None) -> dict[str, Any]:
    """Sum a model's windows up."""
    nll = [sum(record["models"][name]["nll"]) for record in records]
    tokens = [sum(record["tokens"]) for record in records]
    low, high = bootstrap_ratio_interval(nll, tokens)
    mean = sum(nll) / sum(tokens)
    return {
        **nothing("ok", None),
        "windows": len(records),
        "tokens": sum(tokens),
        "nll_nats": mean,
        "perplexity": _exp(mean),
        "perplexity_ci95": [_exp(low), _exp(high)],
        "bits_per_byte": None if scored_bytes is None else sum(nll) / (math.log(2) * scored_bytes),
        **_against_teacher(records, name, sum(tokens), slice(None)),
    }


def _against_teacher(records: Sequence[Record], name: str, tokens: int, buckets: slice) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for source, target in (("kl", "kl_nats"), ("agree", "agreement")):
        sums = [record["models"][name][source] for record in records]
        found[target] = None if None in sums else sum(sum(one[buckets]) for one in sums) / tokens
    return found


def _exp(nats: float) -> float:
    """Return exp(nats), capped where a float would overflow."""
    return math.exp(min(nats, 700.0))


def by_position(name: str, length: int, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Split a model's windows of one length by position."""
    found = []
    for at in range(max(len(record["tokens"]) for record in records)):
        here = [r for r in records if len(r["tokens"]) > at and r["tokens"][at]]
        counts = [record["tokens"][at] for record in here]
        nll = [record["models"][name]["nll"][at] for record in here]
        if not counts:
            continue
        start, stop = bucket_range(at)
        found.append(
            {
                "model": name,
                "window_length": length,
                "start": start,
                "stop": min(stop, length),
                "windows": len(here),
                "tokens": sum(counts),
                "nll_nats": sum(nll) / sum(counts),
                "nll_nats_ci95": list(bootstrap_ratio_interval(nll, counts)),
                "perplexity": _exp(sum(nll) / sum(counts)),
                **_against_teacher(here, name, sum(counts), slice(at, at + 1)),
            }
        )
    return found
