# SPDX-License-Identifier: Apache-2.0
"""Two-snapshot leakage: what somebody learns who holds the model from before and from after the erasure.

Chen, Zhang, Wang, Backes, Humbert, Zhang: When Machine Unlearning Jeopardizes Privacy (CCS 2021). Forgetting itself can
give a member away: confidence falls on the forgotten data and nowhere else. Retrain leaks here too, so that this is the
price of an erasure that is noticed, not a fault of a method; compare with Retrain's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedquit.audit.attacks.roc import FPRS, TprAt, auc, roc
from fedquit.audit.scores import Floats, Scores
from fedquit.errors import InputError
from fedquit.results.intervals import Interval


@dataclass(frozen=True)
class Leakage:
    """How well the fall of phi tells forgotten from never-trained data."""

    auc: Interval
    tpr: tuple[TprAt, ...]  # at 1 % and 0.1 % FPR


def leakage(forgotten: tuple[Scores, Scores], outsiders: tuple[Scores, Scores]) -> Leakage:
    """The score is phi before - phi after; each pair is (before, after) on the same examples.

    `outsiders` were never trained on, by either model; best the leaving clients' own hold-out.
    """
    scores = fall(*forgotten), fall(*outsiders)
    curve = roc(*scores)
    return Leakage(auc(*scores), tuple(curve.tpr_at(fpr) for fpr in FPRS))


def fall(before: Scores, after: Scores) -> Floats:
    """By how much phi fell, for each example."""
    if not np.array_equal(before.label, after.label):
        raise InputError("the two snapshots were scored on different examples: give the same ones in the same order.")
    return before.phi - after.phi
