# SPDX-License-Identifier: Apache-2.0
"""The two ends of every comparison: retrain from scratch without the forgotten data, or just leave."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedquit.core import Federation, Request, State, Trained
from fedquit.core.fedavg import fedavg
from fedquit.core.method import Method


@dataclass(frozen=True)
class Retrain(Method):
    """The gold standard: as many rounds as before, from the same start, without the forgotten data."""

    recovers = False

    def rounds(self, trained: Trained, request: Request) -> int:
        """As many as the training took."""
        return trained.training.rounds

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Ordinary training from the initial parameters on."""
        if state.round == 0:
            state = replace(state, params=trained.initial, clock=0)
        return fedavg(fed, state, trained.training, request.stay(fed.clients), split="retain")


@dataclass(frozen=True)
class Natural(Method):
    """No unlearning: the client leaves, and training goes on without it."""

    def rounds(self, trained: Trained, request: Request) -> int:
        """None at all."""
        return 0

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Nothing happens."""
        return state
