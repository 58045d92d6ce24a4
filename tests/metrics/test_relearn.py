# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquit.audit.metrics.relearn import Relearn, relearn_time
from fedquit.errors import InputError

ORACLE = [10.0, 30.0, 50.0, 70.0, 90.0]


def test_steps_to_the_level_over_those_of_the_oracle() -> None:
    assert relearn_time([20, 60, 91, 95], ORACLE, level=90) == Relearn(2, 4, 0.5, "exact")
    assert relearn_time(ORACLE, ORACLE, level=90).ratio == 1
    assert relearn_time([10, 60, 50, 95], ORACLE, level=55).unlearned == 1  # the first time counts


def test_a_loss_has_to_fall() -> None:
    assert relearn_time([4, 2, 1], [4, 3, 2, 1], level=1, rising=False) == Relearn(2, 3, 2 / 3, "exact")


def test_a_curve_that_ends_too_soon_gives_a_bound() -> None:
    assert relearn_time([0, 1, 2], ORACLE, level=90) == Relearn(None, 4, 3 / 4, "at least")
    assert relearn_time([0, 99], [0, 1, 2, 3], level=90) == Relearn(1, None, 1 / 4, "at most")
    both = relearn_time([0], [0], level=90)
    assert math.isnan(both.ratio)
    assert both.bound == "unknown"


def test_an_oracle_that_is_there_already() -> None:
    assert relearn_time([95], [95], level=90).ratio == 1
    assert relearn_time([80, 95], [95], level=90).ratio == math.inf


def test_an_unlearner_that_does_nothing_is_there_at_once() -> None:
    assert relearn_time([95.0, 96.0], ORACLE, level=90) == Relearn(0, 4, 0, "exact")


def test_a_wiped_model_shows_by_learning_more_slowly_than_one_that_kept_the_rest() -> None:
    assert relearn_time([10, 10, 20, 30, 40, 50, 60, 70, 80, 90], ORACLE, level=90).ratio > 2


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.floats(0, 100))
def test_a_higher_level_never_comes_sooner(curve: list[float], level: float) -> None:
    low, high = (relearn_time(curve, [0, 100], level=v).unlearned for v in (level / 2, level))
    assert high is None or (low is not None and low <= high)


def test_what_is_no_curve_is_refused() -> None:
    for wrong in ([], [math.nan], [[1.0]]):
        with pytest.raises(InputError, match="one number for each step"):
            relearn_time(wrong, ORACLE, level=90)
