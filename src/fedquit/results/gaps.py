# SPDX-License-Identifier: Apache-2.0
"""Gaps to Retrain, as the FedQUIT paper reports them, and the rule that tells two methods apart.

For each target the gap is |number of the method - number of Retrain of the same target|, in points; over the targets
its mean and its standard deviation (ddof = 1). Avg. gap is the mean of four mean gaps: retain and forget accuracy, MIA
Song and MIA Yeom.

Two Retrains with different seeds differ too; their gap is the Retrain-vs-Retrain spread. Whether a gap is a difference
is judged by the tests of `fedquit.inference.gaps`. Two methods are compared target by target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquit.errors import InputError
from fedquit.inference.gaps import LEVEL, coincide
from fedquit.results.intervals import Interval

RESAMPLES = 9_999  # of the bootstrap

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Gap:
    """The absolute gaps of all targets, shape (targets,), in points."""

    per_target: Floats

    @property
    def mean(self) -> float:
        """The mean over the targets."""
        return float(self.per_target.mean())

    @property
    def std(self) -> float | None:
        """The standard deviation over the targets, with n - 1; None for a single target."""
        return float(self.per_target.std(ddof=1)) if len(self.per_target) > 1 else None


def gap(method: npt.ArrayLike, retrain: npt.ArrayLike) -> Gap:
    """The absolute difference to Retrain, target by target.

    Args:
        method: One number for each target, shape (targets,).
        retrain: The same of the Retrain of each target; of another seed in `method`'s place it gives the spread.

    Returns:
        The gaps, in the unit of the numbers.
    """
    a, b = _pairs(method, retrain)
    return Gap(np.abs(a - b))


def signed_gap(value: float | None, retrain: float | None) -> float | None:
    """How far a number lies above Retrain's.

    Args:
        value: Of the method.
        retrain: Of the Retrain of the same request.

    Returns:
        The difference in the unit of the numbers; None where one of the two was not measured.
    """
    return None if value is None or retrain is None else value - retrain


def avg_gap(*, retain: float, forget: float, song: float, yeom: float) -> float:
    """The paper's Avg. gap: the mean of four mean gaps, in points.

    Args:
        retain: In retain accuracy.
        forget: In forget accuracy.
        song: In the support-vector attack of Song.
        yeom: In Yeom's attack.
    """
    return (retain + forget + song + yeom) / 4


@dataclass(frozen=True)
class Paired:
    """By how much the first exceeds the second over the same targets, with two 95 % intervals."""

    t: Interval  # Student's: exact for normal differences
    bootstrap: Interval  # BCa: for skewed differences; needs more than a few targets
    p: float = 1.0  # of "the mean difference is 0", two-sided: Student's, or by sign flips where all coincide

    @property
    def mean(self) -> float:
        """The mean of the differences."""
        return self.t.value

    @property
    def different(self) -> bool:
        """The rule for "a difference", for this pair alone: p is at most 0.05, and neither interval covers 0."""
        return self.p <= LEVEL and not (self.t.covers(0.0) or self.bootstrap.covers(0.0))


def paired(first: npt.ArrayLike, second: npt.ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Paired:
    """Compare two methods over the same targets; with one target both intervals are unbounded.

    Differences that coincide, as those of accuracies of few examples often do, say nothing of their spread: both
    intervals are that one number, and p is that of sign flips, 1/2^(T - 1) for T targets.

    Args:
        first: One number for each target, shape (targets,).
        second: The same of the other method, in the same order.
        confidence: The level of both intervals.
        seed: Of the bootstrap.

    Returns:
        The mean difference with both intervals, in the unit of the numbers.
    """
    a, b = _pairs(first, second)
    differences = a - b
    mean = float(differences.mean())
    targets = len(differences)
    if targets < 2:
        unknown = Interval(mean, -math.inf, math.inf)
        return Paired(unknown, unknown)
    p = mean_difference_p(differences)
    if coincide(differences):
        same = Interval(mean, mean, mean)
        return Paired(same, same, p)
    from scipy.stats import bootstrap  # late: a report over single runs needs no scipy
    from scipy.stats import t as student

    deviation = float(differences.std(ddof=1))
    error = deviation / math.sqrt(targets)
    half = float(student.ppf((1 + confidence) / 2, targets - 1)) * error
    resampled = bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="BCa" if targets > 2 else "percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Paired(
        t=Interval(mean, mean - half, mean + half),
        bootstrap=Interval(mean, float(resampled.low), float(resampled.high)),
        p=p,
    )


def mean_difference_p(differences: npt.ArrayLike) -> float:
    """The two-sided p-value of "the mean difference is 0": Student's, or that of sign flips where all coincide.

    Args:
        differences: Of at least two independent targets.
    """
    values = np.asarray(differences, dtype=np.float64)
    mean = abs(float(values.mean()))
    targets = len(values)
    if coincide(values):
        return 1.0 if coincide([mean, 0.0]) else 2.0 ** (1 - targets)
    from scipy.special import stdtr

    error = float(values.std(ddof=1)) / math.sqrt(targets)
    return float(2 * stdtr(targets - 1, -mean / error))


def _pairs(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[Floats, Floats]:
    a = np.atleast_1d(np.asarray(first, dtype=np.float64))
    b = np.atleast_1d(np.asarray(second, dtype=np.float64))
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise InputError(f"shapes {a.shape} and {b.shape} do not pair: give one number for each target, in one order.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("some numbers are not finite: every target needs both.")
    return a, b
