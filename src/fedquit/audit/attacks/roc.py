# SPDX-License-Identifier: Apache-2.0
"""How strong an attack is: its ROC, its AUC, and its TPR at a low FPR, each with an interval.

An attack that is right about one person in a hundred and never wrong about others is a breach that averages hide:
Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From First Principles (S&P 2022). So report the
TPR at an FPR of 1 % and 0.1 %, and draw the ROC on log axes.

A score is the higher, the more an example looks like a member.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Floats
from fedquit.errors import InputError
from fedquit.results.intervals import Interval

FPRS = (0.01, 0.001)  # where the TPR is reported


@dataclass(frozen=True)
class TprAt:
    """The share of members found at a false positive rate."""

    asked: float  # the FPR that was asked for
    tpr: Interval
    fpr: Interval  # the FPR on these outsiders; its upper end says what they can rule out
    enough: bool  # whether there are outsiders enough for that FPR to mean even one false alarm


@dataclass(frozen=True, eq=False)
class Roc:
    """From "nobody is a member" to "everybody is", one point for each distinct score."""

    fpr: Floats
    tpr: Floats
    threshold: Floats  # members are those with this score or more
    members: int
    outsiders: int

    def tpr_at(self, fpr: float, confidence: float = 0.95) -> TprAt:
        """The highest TPR with at most floor(fpr * outsiders) false positives, with Clopper and Pearson's intervals.

        With fewer than 1/fpr outsiders not one false alarm is allowed. The number is then the TPR at no false alarm on
        these outsiders, `enough` is False, and `fpr.high` says how large the true FPR may still be.
        """
        if not 0 <= fpr <= 1:
            raise InputError(f"the false-positive rate is {fpr}: give a number from 0 to 1.")
        allowed = math.floor(fpr * self.outsiders + 1e-9)
        alarms = np.rint(self.fpr * self.outsiders).astype(np.int64)
        at = int(np.searchsorted(alarms, allowed, side="right")) - 1
        hits = round(float(self.tpr[at]) * self.members)
        return TprAt(
            fpr,
            clopper_pearson(hits, self.members, confidence),
            clopper_pearson(int(alarms[at]), self.outsiders, confidence),
            allowed > 0 or fpr == 0,
        )


def roc(scores_members: npt.ArrayLike, scores_outsiders: npt.ArrayLike) -> Roc:
    """The ROC of a score; equal scores make one step together.

    Args:
        scores_members: of the members, (M,); higher means more likely a member.
        scores_outsiders: of the outsiders, (N,).
    """
    members, outsiders = _scores(scores_members, scores_outsiders)
    values = np.unique(np.concatenate([members, outsiders]))[::-1]
    fpr, tpr = (_share_from(values, scores) for scores in (outsiders, members))
    return Roc(fpr, tpr, np.concatenate([[np.inf], values]), len(members), len(outsiders))


def _share_from(thresholds: Floats, scores: Floats) -> Floats:
    """The share of scores at or above each threshold, after a 0 for the threshold that no score reaches."""
    above = len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")
    return np.concatenate([[0.0], above / len(scores)])


def auc(scores_members: npt.ArrayLike, scores_outsiders: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """The chance that a member scores higher than an outsider, ties counting half, with an interval.

    The interval is Newcombe's score interval on Hanley and McNeil's variance (Statistics in Medicine 2006, method 5):
    it has a width even where the separation is perfect, where the usual standard error is 0.

    Args:
        scores_members: of the members, (M,); higher means more likely a member.
        scores_outsiders: of the outsiders, (N,).
        confidence: of the interval, from 0 to 1.
    """
    from scipy.optimize import brentq  # scipy takes half a second, and every recipe names attacks
    from scipy.stats import norm, rankdata

    members, outsiders = _scores(scores_members, scores_outsiders)
    m, n = len(members), len(outsiders)
    ranks = rankdata(np.concatenate([members, outsiders]))
    value = float((ranks[:m].sum() - m * (m + 1) / 2) / (m * n))
    z, half = float(norm.ppf((1 + confidence) / 2)), (m + n) / 2 - 1

    def excess(theta: float) -> float:
        variance = theta * (1 - theta) * (1 + half * ((1 - theta) / (2 - theta) + theta / (1 + theta))) / (m * n)
        return (theta - value) ** 2 - z * z * variance

    # at 0 and 1 the estimate itself solves the equation; the end of the interval is the other solution
    low = float(brentq(excess, 0.0, min(value, 1 - 1e-12))) if value > 0 else 0.0
    high = float(brentq(excess, max(value, 1e-12), 1.0)) if value < 1 else 1.0
    return Interval(value, low, high)


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> Interval:
    """The exact interval of a share: it covers the truth at least as often as it says."""
    from scipy.stats import beta

    if not 0 <= hits <= trials or trials < 1:
        raise InputError(f"{hits} of {trials} is not a share.")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, trials - hits)) if hits < trials else 1.0
    return Interval(hits / trials, low, high)


def _scores(members: npt.ArrayLike, outsiders: npt.ArrayLike) -> tuple[Floats, Floats]:
    ours = np.asarray(members, dtype=np.float64).ravel()
    theirs = np.asarray(outsiders, dtype=np.float64).ravel()
    if not (len(ours) and len(theirs)):
        raise InputError(f"there are {len(ours)} members and {len(theirs)} outsiders: give at least one of each.")
    if np.isnan(ours).any() or np.isnan(theirs).any():
        raise InputError("some scores are not a number: an attack must rank every example.")
    return ours, theirs
