# SPDX-License-Identifier: Apache-2.0
"""A limit on how often somebody may ask: many times at once, and then once in a while."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenBucket:
    """A bucket that is full at first, and from which each request takes one token."""

    burst: int  # tokens that it holds
    every: float  # seconds in which one is added

    def next_token(self, taken: Iterable[float]) -> float:
        """When there is a token again (Unix time; in the past if there is one now).

        Args:
            taken: when tokens were taken (Unix time).
        """
        tokens = float(self.burst)
        last = -math.inf
        for when in sorted(taken):
            tokens = min(self.burst, tokens + (when - last) / self.every) - 1
            last = when
        return last + max(0.0, 1 - tokens) * self.every


@dataclass
class SiteLimit:
    """A bucket for each site."""

    bucket: TokenBucket
    _held: dict[str, tuple[float, float]] = field(default_factory=dict)  # tokens of a site, and when (Unix time)

    def take(self, site: str, now: float) -> bool:
        """Take a token of a site; whether there was one."""
        tokens, last = self._held.get(site, (float(self.bucket.burst), now))
        added = max(0.0, now - last) / self.bucket.every  # a clock may be set back
        tokens = min(float(self.bucket.burst), tokens + added)
        allowed = tokens >= 1
        self._held[site] = (tokens - 1 if allowed else tokens, now)
        return allowed
