# SPDX-License-Identifier: Apache-2.0
"""Gaps to Retrain, as the FedQUIT paper reports them, and what makes a gap a difference.

For each target the gap is |number of the method - number of Retrain of the same target|, in points; over the targets
its mean and its standard deviation (ddof = 1). Avg. Gap is the mean of four mean gaps: retain and forget accuracy, MIA
Song and MIA Yeom.

Two Retrains with different seeds differ too. That gap is the noise floor: a method whose gap lies inside it cannot be
told from Retrain, and two methods are compared target by target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap
from scipy.stats import t as student

from fedquit.audit.attacks.roc import Interval
from fedquit.audit.scores import Floats
from fedquit.errors import InputError

RESAMPLES = 9_999


@dataclass(frozen=True, eq=False)
class Gap:
    """The gaps of all targets."""

    per_target: Floats

    @property
    def mean(self) -> float:
        """Over the targets."""
        return float(self.per_target.mean())

    @property
    def std(self) -> float | None:
        """Over the targets, with n - 1; None for a single one, which says nothing about others."""
        return float(self.per_target.std(ddof=1)) if len(self.per_target) > 1 else None


def gap(method: npt.ArrayLike, retrain: npt.ArrayLike) -> Gap:
    """The absolute difference to Retrain, target by target. Retrain against Retrain of other seeds gives the floor."""
    a, b = _pairs(method, retrain)
    return Gap(np.abs(a - b))


def avg_gap(*, retain: float, forget: float, song: float, yeom: float) -> float:
    """The paper's Avg. Gap: the mean of the four mean gaps."""
    return (retain + forget + song + yeom) / 4


def inside_floor(gap: float, floor: float) -> bool:
    """Whether a gap is no larger than what another seed does to Retrain; then it is not called a difference."""
    return gap <= floor


@dataclass(frozen=True)
class Paired:
    """By how much the first exceeds the second over the same targets, with two 95 % intervals."""

    t: Interval  # Student's: exact for normal differences
    bootstrap: Interval  # BCa: for skewed ones; needs more than a few targets

    @property
    def mean(self) -> float:
        """Of the differences."""
        return self.t.value

    @property
    def different(self) -> bool:
        """Whether neither interval covers 0."""
        return not (self.t.covers(0.0) or self.bootstrap.covers(0.0))


def paired(first: npt.ArrayLike, second: npt.ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Paired:
    """Compare two methods over the same targets; with one target the intervals know nothing and say so."""
    a, b = _pairs(first, second)
    d, n = a - b, len(a)
    mean = float(d.mean())
    if n < 2:
        unknown = Interval(mean, -math.inf, math.inf)
        return Paired(unknown, unknown)
    if float(np.ptp(d)) <= 1e-12 * float(np.abs(d).max()):  # equal up to rounding
        same = Interval(mean, mean, mean)
        return Paired(same, same)
    half = float(student.ppf((1 + confidence) / 2, n - 1)) * float(d.std(ddof=1)) / math.sqrt(n)
    drawn = bootstrap(
        (d,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="BCa" if n > 2 else "percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Paired(Interval(mean, mean - half, mean + half), Interval(mean, float(drawn.low), float(drawn.high)))


def _pairs(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[Floats, Floats]:
    a, b = (np.atleast_1d(np.asarray(values, dtype=np.float64)) for values in (first, second))
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise InputError(f"shapes {a.shape} and {b.shape} do not pair: give one number for each target, in one order.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("some numbers are not finite: every target needs both.")
    return a, b
