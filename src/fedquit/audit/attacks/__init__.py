# SPDX-License-Identifier: Apache-2.0
"""Membership inference: who trained this model?

`ATTACKS` need one model: they learn from members (retain data) and outsiders (test data) what membership looks like,
and say what share of the suspects (forget data) they call members, in percent. `REFERENCE_ATTACKS` need more models and
give a score for each example; `strength` says what a score is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fedquit.audit.attacks import lira, rmia, svc, threshold
from fedquit.audit.scores import Scores


class Attack(Protocol):
    """The share of suspects called members, in percent; the first line of its docstring says how."""

    def __call__(self, members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
        """Learn from members and outsiders, then judge the suspects; `seed` is for what it draws."""


ATTACKS: dict[str, Attack] = {
    "song_svc": svc.song_svc,
    "yeom": threshold.yeom,
    "song_correctness": threshold.song_correctness,
    "song_confidence": threshold.song_confidence,
    "song_entropy": threshold.song_entropy,
    "song_modified_entropy": threshold.song_modified_entropy,
}

REFERENCE_ATTACKS: dict[str, Callable[..., object]] = {
    "rmia": rmia.rmia,
    "lira_offline": lira.lira_offline,
    "lira_online": lira.lira_online,
    "ulira": lira.ulira,
}


def described(attack: Callable[..., object]) -> str:
    """An attack in one line."""
    return (attack.__doc__ or "").strip().partition("\n")[0]
