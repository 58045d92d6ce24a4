# SPDX-License-Identifier: Apache-2.0
"""Simulations with fixed seeds: error rates lie within three Monte-Carlo standard errors of what is claimed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import beta, t

from fedquit.audit.attacks.lira import ulira, ulira_by_model
from fedquit.audit.metrics.forgetting_quality import forgetting_quality
from fedquit.audit.metrics.klom import klom
from fedquit.errors import InputError
from fedquit.inference.models import (
    Floats,
    ModelTest,
    epsilon_bound,
    epsilon_of_errors,
    permutation_test,
    require_enough_models,
    sample_exposure,
    smallest_p,
    student_over_models,
    verdict,
)

Four = tuple[Floats, Floats, Floats, Floats]  # phi of both kinds on the forget data, and of both on control data


def drawn(
    rng: np.random.Generator,
    unlearned: int,
    retrained: int = 0,
    *,
    examples: int = 50,
    shift: float = 0.0,
    share: float = 1.0,
    spread: float = 1.0,
    model: float = 0.5,
) -> Four:
    """phi over models that are each surer, or less sure, of everything by `model` times a normal number.

    Unlearned models are shifted on a share of the examples, or spread wider over all of them.
    """
    counts = (unlearned, retrained or unlearned)
    effects = [model * rng.normal(size=(count, 1)) for count in counts]
    u, o = (effect + rng.normal(size=(len(effect), examples)) for effect in effects)
    u = effects[0] + spread * (u - effects[0])
    u[:, : round(share * examples)] += shift
    control_u, control_o = (effect + rng.normal(size=(len(effect), 100)) for effect in effects)
    return u, o, control_u, control_o


def studied(studies: int, seed: int, make: Callable[[np.random.Generator], Four]) -> list[ModelTest]:
    rng = np.random.default_rng(seed)
    return [permutation_test(*make(rng), draws=199) for _ in range(studies)]


def rejected(tests: list[ModelTest]) -> float:
    return float(np.mean([test.word == "differs" for test in tests]))


def at_most(share: float, studies: int) -> float:
    """The share and three Monte-Carlo standard errors."""
    return share + 3 * math.sqrt(share * (1 - share) / studies)


# --- the permutation test


def test_the_p_value_counts_every_assignment_of_labels() -> None:
    u, o, control_u, control_o = drawn(np.random.default_rng(0), 3, 4, examples=6, shift=0.7)
    centred = np.concatenate([u - control_u.mean(1)[:, None], o - control_o.mean(1)[:, None]])
    phi = np.concatenate([u, o])
    shifts = []
    divergences = []
    for chosen in itertools.combinations(range(7), 3):
        rest = [i for i in range(7) if i not in chosen]
        shifts.append(((centred[list(chosen)].mean(0) - centred[rest].mean(0)) ** 2).mean())
        divergences.append(klom(phi[list(chosen)], phi[rest]).mean)
    found = permutation_test(u, o, control_u, control_o)
    assert found.permutations == 35
    assert found.exhaustive
    assert found.shift == pytest.approx(math.sqrt(shifts[0]))
    assert found.shift_p == pytest.approx(np.mean(np.array(shifts) >= shifts[0] - 1e-12))
    assert found.klom == pytest.approx(divergences[0])
    assert found.klom_p == pytest.approx(np.mean(np.array(divergences) >= divergences[0] - 1e-12))
    assert found.klom_by_chance == pytest.approx(np.mean(divergences))
    p_shift, p_klom = (np.array([np.mean(np.array(s) >= x - 1e-12) for x in s]) for s in (shifts, divergences))
    smaller = np.minimum(p_shift, p_klom)
    assert found.smaller_p == pytest.approx(np.mean(smaller <= smaller[0] + 1e-12))
    assert found.p == found.shift_p, "7 models make too few assignments for two statistics"


@pytest.mark.parametrize(("unlearned", "retrained"), [(4, 4), (3, 4), (2, 5), (1, 19)])
def test_the_least_sizes_reach_five_percent(unlearned: int, retrained: int) -> None:
    require_enough_models(unlearned, retrained)
    apart = permutation_test(*drawn(np.random.default_rng(1), unlearned, retrained, shift=9.0, model=0.0))
    assert apart.p == smallest_p(unlearned, retrained)
    assert apart.word == "differs"


@pytest.mark.parametrize(
    ("unlearned", "retrained", "p"), [(3, 3, "0.100"), (1, 18, "0.053"), (2, 4, "0.067"), (0, 9, "1")]
)
def test_fewer_models_are_refused_with_the_reason(unlearned: int, retrained: int, p: str) -> None:
    reason = rf"smallest p-value that they can give is {p}.*4 \+ 4, 3 \+ 4, 2 \+ 5 or 1 \+ 19"
    with pytest.raises(InputError, match=reason):
        require_enough_models(unlearned, retrained)
    if unlearned:
        with pytest.raises(InputError, match="too few"):
            permutation_test(*drawn(np.random.default_rng(0), unlearned, retrained))


def test_two_statistics_decide_from_five_models_of_each_kind_on() -> None:
    for count, both in ((4, False), (5, True)):
        found = permutation_test(*drawn(np.random.default_rng(2), count, spread=2.0))
        assert found.shift_p != found.smaller_p
        assert found.p == (found.smaller_p if both else found.shift_p)


@pytest.mark.parametrize(("unlearned", "retrained", "studies"), [(4, 4, 600), (3, 4, 400), (8, 8, 150)])
def test_equal_kinds_are_told_apart_in_five_percent_of_studies_at_most(
    unlearned: int, retrained: int, studies: int
) -> None:
    tests = studied(studies, 3, lambda rng: drawn(rng, unlearned, retrained))
    assert rejected(tests) <= at_most(0.05, studies)
    for name in ("shift_p", "klom_p", "smaller_p"):
        assert np.mean([getattr(test, name) <= 0.05 for test in tests]) <= at_most(0.05, studies), name


def test_the_power_is_that_of_the_docs() -> None:
    """A shift by half a standard deviation of phi, or by a whole one on a fifth of the examples, with 8 + 8 models."""
    everywhere = studied(40, 4, lambda rng: drawn(rng, 8, examples=100, shift=0.5))
    in_a_fifth = studied(40, 5, lambda rng: drawn(rng, 8, examples=100, shift=1.0, share=0.2))
    assert rejected(everywhere) > 0.9
    assert rejected(in_a_fifth) > 0.85
    raw = np.mean([t.klom_p <= 0.05 for t in everywhere])
    assert raw < 0.5, "without the control data, what a model says of everything hides the shift"
    four = studied(60, 6, lambda rng: drawn(rng, 4, shift=1.0))
    assert rejected(four) > 0.9


def test_klom_sees_another_spread_and_the_shift_does_not() -> None:
    tests = studied(40, 7, lambda rng: drawn(rng, 16, examples=100, spread=1.5))
    assert np.mean([test.klom_p <= 0.05 for test in tests]) > 0.6
    assert np.mean([test.shift_p <= 0.05 for test in tests]) < 0.2
    assert rejected(tests) > 0.5


def test_what_a_model_says_of_everything_is_no_shift() -> None:
    rng = np.random.default_rng(8)
    u, o, control_u, control_o = drawn(rng, 8, model=0.0)
    assert permutation_test(u, o, control_u, control_o).shift == pytest.approx(
        permutation_test(u + 5, o, control_u + 5, control_o).shift
    )
    assert permutation_test(u + 5, o, control_u, control_o).shift > 4


def test_draws_stand_for_all_assignments_where_these_are_too_many() -> None:
    found = permutation_test(*drawn(np.random.default_rng(9), 16, shift=3.0), draws=99)
    assert (found.permutations, found.exhaustive) == (100, False)
    assert found.p == 0.01, "the observed assignment counts as one of the hundred"


def test_the_rule_for_differs_is_a_p_value_of_five_percent() -> None:
    assert verdict(0.05) == "differs"
    assert verdict(0.0501) == "cannot tell"


def test_other_models_on_the_control_data_are_refused() -> None:
    u, o, control_u, control_o = drawn(np.random.default_rng(0), 4)
    with pytest.raises(InputError, match="the same models"):
        permutation_test(u, o, control_u[:3], control_o)


# --- U-LiRA over models


def student_covers(by_model: Floats, truth: float) -> bool:
    found = student_over_models(by_model)
    return found.low <= truth <= found.high


def test_students_interval_by_hand() -> None:
    found = student_over_models([1.0, 3.0])
    half = float(t.ppf(0.975, 1)) * 1.0
    assert (found.value, found.low, found.high, found.models) == pytest.approx((2.0, 2.0 - half, 2.0 + half, 2))
    assert student_over_models([1.0]).high == math.inf
    with pytest.raises(InputError, match="give \\(models,\\)"):
        student_over_models([])


def test_ulira_over_models_covers_what_it_says_and_binomial_intervals_do_not() -> None:
    rng = np.random.default_rng(10)
    studies, models, examples = 300, 16, 100
    by_pair = []
    left_out = []
    binomial = []
    for _ in range(studies):
        u, o, _, _ = drawn(rng, models, examples=examples, model=1.0)
        accuracies = ulira_by_model(u, o)
        by_pair.append(student_covers(accuracies, 0.5))
        duel = ulira(u, o)
        pairs = 0.5 + (np.sign(duel.unlearned) - np.sign(duel.never)).mean(1) / 4
        left_out.append(student_covers(pairs, 0.5))
        half = 1.96 * 0.5 / math.sqrt(models * examples)
        binomial.append(abs(accuracies.mean() - 0.5) <= half)
    assert np.mean(by_pair) == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / studies))
    assert np.mean(binomial) < 0.6, "the examples of one model are not independent"
    assert np.mean(left_out) < 0.9, "nor are models that enter each other's fits"


def test_the_scored_models_enter_no_fit() -> None:
    rng = np.random.default_rng(11)
    u, o, _, _ = drawn(rng, 8, shift=1.0, model=0.0)
    found = ulira_by_model(u, o)
    changed = u.copy()
    changed[7] = 50.0
    assert len(found) == 4
    assert ulira_by_model(changed, o)[:3].tolist() == found[:3].tolist()
    assert ulira_by_model(changed, o)[3] != found[3]
    assert found.mean() > 0.6
    assert ulira_by_model(np.zeros((4, 3)), np.zeros((4, 3))).tolist() == [0.5, 0.5]
    with pytest.raises(InputError, match="as many of each kind"):
        ulira_by_model(u[:6], o)


# --- epsilon


@pytest.mark.parametrize(("models", "ceiling"), [(5, 0.0), (6, 0.16), (16, 1.35), (32, 2.10), (64, 2.82)])
def test_no_error_of_so_many_models_gives_the_ceiling(models: int, ceiling: float) -> None:
    assert epsilon_of_errors(0, 0, models) == pytest.approx(ceiling, abs=0.005)


def test_the_bound_by_hand() -> None:
    fp, fn = beta.ppf(0.975, 3, 8), beta.ppf(0.975, 1, 10)  # 2 and 0 of 10
    expected = max(math.log((1 - 1e-5 - fp) / fn), math.log((1 - 1e-5 - fn) / fp), 0.0)
    assert epsilon_of_errors(2, 0, 10) == pytest.approx(expected)
    assert epsilon_of_errors(0, 2, 10) == pytest.approx(expected)
    assert epsilon_of_errors(10, 10, 10) == 0
    assert epsilon_of_errors(0, 0, 10, delta=0.5) < epsilon_of_errors(0, 0, 10)


def test_equal_kinds_get_a_bound_above_zero_in_five_percent_of_studies_at_most() -> None:
    rng = np.random.default_rng(12)
    studies = 150
    bounds = [epsilon_bound(*drawn(rng, 32, examples=20)).value for _ in range(studies)]
    assert np.mean(np.array(bounds) > 0) <= at_most(0.05, studies)
    assert np.median(bounds) == 0
    quality = forgetting_quality(rng.normal(size=(32, 100)), rng.normal(size=(32, 100)))
    assert np.median(quality.epsilon) > 1, "the competition's epsilon is no bound"


def test_a_shift_of_two_standard_deviations_over_64_models_is_bounded_as_in_the_docs() -> None:
    rng = np.random.default_rng(13)
    bounds = [epsilon_bound(*drawn(rng, 64, examples=1, shift=2.0, model=0.0)).value for _ in range(60)]
    assert 0.6 < np.median(bounds) < 1.1
    assert max(bounds) <= epsilon_of_errors(0, 0, 32)


def test_randomised_response_is_bounded_by_its_own_epsilon() -> None:
    """Models show one of two values with odds e^1: epsilon is 1, and the bound may exceed it in 5 % of studies."""
    rng = np.random.default_rng(14)
    studies = 200
    q = 1 / (1 + math.exp(-1))
    control = np.zeros((128, 1))
    above = 0
    for _ in range(studies):
        u = (rng.random((128, 1)) < q).astype(float)
        o = (rng.random((128, 1)) > q).astype(float)
        above += epsilon_bound(u, o, control, control, delta=0.0).value > 1
    assert above / studies <= at_most(0.05, studies)


def test_the_attack_is_chosen_on_other_models_than_it_is_tested_on() -> None:
    u, o, control_u, control_o = drawn(np.random.default_rng(15), 32, shift=3.0, model=0.0)
    apart = epsilon_bound(u, o, control_u, control_o)
    assert apart.value == apart.ceiling == pytest.approx(1.35, abs=0.005)
    assert (apart.false_positives, apart.false_negatives, apart.models) == (0, 0, 16)
    swapped = np.concatenate([u[:16], o[16:]]), np.concatenate([o[:16], u[16:]])
    assert epsilon_bound(*swapped, control_u, control_o).value == 0, "what holds for the first half fails on the second"


def test_a_shift_both_ways_needs_the_likelihood_ratio() -> None:
    u, o, control_u, control_o = drawn(np.random.default_rng(16), 32, model=0.0)
    ways = np.where(np.arange(50) % 2, 1.5, -1.5)
    found = epsilon_bound(u + ways, o, control_u, control_o)
    assert found.attack == "likelihood ratio"
    assert found.value > 1
    assert epsilon_bound(u + 1.5, o, control_u, control_o).value > 1


def test_too_few_models_for_a_bound_are_refused() -> None:
    with pytest.raises(InputError, match="at least 12"):
        epsilon_bound(*drawn(np.random.default_rng(0), 11))
    with pytest.raises(InputError, match="as many of each"):
        epsilon_bound(*drawn(np.random.default_rng(0), 12, 13))


# --- single examples


def test_no_example_is_named_by_chance_in_more_than_five_percent_of_studies() -> None:
    rng = np.random.default_rng(17)
    studies = 250
    named = 0
    covered = []
    for _ in range(studies):
        found = sample_exposure(*drawn(rng, 6, examples=40), draws=199)
        named += bool(found.remembered.any() or found.over_unlearned.any())
        covered.append(np.mean((found.low <= 0) & (found.high >= 0)))
    assert named / studies <= at_most(0.05, studies)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_the_examples_that_stay_known_are_named_and_those_pushed_too_far() -> None:
    u, o, control_u, control_o = drawn(np.random.default_rng(18), 10)
    u[:, 3] += 6
    u[:, 4] -= 6
    found = sample_exposure(u, o, control_u, control_o)
    assert np.flatnonzero(found.remembered).tolist() == [3]
    assert np.flatnonzero(found.over_unlearned).tolist() == [4]
    assert found.low[3] < found.difference[3] < found.high[3]
    assert found.low[3] > 3


def test_the_interval_of_an_example_is_welchs() -> None:
    from scipy.stats import ttest_ind

    u, o, control_u, control_o = drawn(np.random.default_rng(19), 5, 7)
    found = sample_exposure(u, o, control_u, control_o)
    welch = ttest_ind(u - control_u.mean(1)[:, None], o - control_o.mean(1)[:, None], equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert found.low.tolist() == pytest.approx(interval.low.tolist())
    assert found.high.tolist() == pytest.approx(interval.high.tolist())


def test_one_model_takes_the_spread_of_the_others_and_equal_ones_are_no_exposure() -> None:
    found = sample_exposure(*drawn(np.random.default_rng(20), 1, 19, shift=9.0, share=0.02))
    assert np.isfinite(found.high).all()
    assert found.p[0] == 0.05
    same = sample_exposure(np.ones((4, 3)), np.ones((4, 3)), np.zeros((4, 1)), np.zeros((4, 1)))
    assert same.p.tolist() == [1.0, 1.0, 1.0]
