# SPDX-License-Identifier: Apache-2.0
"""The one-run audit: the paper's example, and simulated error rates and power with fixed seeds."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binom, norm

from fedquit.errors import InputError
from fedquit.inference.multiplicity import holm
from fedquit.inference.one_run import (
    CONFIDENCE,
    OneRunAudit,
    Tally,
    audit,
    count_correct,
    default_guesses,
    epsilon_lower_bound,
    gain_upper_bound,
    p_of_retrain,
    p_value,
)

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
DRAWS = 4000
SLACK = 3 * math.sqrt(0.05 * 0.95 / DRAWS)  # three Monte-Carlo standard errors of a rate of .05


@cache
def bounds(canaries: int, guesses: int, delta: float, level: float = 0.05) -> npt.NDArray[np.float64]:
    """The lower bound on epsilon for each number of correct guesses."""
    tallies = [Tally(canaries, guesses, correct) for correct in range(guesses + 1)]
    return np.array([epsilon_lower_bound(tally, delta, level) for tally in tallies])


def sorted_coins(canaries: int, auc: float, seed: int, draws: int = DRAWS) -> Bools:
    """Coins of canaries with normal scores, the highest score first, (draws, canaries)."""
    rng = np.random.default_rng(seed)
    coins = rng.integers(0, 2, (draws, canaries)).astype(bool)
    shift = math.sqrt(2) * norm.ppf(auc)
    order = np.argsort(-(rng.normal(size=coins.shape) + shift * coins), axis=1)
    return np.take_along_axis(coins, order, axis=1)


def correct_guesses(coins: Bools, k: int) -> Counts:
    """Of 2k guesses on sorted coins, (draws,)."""
    return np.asarray(coins[:, :k].sum(1) + (~coins[:, -k:]).sum(1), dtype=np.int64)


def test_the_paper_s_example_has_epsilon_0_673() -> None:
    tally = Tally(1000, 100, 75)
    assert epsilon_lower_bound(tally, 1e-4) == pytest.approx(0.67298, abs=1e-5)
    assert epsilon_lower_bound(tally, 0.0) == pytest.approx(0.702, abs=5e-4)
    assert p_value(tally, epsilon_lower_bound(tally, 1e-4), 1e-4) == pytest.approx(0.05)


def test_without_delta_p_is_the_binomial_tail_and_delta_adds_the_largest_mean_below_it() -> None:
    tally = Tally(50, 10, 8)
    q = 1 / (1 + math.exp(-0.3))
    tail = sum(binom.pmf(w, 10, q) for w in (8, 9, 10))
    assert p_value(tally, 0.3, 0.0) == pytest.approx(tail)
    runs = [sum(binom.pmf(w, 10, q) for w in range(8 - i, 8)) / i for i in range(1, 9)]
    assert p_value(tally, 0.3, 1e-3) == pytest.approx(tail + 2 * 50 * 1e-3 * max(runs))
    assert p_value(Tally(50, 10, 0), 0.3, 1.0) == 1.0


def test_all_guesses_right_bound_epsilon_by_the_ceiling_of_their_number() -> None:
    assert epsilon_lower_bound(Tally(100, 100, 100), 0.0) == pytest.approx(3.49, abs=0.01)
    assert epsilon_lower_bound(Tally(1000, 1000, 1000), 0.0) == pytest.approx(5.81, abs=0.01)
    assert epsilon_lower_bound(Tally(1000, 100, 50), 0.0) == 0.0


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("guesses", [40, 100])
def test_under_randomised_response_the_bound_exceeds_the_truth_in_at_most_5_percent(
    epsilon: float, guesses: int
) -> None:
    rng = np.random.default_rng(1)
    correct = rng.binomial(guesses, 1 / (1 + math.exp(-epsilon)), DRAWS)
    error = (bounds(500, guesses, 0.0)[correct] > epsilon).mean()
    assert error <= 0.05 + SLACK
    exact = binom.pmf(np.arange(guesses + 1), guesses, 1 / (1 + math.exp(-epsilon)))
    assert exact[bounds(500, guesses, 0.0) > epsilon].sum() <= 0.05


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 2.0])
def test_with_a_delta_that_reveals_canaries_the_bound_still_holds(epsilon: float) -> None:
    """Each of m canaries is revealed with chance delta; all others answer at random, as epsilon allows."""
    rng = np.random.default_rng(2)
    m, delta = 200, 0.001
    revealed = rng.binomial(m, delta, DRAWS)
    correct = revealed + rng.binomial(m - revealed, 1 / (1 + math.exp(-epsilon)))
    error = (bounds(m, m, delta)[correct] > epsilon).mean()
    assert error <= 0.05 + SLACK


def test_the_best_k_of_a_grid_errs_and_must_be_fixed_beforehand() -> None:
    m = 200
    coins = sorted_coins(m, auc=0.5, seed=3)
    grid = (5, 10, 20, 30, 40, 50, 60, 80, 100)
    by_k = {k: bounds(m, 2 * k, 0.0)[correct_guesses(coins, k)] > 0 for k in grid}
    best = np.any(list(by_k.values()), axis=0).mean()
    assert best > 0.08
    assert by_k[default_guesses(m)].mean() <= 0.05 + SLACK
    shared = [bounds(m, 2 * k, 0.0, 0.05 / len(grid))[correct_guesses(coins, k)] > 0 for k in grid]
    assert np.any(shared, axis=0).mean() <= 0.05


@pytest.mark.parametrize(
    ("canaries", "auc", "power", "median"),
    [(100, 0.64, 0.43, 0.0), (200, 0.64, 0.84, 0.24), (500, 0.64, 1.0, 0.52), (100, 0.76, 0.95, 0.65)],
)
def test_power_for_normal_scores_at_a_tenth_of_the_canaries(
    canaries: int, auc: float, power: float, median: float
) -> None:
    k = default_guesses(canaries)
    lows = bounds(canaries, 2 * k, 0.0)[correct_guesses(sorted_coins(canaries, auc, seed=4), k)]
    assert (lows > 0).mean() == pytest.approx(power, abs=0.03)
    assert np.median(lows) == pytest.approx(median, abs=0.12), "one correct guess more moves the bound by about .1"


def words(canaries: int, k: int) -> dict[str, npt.NDArray[np.bool_]]:
    """For each number of correct guesses: whether it is remembered, and whether over-unlearned."""
    audits = [audit({"natural": Tally(canaries, 2 * k, v)})["natural"].verdict for v in range(2 * k + 1)]
    return {word: np.array([verdict == word for verdict in audits]) for word in ("remembered", "over-unlearned")}


def test_both_directions_together_err_in_at_most_5_percent_and_each_in_2_5() -> None:
    k = 20
    verdicts = words(200, k)
    null = correct_guesses(sorted_coins(200, auc=0.5, seed=5), k)
    each = 3 * math.sqrt(0.025 * 0.975 / DRAWS)
    assert verdicts["remembered"][null].mean() <= 0.025 + each
    assert verdicts["over-unlearned"][null].mean() <= 0.025 + each
    pushed_down = correct_guesses(sorted_coins(200, auc=0.36, seed=6), k)
    assert verdicts["over-unlearned"][pushed_down].mean() > 0.65
    remembered = correct_guesses(sorted_coins(200, auc=0.64, seed=7), k)
    assert verdicts["remembered"][remembered].mean() == pytest.approx(0.73, abs=0.04)


def test_holm_over_two_kinds_keeps_the_error_where_uncorrected_tests_double_it() -> None:
    k = 50
    kinds = [correct_guesses(sorted_coins(500, 0.5, seed), k) for seed in (8, 9)]
    p_by_count = np.array([p_of_retrain(Tally(500, 2 * k, v)) for v in range(2 * k + 1)])
    pairs = list(zip(*(p_by_count[correct] for correct in kinds), strict=True))
    corrected = np.array([min(holm(pair)) <= 0.05 for pair in pairs])
    uncorrected = np.array([min(pair) <= 0.05 for pair in pairs])
    assert corrected.mean() <= 0.05 + SLACK
    assert uncorrected.mean() > 0.05 + SLACK
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_what_an_attack_gains_is_bounded_from_above() -> None:
    shown = {}
    for guesses, margin in ((100, 0.5), (200, 0.5), (500, 0.25)):
        gains = np.array([gain_upper_bound(Tally(1000, guesses, v)) for v in range(guesses + 1)])
        shown[guesses] = binom.pmf(np.arange(guesses + 1), guesses, 0.5)[gains <= margin].sum()
    assert shown == pytest.approx({100: 0.76, 200: 0.96, 500: 0.87}, abs=0.01)
    for epsilon in (0.0, 1.0):
        q = 1 / (1 + math.exp(-epsilon))
        gains = np.array([gain_upper_bound(Tally(1000, 100, v)) for v in range(101)])
        assert binom.pmf(np.arange(101), 100, q)[gains < epsilon].sum() <= 0.05
    assert gain_upper_bound(Tally(10, 10, 10)) == math.inf


def test_the_highest_scores_are_guessed_in_and_the_lowest_out() -> None:
    scores = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert count_correct(scores, [True, True, False, True, False, False], 2) == Tally(6, 4, 4)
    assert count_correct(scores, [False, False, True, False, True, True], 2).correct == 0
    assert count_correct([1.0] * 4, [True, False, True, False], 2).correct == 2, "of equal scores the first is higher"
    with pytest.raises(InputError, match="do not fit 6 canaries"):
        count_correct(scores, [True] * 6, 4)
    with pytest.raises(InputError, match="same length"):
        count_correct(scores, [True], 1)
    with pytest.raises(InputError, match="not finite"):
        count_correct([math.nan, 1.0], [True, False], 1)
    with pytest.raises(InputError, match="is impossible"):
        Tally(10, 4, 5)


def only(tally: Tally, original: Tally | None = None, delta: float = 1e-5) -> OneRunAudit:
    return audit({"natural": tally}, delta, {"natural": original} if original else None)["natural"]


def test_each_verdict_has_its_sentence() -> None:
    caught = Tally(200, 40, 36)
    remembered = only(caught)
    assert remembered.verdict == "remembered"
    assert remembered.epsilon_low == epsilon_lower_bound(caught, 1e-5, 0.025) > 0
    assert remembered.sentence == (
        f"With 95 % confidence this pipeline is not ({remembered.epsilon_low:.2f}, 1e-05)-indistinguishable in a "
        "canary's presence: 36 of 40 guesses correct."
    )
    silent = only(Tally(200, 40, 21), caught)
    assert silent.verdict == "not detected"
    assert silent.epsilon_low == 0
    assert silent.sentence == (
        "No memory of the canaries is detected: 21 of 40 guesses correct, so with 95 % confidence this attack gains at "
        f"most {gain_upper_bound(Tally(200, 40, 21)):.2f}. That is no proof."
    )
    blind = only(Tally(200, 40, 21), Tally(200, 40, 24))
    assert blind.verdict == only(Tally(200, 40, 24)).verdict == "blind"
    assert "does not catch Original" in blind.sentence
    pushed = only(Tally(200, 40, 5), caught)
    assert pushed.verdict == "over-unlearned"
    assert pushed.epsilon_low == epsilon_lower_bound(Tally(200, 40, 35), 1e-5, 0.025)
    assert "score lower than those left out" in pushed.sentence
    assert only(caught, Tally(200, 40, 20)).verdict == "remembered", "a refutation holds whatever Original says"
    coarse = only(Tally(200, 40, 28), delta=0.01)
    assert (coarse.verdict, coarse.epsilon_low) == ("remembered", 0.0)
    assert "as Retrain does not (p = 0.017)" in coarse.sentence


def test_two_kinds_share_the_confidence() -> None:
    both = audit({"natural": Tally(200, 40, 27), "mislabelled": Tally(200, 40, 40)}, 0.0)
    assert both["natural"].p == pytest.approx(p_of_retrain(Tally(200, 40, 27)))
    assert both["natural"].verdict == "remembered"
    assert both["natural"].epsilon_low == epsilon_lower_bound(Tally(200, 40, 27), 0.0, 0.0125) == 0
    assert both["mislabelled"].epsilon_low == epsilon_lower_bound(Tally(200, 40, 40), 0.0, 0.0125) > 0
    weak = audit({"natural": Tally(200, 40, 27), "mislabelled": Tally(200, 40, 28)}, 0.0)
    assert weak["mislabelled"].p == pytest.approx(2 * p_of_retrain(Tally(200, 40, 28)))
    assert all(judged.confidence == CONFIDENCE for judged in both.values())
