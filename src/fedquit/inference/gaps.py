# SPDX-License-Identifier: Apache-2.0
"""Gaps to Retrain: whether a method differs from it, is equivalent to it within a margin, or neither can be told.

A method is run M times and Retrain R times, with other seeds, for each of T targets (the clients that leave). The gap
of target t is the mean of its M values less the mean of its R values, with its sign. Method and Retrain that are the
same procedure give exchangeable values, so that permuting which of the M + R values are the method's is an exact test.

| question | function |
|---|---|
| does any target differ | `any_target_p` (decides "differs") |
| does the mean over targets differ | `bias_p`, `mean_interval` |
| where would one more Retrain of one target lie | `prediction_interval`, `client_gap` |
| is the mean gap within a margin that was fixed beforehand | `equivalence_p` (TOST, Schuirmann 1987) |
| is the root-mean-square gap within k standard deviations of these very Retrains | `studentised_p` (Wellek 2010) |
| several measures and methods at once | `holm` (Holm 1979) |
| which sizes would tell | `least_targets`, `least_retrains`, `targets_for_equivalence`, `targets_for_difference` |

Accuracies lie on a grid: those of n examples are multiples of 1/n, and the values of few runs often coincide. What
assumes normal values therefore takes the `step` of each target's grid, and adds to the variance what rounding to it
adds, and to the half width a part of the step; `docs/evaluation.md` has the error rates. Where the numbers of examples
are not known and the values of a target coincide, nothing shows its step, and nothing is said.

Targets must be independent: each has an Original of its own seed. Where they share an Original, the gaps of all targets
move together; then whole seeds are permuted, all targets at once (`seed_blocks_p`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedquit.errors import InputError
from fedquit.inference.multiplicity import holm_in_two_families

LEVEL = 0.05
POWER = 0.8  # of the sizes that are said to tell
DIFFERS = "differs"
EQUIVALENT = "equivalent"
CANNOT_TELL = "cannot tell"
WORDS = (DIFFERS, EQUIVALENT, CANNOT_TELL)
NO_STEP = "the values of a target coincide, and nothing says of how many examples they are"

_ENUMERATED = 200_000  # sums over half of the targets that are listed; beyond, arrangements are drawn
_LISTED = 50_000  # arrangements of one target that are listed; beyond, so many are drawn
_LIKELY = 50  # targets or Retrains that somebody may run
_MOST = 200  # targets or Retrains: larger sizes are not proposed
_TYPICAL = 2.0  # the gap, in standard deviations of Retrain, that a study should find
_EQUAL = 1e-9  # points; what rounding makes of equal numbers is less, and no accuracy differs by so little

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Margin:
    """A gap that would not matter.

    Attributes:
        size: In points, fixed before the runs; or in standard deviations of Retrain.
        studentised: Whether the size counts standard deviations of the same Retrains.
    """

    size: float
    studentised: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.size) and self.size > 0):
            raise InputError(f"the margin is {self.size:g}: it must be a number above 0.")

    @staticmethod
    def parse(text: str) -> Margin:
        """From "1.5" (points) or "2s" (standard deviations of Retrain)."""
        studentised = text.strip().endswith("s")
        try:
            size = float(text.strip().removesuffix("s"))
        except ValueError as error:
            raise InputError(
                f"the margin {text!r} is neither points nor standard deviations: write, for example, 1.5 or 2s."
            ) from error
        return Margin(size, studentised)

    def __str__(self) -> str:
        return f"{self.size:g}s" if self.studentised else f"{self.size:g}"


@dataclass(frozen=True, eq=False)
class GapSample:
    """The values of one measure, target by target.

    Attributes:
        method: For each target the values of the method, one for each of its seeds.
        retrain: For each target the values of Retrain, with seeds that the method does not use.
        shared: Whether targets share an Original; then the n-th value of every target must come from the same seed.
        steps: For each target the step of the grid on which its values lie, 100/n points for n examples; None where it
            is not known. No steps at all where none is known.
    """

    method: Sequence[Floats]
    retrain: Sequence[Floats]
    shared: bool = False
    steps: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        if self.steps and len(self.steps) != len(self.method):
            raise InputError(f"{len(self.steps)} steps for {len(self.method)} targets: give one for each, or none.")

    @staticmethod
    def of(
        method: npt.ArrayLike, retrain: npt.ArrayLike, *, shared: bool = False, steps: Sequence[float | None] = ()
    ) -> GapSample:
        """From arrays of shape (targets, M) and (targets, R)."""
        a = np.asarray(method, dtype=np.float64)
        b = np.asarray(retrain, dtype=np.float64)
        if a.ndim != 2 or b.ndim != 2 or len(a) != len(b):
            raise InputError(f"shapes {a.shape} and {b.shape} do not pair: give (targets, M) and (targets, R).")
        return GapSample(list(a), list(b), shared, steps)

    @property
    def targets(self) -> int:
        """The number of targets."""
        return len(self.method)

    @property
    def runs(self) -> int:
        """The runs of the method for each target; the fewest where they differ."""
        return min((len(values) for values in self.method), default=0)

    @property
    def retrains(self) -> int:
        """The Retrains of each target; the fewest where they differ."""
        return min((len(values) for values in self.retrain), default=0)

    @property
    def balanced(self) -> bool:
        """Whether all targets have as many runs and as many Retrains."""
        return len({(len(m), len(r)) for m, r in zip(self.method, self.retrain, strict=True)}) <= 1

    @property
    def gaps(self) -> Floats:
        """The signed gap of each target, shape (targets,)."""
        pairs = zip(self.method, self.retrain, strict=True)
        return np.array([float(m.mean() - r.mean()) for m, r in pairs])

    @property
    def retrain_variance(self) -> float:
        """The variance of Retrain within a target, pooled over targets; nan without two Retrains of any target."""
        squares = sum(float(((values - values.mean()) ** 2).sum()) for values in self.retrain)
        freedom = sum(len(values) - 1 for values in self.retrain)
        return squares / freedom if freedom else math.nan

    @property
    def step(self) -> Floats:
        """The step of each target: the known one, else as far as its values show it; nan where nothing does.

        The gap itself is no step: what does not spread within the method nor within Retrain shows none.
        """
        known = self.steps or [None] * self.targets
        own = zip(self.method, self.retrain, known, strict=True)
        return np.array([shown_step(m, r) if step is None else step for m, r, step in own], dtype=np.float64)


@dataclass(frozen=True)
class GapVerdict:
    """What may be said about the gap of one method to Retrain in one measure.

    Attributes:
        word: "differs", "equivalent" or "cannot tell".
        gap: The mean over targets of the signed gaps, in points.
        low: The lower end of its 95 % interval; None where there is none.
        high: The upper end.
        margin: The margin of the equivalence in points; None where none was fixed.
        p: Of "any target differs", by Holm's rule over all hypotheses; None where no test was possible.
        equivalence_p: Of "not within the margin", by Holm's rule; None without a margin or a test.
        bias_p: Of "the mean over targets differs", for itself; it decides nothing.
        targets: How many.
        runs: Of the method for each target.
        retrains: Retrains with other seeds for each target.
        hypotheses: How many methods and measures were judged together.
        design: "own" where each target has an Original of its own, "shared" where targets share one.
        reason: A sentence on why it is so, and which sizes would tell.
    """

    word: str
    reason: str
    gap: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    p: float | None = None
    equivalence_p: float | None = None
    bias_p: float | None = None
    targets: int = 0
    runs: int = 0
    retrains: int = 0
    hypotheses: int = 1
    design: str = "own"


# Tests


@lru_cache(maxsize=64)
def _arrangements(runs: int, retrains: int) -> npt.NDArray[np.bool_]:
    """Every choice of the method's values among all, shape (arrangements, runs + retrains); the observed one first.

    Where there are more than `_LISTED`, so many are drawn.
    """
    total = runs + retrains
    if math.comb(total, runs) > _LISTED:
        order = np.random.default_rng(0).permuted(np.tile(np.arange(total), (_LISTED, 1)), axis=1)
        order[0] = np.arange(total)
        return order < runs
    chosen = np.zeros((math.comb(total, runs), total), dtype=bool)
    for row, places in zip(chosen, itertools.combinations(range(total), runs), strict=True):
        row[list(places)] = True
    return chosen


def _standardised_gaps(sample: GapSample) -> list[Floats]:
    """For each target d / sqrt(V) under every arrangement, the observed one first; targets without spread drop out."""
    tables = []
    for method, retrain in zip(sample.method, sample.retrain, strict=True):
        pooled = np.concatenate([method, retrain])
        deviation = float(pooled.std(ddof=1))
        if deviation <= 1e-12 * max(1.0, float(np.abs(pooled).max())):
            continue
        chosen = _arrangements(len(method), len(retrain))
        sums = chosen @ pooled
        gaps = sums / len(method) - (pooled.sum() - sums) / len(retrain)
        tables.append(gaps / deviation)
    return tables


def share_at_least(tables: Sequence[Floats], observed: float, draws: int, *, both_tails: bool) -> float:
    """The share of all combinations, one entry from each table, whose sum is no smaller than the observed one.

    Args:
        tables: What each part of the sum can be.
        observed: The sum to compare with.
        draws: How many combinations are drawn where there are too many to count.
        both_tails: Whether sums of that size with either sign count.
    """
    limit = observed - 1e-9 * max(1.0, abs(observed))
    middle = (len(tables) + 1) // 2
    first, second = tables[:middle], tables[middle:]
    if math.prod(len(table) for table in first) <= _ENUMERATED:
        ones, others = _sums(first), np.sort(_sums(second))
        count = int((len(others) - np.searchsorted(others, limit - ones, side="left")).sum())
        if both_tails:
            count += int(np.searchsorted(others, -limit - ones, side="right").sum())
        return count / (len(ones) * len(others))
    draw = np.random.default_rng(0)
    sums = np.zeros(draws)
    for table in tables:
        sums += table[draw.integers(len(table), size=draws)]
    count = int((np.abs(sums) >= limit).sum()) if both_tails else int((sums >= limit).sum())
    return (1 + count) / (1 + draws)


def _sums(tables: Sequence[Floats]) -> Floats:
    sums = np.zeros(1)
    for table in tables:
        sums = np.add.outer(sums, table).ravel()
    return sums


def any_target_p(sample: GapSample, *, hypotheses: int = 1) -> float:
    """The permutation p-value of "some target differs": S = sum of d_t^2 / V_t.

    Within each target it is permuted which of the M + R values are the method's; V_t, the variance of all M + R values,
    does not change. All arrangements are counted where half of the targets have at most 200,000, else drawn.

    Args:
        sample: With independent targets.
        hypotheses: How many tests are corrected together: at least 100 arrangements are drawn for each.
    """
    squares = [table**2 for table in _standardised_gaps(sample)]
    if not squares:
        return 1.0
    observed = sum(float(table[0]) for table in squares)
    return share_at_least(squares, observed, max(10_000, 100 * hypotheses), both_tails=False)


def bias_p(sample: GapSample, *, hypotheses: int = 1) -> float:
    """The permutation p-value of "the mean differs", by |mean of d_t / sqrt(V_t)|, two-sided.

    Args:
        sample: With independent targets.
        hypotheses: As for `any_target_p`.
    """
    tables = _standardised_gaps(sample)
    if not tables:
        return 1.0
    observed = abs(sum(float(table[0]) for table in tables))
    if observed <= 1e-9:
        return 1.0
    return share_at_least(tables, observed, max(10_000, 100 * hypotheses), both_tails=True)


def seed_blocks_p(sample: GapSample) -> float:
    """The p-value of "some target differs" where targets share seeds: whole seeds are permuted, all targets at once.

    Args:
        sample: With as many runs and as many Retrains for each target, in the order of the seeds.
    """
    if not sample.balanced:
        raise InputError("whole seeds can be permuted only where every target has every seed.")
    pooled = np.array([np.concatenate([m, r]) for m, r in zip(sample.method, sample.retrain, strict=True)])
    deviations = pooled.std(axis=1, ddof=1)
    pooled = pooled[deviations > 1e-12 * np.maximum(1.0, np.abs(pooled).max(axis=1))]
    if not len(pooled):
        return 1.0
    chosen = _arrangements(sample.runs, sample.retrains)
    sums = pooled @ chosen.T  # (targets, arrangements)
    gaps = sums / sample.runs - (pooled.sum(axis=1, keepdims=True) - sums) / sample.retrains
    statistics = (gaps**2 / pooled.var(axis=1, ddof=1, keepdims=True)).sum(axis=0)
    return float((statistics >= statistics[0] * (1 - 1e-9)).mean())


def coincide(values: npt.ArrayLike) -> bool:
    """Whether all numbers are the same up to rounding: their deviation then says nothing of the spread of others."""
    known = np.asarray(values, dtype=np.float64)
    return float(np.ptp(known)) <= _EQUAL * max(1.0, float(np.abs(known).max()))


def grid_step(*groups: npt.ArrayLike) -> float:
    """The smallest difference of two numbers of one group; 0 where the numbers of every group coincide.

    On a grid it is the step or a multiple of it. Of many numbers without a grid it is small against their spread.

    Args:
        groups: Numbers that lie on the same grid, such as the accuracies of one target.
    """
    steps = [math.inf]
    for group in groups:
        known = np.sort(np.asarray(group, dtype=np.float64).ravel())
        apart = np.diff(known)
        equal = _EQUAL * max(1.0, float(np.abs(known).max(initial=0.0)))
        steps += [float(apart[apart > equal].min(initial=math.inf))]
    return min(steps) if math.isfinite(min(steps)) else 0.0


def shown_step(*sides: npt.ArrayLike) -> float:
    """The step of one target's grid as its values show it: an upper estimate; nan where no side spreads.

    Args:
        sides: The values of the method and those of Retrain.
    """
    spread = any(grid_step(side) for side in sides)
    return grid_step(np.concatenate([np.asarray(side, dtype=np.float64) for side in sides])) if spread else math.nan


def mean_interval(gaps: npt.ArrayLike, *, confidence: float = 0.95, step: npt.ArrayLike = 0.0) -> tuple[float, float]:
    """Student's interval of the mean signed gap over independent targets.

    It is unbounded with fewer than two targets, where a step is not known (nan), and where all gaps coincide and there
    is no step: then nothing shows how far others would spread.

    Args:
        gaps: One for each target.
        confidence: 0.90 for the equivalence test at 5 %.
        step: Of the grid on which accuracies lie, or one for each target; 0 for none, nan where it is not known.
    """
    values = np.asarray(gaps, dtype=np.float64)
    steps = _each(step, len(values))
    if len(values) < 2 or not np.isfinite(steps).all() or (coincide(values) and not steps.any()):
        return -math.inf, math.inf
    from scipy.special import stdtrit  # late: a report over single runs needs no scipy

    mean = float(values.mean())
    student = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    half = student * _error(values, steps) + float(steps.mean()) / 4
    return mean - half, mean + half


def _each(step: npt.ArrayLike, targets: int) -> Floats:
    """One step for each target."""
    return np.broadcast_to(np.asarray(step, dtype=np.float64), (targets,))


def _error(gaps: Floats, steps: Floats) -> float:
    """The standard error of a mean gap; each gap is a difference of two numbers that are rounded to its step."""
    return math.sqrt((float(gaps.var(ddof=1)) + _rounding(steps)) / len(gaps))


def _rounding(steps: Floats) -> float:
    """The variance that two rounded numbers add to a gap, in the mean over targets."""
    return float((2 * steps**2 / 12).mean())


def prediction_interval(
    retrain: npt.ArrayLike, *, runs: int = 1, confidence: float = 0.95, step: float = 0.0
) -> tuple[float, float]:
    """Where the mean of some more Retrains of one target would lie, from those that are there.

    It is unbounded with fewer than two Retrains, and where all of them coincide and no step is known.

    Args:
        retrain: Their values.
        runs: Of how many more: 1 for a method that was run once.
        confidence: Of the interval.
        step: Of the grid on which the values lie; 0 for none, nan where it is not known.
    """
    values = np.asarray(retrain, dtype=np.float64)
    if len(values) < 2 or not math.isfinite(step) or (coincide(values) and not step):
        return -math.inf, math.inf
    from scipy.special import stdtrit

    factor = math.sqrt(1 / runs + 1 / len(values))
    deviation = math.sqrt(float(values.var(ddof=1)) + step**2 / 12)
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * deviation * factor + step / 2
    return float(values.mean()) - half, float(values.mean()) + half


def equivalence_p(gaps: npt.ArrayLike, margin: float, *, step: npt.ArrayLike = 0.0) -> float:
    """The p-value of two one-sided tests: at most 0.05 where the 90 % interval of the mean lies in (-margin, margin).

    Gaps that coincide, as accuracies of few examples often do, have no deviation that a t test could use. Their p-value
    is how often they would coincide if some runs lay one step off, so often that the mean gap is the margin
    (`_coinciding_p`). It is 1 where a step is not known, and where gaps coincide without a step.

    Args:
        gaps: The signed gap of each of at least two independent targets.
        margin: In the unit of the gaps, fixed before the runs.
        step: Of the grid on which accuracies lie, or one for each target; 0 for none, nan where it is not known.
    """
    values = np.asarray(gaps, dtype=np.float64)
    steps = _each(step, len(values))
    if len(values) < 2 or not np.isfinite(steps).all():
        return 1.0
    from scipy.special import stdtr

    inside = margin - abs(float(values.mean()))
    if coincide(values):
        return _coinciding_p(inside, steps) if steps.all() else 1.0
    return float(stdtr(len(values) - 1, -(inside - float(steps.mean()) / 4) / _error(values, steps)))


def _coinciding_p(inside: float, steps: Floats) -> float:
    """The largest chance that gaps coincide so far inside of the margin although their mean is the margin.

    Target t lies one step h_t off with the chance q_t, and the mean of q_t h_t is what is inside. The product of
    1 - q_t is largest where 1 - q_t = min(1, c / h_t). It is (1 - inside/h)^T for equal steps, and never taken as less
    than 1/2^T, that of steps off by two a whole step inside.

    Args:
        inside: How far the gaps lie inside of the margin.
        steps: One for each target, above 0.
    """
    if inside <= _EQUAL:
        return 1.0
    low, high = 0.0, float(steps.max())
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.maximum(0.0, steps - middle).mean()) > inside:
            low = middle
        else:
            high = middle
    return max(2.0 ** -len(steps), float(np.minimum(1.0, high / steps).prod()))


def studentised_p(sample: GapSample, k: float) -> float:
    """The p-value of "the root-mean-square gap is k standard deviations of Retrain or more" (Wellek).

    It needs normal values with the same spread for method, Retrain and all targets. Retrains without any spread give 1:
    there is nothing to count the gap in.

    Args:
        sample: With as many runs and as many Retrains, two at least, for each target.
        k: The margin in standard deviations of the same Retrains.
    """
    if not sample.balanced or sample.retrains < 2:
        raise InputError(
            "a margin in standard deviations needs as many runs, and two or more Retrains, of each target."
        )
    from scipy.stats import ncf

    targets, retrains = sample.targets, sample.retrains
    scale = 1 / sample.runs + 1 / retrains
    variance = sample.retrain_variance
    size = float((sample.gaps**2).mean())
    if variance <= _EQUAL**2:
        return 1.0
    return float(ncf.cdf(size / (variance * scale), targets, targets * (retrains - 1), targets * k**2 / scale))


@dataclass(frozen=True)
class ClientGap:
    """The gap of one target to its own Retrains, and where that of another Retrain would lie.

    Attributes:
        gap: The mean of the method's values less that of the Retrains, in points.
        low: The lower end of the 95 % prediction interval of the gap of as many more Retrains; for this target alone.
        high: The upper end.
        runs: Of the method.
        retrains: Retrains with other seeds.
    """

    gap: float
    low: float
    high: float
    runs: int
    retrains: int

    @property
    def outside(self) -> bool:
        """Whether the gap lies where another Retrain's would lie in at most 5 % of cases."""
        return not self.low <= self.gap <= self.high


def client_gap(method: npt.ArrayLike, retrain: npt.ArrayLike, *, step: float | None = None) -> ClientGap | None:
    """Judge a single target by the spread of its own Retrains.

    Args:
        method: Its values.
        retrain: Those of Retrain.
        step: Of the grid on which they lie, 100/n points for n examples; None takes what the values show.

    Returns:
        None with fewer than two Retrains or without a run; and where neither Retrains nor runs spread and no step is
        known, so that nothing shows how far another Retrain would lie.
    """
    values = np.asarray(method, dtype=np.float64)
    gold = np.asarray(retrain, dtype=np.float64)
    if not len(values) or len(gold) < 2:
        return None
    centre = float(gold.mean())
    known = shown_step(values, gold) if step is None else step
    low, high = prediction_interval(gold, runs=len(values), step=known)
    if not math.isfinite(low):
        return None
    return ClientGap(float(values.mean()) - centre, low - centre, high - centre, len(values), len(gold))


# Sizes


def least_p(targets: int, runs: int, retrains: int, *, shared: bool = False) -> float:
    """The smallest p-value that "any target differs" can have.

    Args:
        targets: How many.
        runs: Of the method for each target.
        retrains: Of each target.
        shared: Whether whole seeds are permuted.
    """
    arrangements = math.comb(runs + retrains, runs) / (2 if runs == retrains else 1)  # d and -d are the same for S
    return 1 / arrangements if shared else arrangements ** (-targets)


def least_targets(runs: int, retrains: int, hypotheses: int = 1) -> int | None:
    """The fewest targets with which a difference can be shown: (R + 1)^T >= 20 K for one run of the method.

    Args:
        runs: Of the method for each target.
        retrains: Of each target, two at least.
        hypotheses: K, how many tests are corrected together.
    """
    if retrains < 2:
        return None
    sizes = range(1, _MOST + 1)
    return next((t for t in sizes if least_p(t, runs, retrains) <= LEVEL / hypotheses + 1e-12), None)


def least_retrains(targets: int, runs: int, hypotheses: int = 1, *, shared: bool = False) -> int | None:
    """The fewest Retrains of each target with which a difference can be shown.

    Args:
        targets: How many.
        runs: Of the method for each target.
        hypotheses: How many tests are corrected together.
        shared: Whether whole seeds are permuted.
    """
    limit = LEVEL / hypotheses + 1e-12
    sizes = range(2, _MOST + 1)
    return next((r for r in sizes if least_p(targets, runs, r, shared=shared) <= limit), None)


def equivalence_power(
    targets: int, deviation: float, margin: float, level: float = LEVEL, *, step: npt.ArrayLike = 0.0
) -> float:
    """The chance that `equivalence_p` is at most the level where the true gap of every target is 0.

    Args:
        targets: How many, two at least.
        deviation: The standard deviation of the gap of one target.
        margin: In the same unit.
        level: Of each test.
        step: Of the grid, or those of some targets, which more targets would have as well.
    """
    from scipy.special import gammaincinv, ndtr, stdtrit

    ranks = (np.arange(400) + 0.5) / 400
    spread = np.sqrt(
        2 * gammaincinv((targets - 1) / 2, ranks) / (targets - 1)
    )  # of the estimated deviation over the true one
    steps = np.asarray(step, dtype=np.float64)
    error = np.sqrt(((deviation * spread) ** 2 + _rounding(steps)) / targets)
    half = float(stdtrit(targets - 1, 1 - level)) * error + float(steps.mean()) / 4
    room = (margin - half) * math.sqrt(targets) / deviation
    return float(np.maximum(0.0, 2 * ndtr(room) - 1).mean())


def targets_for_equivalence(
    deviation: float, margin: float, hypotheses: int = 1, *, step: npt.ArrayLike = 0.0
) -> int | None:
    """The fewest targets that show an equivalence in 80 % of the studies of a method without a gap.

    Args:
        deviation: The standard deviation of the gap of one target.
        margin: In the same unit.
        hypotheses: How many tests are corrected together.
        step: As for `equivalence_power`.

    Returns:
        None where more than 200 would be needed, and where gaps coincide without a step.
    """
    level = LEVEL / hypotheses
    if deviation > _EQUAL:
        return _first(2, lambda targets: equivalence_power(targets, deviation, margin, level, step=step) >= POWER)
    steps = np.atleast_1d(np.asarray(step, dtype=np.float64))
    if not steps.all():
        return None
    return _first(2, lambda targets: _coinciding_p(margin, np.resize(steps, targets)) <= level)


def difference_power(targets: int, runs: int, retrains: int, effect: float, level: float = LEVEL) -> float:
    """About the power of `any_target_p` for a gap of every target, by the F test with the same statistic.

    Args:
        targets: How many.
        runs: Of the method for each target.
        retrains: Of each target.
        effect: The gap in standard deviations of Retrain.
        level: Of the test.
    """
    from scipy.stats import f, ncf

    freedom = targets * (runs + retrains - 2)
    if freedom < 1:
        return 0.0
    moved = targets * effect**2 / (1 / runs + 1 / retrains)
    return float(ncf.sf(f.ppf(1 - level, targets, freedom), targets, freedom, moved))


@lru_cache(maxsize=1024)
def targets_for_difference(runs: int, retrains: int, effect: float, hypotheses: int = 1) -> int | None:
    """The fewest targets that show a gap of so many standard deviations in 80 % of studies.

    Args:
        runs: Of the method for each target.
        retrains: Of each target, two at least.
        effect: The gap in standard deviations of Retrain.
        hypotheses: How many tests are corrected together.
    """
    least = least_targets(runs, retrains, hypotheses)
    if least is None:
        return None
    level = LEVEL / hypotheses
    return _first(least, lambda targets: difference_power(targets, runs, retrains, effect, level) >= POWER)


def _first(least: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest size from `least` on that is enough, by bisection; None where `_MOST` is not."""
    if least > _MOST or not enough(_MOST):
        return None
    high = _MOST
    while least < high:
        middle = (least + high) // 2
        if enough(middle):
            high = middle
        else:
            least = middle + 1
    return high


# Verdicts


def judge(
    samples: Mapping[tuple[str, str], GapSample], margin: Margin | None = None
) -> dict[tuple[str, str], GapVerdict]:
    """The verdicts of all methods and measures, corrected together by Holm's rule.

    "Differs" and "equivalent" are two families: at most 5 % for any false claim in each.

    Args:
        samples: By method and measure.
        margin: Of the equivalence; without one nothing is called equivalent.

    Returns:
        For each sample its verdict, with a sentence that gives the reason.
    """
    hypotheses = len(samples)
    each = {key: tested(sample, margin, hypotheses) for key, sample in samples.items()}
    return {key: _worded(one, samples[key], margin) for key, one in holm_in_two_families(each).items()}


def tested(sample: GapSample, margin: Margin | None, hypotheses: int) -> GapVerdict:
    """The tests of one sample, each for itself and without a word.

    Args:
        sample: Of one method in one measure.
        margin: Of the equivalence; None where none was fixed.
        hypotheses: How many tests will be corrected together.
    """
    sizes = {"targets": sample.targets, "runs": sample.runs, "retrains": sample.retrains, "hypotheses": hypotheses}
    design = "shared" if sample.shared else "own"
    size = _points(sample, margin)
    if not sample.targets or not sample.runs or not sample.retrains:
        return GapVerdict(CANNOT_TELL, "", design=design, margin=size, **sizes)
    gap = float(sample.gaps.mean())
    known = GapVerdict(CANNOT_TELL, "", gap=gap, design=design, margin=size, **sizes)
    if sample.shared:
        possible = sample.retrains > 1 and sample.balanced
        return replace(known, p=seed_blocks_p(sample)) if possible else known
    low, high = _interval(sample, gap)
    known = replace(known, low=low, high=high)
    if sample.retrains < 2:
        return known
    return replace(
        known,
        p=any_target_p(sample, hypotheses=hypotheses),
        bias_p=bias_p(sample, hypotheses=hypotheses),
        equivalence_p=_equivalence(sample, margin),
    )


def _points(sample: GapSample, margin: Margin | None) -> float | None:
    """The margin in points; None without one, or without the Retrains that it counts."""
    if margin is None or not margin.studentised:
        return None if margin is None else margin.size
    variance = sample.retrain_variance
    return None if math.isnan(variance) else margin.size * math.sqrt(variance)


def _interval(sample: GapSample, gap: float) -> tuple[float | None, float | None]:
    """The 95 % interval of the mean gap over targets; for one target, from the spread of its Retrains."""
    if sample.targets == 1:
        low, high = prediction_interval(sample.retrain[0], runs=sample.runs, step=float(sample.step[0]))
        half = (high - low) / 2
        return (gap - half, gap + half) if math.isfinite(half) else (None, None)
    low, high = mean_interval(sample.gaps, step=sample.step)
    return (low, high) if math.isfinite(low) else (None, None)


def _equivalence(sample: GapSample, margin: Margin | None) -> float | None:
    """Its p-value for itself; None without a margin, for one target, and for two targets with two Retrains."""
    if margin is None or sample.targets < 2 or (sample.retrains == 2 and sample.targets < 3):
        return None
    if not margin.studentised:
        return equivalence_p(sample.gaps, margin.size, step=sample.step)
    return studentised_p(sample, margin.size) if sample.balanced else None


def _worded(verdict: GapVerdict, sample: GapSample, margin: Margin | None) -> GapVerdict:
    """The rule: a difference that is shown comes first, then an equivalence that is shown; else nothing can be told."""
    if verdict.p is not None and verdict.p <= LEVEL:
        within = verdict.equivalence_p is not None and verdict.equivalence_p <= LEVEL
        note = f"; its mean over targets is within ±{verdict.margin:.1f} points all the same" if within else ""
        return replace(verdict, word=DIFFERS, reason=f"differs from Retrain ({rounded_p(verdict.p)}){note}")
    if verdict.equivalence_p is not None and verdict.equivalence_p <= LEVEL and margin is not None:
        kind = "root-mean-square gap" if margin.studentised else "mean gap"
        own = f", {margin.size:g} standard deviations of Retrain" if margin.studentised else ""
        size = f"the {kind} lies within ±{verdict.margin:.1f} points{own}"
        reason = f"equivalent: {size} ({rounded_p(verdict.equivalence_p)})"
        return replace(verdict, word=EQUIVALENT, reason=reason)
    return replace(verdict, word=CANNOT_TELL, reason=f"cannot tell: {why_not(verdict, sample, margin)}")


def rounded_p(value: float) -> str:
    """A p-value with three digits, as in "p = 0.042" and "p < 0.001"."""
    return f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"


def why_not(verdict: GapVerdict, sample: GapSample, margin: Margin | None) -> str:
    """Why neither a difference nor an equivalence is shown, and which sizes would show one.

    Args:
        verdict: With the corrected p-values.
        sample: That it was made from.
        margin: Of the equivalence; None where none was fixed.
    """
    targets, runs, retrains, hypotheses = verdict.targets, verdict.runs, verdict.retrains, verdict.hypotheses
    if not targets or not runs:
        return "no target has both the method's measure and that of a Retrain with another seed"
    if not retrains:
        return "no seed of Retrain serves all targets, which share an Original"
    if retrains == 1:
        return f"one Retrain shows no spread; {_enough(max(targets, 3), runs, hypotheses)}"
    if sample.shared and verdict.p is None:
        return "the targets share an Original, and not every target has a value of every seed"
    smallest = least_p(targets, runs, retrains, shared=sample.shared)
    if smallest > LEVEL / hypotheses + 1e-12:
        sizes = f"{counted(targets, 'target')} and {counted(retrains, 'Retrain')}"
        least = f"the smallest p with {sizes} is {smallest:.2g}, and {counted(hypotheses, 'test')} together need "
        shared = "; the targets share an Original, so that only whole seeds count" if sample.shared else ""
        enough = _enough(targets, runs, hypotheses, retrains, shared=sample.shared)
        return f"{least}{LEVEL / hypotheses:.2g}{shared}; {enough}"
    return _not_shown(verdict, sample, margin)


def _enough(targets: int, runs: int, hypotheses: int, retrains: int = 3, *, shared: bool = False) -> str:
    """Which sizes can show a difference at all."""
    own = " and an Original of its own" if shared else ""
    more_targets = least_targets(runs, retrains, hypotheses)
    more_retrains = least_retrains(targets, runs, hypotheses, shared=shared)
    ways = []
    if more_targets is not None and more_targets <= _LIKELY:
        ways.append(f"{counted(more_targets, 'target')} with {counted(retrains, 'Retrain')}{own} each")
    if more_retrains is not None and more_retrains <= _LIKELY and (more_targets, retrains) != (targets, more_retrains):
        ways.append(f"{counted(targets, 'target')} with {counted(more_retrains, 'Retrain')} each")
    return f"a difference can be shown with {' or '.join(ways)}" if ways else "compare fewer methods at once"


def _not_shown(verdict: GapVerdict, sample: GapSample, margin: Margin | None) -> str:
    """Sizes would do, and the numbers do not decide."""
    p = rounded_p(1.0 if verdict.p is None else verdict.p)
    shown = f"no difference is shown ({p}), and that is no proof of none"
    if sample.shared:
        return f"{shown}; equivalence needs an Original of its own for each target"
    if margin is None:
        return f"{shown}; an equivalence needs a margin that is fixed beforehand; {_would_find(verdict, sample)}"
    if verdict.equivalence_p is None:
        uneven = margin.studentised and not sample.balanced
        needs = "as many runs and as many Retrains of every target" if uneven else "3 targets, or 2 with 3 Retrains"
        return f"{shown}; an equivalence within {margin} needs {needs}; {_would_find(verdict, sample)}"
    missed = f"nor is an equivalence within ±{verdict.margin:.1f} points ({rounded_p(verdict.equivalence_p)})"
    if margin.studentised or not verdict.margin:
        return f"{shown}, {missed}; {_would_find(verdict, sample)}"
    return f"{shown}, {missed}; {_would_show(verdict.margin, sample, verdict.hypotheses)}"


def _would_show(margin: float, sample: GapSample, hypotheses: int) -> str:
    """How many targets would show an equivalence within so many points."""
    if not np.isfinite(sample.step).all():
        return NO_STEP
    deviation = 0.0 if coincide(sample.gaps) else float(sample.gaps.std(ddof=1))
    enough = targets_for_equivalence(deviation, margin, hypotheses, step=sample.step)
    if enough is None:
        return f"more than {_MOST} targets would be needed: take a wider margin or more runs of each"
    return f"{counted(enough, 'target')} would show it in 80 % of studies if there is no gap"


def _would_find(verdict: GapVerdict, sample: GapSample) -> str:
    enough = targets_for_difference(verdict.runs, verdict.retrains, _TYPICAL, verdict.hypotheses)
    points = _TYPICAL * math.sqrt(sample.retrain_variance)
    number = f"more than {_MOST} targets" if enough is None else counted(enough, "target")
    return f"{number} would find a gap of {points:.1f} points in 80 % of studies"


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in "1 target" and "3 targets"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def together(verdicts: Sequence[GapVerdict]) -> GapVerdict:
    """One verdict over several measures of a method: it differs in some, is equivalent in all, or neither is shown.

    Equivalence in all needs no correction (Berger 1982); the corrected verdicts are read here, which is stricter.
    """
    words = [verdict.word for verdict in verdicts]
    first = verdicts[0]
    sizes = replace(first, gap=None, low=None, high=None, p=None, equivalence_p=None, bias_p=None, margin=None)
    if DIFFERS in words:
        known = [verdict.p for verdict in verdicts if verdict.word == DIFFERS and verdict.p is not None]
        reason = f"differs from Retrain in {words.count(DIFFERS)} of {len(words)} measures"
        return replace(sizes, word=DIFFERS, p=min(known), reason=reason)
    if all(word == EQUIVALENT for word in words):
        return replace(sizes, word=EQUIVALENT, margin=first.margin, reason=f"equivalent in all {len(words)} measures")
    open_ = next(verdict for verdict in verdicts if verdict.word == CANNOT_TELL)
    return replace(sizes, word=CANNOT_TELL, reason=open_.reason)
