# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.audit.metrics.klom import Klom, klom
from fedquit.errors import InputError
from signal_world import Kind, phi_over_models

quick = settings(max_examples=40)
SEPARATED = math.log((1 + 1e-5) / 1e-5)  # the oracles' floor, after it is normed


def one(unlearned: list[float], oracle: list[float]) -> float:
    return klom(np.array(unlearned)[:, None], np.array(oracle)[:, None]).mean


def test_two_bins_worked_out_by_hand() -> None:
    # halves against a quarter and three quarters
    assert one([0, 0, 10, 10], [0, 10, 10, 10]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    # the highest value has a bin: nothing is lost at the edge
    assert one([0, 10], [0, 10]) == 0


def test_there_are_twenty_bins_between_the_lowest_and_the_highest() -> None:
    assert one([0, 20, 0.5, 0.5], [0, 20, 0.9, 0.9]) == 0  # one bin
    assert one([0, 20, 0.5, 0.5], [0, 20, 1.1, 1.1]) > 0.3  # two


def test_the_divergence_is_that_of_the_unlearned_from_the_oracles() -> None:
    narrow, wide = [0.0] * 4, [0.0, 10.0, 0.0, 10.0]
    assert one(narrow, wide) == pytest.approx(math.log(2))
    assert one(wide, narrow) > 5  # unlearned models where no oracle is: the floor


def test_separated_models_get_the_floor_and_agreeing_ones_nothing() -> None:
    assert one([5.0] * 8, [-5.0] * 8) == pytest.approx(SEPARATED)
    assert one([3.0] * 8, [3.0] * 8) == 0


def test_phi_is_clipped_at_a_hundred() -> None:
    assert one([500.0, 200.0], [100.0, 900.0]) == 0
    assert one([-500.0, -200.0], [-100.0, -900.0]) == 0


def test_the_mean_and_the_worst_twentieth_are_reported() -> None:
    found = Klom(np.arange(101.0))
    assert (found.mean, found.p95) == (50, 95)


def test_each_example_is_on_its_own() -> None:
    u, o = phi_over_models("nothing", 30, 5, 1), phi_over_models("retrain", 40, 5, 2)
    found = klom(u, o).per_example
    assert found.tolist() == pytest.approx([klom(u[:, [i]], o[:, [i]]).mean for i in range(5)])


@quick
@given(seed=st.integers(0, 999), scale=st.floats(0.1, 20), shift=st.floats(-10, 10))
def test_it_is_never_negative_nor_above_separation_and_the_order_of_models_does_not_matter(
    seed: int, scale: float, shift: float
) -> None:
    rng = np.random.default_rng(seed)
    u, o = scale * rng.normal(size=(12, 4)) + shift, rng.normal(size=(9, 4))
    found = klom(u, o).per_example
    assert (found >= 0).all()
    assert (found <= SEPARATED + 1e-3).all()
    assert klom(rng.permutation(u), rng.permutation(o)).per_example.tolist() == found.tolist()
    assert klom(u, u).mean == 0


@pytest.mark.parametrize("kind", ["nothing", "wiped"])
def test_both_broken_unlearners_are_caught(kind: Kind) -> None:
    oracle = phi_over_models("retrain", 64, 100, 1)
    floor = klom(phi_over_models("retrain", 64, 100, 2), oracle)
    found = klom(phi_over_models(kind, 64, 100, 3), oracle)
    assert found.mean > 2 * floor.p95
    assert found.p95 > 3 * floor.p95


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="the same examples"):
        klom(np.zeros((3, 2)), np.zeros((3, 1)))
    with pytest.raises(InputError, match="not finite"):
        klom(np.full((3, 2), np.inf), np.zeros((3, 2)))
