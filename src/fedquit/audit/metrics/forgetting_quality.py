# SPDX-License-Identifier: Apache-2.0
"""Forgetting quality of the NeurIPS 2023 unlearning competition: an epsilon for each example.

Triantafillou, Kairouz, Pedregosa, Hayes, Kurmanji, Zhao and others: Are We Making Progress in Unlearning? Findings from
the First NeurIPS Unlearning Competition (2024). phi of an example over N unlearned and N retrained models are two
samples; epsilon says how well the best of a family of attacks tells them apart, in the terms of differential privacy.
Both numbers describe: the best attack is chosen on the models that it is measured on, so that this epsilon is no bound
(`fedquit.inference.models.epsilon_bound` is one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquit.audit.metrics.klom import phi_pair
from fedquit.audit.scores import Floats
from fedquit.errors import InputError

DELTA = 1e-5
CAP = 50.0  # for perfect separation
BUCKET = 0.5  # of epsilon; each halves the points
PEAKY = 0.01  # a range below this share of the other's counts as separation
BUFFER = 2.0  # by how much an interval may be wider or narrower than the narrower sample


@dataclass(frozen=True, eq=False)
class ForgettingQuality:
    """An epsilon for each example, and how many models of a kind it comes from."""

    epsilon: Floats
    models: int

    @property
    def points(self) -> Floats:
        """H(epsilon) = 2^-floor(epsilon / 0.5), and 0 from ceil(ln(N - 1)) on: finer than that N models cannot tell."""
        points = 0.5 ** np.floor(self.epsilon / BUCKET)
        return np.where(self.epsilon < math.ceil(math.log(self.models - 1)), points, 0.0)

    @property
    def score(self) -> float:
        """F, the mean of the points: 1 for indistinguishable, 0 for separated."""
        return float(self.points.mean())


def forgetting_quality(unlearned: npt.ArrayLike, oracle: npt.ArrayLike) -> ForgettingQuality:
    """Epsilon of each example from phi of as many unlearned models as oracles.

    epsilon = max over attacks of max{ln((1 - δ - FPR) / FNR), ln((1 - δ - FNR) / FPR)} with δ = 1e-5. The attacks:
    above a threshold means the kind with the larger median; between two thresholds means the kind with the narrower
    range, the interval being as wide as that range, give or take 2. Thresholds are the observed values (the competition
    took a grid of 100 for each unit of phi). An attack with FPR = FNR = 0 gives 50, one with just one of them 0 is
    dropped as a sign of too few models; where none is left, and where one range is below 1 % of the other, epsilon is
    50.

    Args:
        unlearned: phi under the unlearned models, (models, examples).
        oracle: phi under the Retrains, (models, examples).

    Raises:
        InputError: if there are fewer than 3 models, or not as many of each kind.
    """
    u, o = phi_pair(unlearned, oracle)
    if len(u) != len(o) or len(u) < 3:
        raise InputError(f"there are {len(u)} unlearned models and {len(o)} oracles: give as many of each, at least 3.")
    return ForgettingQuality(np.array([_epsilon(u[:, i], o[:, i]) for i in range(u.shape[1])]), len(u))


def _epsilon(u: Floats, o: Floats) -> float:
    narrow, wide = sorted((u, o), key=np.ptp)
    if float(np.ptp(wide)) == 0:  # all models agree within each kind
        return 0.0 if u[0] == o[0] else CAP
    if float(np.ptp(narrow)) < PEAKY * float(np.ptp(wide)):
        return CAP
    high, low = (u, o) if np.median(u) > np.median(o) else (o, u)
    rates = [np.concatenate(parts) for parts in zip(_above(high, low), _between(narrow, wide), strict=True)]
    return _largest(*rates)


def _above(high: Floats, low: Floats) -> tuple[Floats, Floats]:
    """FPR and FNR of every single threshold."""
    values = np.unique(np.concatenate([high, low]))
    below = [np.searchsorted(np.sort(s), values, side="left") / len(s) for s in (low, high)]
    return 1 - below[0], below[1]


def _between(narrow: Floats, wide: Floats) -> tuple[Floats, Floats]:
    """FPR and FNR of every pair of thresholds near the narrower range.

    Two pairs that part the values alike are one attack: the left threshold may lie anywhere above the value before, the
    right one anywhere below the value after.
    """
    v = np.unique(np.concatenate([narrow, wide]))
    width = float(np.ptp(narrow))
    before, after = np.concatenate([[-np.inf], v[:-1]]), np.concatenate([v[1:], [np.inf]])
    least, most = narrow.min() + width - BUFFER, narrow.max() + BUFFER  # of the right threshold
    right = np.maximum(v, least)
    possible = (
        ((right < after) & (right <= most))[None, :]
        & (v[None, :] >= v[:, None])
        & (right[None, :] - v[:, None] <= width + BUFFER)
        & (np.minimum(after, most)[None, :] - before[:, None] > width - BUFFER)
    )
    i, j = np.nonzero(possible)

    def inside(s: Floats) -> Floats:
        s = np.sort(s)
        inside = np.searchsorted(s, v[j], side="right") - np.searchsorted(s, v[i], side="left")
        return np.asarray(inside / len(s), dtype=np.float64)

    return inside(wide), 1 - inside(narrow)


def _largest(fpr: Floats, fnr: Floats) -> float:
    none = 1e-12  # rates are multiples of 1/N
    if bool(((fpr < none) & (fnr < none)).any()):
        return CAP
    usable = (fpr > none) & (fnr > none)
    if not usable.any():
        return CAP
    fpr, fnr = fpr[usable], fnr[usable]
    bounds = [np.log(np.maximum(1 - DELTA - a, 1e-300)) - np.log(b) for a, b in ((fpr, fnr), (fnr, fpr))]
    return float(np.clip(np.max(bounds), 0.0, CAP))
