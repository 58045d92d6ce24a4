# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.audit.attacks.lira import lira_offline, lira_online, ulira
from fedquit.audit.attacks.roc import auc, roc
from fedquit.audit.scores import Floats
from fedquit.errors import InputError
from signal_world import Kind, phi_over_models

quick = settings(max_examples=30)
KINDS: tuple[Kind, ...] = ("retrain", "nothing", "wiped")


def test_offline_counts_standard_deviations_above_models_that_did_not_see_it() -> None:
    refs = [[1.0, 0.0], [3.0, 0.0], [1.0, 4.0], [3.0, 4.0]]  # standard deviations sqrt(4/3) and sqrt(16/3)
    own = lira_offline([2 + 2 * math.sqrt(4 / 3), 2.0], refs, fixed_variance=False)
    assert own.tolist() == pytest.approx([2.0, 0.0])
    pooled = lira_offline([4.0, 4.0], refs, fixed_variance=True)  # (4/3 + 16/3) / 2 for both
    assert pooled.tolist() == pytest.approx([2 / math.sqrt(10 / 3)] * 2)


def test_offline_leaves_out_the_models_that_saw_it() -> None:
    refs = [[1.0], [3.0], [100.0]]
    found = lira_offline([2 + math.sqrt(2)], refs, seen=[[False], [False], [True]], fixed_variance=False)
    assert found.tolist() == pytest.approx([1.0])


def test_online_is_the_log_likelihood_ratio_of_two_normals() -> None:
    refs = [[1.0], [3.0], [1.0], [3.0], [5.0], [7.0], [5.0], [7.0]]
    seen = [[False]] * 4 + [[True]] * 4
    # means 2 and 6, variance 4/3: ((phi - 2)^2 - (phi - 6)^2) / (2 * 4/3)
    for fixed in (False, True, None):
        assert lira_online([4.0], refs, seen=seen, fixed_variance=fixed).tolist() == pytest.approx([0.0])
        assert lira_online([5.0], refs, seen=seen, fixed_variance=fixed).tolist() == pytest.approx([3.0])


def test_online_weighs_unequal_variances() -> None:
    refs = [[-1.0], [1.0], [-2.0], [2.0]]
    found = lira_online([0.0], refs, seen=[[False], [False], [True], [True]], fixed_variance=False)
    assert found.tolist() == pytest.approx([-math.log(2)])


def test_with_few_models_one_variance_serves_all() -> None:
    rng = np.random.default_rng(0)
    phi, few, many = rng.normal(size=5), rng.normal(size=(63, 5)), rng.normal(size=(64, 5))
    assert lira_offline(phi, few).tolist() == lira_offline(phi, few, fixed_variance=True).tolist()
    assert lira_offline(phi, many).tolist() == lira_offline(phi, many, fixed_variance=False).tolist()
    assert lira_offline([1.0, 3.0], [[0.0, 4.0]]).tolist() == [0.5, -0.5]  # one model: the spread over the examples


def test_models_that_all_agree_do_no_harm() -> None:
    assert np.isfinite(lira_offline([1.0, 2.0], np.ones((3, 2)))).all()


def shadow_models(n: int, models: int, seed: int) -> tuple[Floats, Floats]:
    """Phi of n examples under models of which each saw a random half; the first one is to be attacked.

    The others come in pairs that share the examples out between them.
    """
    rng = np.random.default_rng(seed)
    half = rng.uniform(size=(1 + models // 2, n)) < 0.5
    seen = np.concatenate([half, ~half[1:]])
    return rng.normal(0, 3, n) + 2.5 * seen + rng.normal(0, 1, seen.shape), seen.astype(np.float64)


@pytest.mark.parametrize("models", [8, 128])
def test_members_are_found_at_few_false_alarms_where_a_global_threshold_finds_none(models: int) -> None:
    phi, seen = shadow_models(4000, models, seed=1)
    member = seen[0] > 0
    for score in (
        lira_offline(phi[0], phi[1:], seen=seen[1:]),
        lira_online(phi[0], phi[1:], seen=seen[1:]),
    ):
        found = roc(score[member], score[~member]).tpr_at(0.01).tpr
        assert found.low > 0.3
        assert roc(phi[0][member], phi[0][~member]).tpr_at(0.01).tpr.high < 0.15


def test_perfect_separation_and_identical_distributions() -> None:
    rng = np.random.default_rng(0)
    refs = rng.normal(size=(80, 300))
    assert lira_offline(np.full(300, 50.0), refs).min() > lira_offline(rng.normal(size=300), refs).max()
    scores = lira_offline(rng.normal(size=300), refs), lira_offline(rng.normal(size=300), refs)
    assert auc(*scores).covers(0.5)


@quick
@given(seed=st.integers(0, 999))
def test_the_order_of_models_and_examples_does_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    phi, refs = rng.normal(size=6), rng.normal(size=(8, 6))
    seen = np.arange(8)[:, None] < 4
    models, examples = rng.permutation(8), rng.permutation(6)
    seen = np.broadcast_to(seen, (8, 6))
    found = lira_online(phi, refs, seen=seen)
    mixed = lira_online(phi[examples], refs[models][:, examples], seen=seen[models][:, examples])
    np.testing.assert_allclose(mixed, found[examples], rtol=1e-9, atol=1e-9)


def against_holdout(kind: Kind) -> tuple[Floats, Floats]:
    unseen: Kind = "wiped" if kind == "wiped" else "retrain"
    refs = [phi_over_models("retrain", 20, 400, s) for s in (1, 2)]
    return (
        lira_offline(phi_over_models(kind, 1, 400, 3)[0], refs[0]),
        lira_offline(phi_over_models(unseen, 1, 400, 4)[0], refs[1]),
    )


def test_offline_catches_an_unlearner_that_does_nothing_but_not_retrain() -> None:
    assert auc(*against_holdout("nothing")).low > 0.9
    assert auc(*against_holdout("retrain")).covers(0.5)


def test_offline_cannot_catch_a_wiped_model_by_rank_since_it_remembers_nobody() -> None:
    """Forget and hold-out data are equally unknown to it; that both lie far below every reference is plain."""
    forget, holdout = against_holdout("wiped")
    assert auc(forget, holdout).covers(0.5)
    assert forget.mean() < -2


def test_online_catches_an_unlearner_that_does_nothing_but_not_a_wiped_model() -> None:
    """A wiped model looks least of all like one that saw the data: the same reason as offline."""
    refs = np.concatenate([phi_over_models("nothing", 20, 400, 1), phi_over_models("retrain", 20, 400, 2)])
    seen = np.broadcast_to(np.arange(40)[:, None] < 20, (40, 400))
    member = {k: lira_online(phi_over_models(k, 1, 400, 3)[0], refs, seen=seen) > 0 for k in KINDS}
    assert member["nothing"].mean() > 0.85
    assert member["retrain"].mean() < 0.15
    assert member["wiped"].mean() < 0.15


def test_ulira_scores_a_pair_by_all_other_models() -> None:
    u, n = [[0.0], [2.0], [1.0]], [[10.0], [12.0], [14.0]]
    duel = ulira(u, n, fixed_variance=False)
    # without the third pair: means 1 and 11, variance 2
    assert duel.unlearned[2, 0] == pytest.approx(-0 / 4 + 10**2 / 4)
    assert duel.never[2, 0] == pytest.approx(-(13**2) / 4 + 3**2 / 4)
    assert duel.accuracy.tolist() == [1.0]


def test_ulira_is_right_half_the_time_where_nothing_is_left() -> None:
    """Also with few models: a model judged by a fit that it entered, or by uneven fits, would shift this."""
    rng = np.random.default_rng(0)
    for models in (4, 20):
        duel = ulira(rng.normal(size=(models, 3000)), rng.normal(size=(models, 3000)))
        assert auc(duel.unlearned, duel.never).value == pytest.approx(0.5, abs=0.015)
        assert duel.accuracy.mean() == pytest.approx(0.5, abs=0.015)


def test_ulira_undecided_scores_count_half() -> None:
    assert ulira(np.ones((4, 2)), np.ones((4, 2))).accuracy.tolist() == [0.5, 0.5]


def test_ulira_takes_unequal_numbers_and_scores_pairs() -> None:
    rng = np.random.default_rng(0)
    duel = ulira(rng.normal(size=(5, 7)), rng.normal(size=(9, 7)))
    assert duel.unlearned.shape == duel.never.shape == (5, 7)


@pytest.mark.parametrize("kind", ["nothing", "wiped"])
def test_ulira_catches_both_broken_unlearners(kind: Kind) -> None:
    broken = ulira(phi_over_models(kind, 16, 200, 1), phi_over_models("retrain", 16, 200, 2))
    good = ulira(phi_over_models("retrain", 16, 200, 3), phi_over_models("retrain", 16, 200, 2))
    assert broken.accuracy.mean() > 0.85
    assert good.accuracy.mean() < 0.55
    assert roc(broken.unlearned, broken.never).tpr_at(0.01).tpr.low > 0.4
    assert roc(good.unlearned, good.never).tpr_at(0.01).tpr.high < 0.05


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="do not fit"):
        lira_offline([1.0, 2.0], [[1.0]])
    with pytest.raises(InputError, match="no reference model"):
        lira_online([1.0], [[1.0], [2.0]], seen=[[True], [True]])
    with pytest.raises(InputError, match="take fixed_variance"):
        lira_offline([1.0, 2.0], [[1.0, 2.0]], fixed_variance=False)
    with pytest.raises(InputError, match="two models of each kind"):
        ulira([[1.0]], [[1.0]])
