# SPDX-License-Identifier: Apache-2.0
"""Verdicts on gaps to Retrain: error rates, power and coverage, simulated with fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from fedquit.errors import InputError
from fedquit.inference import gaps
from fedquit.inference.gaps import (
    CANNOT_TELL,
    DIFFERS,
    EQUIVALENT,
    GapSample,
    Margin,
    any_target_p,
    bias_p,
    equivalence_p,
    judge,
    mean_interval,
    prediction_interval,
    seed_blocks_p,
    studentised_p,
    together,
)
from fedquit.inference.multiplicity import holm

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]


def tolerance(rate: float, studies: int) -> float:
    """Three Monte-Carlo standard errors."""
    return 3 * math.sqrt(rate * (1 - rate) / studies)


def normal(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.normal(size=shape)


def unequal(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.normal(size=shape) * np.exp(draw.normal(0, 0.7, (shape[0], 1)))


def heavy(draw: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return draw.standard_t(3, size=shape)


def split(values: Floats, runs: int = 1, *, shared: bool = False) -> GapSample:
    return GapSample.of(values[:, :runs], values[:, runs:], shared=shared)


def test_a_gap_no_larger_than_that_of_one_other_retrain_is_no_test() -> None:
    """The rule that this module replaced: it calls a Retrain different half of the time, however many the targets."""
    draw = np.random.default_rng(10)
    for targets in (1, 5, 20):
        method, retrain, again = draw.normal(size=(3, 2000, targets))
        differs = np.abs(method - retrain).mean(axis=1) > np.abs(again - retrain).mean(axis=1)
        assert differs.mean() == pytest.approx(0.5, abs=tolerance(0.5, 2000))


@pytest.mark.parametrize("kind", [normal, unequal, heavy])
@pytest.mark.parametrize("test", [any_target_p, bias_p])
def test_the_permutation_tests_keep_their_level(test: Callable[[GapSample], float], kind: Draw) -> None:
    draw, studies = np.random.default_rng(11), 700
    rejected = [test(split(kind(draw, (5, 4)))) <= 0.05 for _ in range(studies)]
    assert np.mean(rejected) <= 0.05 + tolerance(0.05, studies)


def test_the_f_test_with_the_same_statistic_does_not() -> None:
    from scipy.stats import f

    draw, studies = np.random.default_rng(12), 2000
    values = draw.normal(size=(studies, 5, 4)) * np.exp(draw.normal(0, 0.7, (studies, 5, 1)))
    variance = values[:, :, 1:].var(axis=2, ddof=1).mean(axis=1)
    size = ((values[:, :, 0] - values[:, :, 1:].mean(axis=2)) ** 2).mean(axis=1) / (variance * 4 / 3)
    assert (size > f.ppf(0.95, 5, 10)).mean() > 0.09


@pytest.mark.parametrize(("targets", "any_power", "bias_power"), [(3, 0.42, 0.67), (5, 0.61, 0.91), (10, 0.87, 1.0)])
def test_the_power_for_a_gap_of_two_standard_deviations(targets: int, any_power: float, bias_power: float) -> None:
    draw, studies = np.random.default_rng(13), 400
    samples = []
    for _ in range(studies):
        values = draw.normal(size=(targets, 4))
        values[:, 0] += 2
        samples.append(split(values))
    found = np.mean([any_target_p(sample) <= 0.05 for sample in samples])
    assert found == pytest.approx(any_power, abs=tolerance(any_power, studies) + 0.01)
    biased = np.mean([bias_p(sample) <= 0.05 for sample in samples])
    assert biased == pytest.approx(bias_power, abs=tolerance(0.9, studies) + 0.01)
    assert gaps.difference_power(targets, 1, 3, 2.0) == pytest.approx(any_power, abs=0.03)


def test_signs_that_cancel_are_found_in_single_targets_and_not_in_the_mean() -> None:
    values = np.tile([0.0, -1.0, 0.0, 1.0], (6, 1))
    values[:, 0] = [9, -9, 9, -9, 9, -9]
    sample = split(values)
    assert any_target_p(sample) == pytest.approx(4.0**-6), "the observed arrangement alone"
    assert bias_p(sample) == 1.0


def test_every_arrangement_is_counted_as_a_plain_loop_counts_them() -> None:
    import itertools

    draw = np.random.default_rng(14)
    values = draw.normal(size=(3, 5))
    variances = values.var(axis=1, ddof=1)

    def statistics(chosen: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
        gap = np.empty(3)
        for t, places in enumerate(chosen):
            others = [i for i in range(5) if i not in places]
            gap[t] = values[t, list(places)].mean() - values[t, others].mean()
        return float((gap**2 / variances).sum()), abs(float((gap / np.sqrt(variances)).sum()))

    every = [statistics(chosen) for chosen in itertools.product(itertools.combinations(range(5), 2), repeat=3)]
    observed = statistics(((0, 1),) * 3)
    shares = [np.mean([s[i] >= observed[i] - 1e-9 for s in every]) for i in (0, 1)]
    assert any_target_p(split(values, 2)) == pytest.approx(shares[0])
    assert bias_p(split(values, 2)) == pytest.approx(shares[1])


def test_drawn_arrangements_agree_with_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(15).normal(size=(6, 4))
    values[:, 0] += 0.7
    counted = any_target_p(split(values)), bias_p(split(values))
    monkeypatch.setattr(gaps, "_ENUMERATED", 1)
    drawn = any_target_p(split(values)), bias_p(split(values))
    for one, other in zip(counted, drawn, strict=True):
        assert one != other
        assert one == pytest.approx(other, abs=0.02)
    many = np.random.default_rng(16).normal(size=(2, 60))
    many[:, :30] += 2
    assert any_target_p(split(many, 30)) < 0.001, "more arrangements than can be listed"


def test_targets_without_any_spread_say_nothing() -> None:
    values = np.full((3, 4), 100.0)
    assert any_target_p(split(values)) == bias_p(split(values)) == seed_blocks_p(split(values)) == 1.0


def test_a_shared_original_makes_targets_dependent_and_whole_seeds_keep_the_level() -> None:
    """One component of every value is common to all targets of a seed; correlation 0.5."""
    draw, studies = np.random.default_rng(17), 500
    mean_test, blocks = [], []
    for _ in range(studies):
        common = draw.normal(size=(1, 7)) * math.sqrt(0.5)
        values = common + draw.normal(size=(5, 7)) * math.sqrt(0.5)
        low, high = mean_interval(split(values, 3).gaps)
        mean_test.append(not low <= 0 <= high)
        blocks.append(seed_blocks_p(split(values, 3)) <= 0.05)
    assert np.mean(mean_test) > 0.2, "targets as units"
    assert np.mean(blocks) <= 0.05 + tolerance(0.05, studies)


@pytest.mark.parametrize(("shift", "rate"), [(2.0, 0.05), (0.0, 0.87)], ids=["at the margin", "no gap"])
def test_equivalence_errs_in_five_percent_at_the_margin_and_is_found_without_a_gap(shift: float, rate: float) -> None:
    draw, studies = np.random.default_rng(18), 1500
    claimed = []
    for _ in range(studies):
        values = draw.normal(size=(5, 4))
        values[:, 0] += shift
        claimed.append(equivalence_p(split(values).gaps, 2.0) <= 0.05)
    assert np.mean(claimed) == pytest.approx(rate, abs=tolerance(rate, studies))


def test_equivalence_is_the_90_percent_interval_within_the_margin() -> None:
    draw = np.random.default_rng(19)
    for _ in range(50):
        values = draw.normal(0.5, 1.0, size=5)
        low, high = mean_interval(values, confidence=0.9)
        assert (equivalence_p(values, 1.5) < 0.05) == (low > -1.5 and high < 1.5)
    assert equivalence_p([1.0, 1.0], 2.0, step=1.0) == 1 / 4, "no deviation: a whole step inside"
    assert equivalence_p([0.3, 0.1 + 0.2, 0.3, 0.3, 0.3], 2.0, step=1.0) == 1 / 32, "equal up to rounding"
    assert equivalence_p([0.0] * 5, 1.0, step=5.0) == pytest.approx(0.8**5), "a fifth of the runs may lie one step off"
    assert equivalence_p([1.0, 1.0], 2.0) == 1.0, "nothing shows how far others would lie"
    assert equivalence_p([0.0, 0.5, 1.0], 9.0, step=[0.5, math.nan, 0.5]) == 1.0, "one step is not known"
    assert equivalence_p([2.0, 2.0], 2.0) == 1.0
    assert equivalence_p([0.0], 2.0) == 1.0, "one target has no spread over targets"


def mean_on_grid(centre: float, spread: float) -> float:
    """The mean of a normal number that is rounded to a whole one."""
    from scipy.special import ndtr

    whole = np.arange(math.floor(centre) - 40, math.floor(centre) + 41)
    return float((whole * (ndtr((whole + 0.5 - centre) / spread) - ndtr((whole - 0.5 - centre) / spread))).sum())


def on_grid(draw: np.random.Generator, sizes: tuple[int, int], spread: float, offsets: tuple[float, float]) -> Floats:
    """Accuracies of 100 examples, in whole points: the method's, two points above, and those of Retrain."""
    targets, retrains = sizes
    values = draw.normal(50 + offsets[1], spread, size=(targets, 1 + retrains))
    values[:, 0] += 2 + offsets[0] - offsets[1]
    return np.round(values)


@pytest.mark.parametrize(
    ("sizes", "spread", "offsets"),
    [
        ((2, 3), 0.5, (0.25, 0.25)),
        ((3, 2), 0.3, (0.375, 0.5)),
        ((3, 3), 0.15, (0.4375, 0.3)),
        ((3, 3), 1.0, (0.25, 0.25)),
        ((5, 3), 0.05, (0.25, 0.0)),
        ((5, 3), 0.1, (0.48, 0.0)),
        ((5, 8), 0.2, (0.4375, 0.3)),
        ((6, 3), 0.15, (0.4375, 0.3)),
        ((10, 3), 2.0, (0.1875, 0.3)),
    ],
)
def test_equivalence_at_the_margin_errs_in_five_percent_on_a_grid_too(
    sizes: tuple[int, int], spread: float, offsets: tuple[float, float]
) -> None:
    """Steps from half of Retrain's deviation to twenty of them: the gaps of few targets often coincide."""
    draw, studies = np.random.default_rng(28), 1000
    margin = mean_on_grid(52 + offsets[0], spread) - mean_on_grid(50 + offsets[1], spread)
    claimed = []
    for _ in range(studies):
        sample = split(on_grid(draw, sizes, spread, offsets))
        claimed.append([equivalence_p(sample.gaps, margin, step=step) <= 0.05 for step in (1.0, sample.step)])
    assert np.mean(claimed, axis=0).max() <= 0.05 + tolerance(0.05, studies), "the step known, and as values show it"


def test_the_t_test_of_equivalence_alone_does_not_know_of_a_grid() -> None:
    draw, studies = np.random.default_rng(29), 1000
    margin = mean_on_grid(52.4375, 0.15) - mean_on_grid(50.3, 0.15)
    blind = []
    for _ in range(studies):
        values = on_grid(draw, (3, 3), 0.15, (0.4375, 0.3))
        blind.append(equivalence_p(split(values).gaps, margin) <= 0.05)
    assert np.mean(blind) > 0.1


def coinciding(draw: np.random.Generator, targets: int, share: float, step: float) -> tuple[Floats, Floats]:
    """Retrains that do not spread, and a method of which that share of runs lies one step off."""
    off = (draw.random((targets, 1)) < share).astype(np.float64)
    return 50 + step * off, np.full((targets, 3), 50.0)


@pytest.mark.parametrize(("examples", "margin"), [(20, 1.0), (50, 0.5), (10, 2.0), (20, 2.0)])
@pytest.mark.parametrize("targets", [5, 8, 20])
def test_gaps_below_a_step_are_not_called_equivalent_where_values_coincide(
    examples: int, margin: float, targets: int
) -> None:
    """The mean gap is the margin, and less than half a step: no run of a study need show it."""
    draw, studies, step = np.random.default_rng(41), 250, 100 / examples
    claimed, unknown = [], []
    for _ in range(studies):
        values = coinciding(draw, targets, margin / step, step)
        known = GapSample.of(*values, steps=[step] * targets)
        claimed.append(equivalence_p(known.gaps, margin, step=known.step) <= 0.05)
        unknown.append(one(GapSample.of(*values), Margin(margin)).equivalence_p)
    assert np.mean(claimed) <= 0.05 + tolerance(0.05, studies)
    assert set(unknown) == {1.0}, "Retrains without a spread show no step, and the gap is none"
    still = GapSample.of(*coinciding(draw, 5, 0.0, step), steps=[step] * 5)
    assert one(still, Margin(step)).word == "equivalent", "a margin of a step can be shown"


@pytest.mark.parametrize(
    "sizes", [(10, 10, 1000), (10, 10, 10, 10, 1000), (20, 20, 20, 20, 2000), (20, 22, 24, 26, 28)]
)
@pytest.mark.parametrize(("retrains", "spread"), [(6, 2.0), (3, 1.0)])
def test_clients_of_very_different_sizes_have_steps_of_their_own(
    sizes: tuple[int, ...], retrains: int, spread: float
) -> None:
    draw, studies = np.random.default_rng(42), 400
    steps = np.array([100 / size for size in sizes])
    for method, retrain in ((52.0, 50.0), (53.1, 50.3)):
        centres = [mean_on_grid(method / h, spread / h) * h - mean_on_grid(retrain / h, spread / h) * h for h in steps]
        truth = float(np.mean(centres))
        claimed, missed = [], []
        for _ in range(studies):
            values = draw.normal(retrain, spread, size=(len(sizes), 1 + retrains))
            values[:, 0] += method - retrain
            values = np.round(values / steps[:, None]) * steps[:, None]
            for known in ((), list(steps)):
                sample = GapSample.of(values[:, :1], values[:, 1:], steps=known)
                low, high = mean_interval(sample.gaps, step=sample.step)
                claimed.append(equivalence_p(sample.gaps, truth, step=sample.step) <= 0.05)
                missed.append(not low <= truth <= high)
        assert np.mean(claimed) <= 0.05 + tolerance(0.05, studies)
        assert np.mean(missed) <= 0.05 + tolerance(0.05, studies)


def test_a_gap_is_not_taken_for_a_step_where_retrain_does_not_spread() -> None:
    method, retrain = [[90.0], [92.0], [89.0], [91.0], [90.0]], [[0.0] * 3] * 5
    unknown = one(GapSample.of(method, retrain), Margin(2.0))
    assert (unknown.word, unknown.low, unknown.high, unknown.equivalence_p) == ("differs", None, None, 1.0)
    known = one(GapSample.of(method, retrain, steps=[0.1] * 5), Margin(2.0))
    assert known.low is not None
    assert known.high is not None
    assert 88 < known.low < 90.4 < known.high < 93
    near = GapSample.of([[1.5], [1.5], [1.4], [1.6], [1.5]], retrain, steps=[0.1] * 5)
    assert equivalence_p(near.gaps, 2.0, step=near.step) < 0.001
    assert gaps.client_gap([90.0], [0.0, 0.0, 0.0]) is None
    assert gaps.client_gap([1.0], [0.0, 0.1, 0.0]) is not None
    assert np.array_equal(GapSample.of([[3.0, 3.5]], [[0.0, 0.0]]).step, [0.5]), "the method spreads"
    assert np.array_equal(GapSample.of([[3.0]] * 2, [[0.0, 0.0]] * 2, steps=[None, 2.0]).step, [math.nan, 2.0], True)
    with pytest.raises(InputError, match="2 steps for 1 targets"):
        GapSample.of([[3.0]], [[0.0, 0.0]], steps=[1.0, 1.0])


@pytest.mark.parametrize("step", [0.25, 1.0, 2.0])
def test_the_promised_number_of_targets_reaches_its_power_on_a_grid(step: float) -> None:
    """A margin of two deviations of Retrain, three Retrains; the deviation of the gap on the grid is known."""
    draw, studies = np.random.default_rng(43), 500

    def drawn(targets: int) -> GapSample:
        values = np.round(draw.normal(50.3, 1.0, size=(targets, 4)) / step) * step
        return GapSample.of(values[:, :1], values[:, 1:], steps=[step] * targets)

    promised = gaps.targets_for_equivalence(float(drawn(4000).gaps.std()), 2.0, step=step)
    assert promised is not None
    studied = [drawn(promised) for _ in range(studies)]
    claimed = [equivalence_p(sample.gaps, 2.0, step=sample.step) <= 0.05 for sample in studied]
    assert 0.8 - tolerance(0.8, studies) <= np.mean(claimed) <= 0.93, "no fewer targets would do, nor are many spare"


def test_the_promised_number_of_targets_for_gaps_that_coincide() -> None:
    assert gaps.targets_for_equivalence(0.0, 1.0, step=1.0) == 5
    assert gaps.targets_for_equivalence(0.0, 1.0, step=5.0) == 14, "0.8^14 is the first below 0.05"
    assert gaps.targets_for_equivalence(0.0, 1.0, 4, step=1.0) == 7
    assert gaps.targets_for_equivalence(0.0, 0.01, step=5.0) is None
    assert gaps.targets_for_equivalence(0.0, 1.0) is None, "without a step nothing is said"
    assert "of how many examples" in one(GapSample.of([[50.0]] * 4, [[50.0] * 3] * 4), Margin(0.1)).reason


@pytest.mark.parametrize(("step", "power", "blind"), [(0.0, 0.87, 0.87), (0.25, 0.83, 0.87), (1.0, 0.69, 0.84)])
def test_the_power_of_the_equivalence_on_a_grid(step: float, power: float, blind: float) -> None:
    """Five targets, three Retrains and a margin of two deviations, in steps of none, a quarter and one of them."""
    draw, studies = np.random.default_rng(30), 1000
    claimed, without = [], []
    for _ in range(studies):
        values = draw.normal(50.2, 1.0, size=(5, 4))
        sample = split(np.round(values / step) * step if step else values)
        claimed.append(equivalence_p(sample.gaps, 2.0, step=step) <= 0.05)
        without.append(equivalence_p(sample.gaps, 2.0) <= 0.05)
    assert np.mean(claimed) == pytest.approx(power, abs=tolerance(power, studies) + 0.01)
    assert np.mean(without) == pytest.approx(blind, abs=tolerance(blind, studies) + 0.01)


@pytest.mark.parametrize("retrains", [2, 3, 10])
@pytest.mark.parametrize("spread", [0.1, 0.4, 1.0])
def test_a_single_client_is_covered_on_a_grid_too(retrains: int, spread: float) -> None:
    """Accuracies in whole points; another Retrain in the place of the method, the worst of three places on the grid."""
    draw, studies = np.random.default_rng(31), 700
    for offset in (0.0, 0.25, 0.5):
        values = np.round(draw.normal(50 + offset, spread, size=(studies, 1 + retrains)))
        known, shown, blind = [], [], []
        for own in values:
            gap = gaps.client_gap(own[:1], own[1:], step=1.0)
            assert gap is not None
            known.append(not gap.outside)
            without = gaps.client_gap(own[:1], own[1:])
            assert (without is None) == (len(set(own[1:])) == 1), "nothing shows the step"
            shown.append(without is None or not without.outside)
            half = 0.0 if len(set(own[1:])) == 1 else (gap.high - 0.5)
            blind.append(abs(gap.gap) <= half)
        assert np.mean(known) >= 0.95 - tolerance(0.95, studies)
        assert np.mean(shown) >= 0.95 - tolerance(0.95, studies)
        if retrains == 2 and offset == 0.5:
            assert np.mean(blind) < 0.85, "an interval without width where values coincide"


@pytest.mark.parametrize("sizes", [(2, 3), (5, 3), (10, 3)])
@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0])
def test_the_interval_of_the_mean_covers_on_a_grid_too(sizes: tuple[int, int], spread: float) -> None:
    draw, studies = np.random.default_rng(32), 700
    for offsets in ((0.0, 0.0), (0.4, 0.3), (0.5, 0.0)):
        truth = mean_on_grid(52 + offsets[0], spread) - mean_on_grid(50 + offsets[1], spread)
        covered = []
        for _ in range(studies):
            sample = split(on_grid(draw, sizes, spread, offsets))
            low, high = mean_interval(sample.gaps, step=sample.step)
            covered.append(low - 1e-9 <= truth <= high + 1e-9)
        assert np.mean(covered) >= 0.95 - tolerance(0.95, studies)


def test_numbers_that_coincide_have_no_interval_unless_their_step_is_known() -> None:
    assert mean_interval([1.0, 1.0, 1.0]) == (-math.inf, math.inf)
    assert prediction_interval([50.0, 50.0]) == (-math.inf, math.inf)
    low, high = mean_interval([1.0, 1.0, 1.0], step=1.0)
    assert high - 1.0 == pytest.approx(4.303 * math.sqrt(1 / 6 / 3) + 0.25, rel=1e-3)
    low, high = prediction_interval([50.0, 50.0, 50.0], step=1.0)
    assert high - 50.0 == pytest.approx(4.303 * math.sqrt(4 / 3 / 12) + 0.5, rel=1e-3)
    assert (low + high) / 2 == pytest.approx(50.0)
    assert gaps.client_gap([50.0], [50.0, 50.0]) is None
    unknown = one(GapSample.of([[50.0]] * 3, [[50.0] * 3] * 3))
    assert (unknown.gap, unknown.low, unknown.high) == (0.0, None, None)


def test_the_step_is_the_smallest_difference_within_a_target() -> None:
    assert gaps.grid_step([50.0, 52.0, 52.0], [70.0, 70.5]) == 0.5
    assert gaps.grid_step([50.0, 50.0], [50.2, 50.2]) == 0.0, "targets may have grids of their own"
    assert gaps.grid_step([0.3, 0.1 + 0.2, 0.7]) == pytest.approx(0.4), "equal up to rounding"
    assert gaps.grid_step() == gaps.grid_step([]) == gaps.grid_step([1.0]) == 0.0


def test_gaps_that_coincide_are_no_proof_of_equivalence_with_few_targets() -> None:
    retrains = [[49.0, 51.0], [49.0, 51.0], [48.0, 52.0], [49.0, 51.0], [47.0, 53.0]]
    few = GapSample.of([[50.0]] * 3, retrains[:3])
    verdict = judge({("m", "acc"): few}, Margin(2.0))["m", "acc"]
    assert (verdict.word, verdict.equivalence_p) == ("cannot tell", 1 / 8)
    assert verdict.reason.endswith("(p = 0.125); 5 targets would show it in 80 % of studies if there is no gap")
    enough = GapSample.of([[50.0]] * 5, retrains)
    assert judge({("m", "acc"): enough}, Margin(2.0))["m", "acc"].word == "equivalent"
    flat = GapSample.of([[50.0]] * 3, [[50.0, 50.0]] * 3)
    assert studentised_p(flat, 2.0) == 1.0, "Retrains without a spread measure nothing"


def test_a_p_value_reads_as_one() -> None:
    assert [gaps.rounded_p(p) for p in (0.042, 0.001, 0.0009, 0.0)] == ["p = 0.042", "p = 0.001", *["p < 0.001"] * 2]


@pytest.mark.parametrize(("targets", "power"), [(3, 0.44), (5, 0.87), (8, 0.99)])
def test_the_power_of_the_equivalence_is_computed_as_simulated(targets: int, power: float) -> None:
    assert gaps.equivalence_power(targets, math.sqrt(4 / 3), 2.0) == pytest.approx(power, abs=0.01)


def test_a_margin_from_the_same_retrains_needs_the_studentised_test() -> None:
    draw, studies = np.random.default_rng(20), 800
    plain, studentised = [], []
    for _ in range(studies):
        values = draw.normal(size=(10, 10))
        values[:, :5] += 2.0
        sample = split(values, 5)
        plain.append(equivalence_p(sample.gaps, 2 * math.sqrt(sample.retrain_variance)) <= 0.05)
        studentised.append(studentised_p(sample, 2.0) <= 0.05)
    assert np.mean(plain) > 0.07
    assert np.mean(studentised) <= 0.05 + tolerance(0.05, studies)
    equal = [studentised_p(split(draw.normal(size=(8, 4))), 2.0) <= 0.05 for _ in range(300)]
    assert np.mean(equal) == pytest.approx(0.8, abs=tolerance(0.8, 300))


def test_the_intervals_cover() -> None:
    draw, studies = np.random.default_rng(21), 2000
    covered, predicted = [], []
    for _ in range(studies):
        values = draw.normal(size=(5, 4))
        low, high = mean_interval(split(values).gaps)
        covered.append(low <= 0 <= high)
        low, high = prediction_interval(values[0, 1:])
        predicted.append(low <= values[0, 0] <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=tolerance(0.95, studies))
    assert np.mean(predicted) == pytest.approx(0.95, abs=tolerance(0.95, studies))


@pytest.mark.parametrize(("retrains", "half"), [(2, 15.6), (3, 5.0), (5, 3.0), (10, 2.4)])
def test_the_prediction_interval_in_standard_deviations(retrains: int, half: float) -> None:
    values = np.random.default_rng(22).normal(size=retrains)
    low, high = prediction_interval(values)
    assert (high - low) / 2 / values.std(ddof=1) == pytest.approx(half, abs=0.05)
    assert prediction_interval([1.0]) == (-math.inf, math.inf)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_twenty_null_hypotheses_together_err_in_five_percent() -> None:
    """Four methods and five measures of the same runs, correlated; sizes at which Holm can claim something."""
    draw, studies = np.random.default_rng(23), 150
    raw, corrected = [], []
    for _ in range(studies):
        retrain = draw.normal(size=(5, 5, 3))
        common = draw.normal(size=(5, 4, 1))
        method = math.sqrt(0.5) * common + math.sqrt(0.5) * draw.normal(size=(5, 4, 5))
        pairs = [(i, j) for i in range(4) for j in range(5)]
        samples = {(f"{i}", f"{j}"): GapSample.of(method[:, i, j, None], retrain[:, j]) for i, j in pairs}
        raw.append(min(any_target_p(sample) for sample in samples.values()) <= 0.05)
        corrected.append(any(verdict.word == DIFFERS for verdict in judge(samples).values()))
    assert np.mean(raw) > 0.3
    assert np.mean(corrected) <= 0.05 + tolerance(0.05, studies)


def test_least_sizes() -> None:
    assert gaps.least_targets(1, 2) == gaps.least_targets(1, 3) == 3
    assert gaps.least_targets(1, 4) == 2
    assert gaps.least_retrains(1, 1) == 19
    assert gaps.least_targets(1, 3, hypotheses=20) == 5
    assert gaps.least_targets(1, 1) is None
    assert gaps.least_p(9, 2, 5, shared=True) == pytest.approx(1 / 21)
    assert gaps.least_p(9, 3, 4, shared=True) == pytest.approx(1 / 35)
    assert gaps.least_p(2, 2, 2) == pytest.approx(1 / 9), "d and -d have the same square"
    values = np.array([[1.0, 2.0, 11.0, 12.0]] * 2)
    assert any_target_p(split(values, 2)) == pytest.approx(1 / 9)


def one(sample: GapSample, margin: Margin | None = None) -> gaps.GapVerdict:
    (verdict,) = judge({("m", "forget_acc"): sample}, margin).values()
    return verdict


def test_one_retrain_never_tells() -> None:
    draw = np.random.default_rng(24)
    for targets in (1, 5, 30):
        values = draw.normal(size=(targets, 2))
        values[:, 0] += 50
        verdict = one(split(values), Margin(100.0))
        assert verdict.word == CANNOT_TELL
        assert verdict.reason.startswith("cannot tell: one Retrain shows no spread; a difference can be shown with 3")
        assert (verdict.p, verdict.equivalence_p, verdict.retrains) == (None, None, 1)


@pytest.mark.parametrize(
    ("targets", "retrains", "sizes"),
    [
        (
            2,
            2,
            "0.11, and 1 test together need 0.05; a difference can be shown with 3 targets with 2 Retrains each or ",
        ),
        (
            1,
            3,
            "0.25, and 1 test together need 0.05; a difference can be shown with 3 targets with 3 Retrains each or ",
        ),
    ],
)
def test_too_small_a_study_says_which_would_do(targets: int, retrains: int, sizes: str) -> None:
    values = np.random.default_rng(25).normal(size=(targets, 1 + retrains))
    values[:, 0] += 50
    verdict = one(split(values), Margin(1.0))
    assert verdict.word == CANNOT_TELL
    assert sizes in verdict.reason


def test_a_clear_gap_differs_and_no_gap_is_equivalent() -> None:
    values = np.random.default_rng(26).normal(size=(8, 4))
    alike = one(split(values), Margin(2.0))
    assert (alike.word, alike.margin, alike.targets, alike.runs, alike.retrains) == (EQUIVALENT, 2.0, 8, 1, 3)
    assert alike.reason.startswith("equivalent: the mean gap lies within ±2.0 points (p = ")
    assert one(split(values)).word == CANNOT_TELL, "without a margin"
    assert "needs a margin that is fixed beforehand" in one(split(values)).reason
    assert one(split(values), Margin(0.1)).word == CANNOT_TELL
    assert "would show it in 80 % of studies" in one(split(values), Margin(1.0)).reason
    assert one(split(values), Margin(3.0, studentised=True)).word == EQUIVALENT
    values[:, 0] += 5
    apart = one(split(values), Margin(2.0))
    assert (apart.word, apart.design, apart.hypotheses) == (DIFFERS, "own", 1)
    assert apart.low is not None
    assert apart.high is not None
    assert apart.low < 5 < apart.high
    assert apart.gap == pytest.approx(float(split(values).gaps.mean()))
    within = one(split(values), Margin(20.0))
    assert within.word == DIFFERS, "a difference that is shown comes first"
    assert "within ±20.0 points all the same" in within.reason


def test_a_design_with_a_shared_original_is_tested_by_seeds_or_refused() -> None:
    draw = np.random.default_rng(27)
    values = draw.normal(size=(5, 4))
    values[:, 0] += 50
    refused = one(split(values, shared=True), Margin(2.0))
    assert (refused.word, refused.design, refused.low, refused.equivalence_p) == (CANNOT_TELL, "shared", None, None)
    assert "the targets share an Original, so that only whole seeds count" in refused.reason
    assert "5 targets with 19 Retrains each" in refused.reason
    enough = draw.normal(size=(5, 7))
    enough[:, :3] += 50
    assert one(split(enough, 3, shared=True)).word == DIFFERS
    ragged = GapSample([values[0, :1], values[1, :2]], [values[0, 2:], values[1, 2:]], shared=True)
    assert "not every target has a value of every seed" in one(ragged).reason


def test_targets_may_have_different_numbers_of_runs() -> None:
    draw = np.random.default_rng(28)
    values = draw.normal(size=(4, 6))
    values[:, :2] += 9
    sample = GapSample([values[0, :1], *values[1:, :2]], list(values[:, 2:]))
    assert one(sample).word == DIFFERS
    assert (one(sample).runs, one(sample).retrains) == (1, 4)
    deviations = one(GapSample([values[0, :1], *values[1:, 2:4]], list(values[:, 2:])), Margin(2.0, studentised=True))
    assert "needs as many runs and as many Retrains of every target" in deviations.reason
    assert one(GapSample([], [])).reason == (
        "cannot tell: no target has both the method's measure and that of a Retrain with another seed"
    )


def test_several_measures_together() -> None:
    def verdict(word: str, p: float = 0.01) -> gaps.GapVerdict:
        return gaps.GapVerdict(word, f"{word}: why", p=p, margin=2.0, targets=5)

    same, apart, unknown = verdict(EQUIVALENT), verdict(DIFFERS), verdict(CANNOT_TELL)
    assert together([same, same]).word == EQUIVALENT
    assert together([same, unknown]).reason == "cannot tell: why"
    found = together([unknown, apart, verdict(DIFFERS, 0.002)])
    assert (found.word, found.p, found.targets) == (DIFFERS, 0.002, 5)
    assert found.reason == "differs from Retrain in 2 of 3 measures"


def test_a_margin_is_points_or_standard_deviations() -> None:
    assert Margin.parse("1.5") == Margin(1.5)
    assert Margin.parse("2s") == Margin(2.0, studentised=True)
    assert [str(Margin.parse(text)) for text in ("1.5", "2s")] == ["1.5", "2s"]
    for wrong in ("", "s", "a", "0", "-1s", "nan", "inf"):
        with pytest.raises(InputError, match="margin"):
            Margin.parse(wrong)
