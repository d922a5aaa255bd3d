"""The statistics of the report: intervals for scores, paired differences, effective length."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# RULER (Hsieh et al., 2024) calls a length effective where the score beats Llama-2-7B's at 4k tokens.
EFFECTIVE_THRESHOLD = 0.856
_Z95 = 1.959963984540054
_RESAMPLES = 2000


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval for a proportion.

    `(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)` (Wilson, 1927). A score that is a share of several
    references has less variance than a coin of the same mean, so for those the interval is conservative.

    Args:
        successes: Sum of the scores, 0..n.
        n: Number of samples, at least 1.

    Returns:
        Lower and upper bound, within 0..1.

    Example:
        >>> [round(bound, 3) for bound in wilson_interval(50, 50)]
        [0.929, 1.0]
    """
    p = successes / n
    z2 = _Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At 0 and n the bound is exact; rounding must not put the score outside its interval.
    return (0.0 if successes == 0 else max(0.0, centre - half)), (1.0 if successes == n else min(1.0, centre + half))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Compare two models' scores on the same samples.

    Args:
        first: Scores of the first model.
        second: Scores of the second, in the same order.

    Returns:
        `n`, the number of pairs; `difference`, the mean of first minus second, and `ci95`, its bootstrap 95% interval;
        `wins` and `losses` of the first; `p_value` of the exact McNemar (sign) test, two-sided.
    """
    difference = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return {
        "n": len(difference),
        "difference": float(difference.mean()),
        "ci95": list(bootstrap_ratio_interval(difference, np.ones_like(difference))),
        "wins": wins,
        "losses": losses,
        "p_value": _sign_test(wins, losses),
    }


def _sign_test(wins: int, losses: int) -> float:
    """Return the two-sided exact binomial p-value of `wins` against `losses` under a fair coin."""
    n, k = wins + losses, min(wins, losses)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / (1 << n)
    return min(1.0, 2 * tail)


def bootstrap_ratio_interval(numerators: ArrayLike, denominators: ArrayLike) -> tuple[float, float]:
    """Return the bootstrap 95% interval of `sum(numerators) / sum(denominators)` over units that hang together."""
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(top), (_RESAMPLES, len(top)))
    low, high = np.quantile(top[picks].sum(axis=1) / bottom[picks].sum(axis=1), [0.025, 0.975])
    return float(low), float(high)


def effective_length(lengths: Sequence[int], scores: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the longest length whose mean score beats RULER's threshold of 85.6%, if the samples can tell.

    Args:
        lengths: Tested lengths, ascending.
        scores: Scores of all samples at each length.

    Returns:
        `tokens` (None where no length qualifies or the status is undetermined), `status` (`"determined"` or
        `"undetermined"`), `at_least` (the longest length whose interval lies above the threshold, or None),
        `at_most` (the longest whose interval does not lie below it, or None) and `longest_tested`.

    Example:
        >>> effective_length([512, 1024], [[1] * 50, [0] * 50])["tokens"]
        512
    """
    at_least = at_most = None
    for length, values in zip(lengths, scores, strict=True):
        low, high = wilson_interval(sum(values), len(values))
        if low > EFFECTIVE_THRESHOLD:
            at_least = length
        if high > EFFECTIVE_THRESHOLD:
            at_most = length
    determined = at_least == at_most
    return {
        "tokens": at_least if determined else None,
        "status": "determined" if determined else "undetermined",
        "at_least": at_least,
        "at_most": at_most,
        "longest_tested": max(lengths),
        "threshold": EFFECTIVE_THRESHOLD,
    }


def crossing(lengths: Sequence[int], first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the length from which `first` stays below `second`, interpolated between measurements on log axes.

    Args:
        lengths: Ascending lengths.
        first: Cost of the one that should win at length.
        second: Cost of the other.

    Returns:
        The length; the shortest tested one if `first` is below throughout; None if it is not below at the end.

    Example:
        >>> round(crossing([100, 400], [2.0, 2.0], [1.0, 4.0]))
        200
    """
    gaps = [math.log(b / a) for a, b in zip(first, second, strict=True)]
    if gaps[-1] <= 0:
        return None
    for i in range(len(gaps) - 1, 0, -1):
        if gaps[i - 1] <= 0:
            share = -gaps[i - 1] / (gaps[i] - gaps[i - 1])
            return float(lengths[i - 1] * (lengths[i] / lengths[i - 1]) ** share)
    return float(lengths[0])
