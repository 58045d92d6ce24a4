# SPDX-License-Identifier: Apache-2.0
"""The two baselines of every comparison: retraining without the forgotten data, and no unlearning at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedquit.core import Federation, Request, State, Trained
from fedquit.core.fedavg import fedavg
from fedquit.core.method import Method


@dataclass(frozen=True)
class Retrain(Method):
    """The gold standard: as many rounds as before, from the same start, without the forgotten data."""

    recovers = False
    recalibrates = False  # it trains anew, and its statistics with it
    begins_anew = True
    knobs = ()  # it is what the others are measured against

    def rounds(self, trained: Trained, request: Request) -> int:
        return trained.training.rounds

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Train as before, from the initial parameters."""
        if state.round == 0:
            state = replace(state, params=trained.initial, clock=0)
        return fedavg(fed, state, trained.training, request.stay(fed.clients), split="retain")


@dataclass(frozen=True)
class Natural(Method):
    """No unlearning: the client leaves, and training goes on without it."""

    knobs = ()  # it does nothing, however strongly

    def rounds(self, trained: Trained, request: Request) -> int:
        return 0

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state
