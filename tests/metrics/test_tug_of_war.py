# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedquit.audit.metrics.tug_of_war import tug_of_war, tug_of_war_mia
from fedquit.errors import InputError

points = st.floats(-100, 100)


def test_a_product_worked_out_by_hand() -> None:
    assert tug_of_war(forget=10, retain=-20, test=50) == pytest.approx(0.9 * 0.8 * 0.5)
    assert tug_of_war_mia(mia=30, retain=0, test=10) == pytest.approx(0.7 * 0.9)


def test_retrain_itself_has_1_and_whoever_is_wholly_off_in_one_has_0() -> None:
    assert tug_of_war(forget=0, retain=0, test=0) == 1
    assert tug_of_war(forget=100, retain=0, test=0) == 0


@given(a=points, b=points, c=points)
def test_it_lies_between_0_and_1_and_never_exceeds_its_worst_part(a: float, b: float, c: float) -> None:
    found = tug_of_war(forget=a, retain=b, test=c)
    assert 0 <= found <= 1 - max(abs(a), abs(b), abs(c)) / 100 + 1e-12
    assert found == tug_of_war(forget=-a, retain=-b, test=-c)


def test_both_broken_unlearners_are_caught() -> None:
    """Retrain has 70 % on forget, 97 % on retain, 72 % on test data; an attack calls 50 % of forget data members."""
    good = tug_of_war(forget=1, retain=1, test=1)
    nothing, wiped = (
        tug_of_war(forget=95 - 70, retain=0, test=1),
        tug_of_war(forget=10 - 70, retain=10 - 97, test=10 - 72),
    )
    assert wiped < nothing < good - 0.2
    nothing, wiped = tug_of_war_mia(mia=90 - 50, retain=0, test=1), tug_of_war_mia(mia=0, retain=10 - 97, test=10 - 72)
    assert wiped < nothing < good - 0.2


def test_what_is_no_gap_in_points_is_refused() -> None:
    for wrong in (101.0, math.nan):
        with pytest.raises(InputError, match="between -100 and 100"):
            tug_of_war(forget=wrong, retain=0, test=0)
