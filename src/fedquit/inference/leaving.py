# SPDX-License-Identifier: Apache-2.0
"""A method against Natural: whether it does anything that the client's leaving alone does not do.

Natural unlearns nothing; training goes on without the client. Both begin with the same Original and are compared after
as many rounds from the request on, so that for target t and seed s there is one difference, method less Natural. It is
the difference of their gaps to Retrain as well: Retrain cancels.

| question | function |
|---|---|
| does the mean over targets differ | `sign_flip_p` (decides "differs from leaving") |
| is the mean within a margin that was fixed beforehand | `gaps.equivalence_p` (TOST): "no benefit over leaving" |
| several methods and measures at once | `holm` |
| which sizes would tell | `least_differences`, `gaps.targets_for_equivalence` |

If the method is Natural with other random numbers, each difference is as likely to be positive as negative, whatever
the Original: comparing with all assignments of signs is an exact test. Targets that share an Original and its random
numbers move together; then the differences of a seed keep one sign, all targets at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedquit.errors import InputError
from fedquit.inference.gaps import (
    CANNOT_TELL,
    LEVEL,
    NO_STEP,
    Margin,
    coincide,
    counted,
    equivalence_p,
    grid_step,
    mean_interval,
    rounded_p,
    share_at_least,
    targets_for_equivalence,
)
from fedquit.inference.multiplicity import holm_in_two_families

DIFFERS_FROM_LEAVING = "differs from leaving"
NO_BENEFIT = "no benefit over leaving"
LEAVING_WORDS = (DIFFERS_FROM_LEAVING, NO_BENEFIT, CANNOT_TELL)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LeavingSample:
    """The differences between a method and Natural in one measure, target by target.

    Attributes:
        differences: For each target the method's values less Natural's, one for each seed.
        shared: Whether targets share an Original; then the n-th difference of every target is of the same seed.
        steps: For each target the step of the grid of its values, as in `gaps.GapSample`.
    """

    differences: Sequence[Floats]
    shared: bool = False
    steps: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        if self.steps and len(self.steps) != len(self.differences):
            raise InputError(
                f"{len(self.steps)} steps for {len(self.differences)} targets: give one for each, or none."
            )
        if self.shared and len({len(own) for own in self.differences}) > 1:
            raise InputError("targets that share an Original need a difference of every seed for every target.")

    @property
    def targets(self) -> int:
        """The number of targets."""
        return len(self.differences)

    @property
    def runs(self) -> int:
        """The differences of each target; the fewest where they differ."""
        return min((len(own) for own in self.differences), default=0)

    @property
    def flipped(self) -> Floats:
        """What changes its sign for itself: each difference over its number in the target; or each seed's sum."""
        if self.shared:
            return np.asarray(np.sum([own / len(own) for own in self.differences], axis=0), dtype=np.float64)
        return np.concatenate([own / len(own) for own in self.differences]) if self.targets else np.zeros(0)

    @property
    def units(self) -> Floats:
        """What is independent: the mean of each target; with one target or a shared Original, that of each seed."""
        if self.shared or self.targets == 1:
            return np.asarray(np.mean(np.stack(list(self.differences)), axis=0), dtype=np.float64)
        return np.array([float(own.mean()) for own in self.differences])

    @property
    def step(self) -> Floats:
        """The step of each unit: the known one, else as far as the target's differences show it; nan where they do not.

        No difference lies on the grid, too. Seeds as units have the root mean square of the targets' steps.
        """
        known = self.steps or [None] * self.targets
        pairs = zip(self.differences, known, strict=True)
        each = [(grid_step([0.0, *own]) or math.nan) if step is None else step for own, step in pairs]
        if self.shared or self.targets == 1:
            return np.full(self.runs, math.sqrt(float(np.mean(np.square(each)))))
        return np.array(each, dtype=np.float64)


@dataclass(frozen=True)
class LeavingVerdict:
    """What may be said about a method against Natural in one measure.

    Attributes:
        word: One of `LEAVING_WORDS`.
        reason: A sentence on why it is so, and which sizes would tell.
        difference: The mean over targets, method less Natural, in points.
        low: The lower end of its 95 % interval; None where there is none.
        high: The upper end.
        margin: The margin of the equivalence in points; None where none was fixed.
        p: Of "the mean differs", by Holm's rule over all hypotheses; None where no test was possible.
        equivalence_p: Of "not within the margin", by Holm's rule; None without a margin or a test.
        targets: How many.
        runs: Of each target.
        hypotheses: How many methods and measures were judged together.
        design: "own" where each target has an Original of its own, "shared" where targets share one.
    """

    word: str
    reason: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    p: float | None = None
    equivalence_p: float | None = None
    targets: int = 0
    runs: int = 0
    hypotheses: int = 1
    design: str = "own"


def sign_flip_p(values: npt.ArrayLike, *, hypotheses: int = 1) -> float:
    """The two-sided p-value of "the values do not lie symmetrically about 0", by their sum under all signs.

    It needs no normal values and no equal spreads. The smallest p-value of n values other than 0 is 2^(1 - n).

    Args:
        values: (n,), independent of each other.
        hypotheses: How many tests are corrected together: at least 100 assignments are drawn for each.
    """
    moved = [float(value) for value in np.asarray(values, dtype=np.float64).ravel() if value]
    observed = abs(sum(moved))
    if observed <= 1e-9 * max((abs(value) for value in moved), default=1.0):
        return 1.0
    tables = [np.array([value, -value]) for value in moved]
    return share_at_least(tables, observed, max(10_000, 100 * hypotheses), both_tails=True)


def least_differences(hypotheses: int = 1) -> int:
    """The fewest independent differences with which one from leaving can be shown: 6 for one hypothesis.

    Args:
        hypotheses: How many tests are corrected together.
    """
    return math.ceil(1 + math.log2(hypotheses / LEVEL) - 1e-9)


def judge_leaving(
    samples: Mapping[tuple[str, str], LeavingSample], margin: Margin | None = None
) -> dict[tuple[str, str], LeavingVerdict]:
    """The verdicts of all methods and measures against Natural, corrected together by Holm's rule.

    "Differs from leaving" and "no benefit over leaving" are two families: at most 5 % for any false claim in each.

    Args:
        samples: By method and measure.
        margin: Of the equivalence, in points; without one, or with one in standard deviations of Retrain, nothing is
            called "no benefit over leaving".
    """
    tested = {key: _tested(sample, margin, len(samples)) for key, sample in samples.items()}
    return {key: _worded(one, samples[key], margin) for key, one in holm_in_two_families(tested).items()}


def _tested(sample: LeavingSample, margin: Margin | None, hypotheses: int) -> LeavingVerdict:
    """The tests of one sample, each for itself; the word comes later."""
    verdict = LeavingVerdict(
        CANNOT_TELL,
        "",
        margin=None if margin is None or margin.studentised else margin.size,
        targets=sample.targets,
        runs=sample.runs,
        hypotheses=hypotheses,
        design="shared" if sample.shared else "own",
    )
    if not sample.runs:
        return verdict
    units = sample.units
    low, high = mean_interval(units, step=sample.step)
    bounded = math.isfinite(low)
    return replace(
        verdict,
        difference=float(units.mean()),
        low=low if bounded else None,
        high=high if bounded else None,
        p=sign_flip_p(sample.flipped, hypotheses=hypotheses),
        equivalence_p=(
            equivalence_p(units, verdict.margin, step=sample.step) if verdict.margin and len(units) > 1 else None
        ),
    )


def _worded(verdict: LeavingVerdict, sample: LeavingSample, margin: Margin | None) -> LeavingVerdict:
    """The rule: a difference that is shown comes first, then an equivalence that is shown; else nothing can be told."""
    within = verdict.equivalence_p is not None and verdict.equivalence_p <= LEVEL
    if verdict.p is not None and verdict.p <= LEVEL:
        note = f"; its mean is within ±{verdict.margin:.1f} points of Natural's all the same" if within else ""
        reason = f"{DIFFERS_FROM_LEAVING} ({rounded_p(verdict.p)}){note}"
        return replace(verdict, word=DIFFERS_FROM_LEAVING, reason=reason)
    if within and verdict.equivalence_p is not None:
        size = f"the mean difference lies within ±{verdict.margin:.1f} points"
        reason = f"{NO_BENEFIT}: {size} ({rounded_p(verdict.equivalence_p)})"
        return replace(verdict, word=NO_BENEFIT, reason=reason)
    return replace(verdict, word=CANNOT_TELL, reason=f"{CANNOT_TELL}: {_why_not(verdict, sample, margin)}")


def _why_not(verdict: LeavingVerdict, sample: LeavingSample, margin: Margin | None) -> str:
    if verdict.p is None:
        return "no run has Natural's measure after as many rounds beside it"
    differences = len(sample.flipped)
    needed = least_differences(verdict.hypotheses)
    if differences < needed and verdict.equivalence_p is None:
        ways = f"{needed} seeds" if sample.shared else f"{needed} runs over targets and seeds"
        own = f", or {needed} targets with an Original of their own" if sample.shared else ""
        smallest = f"the smallest p of {counted(differences, 'difference')} is {2.0 ** (1 - differences):.2g}"
        tests = f"{verdict.hypotheses} tests together need" if verdict.hypotheses > 1 else "the test needs"
        return f"{smallest}, and {tests} {LEVEL / verdict.hypotheses:.2g}; it takes {ways}{own}"
    shown = f"no difference from leaving is shown ({rounded_p(verdict.p)}), and that is no proof of none"
    if verdict.equivalence_p is None or verdict.margin is None:
        kind = "in points" if margin is not None and margin.studentised else "that is fixed beforehand"
        return f"{shown}; “{NO_BENEFIT}” needs a margin {kind}, and 2 targets or seeds"
    missed = f"nor an equivalence within ±{verdict.margin:.1f} points ({rounded_p(verdict.equivalence_p)})"
    unit = "seeds" if sample.shared or sample.targets == 1 else "targets"
    if not np.isfinite(sample.step).all():
        return f"{shown}, {missed}; {NO_STEP}"
    deviation = 0.0 if coincide(sample.units) else float(sample.units.std(ddof=1))
    enough = targets_for_equivalence(deviation, verdict.margin, verdict.hypotheses, step=sample.step)
    if enough is None:
        return f"{shown}, {missed}; so many {unit} as that would take are more than 200: take a wider margin"
    return f"{shown}, {missed}; {enough} {unit} would show it in 80 % of studies if there is no difference"
