# SPDX-License-Identifier: Apache-2.0
"""An estimate with its confidence interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval (or whichever level was asked for)."""

    value: float
    low: float
    high: float

    def covers(self, x: float) -> bool:
        """Whether the interval contains x."""
        return self.low <= x <= self.high
