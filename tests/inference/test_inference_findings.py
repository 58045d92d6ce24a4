# SPDX-License-Identifier: Apache-2.0
"""Findings over targets: the words err as rarely as they say, which is simulated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedquit.errors import InputError
from fedquit.inference.findings import LEVEL, allowed, at_least_p, least_targets, less_p

STUDIES = 600
SLACK = 3 * math.sqrt(LEVEL * (1 - LEVEL) / STUDIES)  # three standard errors of the simulation


def test_the_smallest_p_of_n_targets_is_two_to_the_minus_n() -> None:
    assert less_p([0.0] * 5, [1.0] * 5) == 1 / 32
    assert less_p([1.0] * 5, [0.0] * 5) == 1.0
    assert less_p([], []) == 1.0


def test_p_counts_the_sign_patterns_that_favour_the_finding_as_much() -> None:
    # Differences 3, 1, -1: sums at least 3 are those of +++ (3), ++- (5), +-+ (1: no), +-- (3).
    assert less_p([0.0, 0.0, 1.0], [3.0, 1.0, 0.0]) == 3 / 8


def test_many_targets_are_drawn_and_keep_the_observed_pattern() -> None:
    p = less_p([0.0] * 20, [1.0] * 20)
    assert 0 < p < 1e-3


def test_a_finding_that_needs_all_comparisons_has_the_largest_p_and_one_that_needs_one_bonferronis() -> None:
    assert at_least_p([0.01, 0.04, 0.02], 3) == 0.04
    assert at_least_p([0.01, 0.04, 0.02], 1) == pytest.approx(0.03)
    assert at_least_p([0.01, 0.9, 0.02], 2) == pytest.approx(0.04)
    with pytest.raises(InputError, match="4 of 3 comparisons"):
        at_least_p([0.1, 0.2, 0.3], 4)


@pytest.mark.parametrize(("comparisons", "needed"), [(1, 1), (6, 6), (6, 5), (6, 1)])
def test_the_least_targets_can_tell_and_one_fewer_cannot(comparisons: int, needed: int) -> None:
    targets = least_targets(comparisons, needed)
    assert at_least_p([2.0**-targets] * comparisons, needed) <= LEVEL
    assert at_least_p([2.0 ** (1 - targets)] * comparisons, needed) > LEVEL


@pytest.mark.parametrize("tails", ["normal", "t3"])
@pytest.mark.parametrize(("comparisons", "needed", "false"), [(5, 5, 1), (5, 4, 2), (5, 5, 5)])
def test_a_false_finding_is_called_true_in_at_most_five_percent(
    comparisons: int, needed: int, false: int, tails: str
) -> None:
    """The comparisons that are not true have no difference; the others a large one, so that they hide nothing."""
    generator = np.random.default_rng(7)
    called = 0
    for _ in range(STUDIES):
        shape = (comparisons + 1, 8)
        noise = generator.normal(size=shape) if tails == "normal" else generator.standard_t(3, size=shape)
        gain = np.where(np.arange(comparisons) < false, 0.0, 50.0)
        p_values = [less_p(noise[0], noise[1 + k] + gain[k]) for k in range(comparisons)]
        called += at_least_p(p_values, needed) <= LEVEL
    assert called / STUDIES <= LEVEL + SLACK


def test_a_true_finding_over_ten_targets_is_mostly_called_true() -> None:
    generator = np.random.default_rng(8)
    called = 0
    for _ in range(200):
        noise = generator.normal(size=(6, 10))
        called += max(less_p(noise[0], noise[1 + k] + 2.5) for k in range(5)) <= LEVEL
    assert called / 200 > 0.9


@pytest.mark.parametrize("ours", [2, 5, 10])
def test_means_of_the_same_targets_differ_beyond_what_is_allowed_in_five_percent(ours: int) -> None:
    generator = np.random.default_rng(9)
    printed = generator.normal(scale=3.0, size=(20_000, 10))
    own = generator.normal(scale=3.0, size=(20_000, ours)).mean(axis=1)
    deviations = printed.std(axis=1, ddof=1)
    beyond = np.abs(own - printed.mean(axis=1)) > allowed(1.0, ours) * deviations
    assert abs(beyond.mean() - LEVEL) < 3 * math.sqrt(LEVEL * (1 - LEVEL) / 20_000)


def test_rounding_widens_what_is_allowed() -> None:
    assert allowed(1.0, 2, rounding=0.05) == pytest.approx(allowed(1.0, 2) + 0.05)
