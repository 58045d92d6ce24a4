# SPDX-License-Identifier: Apache-2.0
"""A method against Natural at equal rounds: error rates and power, simulated with fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from fedquit.errors import InputError
from fedquit.inference.gaps import CANNOT_TELL, Margin
from fedquit.inference.leaving import (
    DIFFERS_FROM_LEAVING,
    NO_BENEFIT,
    LeavingSample,
    LeavingVerdict,
    judge_leaving,
    least_differences,
    sign_flip_p,
)

Floats = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, int]], Floats]


def tolerance(rate: float, studies: int) -> float:
    """Three Monte-Carlo standard errors."""
    return 3 * math.sqrt(rate * (1 - rate) / studies)


def normal(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.normal(size=shape)


def unequal(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.normal(size=shape) * np.exp(draw.normal(0, 0.7, (shape[0], 1)))


def skewed(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.exponential(size=shape)


def differences(draw: np.random.Generator, targets: int, runs: int = 1, kind: Noise = normal) -> Floats:
    """Method less Natural, both from one Original with noise of their own: no difference in distribution."""
    pair = kind(draw, (targets, 2 * runs))  # one spread for each target
    return pair[:, :runs] - pair[:, runs:]


def sample(values: Floats, *, shared: bool = False) -> LeavingSample:
    """Of a measure without a grid."""
    return LeavingSample(list(values), shared, [0.0] * len(values))


def one(values: Floats, margin: Margin | None = None, *, shared: bool = False) -> LeavingVerdict:
    (verdict,) = judge_leaving({("m", "forget_acc"): sample(values, shared=shared)}, margin).values()
    return verdict


@pytest.mark.parametrize("kind", [normal, unequal, skewed])
@pytest.mark.parametrize(("targets", "runs"), [(8, 1), (4, 2)])
def test_a_method_that_is_natural_is_called_different_in_at_most_five_percent(
    kind: Noise, targets: int, runs: int
) -> None:
    draw, studies = np.random.default_rng(50), 700
    rejected = [sign_flip_p(sample(differences(draw, targets, runs, kind)).flipped) <= 0.05 for _ in range(studies)]
    assert np.mean(rejected) <= 0.05 + tolerance(0.05, studies)


@pytest.mark.parametrize(("targets", "effect", "power"), [(6, 2.0, 0.62), (10, 2.0, 0.97), (10, 1.0, 0.50)])
def test_the_power_for_a_method_that_forgets_more(targets: int, effect: float, power: float) -> None:
    """The effect in standard deviations of one run; a difference has √2 of them."""
    draw, studies = np.random.default_rng(51), 500
    shifted = [differences(draw, targets) - effect for _ in range(studies)]
    found = np.mean([sign_flip_p(values) <= 0.05 for values in shifted])
    assert found == pytest.approx(power, abs=tolerance(power, studies) + 0.01)


def test_six_methods_and_two_measures_together_err_in_five_percent() -> None:
    """Ten targets, the fewest with which Holm's rule can claim one of twelve; a method's measures are correlated."""
    draw, studies = np.random.default_rng(52), 200
    raw, corrected = [], []
    for _ in range(studies):
        samples = {}
        for method in range(6):
            common = differences(draw, 10)
            for measure in range(2):
                own = math.sqrt(0.5) * (common + differences(draw, 10))
                samples[f"{method}", f"{measure}"] = sample(own)
        raw.append(min(sign_flip_p(one.flipped) for one in samples.values()) <= 0.05)
        corrected.append(any(v.word == DIFFERS_FROM_LEAVING for v in judge_leaving(samples).values()))
    assert np.mean(raw) > 0.25
    assert np.mean(corrected) <= 0.05 + tolerance(0.05, studies)


def test_targets_that_share_an_original_keep_the_level_by_whole_seeds_alone() -> None:
    """Batches of one seed are common to all targets: correlation 0.5 of the differences."""
    draw, studies = np.random.default_rng(53), 400
    each, whole = [], []
    for _ in range(studies):
        common = differences(draw, 1, 7)
        values = math.sqrt(0.5) * (common + differences(draw, 4, 7))
        each.append(sign_flip_p(sample(values).flipped) <= 0.05)
        whole.append(sign_flip_p(sample(values, shared=True).flipped) <= 0.05)
    assert np.mean(each) > 0.2
    assert np.mean(whole) <= 0.05 + tolerance(0.05, studies)


@pytest.mark.parametrize(("shift", "rate"), [(2.0, 0.05), (0.0, 0.90)], ids=["at the margin", "no difference"])
def test_no_benefit_is_claimed_in_five_percent_at_the_margin(shift: float, rate: float) -> None:
    draw, studies = np.random.default_rng(54), 1000
    claimed = []
    for _ in range(studies):
        verdict = one(differences(draw, 7) + shift, Margin(2.0))
        claimed.append(verdict.equivalence_p is not None and verdict.equivalence_p <= 0.05)
    assert np.mean(claimed) == pytest.approx(rate, abs=tolerance(rate, studies))


def test_the_interval_of_the_mean_difference_covers() -> None:
    draw, studies = np.random.default_rng(55), 1000
    covered = []
    for _ in range(studies):
        verdict = one(differences(draw, 6) - 4)
        assert verdict.low is not None
        assert verdict.high is not None
        covered.append(verdict.low <= -4 <= verdict.high)
    assert np.mean(covered) == pytest.approx(0.95, abs=tolerance(0.95, studies))


def test_all_signs_are_counted() -> None:
    assert sign_flip_p([1.0, 2.0, 4.0]) == pytest.approx(2 / 8), "the observed signs and their opposite"
    assert sign_flip_p([1.0, 2.0, -4.0]) == pytest.approx(8 / 8), "no other sum is closer to 0"
    assert sign_flip_p([-3.0] * 6) == pytest.approx(2 / 64)
    assert sign_flip_p([-3.0] * 5 + [0.0]) == pytest.approx(2 / 32), "a difference of 0 says nothing"
    assert sign_flip_p([]) == sign_flip_p([0.0, 0.0]) == sign_flip_p([1.0, -1.0]) == 1.0
    assert sign_flip_p(np.full(60, 0.5)) < 0.001, "more signs than can be counted"


def test_least_numbers_of_differences() -> None:
    assert [least_differences(k) for k in (1, 2, 12)] == [6, 7, 9]
    for hypotheses in (1, 2, 3, 12, 40):
        needed = least_differences(hypotheses)
        assert 2.0 ** (1 - needed) <= 0.05 / hypotheses < 2.0 ** (2 - needed)


def test_what_differs_and_what_does_not() -> None:
    values = np.random.default_rng(56).normal(-6, 1.0, size=(8, 1))
    apart = one(values, Margin(2.0))
    assert (apart.word, apart.targets, apart.runs, apart.design) == (DIFFERS_FROM_LEAVING, 8, 1, "own")
    assert apart.reason == "differs from leaving (p = 0.008)"
    assert apart.difference == pytest.approx(float(values.mean()))
    assert "within ±9.0 points of Natural's all the same" in one(values, Margin(9.0)).reason
    alike = one(values - values.mean(), Margin(2.0))
    assert alike.word == NO_BENEFIT
    assert alike.reason.endswith("no benefit over leaving: the mean difference lies within ±2.0 points (p < 0.001)")
    open_ = one(values - values.mean())
    assert open_.word == CANNOT_TELL, "without a margin"
    assert "needs a margin that is fixed beforehand" in open_.reason
    assert "needs a margin in points" in one(values - values.mean(), Margin(2.0, studentised=True)).reason
    wide = one((values - values.mean()) * 3, Margin(1.0))
    assert wide.reason.endswith("targets would show it in 80 % of studies if there is no difference")
    assert "take a wider margin" in one((values - values.mean()) * 30, Margin(1.0)).reason


def test_too_few_differences_say_how_many_would_do() -> None:
    few = one(np.full((3, 1), -30.0))
    assert few.word == CANNOT_TELL
    assert few.reason == (
        "cannot tell: the smallest p of 3 differences is 0.25, and the test needs 0.05; it takes 6 runs over targets "
        "and seeds"
    )
    together = one(np.full((10, 2), -30.0), shared=True)
    assert (together.word, together.design, together.runs) == (CANNOT_TELL, "shared", 2)
    assert together.reason.endswith("it takes 6 seeds, or 6 targets with an Original of their own")
    single = one(np.full((1, 1), -30.0), Margin(2.0))
    assert (single.low, single.high, single.equivalence_p) == (None, None, None)
    assert one(np.zeros((0, 1))).reason.endswith("no run has Natural's measure after as many rounds beside it")


def test_seeds_are_the_units_of_one_target_and_of_a_shared_original() -> None:
    draw = np.random.default_rng(57)
    values = draw.normal(-5, 1, size=(3, 7))
    assert sample(values).units == pytest.approx(values.mean(axis=1))
    assert sample(values, shared=True).units == pytest.approx(values.mean(axis=0))
    assert sample(values[:1]).units == pytest.approx(values[0])
    assert one(values, shared=True).word == DIFFERS_FROM_LEAVING
    assert one(values[:1]).word == DIFFERS_FROM_LEAVING
    ragged = LeavingSample([values[0, :2], values[1]])
    assert (ragged.runs, len(ragged.flipped)) == (2, 9)
    assert float(ragged.flipped.sum()) == pytest.approx(float(ragged.units.sum()))
    with pytest.raises(InputError, match="every seed"):
        LeavingSample([values[0, :2], values[1]], shared=True)


@pytest.mark.parametrize("sizes", [(97, 101, 103, 99, 100), (10, 10, 10, 10, 1000)])
@pytest.mark.parametrize(("spread", "shift"), [(0.15, 2.2), (0.2, 2.3), (0.3, 1.3)])
def test_clients_of_different_sizes_keep_the_level_against_leaving(
    sizes: tuple[int, ...], spread: float, shift: float
) -> None:
    """The true mean difference is the margin; the nearest numbers of two clients are no step of either."""
    draw, studies = np.random.default_rng(44), 250
    steps = 100 / np.array(sizes)
    centres = [np.round((draw.normal(size=100_000) * spread + c)[:, None] / steps) * steps for c in (50 + shift, 50)]
    truth = float((centres[0] - centres[1]).mean())
    claimed, missed = [], []
    for _ in range(studies):
        both = np.round(draw.normal([[50 + shift], [50.0]], spread, size=(2, len(sizes))) / steps) * steps
        for known in ((), list(steps)):
            found = LeavingSample([np.array([d]) for d in both[0] - both[1]], steps=known)
            (verdict,) = judge_leaving({("m", "forget_acc"): found}, Margin(abs(truth) or 1.0)).values()
            claimed.append(truth != 0 and (verdict.equivalence_p or 0.0) <= 0.05)
            missed.append(verdict.low is not None and not verdict.low - 0.01 <= truth <= (verdict.high or 0.0) + 0.01)
    assert np.mean(claimed) <= 0.05 + tolerance(0.05, studies)
    assert np.mean(missed) <= 0.05 + tolerance(0.05, studies)


@pytest.mark.parametrize(("share", "targets"), [(0.2, 5), (0.2, 8), (0.3, 5)])
def test_differences_below_a_step_are_no_proof_of_no_benefit(share: float, targets: int) -> None:
    draw, studies, step = np.random.default_rng(45), 250, 5.0
    words = []
    for _ in range(studies):
        moved = -step * (draw.random((targets, 1)) < share)
        for known in ((), [step] * targets):
            found = LeavingSample(list(moved), steps=known)
            (verdict,) = judge_leaving({("m", "forget_acc"): found}, Margin(share * step)).values()
            words.append(verdict.word == NO_BENEFIT)
    assert np.mean(words) <= 0.05 + tolerance(0.05, studies)
    still = LeavingSample(list(np.zeros((5, 1))), steps=[step] * 5)
    (verdict,) = judge_leaving({("m", "forget_acc"): still}, Margin(step)).values()
    assert verdict.word == NO_BENEFIT, "a margin of a step can be shown"
    (unknown,) = judge_leaving({("m", "forget_acc"): LeavingSample(list(np.zeros((5, 1))))}, Margin(step)).values()
    assert (unknown.word, unknown.low, unknown.equivalence_p) == (CANNOT_TELL, None, 1.0)
    assert "of how many examples" in unknown.reason
    with pytest.raises(InputError, match="2 steps for 5 targets"):
        LeavingSample(list(np.zeros((5, 1))), steps=[1.0, 1.0])
