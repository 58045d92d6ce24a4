# SPDX-License-Identifier: Apache-2.0
"""An estimate with its confidence interval, and the exact interval of a share."""

from __future__ import annotations

from dataclasses import dataclass

from fedquit.errors import InputError


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval (or whichever level was asked for)."""

    value: float
    low: float
    high: float

    def covers(self, x: float) -> bool:
        """Whether the interval contains x."""
        return self.low <= x <= self.high


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> Interval:
    """The exact interval of a share: it covers the truth at least as often as it says.

    Args:
        hits: How many of the trials succeeded.
        trials: How many there were, at least one.
        confidence: Of the interval, from 0 to 1; either end errs with half of the rest.

    Raises:
        InputError: If the hits are no part of the trials.
    """
    from scipy.stats import beta  # late: scipy takes half a second, and every recipe names attacks

    if not 0 <= hits <= trials or trials < 1:
        raise InputError(f"{hits} of {trials} is not a share.")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, trials - hits)) if hits < trials else 1.0
    return Interval(hits / trials, low, high)
