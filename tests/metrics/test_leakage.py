# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedquit.audit.metrics.leakage import fall, leakage
from fedquit.audit.scores import Floats, Scores
from fedquit.errors import InputError
from signal_world import drawn, scene


def with_phi(phi: list[float] | Floats) -> Scores:
    return replace(drawn(len(phi), 1.0, seed=0), phi=np.array(phi, dtype=np.float64))


def test_the_score_is_the_fall_of_phi() -> None:
    assert fall(with_phi([3, 2, 5]), with_phi([1, 2, 6])).tolist() == [2, 0, -1]


def test_falls_worked_out_by_hand() -> None:
    forgotten = with_phi([3.0, 2.0, 1.0]), with_phi([0.0, 0.0, 0.0])  # 3, 2, 1
    outsiders = with_phi([2.0, 0.0]), with_phi([0.0, 0.0])  # 2, 0
    assert leakage(forgotten, outsiders).auc.value == 0.75


def test_a_fall_on_the_forgotten_alone_gives_every_one_of_them_away() -> None:
    before, after = with_phi(np.full(200, 5.0)), with_phi(np.full(200, 1.0))
    found = leakage((before, after), (after, after))
    assert found.auc.value == 1
    assert [(t.asked, t.tpr.value) for t in found.tpr] == [(0.05, 1), (0.01, 1), (0.001, 1)]
    assert [t.enough for t in found.tpr] == [True, True, False]  # 200 outsiders can speak of 1 %, not of 0.1 %


def test_the_same_fall_everywhere_gives_nobody_away() -> None:
    rng = np.random.default_rng(0)
    pairs = [(with_phi(rng.normal(3, 1, 400)), with_phi(rng.normal(1, 1, 400))) for _ in range(2)]
    assert leakage(*pairs).auc.covers(0.5)


def test_a_wiped_model_is_caught_since_confidence_falls_further_where_it_was_earned() -> None:
    before, after = scene("nothing"), scene("wiped")
    after = after._replace(
        forget=replace(after.forget, label=before.forget.label),
        holdout=replace(after.holdout, label=before.holdout.label),
    )
    assert leakage((before.forget, after.forget), (before.holdout, after.holdout)).auc.low > 0.75


def test_an_unlearner_that_does_nothing_cannot_be_caught_since_nothing_changed_between_the_snapshots() -> None:
    """This metric asks what the change gives away; that the data is still there is for the other metrics to show."""
    s = scene("nothing")
    assert leakage((s.forget, s.forget), (s.holdout, s.holdout)).auc.value == 0.5


def test_snapshots_of_different_examples_are_refused() -> None:
    with pytest.raises(InputError, match="different examples"):
        fall(drawn(20, 1.0, seed=0), drawn(20, 1.0, seed=1))
