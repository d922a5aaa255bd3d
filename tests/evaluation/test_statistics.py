"""The statistics, against scipy where it has them and against simulation where it does not."""

import random

import numpy as np
import pytest

from hf_linear_attn.evaluation.statistics import (
    bootstrap_ratio_interval,
    crossing,
    effective_length,
    paired_difference,
    wilson_interval,
)


# Wilson (1927) by hand: z = 1.95996, (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (5, 10, 0.23659, 0.76341), (45, 50, 0.78636, 0.95652)],
)
def test_wilson_interval_has_its_known_values(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_covers_the_truth_about_as_often_as_it_says():
    rng = random.Random(0)
    covered = 0
    for _ in range(1000):
        low, high = wilson_interval(sum(rng.random() < 0.9 for _ in range(50)), 50)
        covered += low <= 0.9 <= high
    assert 0.93 <= covered / 1000 <= 0.985


def test_paired_difference_of_equal_models_is_zero():
    found = paired_difference([1, 0, 1, 0.5], [1, 0, 1, 0.5])
    assert found == {"n": 4, "difference": 0, "ci95": [0, 0], "wins": 0, "losses": 0, "p_value": 1}


# Two-sided exact binomial tests under a fair coin: 2 * (1 + 9) / 2^9 and 2 / 2^12.
@pytest.mark.parametrize(("wins", "losses", "p"), [(8, 1, 2 * 10 / 512), (12, 0, 2 / 4096), (3, 3, 1.0)])
def test_mcnemar_is_the_exact_sign_test(wins, losses, p):
    first = [1.0] * wins + [0.0] * losses + [1.0] * 20
    second = [0.0] * wins + [1.0] * losses + [1.0] * 20
    found = paired_difference(first, second)
    assert (found["wins"], found["losses"]) == (wins, losses)
    assert found["p_value"] == pytest.approx(p)
    assert found["ci95"][0] <= found["difference"] <= found["ci95"][1]


def test_paired_interval_excludes_zero_exactly_when_one_side_wins_throughout():
    assert paired_difference([1] * 40, [0] * 20 + [1] * 20)["ci95"][0] > 0
    low, high = paired_difference([1, 0] * 20, [0, 1] * 20)["ci95"]
    assert low < 0 < high


def test_bootstrap_ratio_interval_holds_the_ratio_and_shrinks_with_more_units():
    rng = np.random.default_rng(0)
    widths = []
    for n in (20, 320):
        tokens = rng.integers(50, 100, n)
        low, high = bootstrap_ratio_interval(tokens * rng.normal(2, 0.2, n), tokens)
        assert low < 2.02
        assert high > 1.98
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
    assert bootstrap_ratio_interval([4, 6], [2, 3]) == (2, 2)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[1] * 100, [1] * 100, [0] * 100], (1024, "determined", 1024, 1024)),
        ([[0] * 100, [0] * 100, [0] * 100], (None, "determined", None, None)),
        ([[1] * 100, [1] * 86 + [0] * 14, [0] * 100], (None, "undetermined", 512, 1024)),
        # Five of five is above the threshold, and yet says little.
        ([[1] * 5, [0] * 5, [0] * 5], (None, "undetermined", None, 512)),
    ],
)
def test_effective_length_is_claimed_only_where_the_interval_clears_the_threshold(scores, expected):
    found = effective_length([512, 1024, 2048], scores)
    assert (found["tokens"], found["status"], found["at_least"], found["at_most"]) == expected
    assert found["longest_tested"] == 2048


def test_crossing_is_where_the_lines_cross():
    lengths = [2**n for n in range(8, 15)]
    assert crossing(lengths, [3.0] * 7, [0.002 * n for n in lengths]) == pytest.approx(1500, rel=1e-6)
    assert crossing(lengths, [1.0] * 7, [2.0] * 7) == 256
    assert crossing(lengths, [2.0] * 7, [1.0] * 7) is None
