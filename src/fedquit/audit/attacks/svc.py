# SPDX-License-Identifier: Apache-2.0
"""The support-vector attack that the FedQUIT authors report as "MIA Song".

A support-vector classifier (radial kernel, C = 3, gamma = 1 / number of features) learns to tell the true-class
confidences of 10,000 random retain examples from those of the test set, under the evaluated model, and then says what
share of the forget data it takes for retain data. It is neither of Song and Mittal's attacks, in spite of its name.
"""

from __future__ import annotations

import numpy as np

from fedquit.audit.scores import Floats, Scores
from fedquit.errors import InputError

LARGEST = 10_000  # of members, and of outsiders
GRID = 1e-3


def song_svc(members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
    """The authors' support-vector attack on the true-class confidence: the share of suspects called members."""
    return svc(members.confidence, outsiders.confidence, suspects.confidence, seed=seed)


def svc(members: Floats, outsiders: Floats, suspects: Floats, *, seed: int, grid: float = GRID) -> float:
    """The same on plain confidences.

    The training confidences are rounded to `grid`, equal ones merged, and their number given as a weight: a problem of
    at most 2,002 points in place of 20,000. The kernel has width 1 and does not see a thousandth; the answer moves by
    less than the solver's own tolerance does (about 0.1 points). Suspects are not rounded. `grid=0` fits every point.
    """
    from sklearn.svm import SVC  # takes half a second, and every recipe names this attack

    if not (len(members) and len(outsiders) and len(suspects)):
        raise InputError("an attack needs at least one member, outsider and suspect.")
    draw = np.random.default_rng(seed)
    inside, outside = (_at_most(s, LARGEST, draw) for s in (members, outsiders))
    x = np.concatenate([inside, outside])
    y = np.concatenate([np.ones(len(inside)), np.zeros(len(outside))])
    weight = np.ones(len(x))
    if grid > 0:
        points, count = np.unique(np.stack([np.rint(x / grid), y], axis=1), axis=0, return_counts=True)
        x, y, weight = points[:, 0] * grid, points[:, 1], count.astype(np.float64)
    fitted = SVC(C=3, gamma="auto", kernel="rbf", cache_size=500).fit(x[:, None], y, sample_weight=weight)
    return 100 * float(fitted.predict(suspects[:, None]).mean())


def _at_most(values: Floats, largest: int, draw: np.random.Generator) -> Floats:
    return values if len(values) <= largest else draw.choice(values, largest, replace=False)
