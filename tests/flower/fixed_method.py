# SPDX-License-Identifier: Apache-2.0
"""A method whose clients use the random numbers that belong to their examples for ever."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedquit.core import Batch, Federation, Model, Params, Request, Sent, State, Task, Trained
from fedquit.core.fedavg import cross_entropy
from fedquit.core.method import Method
from fedquit.core.params import mean


@dataclass(frozen=True)
class WeighedTask(Task):
    """Learn each example as much as its own number and its mark say."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return cross_entropy(model(params, batch.x), batch.y) * (batch.fixed + 2 * batch.forget)


@dataclass(frozen=True)
class Weighed(Method):
    """One round of it at the leaving clients, with all that they have."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        task = WeighedTask(trained.training.task.local)
        return state.next(mean(fed.run(task, request.clients, split="all", start=state.params)))
