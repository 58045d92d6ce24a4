# SPDX-License-Identifier: Apache-2.0
"""Stopping work at the end of a round, with everything on disk: for machines that are lent for some minutes."""

from __future__ import annotations

from collections.abc import Callable

from fedquit.running.training_cache import Reporter


class TimeIsUpError(Exception):
    """The work was stopped at a round's end; it goes on from there."""


class StopAtRoundEnd:
    """A reporter that stops the work at the end of a round once its time is up.

    Each time that work is begun it takes at least one round, so that it comes to an end however short the time is.

    Args:
        inner: is told of every phase and round.
        is_due: whether the time is up.
    """

    def __init__(self, inner: Reporter, is_due: Callable[[], bool]) -> None:
        self._inner = inner
        self._is_due = is_due
        self._found = 0  # rounds that the phase had when it was begun here

    def phase(self, title: str, rounds: int | None, done: int) -> None:
        """Report that a phase begins, or goes on after `done` rounds."""
        self._found = done
        self._inner.phase(title, rounds, done)

    def round(self, done: int, note: str) -> None:
        """Report that a round is over.

        Raises:
            TimeIsUpError: it is the time to stop; whoever drives the rounds stores the last one.
        """
        self._inner.round(done, note)
        if done > self._found and self._is_due():
            raise TimeIsUpError
