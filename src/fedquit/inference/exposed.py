# SPDX-License-Identifier: Apache-2.0
"""Which forgotten samples a single model still gives away, and how many at least, against the client's own hold-out.

A forgotten sample counts as exposed where its score is another than it would be had the model not been trained on it.
With a random split, the scores that the m forgotten samples would have are exchangeable with those of the n hold-out
samples. From this alone follow two statements; neither assumes that samples are equally hard.

- `named`: samples with a small conformal p-value, p_i = (1 + hold-out samples that score as high or higher) / (n + 1),
  by Benjamini and Hochberg's rule (1995): of the samples that it names, at most 5 % on average are not exposed. An
  unexposed sample has a p-value of at most t with a chance of at most t, and p-values with one hold-out in common are
  positively dependent (Bates, Candès, Lei, Romano, Sesia: Testing for outliers with conformal p-values, Annals of
  Statistics 2023).
- `at_least`: with 95 % confidence so many samples are exposed, without a word on which. Above a threshold lie X
  forgotten samples; were none of them exposed, more than U would lie there in few cases (the hypergeometric law of
  `trace.tail_p`). So at least X - U are exposed.

A single model cannot tell a sample that is known by heart from one that is easy for every model: a named sample is
exposed with high probability, but one that is not named may be as well. Models of other seeds are needed for that
(`models.sample_exposure`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedquit.inference.multiplicity import benjamini_hochberg
from fedquit.inference.trace import checked

LEVEL = 0.05
SHARES = (0.01, 0.1, 0.25, 0.5)  # of the hold-out above the thresholds of the count, fixed beforehand

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ExposedSamples:
    """What one model gives away about the forgotten samples.

    Attributes:
        p: The conformal p-value of each, (m,).
        named: Whether each is named, (m,).
        at_least: How many are exposed at least, with 95 % confidence.
    """

    p: Floats
    named: npt.NDArray[np.bool_]
    at_least: int


def exposed_samples(forget: npt.ArrayLike, holdout: npt.ArrayLike, level: float = LEVEL) -> ExposedSamples:
    """Name forgotten samples that score higher than hold-out samples do, and bound their number from below.

    Args:
        forget: Scores of the forgotten samples, (m,); the higher, the more like a member.
        holdout: Scores of the hold-out samples of the same clients, (n,).
        level: Of either statement: the mean share of wrong names, and the chance that the count is too high.
    """
    members, outsiders = checked(forget, holdout)
    p = conformal_p(members, outsiders)
    return ExposedSamples(p, benjamini_hochberg(p, level), _at_least(members, outsiders, level))


def conformal_p(forget: Floats, holdout: Floats) -> Floats:
    """The share of the hold-out, with the sample itself, that scores as high as each forgotten sample or higher."""
    below = np.searchsorted(np.sort(holdout), forget, side="left")
    return np.asarray((1 + len(holdout) - below) / (len(holdout) + 1), dtype=np.float64)


def _at_least(members: Floats, outsiders: Floats, level: float) -> int:
    """The largest X - U over the thresholds, which share the level (Bonferroni)."""
    falling = np.sort(outsiders)[::-1]
    bound = 0
    for share in SHARES:
        rank = max(1, int(share * len(falling)))
        above = int((members > falling[rank - 1]).sum())
        bound = max(bound, above - most_above(len(members), len(falling), rank, level / len(SHARES)))
    return bound


@lru_cache(maxsize=256)
def most_above(members: int, outsiders: int, rank: int, level: float) -> int:
    """The smallest number that exchangeable samples above a hold-out score exceed with at most some chance.

    Args:
        members: Samples that are compared, m.
        outsiders: Hold-out samples, n.
        rank: Of the hold-out score, 1 for the highest.
        level: The chance.
    """
    from scipy.stats import hypergeom

    low, high = 0, members
    while low < high:
        middle = (low + high) // 2
        if float(hypergeom.sf(middle, members + outsiders, members, middle + rank)) <= level:
            high = middle
        else:
            low = middle + 1
    return low
