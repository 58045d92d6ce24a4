# SPDX-License-Identifier: Apache-2.0
"""How strong an attack is: its ROC, its AUC, and its TPR at a low FPR, each with an interval.

An attack that is right about one person in a hundred and never wrong about others is a breach that averages hide:
Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From First Principles (S&P 2022). So report the
TPR at an FPR of 1 % and 0.1 %, and draw the ROC on log axes.

A score is the higher, the more an example looks like a member.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Floats
from fedquit.inference import trace
from fedquit.inference.intervals import Interval, clopper_pearson
from fedquit.inference.trace import TprAt

__all__ = ["FPRS", "Roc", "TprAt", "auc", "clopper_pearson", "roc"]

FPRS = (0.05, 0.01, 0.001)  # where the TPR is reported; 86 outsiders suffice for a bound at the first


@dataclass(frozen=True, eq=False)
class Roc:
    """From "nobody is a member" to "everybody is", one point for each distinct score."""

    fpr: Floats
    tpr: Floats
    threshold: Floats  # members are those with this score or more
    members: int
    outsiders: int
    scores: tuple[Floats, Floats] = field(repr=False)  # of the members and of the outsiders

    def tpr_at(self, fpr: float, confidence: float = 0.95) -> TprAt:
        """The highest TPR with at most floor(fpr * outsiders) false positives, with bounds that cover.

        With fewer than 1/fpr outsiders not one false positive is allowed. The number is then the TPR without a false
        positive on these outsiders, `enough` is False, and `fpr.high` says how large the true FPR may still be.
        """
        return trace.tpr_at(*self.scores, fpr, confidence)


def roc(scores_members: npt.ArrayLike, scores_outsiders: npt.ArrayLike) -> Roc:
    """The ROC of a score; equal scores make one step together.

    Args:
        scores_members: of the members, (M,); higher means more likely a member.
        scores_outsiders: of the outsiders, (N,).
    """
    members, outsiders = trace.checked(scores_members, scores_outsiders)
    values = np.unique(np.concatenate([members, outsiders]))[::-1]
    fpr, tpr = (_share_from(values, scores) for scores in (outsiders, members))
    return Roc(fpr, tpr, np.concatenate([[np.inf], values]), len(members), len(outsiders), (members, outsiders))


def _share_from(thresholds: Floats, scores: Floats) -> Floats:
    """The share of scores at or above each threshold, after a 0 for the threshold that no score reaches."""
    above = len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")
    return np.concatenate([[0.0], above / len(scores)])


def auc(scores_members: npt.ArrayLike, scores_outsiders: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """The chance that a member scores higher than an outsider, ties counting half, with an interval.

    The interval is DeLong's on the logit scale, and Newcombe's where the separation is perfect.

    Args:
        scores_members: of the members, (M,); higher means more likely a member.
        scores_outsiders: of the outsiders, (N,).
        confidence: of the interval, from 0 to 1.
    """
    return trace.area(scores_members, scores_outsiders).interval(confidence)
