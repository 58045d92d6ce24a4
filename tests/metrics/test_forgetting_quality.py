# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.audit.metrics.forgetting_quality import (
    CAP,
    DELTA,
    ForgettingQuality,
    _largest,
    forgetting_quality,
)
from fedquit.audit.scores import Floats
from fedquit.errors import InputError
from signal_world import Kind, phi_over_models

quick = settings(max_examples=40)
Numbers = list[float] | Floats


def epsilon(unlearned: Numbers, oracle: Numbers) -> float:
    return float(forgetting_quality(np.array(unlearned)[:, None], np.array(oracle)[:, None]).epsilon[0])


def test_a_single_threshold_worked_out_by_hand() -> None:
    oracle, unlearned = np.arange(10.0), np.arange(10.0) + 5
    # "9 or more": 1 of 10 oracles, all but 4 of the unlearned: ln((1 - delta - 0.4) / 0.1)
    assert epsilon(unlearned, oracle) == pytest.approx(math.log((1 - DELTA - 0.4) / 0.1))
    found = forgetting_quality(unlearned[:, None], oracle[:, None])
    assert found.points.tolist() == [0.125]  # ln 6 = 1.79 lies in the fourth bucket
    assert found.score == 0.125


def test_two_thresholds_find_a_narrow_sample_inside_a_wide_one() -> None:
    wide = [-9.0, -8.0, -7.0, 7.0, 8.0, 9.0]
    assert epsilon([-1.0, -0.5, 0.0, 0.2, 0.5, 1.0], wide) == CAP
    # one oracle of six inside: FPR 1/6; an interval without one of the unlearned: FNR 1/6
    mixed = [-9.0, -8.0, -7.0, 0.6, 8.0, 9.0]
    assert epsilon([-1.0, -0.5, 0.0, 0.2, 0.5, 1.0], mixed) == pytest.approx(math.log((1 - DELTA - 1 / 6) * 6))


def test_identical_samples_have_no_epsilon_and_all_points() -> None:
    phi = np.random.default_rng(0).normal(size=(16, 5))
    found = forgetting_quality(phi, phi)
    assert found.epsilon.tolist() == [0.0] * 5
    assert found.score == 1.0


def test_separated_peaky_and_undecided_samples_get_the_cap_and_no_points() -> None:
    assert epsilon([5.0, 6.0, 7.0], [1.0, 2.0, 3.0]) == CAP
    assert epsilon([0.0, 0.001, 0.002], [-1.0, 0.0, 1.0]) == CAP
    assert epsilon([1.0] * 3, [2.0] * 3) == CAP
    assert epsilon([1.0] * 3, [1.0] * 3) == 0
    assert _largest(np.array([0.0, 0.5]), np.array([0.5, 0.0])) == CAP  # one kind of error each: no attack is left
    assert forgetting_quality(np.array([[5.0], [6.0], [7.0]]), np.array([[1.0], [2.0], [3.0]])).score == 0


def test_points_halve_with_every_half_and_end_where_the_models_end() -> None:
    found = ForgettingQuality(np.array([0.0, 0.49, 0.5, 1.2, 6.99, 7.0, 50.0]), models=512)  # ceil(ln 511) = 7
    assert found.points.tolist() == [1, 1, 0.5, 0.25, 2.0**-13, 0, 0]
    assert found.score == pytest.approx(sum(found.points) / 7)
    assert ForgettingQuality(np.array([3.9, 5.0]), models=64).points.tolist() == [2.0**-7, 0]


def by_search(u: Floats, o: Floats) -> float:
    """All thresholds on a fine grid, straight from the definition, with the intervals of the competition."""
    pos, neg = (u, o) if np.median(u) > np.median(o) else (o, u)
    rates = [(np.mean(neg >= t), np.mean(pos < t)) for t in np.unique(np.concatenate([u, o]))]
    narrow, wide = sorted((u, o), key=np.ptp)
    width = np.ptp(narrow)
    for right in np.arange(narrow.min() + width - 2, narrow.max() + 2 + 1e-9, 0.25):
        for left in np.arange(right - width - 2, right - width + 2 + 1e-9, 0.25):
            rates.append((np.mean((left <= wide) & (wide <= right)), 1 - np.mean((left <= narrow) & (narrow <= right))))
    if any(a < 1e-9 and b < 1e-9 for a, b in rates):
        return CAP
    logs = [
        math.log(max(1 - DELTA - x, 1e-300) / y) for a, b in rates if a > 1e-9 and b > 1e-9 for x, y in ((a, b), (b, a))
    ]
    return max(0.0, *logs) if logs else CAP


@quick
@given(
    u=st.lists(st.integers(-4, 9), min_size=5, max_size=5, unique=True),
    o=st.lists(st.integers(-4, 9), min_size=5, max_size=5, unique=True),
)
def test_it_is_the_best_of_all_attacks_on_a_grid(u: list[int], o: list[int]) -> None:
    a, b = np.array(u, dtype=np.float64), np.array(o, dtype=np.float64)
    if np.ptp(a) == np.ptp(b):  # either may count as the narrower
        return
    assert epsilon(a, b) == pytest.approx(by_search(a, b))


@quick
@given(seed=st.integers(0, 999), shift=st.floats(-3, 3))
def test_it_lies_between_0_and_the_cap_whatever_the_order_of_models(seed: int, shift: float) -> None:
    rng = np.random.default_rng(seed)
    u, o = rng.normal(shift, 1, (9, 3)), rng.normal(0, 1, (9, 3))
    found = forgetting_quality(u, o)
    assert ((found.epsilon >= 0) & (found.epsilon <= CAP)).all()
    assert 0 <= found.score <= 1
    assert forgetting_quality(rng.permutation(u), rng.permutation(o)).epsilon.tolist() == found.epsilon.tolist()


@pytest.mark.parametrize("models", [16, 64, 256])
def test_even_retrain_against_retrain_has_about_a_fifth_of_the_points(models: int) -> None:
    """The best of many attacks fits the tails: F means nothing without that of Retrain against Retrain beside it."""
    rng = np.random.default_rng(0)
    found = forgetting_quality(rng.normal(size=(models, 100)), rng.normal(size=(models, 100)))
    assert 0.12 < found.score < 0.28


@pytest.mark.parametrize("kind", ["nothing", "wiped"])
def test_both_broken_unlearners_are_caught(kind: Kind) -> None:
    oracle = phi_over_models("retrain", 64, 60, 1)
    good = forgetting_quality(phi_over_models("retrain", 64, 60, 2), oracle)
    broken = forgetting_quality(phi_over_models(kind, 64, 60, 3), oracle)
    assert broken.score < good.score / 5
    assert np.median(broken.epsilon) > np.median(good.epsilon) + 1


def test_too_few_or_unequal_models_are_refused() -> None:
    for shape in ((2, 2), (4, 3)):
        with pytest.raises(InputError, match="as many of each"):
            forgetting_quality(np.zeros((shape[0], 1)), np.zeros((shape[1], 1)))


def test_every_pair_of_kinds_is_symmetric() -> None:
    kinds: tuple[Kind, ...] = ("retrain", "nothing", "wiped")
    for a, b in itertools.combinations(kinds, 2):
        one, other = phi_over_models(a, 16, 10, 1), phi_over_models(b, 16, 10, 2)
        assert forgetting_quality(one, other).epsilon.tolist() == forgetting_quality(other, one).epsilon.tolist()
