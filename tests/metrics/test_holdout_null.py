# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ks_2samp

from fedquit.audit.metrics.holdout import halves_of, holdout_null
from fedquit.audit.scores import Scores
from signal_world import TRAINED, UNSEEN, Kind, drawn, scene


def with_numbers(phi: list[float], entropy: list[float]) -> Scores:
    return replace(drawn(len(phi), 1.0, seed=0), phi=np.array(phi), entropy=np.array(entropy))


def test_numbers_worked_out_by_hand() -> None:
    found = holdout_null(with_numbers([3, 2, 1], [0.1, 0.2, 0.3]), with_numbers([2, 0], [0.25, 0.9]))
    assert found.auc.value == 0.75
    assert found.entropy_ks == pytest.approx(2 / 3)  # at 0.2: two of three against none
    assert found.verdict == "cannot tell"  # five examples prove nothing


def caught(m: int, n: int) -> tuple[Scores, Scores]:
    """An Original that remembers m forgotten samples and not n hold-out samples."""
    return drawn(m, TRAINED, seed=8), drawn(n, UNSEEN, seed=9)


def test_identical_data_are_forgotten_where_original_is_caught() -> None:
    s = drawn(1200, 3.0, seed=0)
    found = holdout_null(s, s, caught(1200, 1200))
    assert (found.auc.value, found.entropy_ks, found.entropy_p) == (0.5, 0, 1)
    assert found.verdict == "forgotten within the margin"
    assert found.change is not None
    assert found.change.high < -0.2, "and less than Original does"
    blind = holdout_null(s, s)
    assert blind.verdict == "cannot tell"
    assert blind.change is None


def test_perfect_separation_is_remembered_one_way_and_over_unlearned_the_other() -> None:
    high, low = with_numbers([5.0] * 50, [0.1] * 50), with_numbers([-5.0] * 50, [2.0] * 50)
    assert holdout_null(high, low).verdict == "remembered"
    worse = holdout_null(low, high)
    assert worse.verdict == "over-unlearned"
    assert worse.verdict == "over-unlearned"
    assert worse.entropy_ks == 1
    assert worse.entropy_p < 1e-9


@pytest.mark.parametrize(("kind", "verdict"), [("retrain", "forgotten within the margin"), ("nothing", "remembered")])
def test_an_unlearner_that_does_nothing_is_caught_and_retrain_is_not(kind: Kind, verdict: str) -> None:
    s = scene(kind)
    original = scene("nothing")
    found = holdout_null(s.forget, s.holdout, (original.forget, original.holdout))
    assert found.verdict == verdict
    assert (found.entropy_p < 1e-6) == (kind == "nothing")


def test_a_wiped_model_cannot_be_caught_since_it_knows_forget_and_holdout_equally_little() -> None:
    """It is caught by the accuracy on test data, which a production erasure watches as well."""
    s = scene("wiped")
    assert holdout_null(s.forget, s.holdout, caught(1000, 1000)).verdict == "forgotten within the margin"


def test_data_treated_worse_than_unseen_is_flagged() -> None:
    s = scene("retrain")
    assert holdout_null(drawn(400, 1.5, seed=5), s.holdout).verdict == "over-unlearned"


def test_label_skew_is_not_mistaken_for_membership() -> None:
    """A client with easy data: against the test set it looks remembered, against its own hold-out it does not."""
    s = scene("retrain", n=8000)
    forget, holdout = s.forget[s.forget.phi > 2], s.holdout[s.holdout.phi > 2]
    assert holdout_null(forget, s.test).verdict == "remembered"
    original = caught(len(forget), len(holdout))
    assert holdout_null(forget, holdout, original).verdict == "forgotten within the margin"


def test_a_wider_margin_needs_fewer_samples() -> None:
    s = scene("retrain", n=100)
    original = caught(100, 100)
    assert holdout_null(s.forget, s.holdout, original).verdict == "cannot tell"
    assert holdout_null(s.forget, s.holdout, original, margin=0.15).verdict == "forgotten within the margin"


def test_the_halves_part_the_holdout_class_by_class_and_are_judged_alone() -> None:
    s = scene("retrain", n=600)
    halves = halves_of(s.holdout.label)
    assert sorted(np.concatenate(halves)) == list(range(600))
    counts = [np.bincount(s.holdout.label[half], minlength=10) for half in halves]
    assert np.abs(counts[0] - counts[1]).max() <= 1
    original = caught(600, 600)
    found = holdout_null(s.forget, s.holdout, original, margin=0.1)
    alone = holdout_null(s.forget, s.holdout[halves[1]], (original[0], original[1][halves[1]]), margin=0.1)
    assert found.halves[1] == alone.trace
    assert found.halves[0] != found.halves[1]
    assert halves_of(np.array([3])) == []


def test_large_samples_use_the_asymptotic_test() -> None:
    a, b = drawn(1200, 3.0, seed=1), drawn(900, 3.0, seed=2)
    assert holdout_null(a, b).entropy_p == ks_2samp(a.entropy, b.entropy, method="asymp").pvalue
    assert holdout_null(a[:50], b[:50]).entropy_p == ks_2samp(a.entropy[:50], b.entropy[:50], method="exact").pvalue
