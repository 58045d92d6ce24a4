# SPDX-License-Identifier: Apache-2.0
"""The hold-out null: is the forget data told from data of the same client that never trained?

The hold-out has the client's own label skew, so that the skew is not mistaken for membership; the global test set has
not. No Retrain is needed: this is what a production erasure can run. The rule is `fedquit.inference.trace`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Scores
from fedquit.inference import trace
from fedquit.inference.exposed import ExposedSamples, exposed_samples
from fedquit.inference.intervals import Interval
from fedquit.inference.trace import MARGIN, Trace, Verdict

EXACT = 1_000  # examples of a kind up to which the KS test is exact
HALVES_SEED = 0  # of the two halves of a hold-out, which are the same for every model

Samples = tuple[Scores, Scores]  # of the forget and of the hold-out data, under one model


@dataclass(frozen=True)
class HoldoutNull:
    """What tells the forget data from the hold-out.

    Attributes:
        trace: The verdict, with all that it comes from.
        auc: The chance that phi is higher on forget than on hold-out data, with its 95 % interval.
        change: The AUC less Original's, with its paired interval; None where Original is unknown.
        halves: The same verdict against either half of the hold-out; empty where it has fewer than two examples.
        entropy_ks: The largest distance between the two distribution functions of the entropy; it decides nothing.
        entropy_p: The chance of such a distance where there is no difference.
        exposed: Which forgotten samples are still exposed, and how many at least.
    """

    trace: Trace
    auc: Interval
    change: Interval | None
    halves: tuple[Trace, ...]
    entropy_ks: float
    entropy_p: float
    exposed: ExposedSamples

    @property
    def verdict(self) -> Verdict:
        """One of `fedquit.inference.trace.VERDICTS`."""
        return self.trace.verdict


def holdout_null(
    forget: Scores, holdout: Scores, original: Samples | None = None, margin: float = MARGIN
) -> HoldoutNull:
    """Compare the forget data with the same clients' hold-out, under one model.

    Args:
        forget: The model's scores on the forget data.
        holdout: Its scores on the hold-out data.
        original: Original's scores on both; without them the test may be blind, and nothing is called forgotten.
        margin: How far from one half an AUC may lie and still count as forgotten.
    """
    from scipy.stats import ks_2samp

    before = (original[0].phi, original[1].phi) if original else None
    judged = trace.judge(forget.phi, holdout.phi, before, margin)
    halves = []
    for half in halves_of(holdout.label):
        original_half = (before[0], before[1][half]) if before else None
        halves.append(trace.judge(forget.phi, holdout.phi[half], original_half, margin))
    exact = max(len(forget), len(holdout)) <= EXACT
    ks = ks_2samp(forget.entropy, holdout.entropy, method="exact" if exact else "asymp")
    return HoldoutNull(
        trace=judged,
        auc=judged.area.interval(),
        change=trace.auc_difference((forget.phi, holdout.phi), before) if before else None,
        halves=tuple(halves),
        entropy_ks=float(ks.statistic),
        entropy_p=float(ks.pvalue),
        exposed=exposed_samples(forget.phi, holdout.phi),
    )


def halves_of(labels: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Two random halves of a hold-out with the same classes in both, as positions in rising order.

    Args:
        labels: Of the hold-out examples, (N,).

    Returns:
        Two halves, or none where there are fewer than two examples.
    """
    if len(labels) < 2:
        return []
    shuffled = np.random.default_rng(HALVES_SEED).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return [np.sort(by_class[first::2]) for first in (0, 1)]
