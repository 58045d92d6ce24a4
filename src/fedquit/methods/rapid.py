# SPDX-License-Identifier: Apache-2.0
"""Rapid retraining: The Right to be Forgotten in Federated Learning. Liu, Xu, Yuan, Wang, Li. INFOCOM 2022.

Retraining from the initial model, without the forgotten data, in fewer rounds: the clients
precondition their steps with an estimate of the loss's curvature, the diagonal of the empirical
Fisher information (or of the Hessian, as in the public implementations).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedquit.core import Federation, Request, State, Trained
from fedquit.core.fedavg import fedavg
from fedquit.core.method import Knob, Method


@dataclass(frozen=True)
class RapidRetraining(Method):
    """Half as many rounds as training took, unless given."""

    retraining_rounds: int = 0
    lr: float = 1e-3
    optimizer: str = "adam"  # moments of the squared gradient: the diagonal of the empirical Fisher information

    recalibrates = False  # it trains anew, and its statistics with it
    begins_anew = True
    presets = {"adahessian": {"optimizer": "adahessian"}}  # noqa: RUF012 - a ClassVar of the base
    knobs = (Knob("retraining_rounds", 1, 200), Knob("lr", 1e-4, 1e-1))

    def rounds(self, trained: Trained, request: Request) -> int:
        return self.retraining_rounds or max(1, trained.training.rounds // 2)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Do a round of FedAvg with the second-order optimizer."""
        clock = state.clock
        if state.round == 0:
            state = replace(state, params=trained.initial)
        task = trained.training.task
        local = replace(task.local, optimizer=self.optimizer, lr=self.lr, momentum=0.0, weight_decay=0.0)
        training = replace(trained.training, task=replace(task, local=local), lr_decay=1.0)
        after = fedavg(fed, state, training, request.stay(fed.clients), split="retain")
        return replace(after, clock=clock)  # recovery goes on with the schedule of training
