# SPDX-License-Identifier: Apache-2.0
"""Strength is what a score is worth; broken unlearners are caught by scores (test_rmia, test_lira, …)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.audit.attacks.roc import FPRS, auc, clopper_pearson, roc
from fedquit.errors import InputError

quick = settings(max_examples=60)
scores = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


def test_a_roc_worked_out_by_hand() -> None:
    found = roc([3, 2, 1], [2, 0])
    assert found.threshold.tolist() == [np.inf, 3, 2, 1, 0]
    assert found.tpr.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
    assert found.fpr.tolist() == [0, 0, 0.5, 0.5, 1]
    assert auc([3, 2, 1], [2, 0]).value == 0.75


def test_perfect_separation_still_has_an_interval() -> None:
    few, many = auc([1, 2, 3], [0, -1, -2]), auc(np.arange(1, 500), -np.arange(500))
    assert few.value == few.high == many.value == 1.0
    assert few.low < 0.7
    assert 0.98 < many.low < 1
    assert auc([0, -1, -2], [1, 2, 3]).low == 0.0


def test_identical_scores_are_worth_one_half() -> None:
    found = auc([1, 1, 1, 2], [1, 1, 1, 2])
    assert found.value == 0.5
    assert found.covers(0.5)
    assert found.low == pytest.approx(1 - found.high)


def test_the_interval_agrees_with_the_usual_standard_error_where_there_are_many_examples() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 900), rng.normal(0, 1, 700)
    found = auc(a, b)
    assert found.value == pytest.approx((a[:, None] > b).mean())
    v, m, n = found.value, 900, 700
    q1, q2 = v / (2 - v), 2 * v**2 / (1 + v)  # Hanley and McNeil (Radiology 1982)
    half = 1.96 * math.sqrt((v * (1 - v) + (m - 1) * (q1 - v**2) + (n - 1) * (q2 - v**2)) / (m * n))
    assert (found.low, found.high) == pytest.approx((v - half, v + half), abs=2e-3)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = [auc(rng.normal(size=25), rng.normal(size=40)).covers(0.5) for _ in range(400)]
    assert 0.92 <= np.mean(covered) <= 0.98


@quick
@given(a=scores, b=scores)
def test_the_area_under_the_curve_is_the_auc_and_the_curve_climbs(a: list[int], b: list[int]) -> None:
    curve, area = roc(a, b), auc(a, b)
    assert (np.diff(curve.fpr) >= 0).all()
    assert (np.diff(curve.tpr) >= 0).all()
    assert (curve.fpr[-1], curve.tpr[-1]) == (1, 1)
    assert float((np.diff(curve.fpr) * (curve.tpr[1:] + curve.tpr[:-1]) / 2).sum()) == pytest.approx(area.value)
    assert 0 <= area.low <= area.value <= area.high <= 1
    assert auc(b, a).value == pytest.approx(1 - area.value)


@quick
@given(a=scores, b=scores, seed=st.integers(0, 99))
def test_neither_order_nor_a_rising_function_of_the_score_matters(a: list[int], b: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    other = roc(np.exp(rng.permutation(a)), np.exp(rng.permutation(b)))
    assert other.tpr.tolist() == roc(a, b).tpr.tolist()
    assert other.fpr.tolist() == roc(a, b).fpr.tolist()


def test_true_positives_at_few_false_alarms() -> None:
    outsiders = np.arange(1000.0)  # 990 … 999 are the ten highest
    members = np.concatenate([np.full(30, 2000.0), np.full(20, 995.5), np.full(50, -1.0)])
    found = roc(members, outsiders)
    at_1, at_01, at_0 = found.tpr_at(0.01), found.tpr_at(0.001), found.tpr_at(0)
    assert (at_1.tpr.value, at_1.fpr.value) == (0.5, 0.01)
    assert (at_01.tpr.value, at_01.fpr.value) == (0.3, 0.001)
    assert (at_0.tpr.value, at_0.fpr.value) == (0.3, 0)
    assert at_1.enough
    assert at_01.enough
    alone = clopper_pearson(50, 100)
    assert at_1.tpr.low < alone.low, "the threshold's own FPR is uncertain as well"
    assert at_1.tpr.high >= alone.high
    assert FPRS == (0.05, 0.01, 0.001)


def test_false_alarms_that_come_together_are_not_parted() -> None:
    found = roc([5, 5, 4], [5, 5, *[0] * 98]).tpr_at(0.01)
    assert (found.tpr.value, found.fpr.value) == (0.0, 0.0)


def test_too_few_outsiders_for_the_rate_are_said_to_be_too_few() -> None:
    found = roc([2, 2, 0], np.linspace(0, 1, 50)).tpr_at(0.01)
    assert not found.enough
    assert found.tpr.value == pytest.approx(2 / 3)
    assert found.fpr.value == 0
    assert found.fpr.high == pytest.approx(1 - 0.025 ** (1 / 50))  # far above the 1 % asked for
    assert roc([2], np.arange(100)).tpr_at(0.01).enough
    assert not roc([2], np.arange(99)).tpr_at(0.01).enough
    assert roc([2], np.arange(100)).tpr_at(0.29).fpr.value <= 0.29


@quick
@given(a=scores, b=scores, fpr=st.floats(0, 1))
def test_the_false_alarms_never_exceed_what_was_asked(a: list[int], b: list[int], fpr: float) -> None:
    found = roc(a, b).tpr_at(fpr)
    assert found.fpr.value <= fpr + 1e-9
    best = max((np.mean(np.array(a) >= t) for t in [*b, *a, 9] if np.mean(np.array(b) >= t) <= fpr), default=0.0)
    assert found.tpr.value == pytest.approx(best)


def test_clopper_and_pearson_by_hand() -> None:
    assert clopper_pearson(0, 10).low == 0
    assert clopper_pearson(0, 10).high == pytest.approx(1 - 0.025**0.1)
    assert clopper_pearson(10, 10).low == pytest.approx(0.025**0.1)
    half = clopper_pearson(1, 2)
    assert (half.low, half.high) == pytest.approx((1 - 0.975**0.5, 0.975**0.5))


def test_scores_that_cannot_be_ranked_are_refused() -> None:
    with pytest.raises(InputError, match="0 members"):
        roc([], [1.0])
    with pytest.raises(InputError, match="not a number"):
        auc([np.nan], [1.0])
    with pytest.raises(InputError, match="false-positive rate"):
        roc([1.0], [1.0]).tpr_at(1.5)
    with pytest.raises(InputError, match="not a share"):
        clopper_pearson(3, 2)
