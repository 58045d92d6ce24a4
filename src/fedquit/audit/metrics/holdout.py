# SPDX-License-Identifier: Apache-2.0
"""The hold-out null: is the forget data told from data of the same client that never trained?

The hold-out has the client's own label skew, so that the skew is not mistaken for membership; the global test set has
not. No Retrain is needed: this is what a production erasure can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scipy.stats import ks_2samp

from fedquit.audit.attacks.roc import TprAt, auc, roc
from fedquit.audit.scores import Scores
from fedquit.results.intervals import Interval

Verdict = Literal["remembered", "no trace", "over-unlearned"]
EXACT = 1_000  # examples of a kind up to which the KS test is exact


@dataclass(frozen=True)
class HoldoutNull:
    """What tells the forget data from the hold-out."""

    auc: Interval  # the chance that phi is higher on forget than on hold-out data
    tpr: TprAt  # at 1 % FPR
    entropy_ks: float  # the largest distance between the two distribution functions of the entropy
    entropy_p: float  # the chance of such a distance where there is no difference

    @property
    def verdict(self) -> Verdict:
        """By the AUC's interval."""
        return verdict_of(self.auc)

    @property
    def over_unlearned(self) -> bool:
        """Whether the forget data is treated worse than data never seen, which gives it away as well."""
        return self.verdict == "over-unlearned"


def verdict_of(auc: Interval) -> Verdict:
    """Remembered above one half, over-unlearned below it, no trace where the interval covers one half.

    Args:
        auc: Of telling forget from hold-out data, with its interval.
    """
    if auc.low > 0.5:
        return "remembered"
    return "over-unlearned" if auc.high < 0.5 else "no trace"


def holdout_null(forget: Scores, holdout: Scores) -> HoldoutNull:
    """Compare the forget data with the same clients' hold-out, under one model."""
    exact = max(len(forget), len(holdout)) <= EXACT
    curve = roc(forget.phi, holdout.phi)
    ks = ks_2samp(forget.entropy, holdout.entropy, method="exact" if exact else "asymp")
    return HoldoutNull(auc(forget.phi, holdout.phi), curve.tpr_at(0.01), float(ks.statistic), float(ks.pvalue))
