# SPDX-License-Identifier: Apache-2.0
"""Single-model attacks report a share, and only its gap to Retrain's share means anything.

An unlearner that does nothing shows in all of them. One that wipes the model shows in correctness (the same number as
accuracy) but cannot show in the rest as such: under a model that knows nobody, members and outsiders look alike and
there is no threshold to learn. The tests state that: forget and unseen data are then called members equally often.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.audit.attacks import ATTACKS, REFERENCE_ATTACKS, described
from fedquit.audit.attacks.threshold import (
    best_threshold,
    song_confidence,
    song_correctness,
    song_entropy,
    song_modified_entropy,
    yeom,
)
from fedquit.audit.scores import Scores
from fedquit.errors import InputError
from signal_world import scene

quick = settings(max_examples=40)
BY_NUMBER = {
    "confidence": (song_confidence, 1),
    "entropy": (song_entropy, -1),
    "modified_entropy": (song_modified_entropy, -1),
}


def only(label: list[int], **numbers: list[float]) -> Scores:
    """Signals with these numbers and noughts elsewhere."""
    nought = np.zeros(len(label))
    found = {f.name: np.array(numbers.get(f.name, nought), dtype=np.float64) for f in fields(Scores)[1:]}
    return Scores(np.array(label, dtype=np.int64), **found)


def test_the_table_names_every_attack_and_each_says_what_it_does() -> None:
    assert list(ATTACKS) == [
        "song_svc",
        "yeom",
        "song_correctness",
        "song_confidence",
        "song_entropy",
        "song_modified_entropy",
    ]
    assert list(REFERENCE_ATTACKS) == ["rmia", "lira_offline", "lira_online", "ulira"]
    lines = [described(a) for a in [*ATTACKS.values(), *REFERENCE_ATTACKS.values()]]
    assert len(set(lines)) == 10
    assert all(len(line) > 20 for line in lines)


def test_yeom_calls_member_what_has_at_most_the_mean_loss_of_all_members() -> None:
    members = only([0] * 4, loss=[0.0, 0.0, 0.0, 4.0])
    suspects = only([0] * 5, loss=[0.5, 1.0, 1.1, 3.0, 9.0])
    assert yeom(members, members, suspects, seed=0) == 40.0


@quick
@given(loss=st.floats(1e-3, 1e3), n=st.integers(1, 60))
def test_yeom_calls_equal_losses_members_whatever_the_mean_rounds_to(loss: float, n: int) -> None:
    members = only([0] * n, loss=[loss] * n)
    assert yeom(members, members, members, seed=0) == 100.0


def test_correctness_is_the_accuracy_whatever_the_others_say() -> None:
    members, suspects = only([0, 1], correct=[0.0, 0.0]), only([0, 1, 1, 2], correct=[1, 1, 0, 1])
    assert song_correctness(members, members, suspects, seed=0) == 75.0


def test_correctness_of_sequences_has_a_threshold() -> None:
    members, outsiders = only([-1] * 3, correct=[0.8, 0.9, 0.7]), only([-1] * 3, correct=[0.5, 0.4, 0.6])
    suspects = only([-1] * 4, correct=[0.7, 0.69, 0.95, 0.1])
    assert song_correctness(members, outsiders, suspects, seed=0) == 50.0


@pytest.mark.parametrize("number", BY_NUMBER)
def test_a_perfect_separation_is_found_and_the_threshold_is_the_last_member(number: str) -> None:
    attack, sign = BY_NUMBER[number]
    members = only([0] * 3, **{number: [sign * 0.7, sign * 0.8, sign * 0.9]})
    outsiders = only([0] * 3, **{number: [sign * 0.1, sign * 0.2, sign * 0.3]})
    assert attack(members, outsiders, members, seed=0) == 100.0
    assert attack(members, outsiders, outsiders, seed=0) == 0.0
    assert attack(members, outsiders, only([0, 0], **{number: [sign * 0.7, sign * 0.69]}), seed=0) == 50.0


@pytest.mark.parametrize("number", BY_NUMBER)
def test_every_class_has_its_own_threshold(number: str) -> None:
    attack, sign = BY_NUMBER[number]
    members = only([0, 0, 1, 1], **{number: [sign * v for v in (0.9, 0.8, 0.4, 0.3)]})
    outsiders = only([0, 0, 1, 1], **{number: [sign * v for v in (0.7, 0.6, 0.2, 0.1)]})
    suspects = only([0, 1], **{number: [sign * 0.5, sign * 0.5]})  # below class 0's, above class 1's
    assert attack(members, outsiders, suspects, seed=0) == 50.0
    assert attack(members, outsiders, members, seed=0) == 100.0
    assert attack(members, outsiders, outsiders, seed=0) == 0.0


@pytest.mark.parametrize("number", BY_NUMBER)
def test_a_class_without_members_or_outsiders_takes_the_threshold_of_all(number: str) -> None:
    attack, sign = BY_NUMBER[number]
    members = only([0, 0, 1], **{number: [sign * 0.9, sign * 0.8, sign * 0.95]})
    outsiders = only([0, 0, 2], **{number: [sign * 0.2, sign * 0.1, sign * 0.3]})
    for label in (1, 2, 7):
        suspects = only([label] * 4, **{number: [sign * v for v in (0.9, 0.8, 0.79, 0.1)]})
        assert attack(members, outsiders, suspects, seed=0) == 50.0


def test_of_equally_good_thresholds_the_strictest_is_taken() -> None:
    members, outsiders = np.array([0.9, 0.8, 0.3]), np.array([0.7, 0.2, 0.1])
    assert best_threshold(members, outsiders) == 0.8  # 0.3 finds all and accuses one of three: as good
    assert best_threshold(outsiders, members) == np.inf  # nobody: nothing beats guessing
    assert best_threshold(members, members) == np.inf


@quick
@given(
    members=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    outsiders=st.lists(st.integers(0, 6), min_size=1, max_size=12),
)
def test_no_threshold_is_better_than_the_best(members: list[int], outsiders: list[int]) -> None:
    m, o = np.array(members, dtype=np.float64), np.array(outsiders, dtype=np.float64)

    def balanced(t: float) -> float:
        return float(((m >= t).mean() + (o < t).mean()) / 2)

    best = max(balanced(t) for t in [*range(8), np.inf])
    assert balanced(best_threshold(m, o)) == pytest.approx(best)
    assert best >= 0.5


@pytest.mark.parametrize("name", sorted(set(ATTACKS) - {"song_svc"}))
def test_order_and_seed_do_not_matter(name: str) -> None:
    s = scene("nothing", n=300)
    mixed = np.random.default_rng(0).permutation(300)
    found = ATTACKS[name](s.retain, s.test, s.forget, seed=0)
    assert found == ATTACKS[name](s.retain.take(mixed), s.test.take(mixed), s.forget.take(mixed), seed=9)
    assert 0 <= found <= 100


@pytest.mark.parametrize("name", ATTACKS)
def test_an_unlearner_that_does_nothing_is_caught(name: str) -> None:
    shares = [
        [ATTACKS[name](*s[:3], seed=0) for s in (scene(k, seed=i) for i in range(3))] for k in ("retrain", "nothing")
    ]
    floor = max(shares[0]) - min(shares[0])
    assert min(shares[1]) - max(shares[0]) > max(4 * floor, 10)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_wiped_model_shows_in_correctness_only_since_it_knows_no_members(name: str) -> None:
    s = scene("wiped", n=3000)
    forget, test = (ATTACKS[name](s.retain, s.test, suspects, seed=0) for suspects in (s.forget, s.holdout))
    if name == "song_correctness":
        good = scene("retrain")
        assert forget < ATTACKS[name](*good[:3], seed=0) - 50
    assert forget == pytest.approx(test, abs=4)


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_to_attack_is_refused(name: str) -> None:
    s = scene("retrain", n=20)
    with pytest.raises(InputError, match="at least one"):
        ATTACKS[name](s.retain, s.test, s.forget[:0], seed=0)
