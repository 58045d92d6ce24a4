# SPDX-License-Identifier: Apache-2.0
"""Whether a model's scores tell forgotten samples from the same client's hold-out samples.

With a random split and a model that never used the client, both kinds of samples are exchangeable: a score is no higher
on one than on the other. From the scores of m forgotten and n hold-out samples this module derives

- the AUC with DeLong's interval on the logit scale, and the test that it is one half (`area`),
- the interval of the difference between two models' AUCs on the same samples (`auc_difference`),
- the exact test of the highest scores (`tail_p`), and bounds of the TPR at an FPR that cover the truth (`tpr_at`),
- the verdict, which is one rule (`judge`), and the hold-out that it needs (`least_holdout`).

A score is the higher, the more an example looks like a member. What the model knows about the client's *distribution*
is on both kinds of samples alike, and no test of this module sees it.

DeLong, DeLong, Clarke-Pearson: Comparing the Areas under Two or More Correlated ROC Curves (Biometrics 1988).
Newcombe: Confidence intervals for an effect size measure based on the Mann-Whitney statistic (Statistics in Medicine
2006). Schuirmann (1987) for the test of equivalence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedquit.errors import InputError
from fedquit.inference.intervals import Interval, clopper_pearson

Floats = npt.NDArray[np.float64]
Verdict = Literal["remembered", "forgotten within the margin", "over-unlearned", "cannot tell"]

REMEMBERED: Verdict = "remembered"
FORGOTTEN: Verdict = "forgotten within the margin"
OVER_UNLEARNED: Verdict = "over-unlearned"
CANNOT_TELL: Verdict = "cannot tell"
VERDICTS: tuple[Verdict, ...] = (REMEMBERED, FORGOTTEN, OVER_UNLEARNED, CANNOT_TELL)

MARGIN = 0.05  # how far from one half an AUC may lie and still count as forgotten
TAIL_FPR = 0.01  # where the highest scores are tested
REMEMBERED_P = 0.0125  # for either of the two tests that call data remembered
OVER_UNLEARNED_P = 0.025
POWER = 0.8  # that "hold-out too small" refers to

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Area:
    """The AUC: the chance that a forgotten sample scores higher than a hold-out sample, ties counting half.

    Attributes:
        value: The estimate.
        se: DeLong's standard error; 0 where it has none, as with perfect separation.
        members: Forgotten samples, m.
        outsiders: Hold-out samples, n.
    """

    value: float
    se: float
    members: int
    outsiders: int

    def interval(self, confidence: float = 0.95) -> Interval:
        """DeLong's interval on the logit scale; Newcombe's where DeLong's standard error is 0.

        Args:
            confidence: Of the interval, from 0 to 1; either end errs with half of the rest.
        """
        z = _NORMAL.inv_cdf((1 + confidence) / 2)
        if not (0 < self.value < 1 and self.se > 0):
            return _newcombe(self, z)
        centre = math.log(self.value / (1 - self.value))
        half = z * self.se / (self.value * (1 - self.value))
        return Interval(self.value, _expit(centre - half), _expit(centre + half))

    @property
    def p_above(self) -> float:
        """The one-sided p-value of "the AUC is above one half", with the variance under equality."""
        return _NORMAL.cdf(-self._z)

    @property
    def p_below(self) -> float:
        """The one-sided p-value of "the AUC is below one half"."""
        return _NORMAL.cdf(self._z)

    @property
    def _z(self) -> float:
        m, n = self.members, self.outsiders
        return (self.value - 0.5) / math.sqrt((m + n + 1) / (12 * m * n))


def _expit(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


def _newcombe(area: Area, z: float) -> Interval:
    """Newcombe's score interval on Hanley and McNeil's variance (method 5), which has a width at 0 and 1 as well."""
    from scipy.optimize import brentq  # late: scipy takes half a second, and every recipe names attacks

    m, n, value = area.members, area.outsiders, area.value
    half = (m + n) / 2 - 1

    def excess(theta: float) -> float:
        variance = theta * (1 - theta) * (1 + half * ((1 - theta) / (2 - theta) + theta / (1 + theta))) / (m * n)
        return (theta - value) ** 2 - z * z * variance

    # at 0 and 1 the estimate itself solves the equation; the end of the interval is the other solution
    low = float(brentq(excess, 0.0, min(value, 1 - 1e-12))) if value > 0 else 0.0
    high = float(brentq(excess, max(value, 1e-12), 1.0)) if value < 1 else 1.0
    return Interval(value, low, high)


def checked(scores_members: npt.ArrayLike, scores_outsiders: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Both kinds of scores as flat arrays of float64.

    Args:
        scores_members: (m,), at least one.
        scores_outsiders: (n,), at least one.

    Raises:
        InputError: If there are none of a kind, or some are not a number.
    """
    members = np.asarray(scores_members, dtype=np.float64).ravel()
    outsiders = np.asarray(scores_outsiders, dtype=np.float64).ravel()
    if not (len(members) and len(outsiders)):
        raise InputError(f"there are {len(members)} members and {len(outsiders)} outsiders: give at least one of each.")
    if np.isnan(members).any() or np.isnan(outsiders).any():
        raise InputError("some scores are not a number: an attack must rank every example.")
    return members, outsiders


def area(forget: npt.ArrayLike, holdout: npt.ArrayLike) -> Area:
    """The AUC of a score with DeLong's standard error.

    Args:
        forget: Scores of the forgotten samples, (m,).
        holdout: Scores of the hold-out samples, (n,).
    """
    below, above = _placements(*checked(forget, holdout))
    m, n = len(below), len(above)
    variance = float(below.var(ddof=1)) / m + float(above.var(ddof=1)) / n if min(m, n) > 1 else 0.0
    value = float(np.rint(2 * n * below).sum()) / (2 * m * n)  # pairs are counted in halves: no rounding error
    return Area(value, math.sqrt(variance), m, n)


def _placements(forget: Floats, holdout: Floats) -> tuple[Floats, Floats]:
    """The share of hold-out samples below each forgotten one, (m,), and of forgotten above each hold-out one, (n,).

    Ties count half; both have the AUC as their mean.
    """
    return _share_below(forget, holdout), 1 - _share_below(holdout, forget)


def _share_below(scores: Floats, others: Floats) -> Floats:
    """The share of the others that lie below each score; equal ones count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, scores, side="left") + np.searchsorted(ordered, scores, side="right")
    return np.asarray(below / (2 * len(others)), dtype=np.float64)


def auc_difference(
    one: tuple[npt.ArrayLike, npt.ArrayLike], other: tuple[npt.ArrayLike, npt.ArrayLike], confidence: float = 0.95
) -> Interval:
    """The AUC of one model less that of another on the same samples, with DeLong's paired interval.

    Args:
        one: Its scores of the forgotten and of the hold-out samples.
        other: Those of the other model, in the same order.
        confidence: Of the interval, from 0 to 1.

    Raises:
        InputError: If the two have other numbers of samples.
    """
    ours = _placements(*checked(*one))
    theirs = _placements(*checked(*other))
    if any(len(a) != len(b) for a, b in zip(ours, theirs, strict=True)):
        raise InputError("the two models were scored on different samples: give the same ones in the same order.")
    below, above = ours[0] - theirs[0], ours[1] - theirs[1]
    variances = [float(part.var(ddof=1)) / len(part) if len(part) > 1 else 0.25 for part in (below, above)]
    half = _NORMAL.inv_cdf((1 + confidence) / 2) * math.sqrt(sum(variances))
    value = float(below.mean())
    return Interval(value, max(value - half, -1.0), min(value + half, 1.0))


def tail_p(forget: npt.ArrayLike, holdout: npt.ArrayLike, fpr: float = TAIL_FPR) -> float:
    """The exact p-value of "more of the highest scores belong to forgotten samples than chance would put there".

    The threshold is the (k+1)-th largest hold-out score, k = floor(fpr * n). The number of forgotten samples above it
    has a (negative) hypergeometric distribution where the samples are exchangeable. Ties make it conservative.

    Args:
        forget: Scores of the forgotten samples, (m,).
        holdout: Scores of the hold-out samples, (n,).
        fpr: The false-positive rate, below 1.
    """
    from scipy.stats import hypergeom

    members, outsiders = checked(forget, holdout)
    m, n = len(members), len(outsiders)
    allowed = _allowed(fpr, n)
    if allowed >= n:
        raise InputError(f"the false-positive rate is {fpr}: give a number from 0 to below 1.")
    threshold = np.partition(outsiders, n - 1 - allowed)[n - 1 - allowed]
    above = int((members > threshold).sum())
    return float(hypergeom.sf(above - 1, m + n, m, above + allowed))


def _allowed(fpr: float, outsiders: int) -> int:
    """False positives that a rate allows, rounded down; 0.29 of 100 are 29."""
    return math.floor(fpr * outsiders + 1e-9)


@dataclass(frozen=True)
class TprAt:
    """The share of members found at a false-positive rate.

    Attributes:
        asked: The FPR that was asked for.
        tpr: The TPR on these samples, with bounds of the TPR at the true FPR that was asked for.
        fpr: The FPR at the threshold that was used, with Clopper and Pearson's interval.
        enough: Whether there are outsiders enough for that FPR to mean even one false positive.
        needed: How many outsiders a lower bound above 0 needs.
    """

    asked: float
    tpr: Interval
    fpr: Interval
    enough: bool
    needed: int


def tpr_at(
    scores_members: npt.ArrayLike, scores_outsiders: npt.ArrayLike, fpr: float, confidence: float = 0.95
) -> TprAt:
    """The highest TPR with at most floor(fpr * outsiders) false positives, with bounds that cover.

    A threshold from n outsiders has itself an unknown FPR. The lower bound takes a higher threshold, which with
    confidence has at most the FPR asked for, the upper bound a lower one, and either has Clopper and Pearson's end of
    the share of members: four errors of (1 - confidence) / 4 each, so that the bounds cover at least as often as they
    say (union bound).

    Args:
        scores_members: (m,); higher means more likely a member.
        scores_outsiders: (n,).
        fpr: The false-positive rate, from 0 to 1.
        confidence: Of both bounds together.
    """
    if not 0 <= fpr <= 1:
        raise InputError(f"the false-positive rate is {fpr}: give a number from 0 to 1.")
    members, outsiders = checked(scores_members, scores_outsiders)
    m, n = len(members), len(outsiders)
    allowed = _allowed(fpr, n)
    falling = np.sort(outsiders)[::-1]
    threshold = -math.inf if allowed >= n else float(falling[allowed])
    alarms = int((outsiders > threshold).sum()) if allowed < n else n
    hits = int((members > threshold).sum()) if allowed < n else m
    low, high = _tpr_bounds(members, falling, fpr, (1 - confidence) / 4)
    return TprAt(
        asked=fpr,
        tpr=Interval(hits / m, min(low, hits / m), max(high, hits / m)),
        fpr=clopper_pearson(alarms, n, confidence),
        enough=allowed > 0 or fpr == 0,
        needed=least_outsiders(fpr, confidence),
    )


def _tpr_bounds(members: Floats, falling: Floats, fpr: float, level: float) -> tuple[float, float]:
    """Both ends for the TPR at the true FPR; `falling` are the outsiders' scores, the highest first."""
    from scipy.stats import binom

    n = len(falling)
    first = int(binom.ppf(level, n, fpr))  # surely so many outsiders exceed the true threshold
    last = int(binom.ppf(1 - level, n, fpr)) + 1  # surely fewer do
    confidence = 1 - 2 * level  # of the interval whose one end errs with `level`
    low = 0.0
    if first >= 1:
        above = int((members > falling[first - 1]).sum())
        low = clopper_pearson(above, len(members), confidence).low
    if last > n:
        return low, 1.0
    reached = int((members >= falling[last - 1]).sum())
    return low, clopper_pearson(reached, len(members), confidence).high


def least_outsiders(fpr: float, confidence: float = 0.95) -> int:
    """How many outsiders a lower bound of the TPR above 0 needs: 86 at 5 % FPR, 437 at 1 %, 4,380 at 0.1 %.

    Args:
        fpr: The false-positive rate; at 0 no number suffices, and the answer is 0.
        confidence: Of both bounds together.
    """
    if not 0 < fpr < 1:
        return 0
    return math.ceil(math.log((1 - confidence) / 4) / math.log1p(-fpr))


def least_holdout(
    margin: float = MARGIN,
    *,
    members: int | None = None,
    ratio: float = 9.0,
    power: float = POWER,
    goal: Literal["equivalence", "detection"] = "equivalence",
) -> int | None:
    """The smallest hold-out with which the verdict is reached with some power.

    Args:
        margin: Around one half.
        members: How many forgotten samples there are; None where `ratio` says it.
        ratio: Forgotten samples for each hold-out sample, where `members` is not given.
        power: The chance of the verdict.
        goal: `equivalence`: an AUC of one half is called forgotten. `detection`: an AUC that lies off by the margin is
            told from one half, at 2.5 %.

    Returns:
        None where so few forgotten samples admit no answer, however large the hold-out.
    """
    z = _NORMAL.inv_cdf
    deviations = z(0.95) + z((1 + power) / 2) if goal == "equivalence" else z(0.975) + z(power)
    wanted = 12 * (margin / deviations) ** 2  # (m + n + 1) / (m n) must not exceed it
    if members is not None:
        return _least_outsiders_within(wanted, members)
    root = math.sqrt((ratio + 1) ** 2 + 4 * ratio * wanted)
    return math.ceil((ratio + 1 + root) / (2 * ratio * wanted) - 1e-9)


def _least_outsiders_within(wanted: float, members: int) -> int | None:
    """The smallest n with (m + n + 1) / (m n) <= wanted."""
    left = wanted * members - 1
    return math.ceil((members + 1) / left - 1e-9) if left > 0 else None


@dataclass(frozen=True)
class Trace:
    """What a model's scores say about the forgotten samples, with all that the verdict comes from.

    Attributes:
        verdict: One of `VERDICTS`.
        reason: Why, as a phrase.
        area: The AUC.
        tail: The p-value of the exact test of the highest scores.
        margin: Around one half.
        original_low: The one-sided 95 % lower bound of Original's AUC on the same samples; None where it is unknown.
        needed: The hold-out that the margin needs with a power of 80 %, at this number of forgotten samples; for a
            larger hold-out whose verdict is open, what this AUC would need. None where no hold-out would do.
    """

    verdict: Verdict
    reason: str
    area: Area
    tail: float
    margin: float
    original_low: float | None
    needed: int | None


def judge(
    forget: npt.ArrayLike,
    holdout: npt.ArrayLike,
    original: tuple[npt.ArrayLike, npt.ArrayLike] | None,
    margin: float = MARGIN,
) -> Trace:
    """The verdict on a model, from its scores and Original's on the same samples.

    Args:
        forget: The model's scores of the forgotten samples, (m,).
        holdout: Those of the hold-out samples, (n,).
        original: Original's scores of both, or None where they are unknown, which leaves the test blind.
        margin: Around one half, above 0 and below one half.

    Raises:
        InputError: For a margin that is none.
    """
    if not 0 < margin < 0.5:
        raise InputError(f"the margin is {margin}: give a number above 0 and below 0.5.")
    measured = area(forget, holdout)
    tail = tail_p(forget, holdout)
    lowest = area(*original).interval(0.9).low if original else None
    needed = _needed(measured, margin)
    verdict, reason = verdict_of(measured, tail, lowest, margin)
    return Trace(verdict, reason, measured, tail, margin, lowest, needed)


def is_caught(original_low: float | None, margin: float) -> bool:
    """Whether the test sees what Original remembers: the lower bound of its AUC lies beyond the margin."""
    return original_low is not None and original_low > 0.5 + margin


def verdict_of(measured: Area, tail: float, original_low: float | None, margin: float) -> tuple[Verdict, str]:
    """The rule, and the phrase that gives the reason.

    Args:
        measured: The AUC of the model.
        tail: The p-value of the test of its highest scores.
        original_low: The one-sided 95 % lower bound of Original's AUC.
        margin: Around one half.
    """
    ends = measured.interval(0.9)
    inside = 0.5 - margin < ends.low and ends.high < 0.5 + margin
    said = f"AUC {ends.value:.3f}, 90 % interval {ends.low:.3f} to {ends.high:.3f}"
    if tail <= REMEMBERED_P:
        return REMEMBERED, f"the highest scores are those of forgotten samples (tail p = {tail:.2g})"
    if not inside and measured.p_above <= REMEMBERED_P:
        return REMEMBERED, f"forgotten samples score higher than hold-out samples ({said})"
    if not inside and measured.value < 0.5 and measured.p_below <= OVER_UNLEARNED_P:
        return OVER_UNLEARNED, f"forgotten samples score lower than hold-out samples ({said})"
    if not is_caught(original_low, margin):
        return CANNOT_TELL, _blind(original_low, margin)
    if inside:
        return FORGOTTEN, f"{said} within 0.5 ± {margin:g}{_tail_note(measured.outsiders)}"
    return CANNOT_TELL, _too_small(measured, margin)


def _blind(original_low: float | None, margin: float) -> str:
    if original_low is None:
        return "blind: Original was not scored by the same test"
    return (
        "blind: the same test does not catch Original "
        f"(the lower bound of its AUC is {original_low:.3f}, not above {0.5 + margin:g})"
    )


def _tail_note(outsiders: int) -> str:
    least = least_outsiders(TAIL_FPR)
    if outsiders >= least:
        return ""
    return f"; tail untested: {outsiders} hold-out samples, {least} are needed at 1 % FPR"


def _needed(measured: Area, margin: float) -> int | None:
    """The hold-out that the margin needs; where there is as much already, what this very AUC would need."""
    least = least_holdout(margin, members=measured.members)
    if least is None or measured.outsiders < least:
        return least
    ends = measured.interval(0.9)
    if (0.5 - margin < ends.low and ends.high < 0.5 + margin) or measured.p_above <= REMEMBERED_P:
        return least
    off = abs(measured.value - 0.5)
    within = (margin - off) / _NORMAL.inv_cdf(0.95)
    told = off / -_NORMAL.inv_cdf(REMEMBERED_P if measured.value > 0.5 else OVER_UNLEARNED_P)
    least = _least_outsiders_within(12 * max(within, told) ** 2, measured.members)
    return least if least is None else max(least, measured.outsiders + 1)


def _too_small(measured: Area, margin: float) -> str:
    needed = _needed(measured, margin)
    have = f"{measured.outsiders} samples"
    if needed is None:
        equal = least_holdout(margin, ratio=1.0)
        return (
            f"forget data too small: {measured.members} samples admit no answer at a margin of {margin:g}; "
            f"{equal} of each kind would"
        )
    return f"hold-out too small: {have}, about {needed} are needed for a margin of {margin:g}"
