# SPDX-License-Identifier: Apache-2.0
"""The trace verdict by hand and by simulation. Run as a script, this file prints the error rates of the docs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binomtest, hypergeom, mannwhitneyu

from fedquit.errors import InputError
from fedquit.inference import trace
from fedquit.inference.intervals import clopper_pearson

Floats = npt.NDArray[np.float64]


def drawn(rng: np.random.Generator, auc: float, m: int, n: int) -> tuple[Floats, Floats]:
    """Normal scores of forgotten and hold-out samples whose true AUC is given."""
    shift = math.sqrt(2) * NormalDist().inv_cdf(auc)
    return rng.normal(shift, 1, m), rng.normal(0, 1, n)


def within(share: float, truth: float, draws: int) -> bool:
    """Whether a simulated rate agrees with what is claimed, up to three Monte-Carlo standard errors."""
    return abs(share - truth) <= 3 * math.sqrt(truth * (1 - truth) / draws)


def at_most(share: float, limit: float, draws: int) -> bool:
    return share <= limit + 3 * math.sqrt(limit * (1 - limit) / draws)


# Simulations


def delong_coverage(auc: float, m: int, n: int, draws: int = 1000, seed: int = 0) -> float:
    """How often the 95 % interval of the AUC covers the truth."""
    rng = np.random.default_rng(seed)
    return float(np.mean([trace.area(*drawn(rng, auc, m, n)).interval().covers(auc) for _ in range(draws)]))


def difference_coverage(m: int, n: int, draws: int = 500, seed: int = 0) -> float:
    """How often the paired interval covers the true difference of two correlated AUCs, 0.65 and 0.55."""
    rng = np.random.default_rng(seed)
    shifts = [math.sqrt(2) * NormalDist().inv_cdf(auc) for auc in (0.65, 0.55)]
    covered = 0
    for _ in range(draws):
        hard = rng.normal(size=m + n)  # shared by both models
        pairs = []
        for shift in shifts:
            scores = math.sqrt(0.8) * hard + math.sqrt(0.2) * rng.normal(size=m + n)
            pairs.append((scores[:m] + shift, scores[m:]))
        covered += trace.auc_difference(pairs[0], pairs[1]).covers(0.1)
    return covered / draws


def half_errors(m: int, n: int, draws: int = 1000, seed: int = 0) -> float:
    """How often the one-sided test calls an AUC of one half larger, at 5 %."""
    rng = np.random.default_rng(seed)
    return float(np.mean([trace.area(*drawn(rng, 0.5, m, n)).p_above <= 0.05 for _ in range(draws)]))


def tail_errors(m: int, n: int, fpr: float, draws: int = 1000, seed: int = 0) -> float:
    """How often the test of the highest scores rejects at 5 % where there is nothing to find."""
    rng = np.random.default_rng(seed)
    return float(np.mean([trace.tail_p(*drawn(rng, 0.5, m, n), fpr) <= 0.05 for _ in range(draws)]))


def tpr_coverage(m: int, n: int, fpr: float, draws: int = 400, seed: int = 0) -> tuple[float, float]:
    """How often the bounds cover the true TPR of a shift by one, and how often Clopper and Pearson's alone do."""
    rng = np.random.default_rng(seed)
    normal = NormalDist()
    truth = normal.cdf(1 - normal.inv_cdf(1 - fpr))
    covered = naive = 0
    for _ in range(draws):
        at = trace.tpr_at(rng.normal(1, 1, m), rng.normal(size=n), fpr)
        covered += at.tpr.covers(truth)
        naive += clopper_pearson(round(at.tpr.value * m), m).covers(truth)
    return covered / draws, naive / draws


def verdict_rates(
    truth: float, m: int = 1600, n: int = 400, original: float = 0.65, draws: int = 300, seed: int = 0
) -> dict[str, float]:
    """How often each verdict is given, at a margin of 0.05."""
    rng = np.random.default_rng(seed)
    given: Counter[str] = Counter()
    for _ in range(draws):
        before = drawn(rng, original, m, n)
        given[trace.judge(*drawn(rng, truth, m, n), before).verdict] += 1
    return {verdict: given[verdict] / draws for verdict in trace.VERDICTS}


@pytest.mark.parametrize("auc", [0.5, 0.65, 0.9])
def test_delongs_interval_covers_as_often_as_it_says(auc: float) -> None:
    draws = 1000
    share = delong_coverage(auc, 100, 100, draws)
    margin = 3 * math.sqrt(0.95 * 0.05 / draws)
    assert 0.93 - margin <= share <= 0.96 + margin


def test_the_paired_interval_covers_and_is_narrower_than_two_single_ones() -> None:
    assert within(difference_coverage(200, 150), 0.95, 500)
    rng = np.random.default_rng(3)
    forget, holdout = drawn(rng, 0.6, 300, 200)
    before = (forget + 0.3 + 0.1 * rng.normal(size=300), holdout + 0.1 * rng.normal(size=200))
    paired = trace.auc_difference(before, (forget, holdout))
    single = [trace.area(*scores) for scores in (before, (forget, holdout))]
    assert paired.value == pytest.approx(single[0].value - single[1].value)
    assert paired.high - paired.low < 0.5 * 2 * 1.96 * math.hypot(*(each.se for each in single))


def test_the_test_of_one_half_and_that_of_the_tail_err_as_often_as_they_say() -> None:
    assert within(half_errors(200, 60), 0.05, 1000)
    for n, fpr in ((100, 0.05), (300, 0.01)):
        assert at_most(tail_errors(900, n, fpr, draws=700), 0.05, 700)


@pytest.mark.parametrize(("m", "n", "fpr"), [(1000, 500, 0.01), (400, 100, 0.05)])
def test_the_bounds_of_the_tpr_cover_where_clopper_and_pearson_alone_do_not(m: int, n: int, fpr: float) -> None:
    covered, naive = tpr_coverage(m, n, fpr)
    assert covered >= 0.95
    assert naive < 0.8


def test_the_verdict_errs_as_rarely_as_it_says_and_has_its_power() -> None:
    """The figures are those of m = 1600, n = 400, a margin of 0.05 and an Original of 0.65."""
    draws = 250
    assert within(verdict_rates(0.50, draws=draws)[trace.FORGOTTEN], 0.84, draws)
    assert at_most(verdict_rates(0.55, draws=draws)[trace.FORGOTTEN], 0.05, draws)
    assert at_most(verdict_rates(0.45, draws=draws)[trace.FORGOTTEN], 0.05, draws)
    assert verdict_rates(0.60, draws=draws)[trace.REMEMBERED] == 1.0


def test_a_small_holdout_and_a_blind_test_cannot_tell() -> None:
    draws = 300
    assert within(verdict_rates(0.50, m=400, n=100, draws=draws)[trace.CANNOT_TELL], 0.95, draws)
    blind = verdict_rates(0.50, original=0.50, draws=draws)
    assert blind[trace.FORGOTTEN] == 0.0
    assert within(blind[trace.CANNOT_TELL], 0.95, draws)


# By hand


def test_an_auc_worked_out_by_hand() -> None:
    found = trace.area([3, 2, 1], [2, 0])
    below, above = np.array([1, 0.75, 0.5]), np.array([0.5, 1.0])
    assert found.value == 0.75
    assert found.se == pytest.approx(math.sqrt(below.var(ddof=1) / 3 + above.var(ddof=1) / 2))
    logit, half = math.log(3), 1.959964 * found.se / (0.75 * 0.25)
    assert found.interval().low == pytest.approx(1 / (1 + math.exp(half - logit)), rel=1e-6)
    assert found.interval().high == pytest.approx(1 / (1 + math.exp(-half - logit)), rel=1e-6)


def test_the_test_of_one_half_is_mann_and_whitneys() -> None:
    forget, holdout = drawn(np.random.default_rng(0), 0.6, 80, 50)
    plain = {"method": "asymptotic", "use_continuity": False}
    above = mannwhitneyu(forget, holdout, alternative="greater", **plain).pvalue  # type: ignore[call-overload]
    assert trace.area(forget, holdout).p_above == pytest.approx(above)
    assert trace.area(forget, holdout).p_below == pytest.approx(1 - above)


def test_scores_that_are_all_alike_or_wholly_apart_still_have_an_interval() -> None:
    alike = trace.area(np.ones(20), np.ones(10)).interval()
    assert alike.value == 0.5
    assert alike.low < 0.35
    apart = trace.area(np.ones(20), np.zeros(10)).interval()
    assert (apart.value, apart.high) == (1.0, 1.0)
    assert apart.low < 0.95
    lonely = trace.area([1.0], [1.0, 2.0]).interval()
    assert lonely.high - lonely.low > 0.3


def test_the_tail_test_counts_orders_and_ties_make_it_cautious() -> None:
    """Two forgotten samples above all hold-out samples: of the C(5, 2) places of the forgotten, one is as extreme."""
    assert trace.tail_p([9, 8], [3, 2, 1]) == pytest.approx(1 / math.comb(5, 2))
    assert trace.tail_p([0, 0], [3, 2, 1]) == 1.0
    forget, holdout = np.arange(50) + 60.5, np.arange(100.0)
    above = int((forget > 98).sum())  # one false positive is allowed
    assert trace.tail_p(forget, holdout) == pytest.approx(float(hypergeom.sf(above - 1, 150, 50, above + 1)))
    tied = np.where(holdout >= 98, 99, holdout)
    assert trace.tail_p(forget, tied) >= trace.tail_p(forget, holdout)


def test_the_least_outsiders_are_those_of_a_lower_bound_above_zero() -> None:
    assert [trace.least_outsiders(fpr) for fpr in (0.05, 0.01, 0.001)] == [86, 437, 4380]
    for n, positive in ((436, False), (437, True)):
        at = trace.tpr_at(np.full(50, 2.0), np.linspace(0, 1, n), 0.01)
        assert (at.tpr.low > 0) == positive
        assert at.needed == 437


def test_the_ends_of_the_tpr_take_other_thresholds_than_the_estimate() -> None:
    outsiders, members = np.arange(1000.0), np.arange(900.0, 1100.0)
    at = trace.tpr_at(members, outsiders, 0.01)
    assert at.tpr.value == (members > 989).mean()
    first = next(k for k in range(1000) if binomtest(k, 1000, 0.01, alternative="less").pvalue > 0.0125)
    above = int((members > 1000 - first).sum())
    assert at.tpr.low == pytest.approx(clopper_pearson(above, 200, 0.975).low)
    last = 1 + next(k for k in range(1000) if binomtest(k + 1, 1000, 0.01, alternative="greater").pvalue <= 0.0125)
    reached = int((members >= 1000 - last).sum())
    assert at.tpr.high == pytest.approx(clopper_pearson(reached, 200, 0.975).high)
    assert at.fpr.high == pytest.approx(clopper_pearson(10, 1000).high)


def test_the_least_holdout_grows_with_the_square_of_the_margin() -> None:
    assert [trace.least_holdout(margin) for margin in (0.03, 0.05, 0.10)] == [882, 318, 80]
    assert [trace.least_holdout(margin, goal="detection") for margin in (0.03, 0.05, 0.10)] == [808, 291, 73]
    assert trace.least_holdout(0.05, ratio=1.0) == 572
    assert trace.least_holdout(0.05, members=9 * 318) == 318
    assert trace.least_holdout(0.05, members=200) is None, "no hold-out makes up for so few forgotten samples"


def at(auc: float, se: float = 0.01, m: int = 3000, n: int = 800) -> trace.Area:
    return trace.Area(auc, se, m, n)


def test_the_rule_in_its_order() -> None:
    caught, missed = 0.60, 0.53

    def word(measured: trace.Area, tail: float = 0.5, original: float | None = caught) -> str:
        return trace.verdict_of(measured, tail, original, 0.05)[0]

    assert word(at(0.50)) == "forgotten within the margin"
    assert word(at(0.50), tail=0.01) == "remembered", "the tail overrules the mean"
    assert word(at(0.60)) == "remembered"
    assert word(at(0.60), original=None) == "remembered", "what is seen needs no Original"
    assert word(at(0.40)) == "over-unlearned"
    assert word(at(0.525)) == "forgotten within the margin", "significant, but within the margin"
    assert word(at(0.50), original=missed) == "cannot tell"
    assert word(at(0.50), original=None) == "cannot tell"
    assert word(at(0.50, 0.05, 200, 50)) == "cannot tell"


def test_the_reason_says_what_to_do() -> None:
    def reason(measured: trace.Area, original: float | None = 0.6) -> str:
        return trace.verdict_of(measured, 0.5, original, 0.05)[1]

    assert "the same test does not catch Original" in reason(at(0.5), 0.53)
    assert "lower bound of its AUC is 0.530, not above 0.55" in reason(at(0.5), 0.53)
    assert reason(at(0.5), None) == "blind: Original was not scored by the same test"
    assert "tail untested: 400 hold-out samples, 437 are needed" in reason(at(0.5, n=400))
    assert "tail" not in reason(at(0.5))
    needed = trace.least_holdout(0.05, members=3000)
    assert f"hold-out too small: 100 samples, about {needed} are needed" in reason(at(0.5, 0.04, n=100))
    assert "forget data too small: 150 samples" in reason(at(0.5, 0.04, m=150, n=100))
    near = at(0.53, 0.014, n=500)  # the hold-out suffices for one half, but this AUC lies near the margin
    assert int(reason(near).partition("about ")[2].split()[0]) > 500


def test_originals_scores_decide_whether_the_test_is_blind() -> None:
    rng = np.random.default_rng(0)
    scores = drawn(rng, 0.5, 2000, 1000)
    seen = trace.judge(*scores, drawn(rng, 0.7, 2000, 1000))
    assert seen.verdict == trace.FORGOTTEN
    assert seen.original_low is not None
    assert trace.is_caught(seen.original_low, 0.05)
    assert not trace.is_caught(None, 0.05)
    assert trace.judge(*scores, drawn(rng, 0.52, 2000, 1000)).reason.startswith("blind")
    assert trace.judge(*scores, scores).verdict == trace.CANNOT_TELL, "Original itself is never called forgotten"


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(InputError, match=r"margin is 0\.5"):
        trace.judge([1.0], [1.0], None, margin=0.5)
    with pytest.raises(InputError, match="on different samples"):
        trace.auc_difference(([1.0], [1.0]), ([1.0, 2.0], [1.0]))
    with pytest.raises(InputError, match="false-positive rate is 1"):
        trace.tail_p([1.0], [1.0], fpr=1.0)


def main() -> None:
    """Print the error rates as the docs have them."""

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")

    for auc in (0.5, 0.65, 0.9):
        say(f"interval of the AUC covers, AUC {auc}, m = n = 100: {delong_coverage(auc, 100, 100, 4000):.3f}")
    say(f"paired interval covers, m = 200, n = 150: {difference_coverage(200, 150, 4000):.3f}")
    for n, fpr in ((100, 0.05), (300, 0.01), (1000, 0.01)):
        say(f"tail test errs, m = 900, n = {n}, FPR {fpr:g}: {tail_errors(900, n, fpr, 4000):.3f}")
    for m, n, fpr in ((400, 100, 0.05), (1000, 500, 0.01), (2000, 2000, 0.01)):
        covered, naive = tpr_coverage(m, n, fpr, 2000)
        say(f"bounds of the TPR cover, m = {m}, n = {n}, FPR {fpr:g}: {covered:.3f}; Clopper-Pearson {naive:.3f}")
    for truth, m, n, original in (
        (0.50, 1600, 400, 0.65),
        (0.55, 1600, 400, 0.65),
        (0.45, 1600, 400, 0.65),
        (0.60, 1600, 400, 0.65),
        (0.50, 400, 100, 0.65),
        (0.50, 1600, 400, 0.50),
    ):
        rates = verdict_rates(truth, m, n, original, 2000)
        text = ", ".join(f"{verdict} {share:.3f}" for verdict, share in rates.items())
        say(f"verdict, truth {truth}, m = {m}, n = {n}, Original {original}: {text}")


if __name__ == "__main__":
    main()
