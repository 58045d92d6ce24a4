# SPDX-License-Identifier: Apache-2.0
"""What an unlearning method is: rounds of the server, and hooks into the training that came before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fedquit.core import ClientId, Federation, Memory, Params, Reply, Request, State, Task, Trained
from fedquit.fedavg import fedavg


@dataclass(frozen=True)
class Method(ABC):
    """An unlearning method: hyper-parameters, never state."""

    def check(self, request: Request) -> None:
        """Refuse, with a reason, a kind of request that the method does not define."""

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        """What this client does in ordinary training; methods that must prepare for a request replace it."""
        return task

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        """See a reply of ordinary training pass by, and keep in the server's memory what the method will need."""

    def rounds(self, trained: Trained, request: Request) -> int:
        """How many rounds the unlearning takes."""
        return 1

    @abstractmethod
    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """One round of the unlearning: number `state.round`, from 0."""

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """One round of the recovery: ordinary training without the forgotten data."""
        return fedavg(fed, state, trained.training, request.stay(fed.clients), split="retain")

    @property
    def shapes_training(self) -> bool:
        """Whether ordinary training must run with this method attached (it watches, or replaces a task)."""
        return type(self).watch is not Method.watch or type(self).training_task is not Method.training_task
