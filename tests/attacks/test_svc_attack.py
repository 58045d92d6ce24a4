# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from sklearn.svm import SVC

from fedquit.audit.attacks import svc as module
from fedquit.audit.attacks.svc import song_svc, svc
from fedquit.audit.scores import Floats
from signal_world import scene


def beta(a: float, b: float, n: int, seed: int) -> Floats:
    return np.random.default_rng(seed).beta(a, b, n)


def test_a_perfect_separation_is_found() -> None:
    members, outsiders = beta(1, 1, 300, 0) * 0.2 + 0.8, beta(1, 1, 300, 1) * 0.2
    assert svc(members, outsiders, members, seed=0) == 100.0
    assert svc(members, outsiders, outsiders, seed=0) == 0.0
    assert svc(members, outsiders, np.array([0.9, 0.1, 0.05, 0.15]), seed=0) == 25.0


def test_two_points_are_parted_halfway() -> None:
    """Of two opposite points the decision is 0 where both kernels are equal: in the middle."""
    suspects = np.array([0.0, 0.49, 0.51, 1.0])
    assert svc(np.array([1.0]), np.array([0.0]), suspects, seed=0) == 50.0
    assert svc(np.array([1.0]), np.array([0.0]), suspects[1:2], seed=0) == 0.0


def test_identical_members_and_outsiders_give_suspects_no_better_than_chance() -> None:
    members, outsiders = beta(2, 1, 800, 0), beta(2, 1, 800, 1)
    called = [svc(members, outsiders, s, seed=0) for s in (beta(2, 1, 2000, 2), beta(2, 1, 2000, 3))]
    assert called[0] == pytest.approx(called[1], abs=5)


@pytest.mark.parametrize(("a", "b"), [((8.0, 1.0), (2.0, 1.0)), ((1.0, 1.0), (1.0, 1.2)), ((30.0, 0.3), (5.0, 0.5))])
def test_rounding_to_a_thousandth_answers_as_the_plain_classifier_does(
    a: tuple[float, float], b: tuple[float, float]
) -> None:
    members, outsiders, suspects = beta(*a, 1200, 0), beta(*b, 1200, 1), beta(*a, 3000, 2)
    x, y = np.concatenate([members, outsiders])[:, None], np.repeat([1, 0], 1200)
    plain = 100 * SVC(C=3, gamma="auto", kernel="rbf").fit(x, y).predict(suspects[:, None]).mean()
    assert svc(members, outsiders, suspects, seed=0, grid=0) == plain
    assert svc(members, outsiders, suspects, seed=0) == pytest.approx(plain, abs=0.3)


def test_of_many_examples_ten_thousand_are_drawn_and_the_seed_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.LARGEST == 10_000
    monkeypatch.setattr(module, "LARGEST", 50)
    members, outsiders, suspects = beta(3, 1, 900, 0), beta(2, 1, 900, 1), beta(2, 1, 900, 2)
    found = [svc(members, outsiders, suspects, seed=s) for s in (0, 0, 1, 2, 3)]
    assert found[0] == found[1]
    assert len(set(found)) > 1


def test_twenty_thousand_points_become_a_problem_of_two_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    fit = SVC.fit

    def watched(self: SVC, x: Floats, y: Floats, sample_weight: Floats) -> SVC:
        seen.append((len(x), float(sample_weight.sum())))
        return fit(self, x, y, sample_weight=sample_weight)

    monkeypatch.setattr(SVC, "fit", watched)
    svc(beta(3, 1, 12_000, 0), beta(2, 1, 12_000, 1), beta(2, 1, 100, 2), seed=0)
    assert seen[0][0] <= 2002
    assert seen[0][1] == 20_000


def test_it_looks_at_the_true_class_confidence() -> None:
    s = scene("nothing", n=300)
    found = song_svc(s.retain, s.test, s.forget, seed=3)
    assert found == svc(s.retain.confidence, s.test.confidence, s.forget.confidence, seed=3)
