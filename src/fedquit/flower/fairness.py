# SPDX-License-Identifier: Apache-2.0
"""Whose request is served when: what one client asks for, or leaves unanswered, never stops the others.

A client has a bucket of tokens, one for each time that its requests are started; the bucket fills again with time. A
client that is silent is tried again after pauses that grow, while training goes on, until its deadline. Everything is
derived from the ledger, so that a server that is started again decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedquit.core import ClientId
from fedquit.flower.ledger import Erasure
from fedquit.flower.token_bucket import TokenBucket

TRIES = 3  # times that a request is started while others wait; then its deadline is waited for


@dataclass(frozen=True)
class Queue:
    """The requests that wait, as the server sees them at one moment."""

    entries: Sequence[Erasure]  # all of the ledger
    here: Collection[ClientId]  # who is online
    now: float  # Unix time
    bucket: TokenBucket
    deadline: float  # seconds that a client has from the receipt of its request on
    pause: float  # seconds before a silent client is tried again; doubled each time
    patient: bool  # whether nobody else would be kept waiting by a client that does not answer
    began: float = 0.0  # when this server was started, or the clock set back since (Unix time); not after `now`
    grace: float = 0.0  # seconds that a client has at least after that
    revoked: Collection[ClientId] = ()  # who takes no part any more, and can never answer

    def _starts(self, client: ClientId) -> set[float]:
        """When requests of a client were started; those that are served as one count once."""
        own = [e for e in self.entries if e.client == client and e.source == "client"]
        return {when for e in own for when in e.attempts}

    def is_overdue(self, entry: Erasure) -> bool:
        """Whether a client has had its time, so that the request is served without it."""
        if entry.client in self.revoked:
            return True
        untried = not entry.attempts and entry.client in self.here
        return self.now >= self._last_moment(entry) and not untried

    def _last_moment(self, entry: Erasure) -> float:
        """Until when a client has time; from this start on where the clock has been set back far since its request."""
        since = entry.since if entry.since <= self.now + self.deadline else self.began
        return max(since + self.deadline, self.began + self.grace)

    def _token_at(self, entry: Erasure) -> float:
        """When the client of a request may have it started (Unix time); the operator may at any time."""
        if entry.source != "client":
            return -math.inf
        return self.bucket.next_token(when for when in self._starts(entry.client) if when <= self.now)

    @property
    def waits_for_clients(self) -> bool:
        """Whether a request waits only because its client is away or silent."""
        return any(e.status == "received" and self._token_at(e) <= self.now < self.ready_at(e) for e in self.entries)

    def ready_at(self, entry: Erasure) -> float:
        """When a request can be started (Unix time); in the past if it can be started now."""
        token = self._token_at(entry)
        if token > self.now or self.patient or self.is_overdue(entry):
            return token
        last_moment = self._last_moment(entry)
        tried = len(entry.attempts)
        if entry.client not in self.here or tried >= TRIES:
            return last_moment
        if not tried:
            return token
        return min(last_moment, entry.attempts[-1] + self.pause * 2.0**tried)

    def ready(self) -> list[Erasure]:
        """The requests that can be started now: whole clients first, and of these who was served longest ago."""
        waiting = [e for e in self.entries if e.status == "received" and self.ready_at(e) <= self.now]
        last_start: Mapping[str, float] = {e.id: max(self._starts(e.client), default=-math.inf) for e in waiting}
        return sorted(waiting, key=lambda e: (e.kind, last_start[e.id]))

    def next_time(self) -> float | None:
        """When the next of those that wait can be started (Unix time); None if none waits."""
        times = [self.ready_at(e) for e in self.entries if e.status == "received"]
        return min(times, default=None)
