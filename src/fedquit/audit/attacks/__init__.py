# SPDX-License-Identifier: Apache-2.0
"""Membership inference: was this example part of the model's training data?

`ATTACKS` need one model: they learn from members (retain data) and outsiders (test data) what membership looks like,
and return the percentage of the suspects (forget data) that they call members. `REFERENCE_ATTACKS` need more models and
return a score for each example; `roc` turns scores into an ROC curve, an AUC and true-positive rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fedquit.audit.attacks import lira, rmia, svc, threshold
from fedquit.audit.scores import Scores

__all__ = ["ATTACKS", "REFERENCE_ATTACKS", "Attack"]


class Attack(Protocol):
    """The share of suspects called members, in percent; the first line of its docstring says how."""

    def __call__(self, members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
        """Learn from members and outsiders, then classify the suspects.

        Args:
            members: scores of examples that the model was trained on.
            outsiders: scores of examples that it was not trained on.
            suspects: scores of the examples to classify.
            seed: fixes whatever the attack draws.

        Returns:
            The percentage of the suspects that the attack calls members.
        """


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
    """Return the first line of an attack's docstring."""
    return (attack.__doc__ or "").strip().partition("\n")[0]
